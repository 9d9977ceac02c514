"""Read a run's folder: settings, evaluations and curves."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import losses
from ..train import run as train
from ..train.records import typed


@dataclass
class Run:
    """The contents of a run's folder.

    Attributes:
        folder: the directory, absolute.
        config: ``config.json``.
        rows: ``metrics.csv``, one dict per evaluation; empty cells are nan.
        evaluation: ``evaluation.json``, or None.
        row: the evaluation of the checkpoint that the run keeps: the best one, if it selects one, or the last.
    """

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, float]]
    evaluation: dict[str, Any] | None
    row: dict[str, float]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def task(self) -> str:
        """``"lm"``, ``"next-item"`` or ``"classify"``."""
        return self.config["task"]

    @property
    def sampler(self) -> str:
        """The sampler's name, or ``"full"``; for a loss of related work, its name and the sampler's."""
        settings = self.config["settings"]
        loss, sampler = settings.get("loss", "softmax"), settings["sampler"]
        if loss == "softmax":
            return sampler
        return f"{loss}, {sampler}" if loss in losses.names() and losses.draws(loss) else loss

    @property
    def loss(self) -> float:
        """Held-out loss of the checkpoint that the run keeps, in nats."""
        return self.row["heldout_loss"]

    @property
    def measures(self) -> dict[str, Any]:
        """The measures of `manyclass evaluate` for that checkpoint; empty if it evaluated another one."""
        found = {key: value for key, value in (self.evaluation or {}).items() if not isinstance(value, dict)}
        return found if found.get("step", self.row["step"]) == self.row["step"] else {}

    @property
    def steps_per_second(self) -> float:
        """Training steps per second, or nan before the first step."""
        last = self.rows[-1]
        return last["step"] / last["seconds"] if last["step"] > 0 < last["seconds"] else math.nan

    def column(self, name: str) -> list[float]:
        """Return one column of ``metrics.csv``."""
        return [row[name] for row in self.rows]


def load(folder: Path) -> Run:
    """Read a run's folder; an error names the file and its defect."""
    found = train.Run(folder.resolve())
    config = found.config()
    metrics = found.metrics()
    rows = [
        {name: math.nan if value is None else float(value) for name, value in row._asdict().items()} for row in metrics
    ]
    select = typed(config.get("select"), str | None, f"{found.folder / 'config.json'}: 'select'")
    kept = train.best(metrics, select) or metrics[-1]
    return Run(found.folder, config, rows, found.evaluation(), rows[metrics.index(kept)])
