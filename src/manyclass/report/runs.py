"""Read a run's folder: settings, evaluations and curves."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import losses
from ..train import run as train


@dataclass
class Run:
    """The contents of a run's folder.

    Attributes:
        folder: the directory, absolute.
        config: ``config.json``.
        rows: ``metrics.csv``, one dict per evaluation; empty cells are nan.
        evaluation: ``evaluation.json``, or None.
    """

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, float]]
    evaluation: dict[str, Any] | None

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
    def row(self) -> dict[str, float]:
        """The evaluation of the checkpoint that the run keeps: the best one, if it selects one, or the last."""
        select = self.config.get("select")
        name = "heldout_loss" if select == "loss" else str(select).replace("@", "_")
        rows = [row for row in self.rows if row["step"] > 0 and math.isfinite(row.get(name, math.nan))]
        if not rows:
            return self.rows[-1]
        return (min if select == "loss" else max)(rows, key=lambda row: row[name])

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
    rows = [
        {name: math.nan if value is None else float(value) for name, value in row._asdict().items()}
        for row in found.metrics()
    ]
    return Run(found.folder, config, rows, found.evaluation())
