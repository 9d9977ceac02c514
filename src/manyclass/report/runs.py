"""What a run's folder holds: settings, evaluations and curves."""

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = ("step", "epoch", "seconds", "lr", "train_loss", "heldout_loss", "bias", "num_samples")
CONFIG = {"task": str, "num_classes": int, "settings": dict}


@dataclass
class Run:
    """What a run directory holds.

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
        """The sampler's name, or ``"full"``."""
        return self.config["settings"]["sampler"]

    @property
    def loss(self) -> float:
        """Held-out loss at the end, in nats."""
        return self.rows[-1]["heldout_loss"]

    @property
    def steps_per_second(self) -> float:
        """Training steps per second, or nan before the first step."""
        last = self.rows[-1]
        return last["step"] / last["seconds"] if last["step"] > 0 < last["seconds"] else math.nan

    def column(self, name: str) -> list[float]:
        """One column of ``metrics.csv``."""
        return [row[name] for row in self.rows]


def load(folder: Path) -> Run:
    """Read a run directory; an error names the file and says what is wrong with it."""
    folder = folder.resolve()
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has no config.json")
    config = _load_json(folder / "config.json")
    for key, kind in CONFIG.items():
        if not isinstance(config.get(key), kind):
            raise ValueError(f"{folder / 'config.json'}: {key!r} must be of type {kind.__name__}")
    if not isinstance(config["settings"].get("sampler"), str):
        raise ValueError(f"{folder / 'config.json'}: 'settings' must name the 'sampler'")
    rows = _load_metrics(folder / "metrics.csv")
    evaluation = folder / "evaluation.json"
    return Run(folder, config, rows, _load_json(evaluation) if evaluation.exists() else None)


def _load_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: must hold an object, not {type(found).__name__}")
    return found


def _load_metrics(file: Path) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    with file.open(newline="", encoding="utf-8") as handle:
        reader = csv.DictReader(handle)
        try:
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or COLUMNS)]
            if missing:
                raise ValueError(f"lacks the column {', '.join(missing)}")
            for row in reader:
                if None in row.values():
                    raise ValueError(f"line {reader.line_num} is cut short")
                rows.append({column: float(row[column] or "nan") for column in COLUMNS})
                if not (math.isfinite(rows[-1]["step"]) and math.isfinite(rows[-1]["seconds"])):
                    raise ValueError(f"line {reader.line_num} lacks the step or the seconds")
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{file}: {error}") from error
    if not rows:
        raise ValueError(f"{file}: has no rows yet")
    return rows
