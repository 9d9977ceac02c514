"""A run's folder: settings, metrics, classes, and checkpoints that are whole or not there."""

import csv
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .atomic import clear, remove, replacing
from .records import first_line, read_json, regular, typed

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no locks that end with their process
    fcntl = None

CHECKPOINT = "checkpoint-"
#: Entries of ``config.json`` that every reader needs.
CONFIG = {"task": str, "num_classes": int, "settings": dict}


class Metrics(NamedTuple):
    """One evaluation, a line of ``metrics.csv``."""

    step: int
    epoch: float
    #: Training time so far, evaluations and checkpoints not counted.
    seconds: float
    lr: float
    #: Mean training loss since the evaluation before; sampled, unless the run has the full softmax.
    train_loss: float | None
    #: Under the full softmax, always, in nats.
    heldout_loss: float
    #: Bias of the sampled loss in nats, measured on some examples of the last batch.
    bias: float | None
    num_samples: int | None
    #: On held-out data, exact and over all classes; None for language models.
    recall_10: float | None = None
    recall_20: float | None = None
    ndcg_10: float | None = None
    mrr_10: float | None = None
    #: CPU time of the first process in training so far, all its threads together.
    cpu_seconds: float | None = None

    def measure(self, name: str) -> float:
        """Return a held-out measure by its usual name, ``loss`` or such as ``ndcg@10``; nan if it is missing."""
        value = self.heldout_loss if name == "loss" else getattr(self, name.replace("@", "_"), None)
        return math.nan if value is None else value


def best(rows: Sequence[Metrics], select: str | None) -> Metrics | None:
    """Return the evaluation whose checkpoint is kept by the measure ``select``, the first of equal ones.

    None if the last checkpoint is kept: without a measure, or without a finite value of it after a step.
    """
    measured = [row for row in rows if select and row.step > 0 and math.isfinite(row.measure(select))]
    order = min if select == "loss" else max
    return order(measured, key=lambda row: row.measure(str(select)), default=None)


def read_metrics(file: Path) -> list[Metrics]:
    """Read ``metrics.csv``; empty cells are None, and so are columns that an older version did not write."""
    rows: list[Metrics] = []
    with regular(file).open(newline="", encoding="utf-8") as handle:
        try:
            reader = csv.DictReader(handle)
            needed = [name for name in Metrics._fields if name not in Metrics._field_defaults]
            missing = [name for name in needed if name not in (reader.fieldnames or needed)]
            if missing:
                raise ValueError(f"lacks the column {', '.join(missing)}")
            for row in reader:
                if None in row.values():
                    raise ValueError(f"line {reader.line_num} is cut short")
                found = [float(row[name]) if row.get(name) else None for name in Metrics._fields]
                rows.append(Metrics(*found)._replace(heldout_loss=math.nan if found[5] is None else found[5]))  # pyright: ignore
                if found[0] is None or found[2] is None or not math.isfinite(found[0] + found[2]):
                    raise ValueError(f"line {reader.line_num} lacks the step or the seconds")
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{file}: {first_line(error)}") from error
    if not rows:
        raise ValueError(f"{file}: has no rows yet")
    return rows


class Run:
    """The folder of a run.

    Args:
        folder: the folder; created by the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.vocabulary = folder / "vocabulary.parquet"

    def exists(self) -> bool:
        """Return whether a run has begun here."""
        return (self.folder / "config.json").exists()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder against other writing processes; the lock ends with its process.

        Temporary files of processes that were killed are deleted.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = None if fcntl is None else os.open(self.folder, os.O_RDONLY)
        try:
            if fcntl is not None and descriptor is not None:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(f"{self.folder}: another process is writing a run there") from None
                except OSError:  # a file system without locks
                    pass
            clear(self.folder)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write ``name``, such as ``config.json``."""
        with replacing(self.folder / name) as file:
            file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")

    def config(self) -> dict[str, Any]:
        """Read ``config.json``: versions and settings of the run."""
        file = self.folder / "config.json"
        if not file.exists():
            raise FileNotFoundError(f"{self.folder} is not the folder of a run: it has no config.json")
        content = read_json(file)
        for key, kind in CONFIG.items():
            typed(content.get(key), kind, f"{file}: {key!r}")
        if not isinstance(content["settings"].get("sampler"), str):
            raise ValueError(f"{file}: 'settings' must name the 'sampler'")
        return content

    def evaluation(self) -> dict[str, Any] | None:
        """Read ``evaluation.json``, if the run was evaluated."""
        file = self.folder / "evaluation.json"
        return read_json(file) if file.exists() else None

    def metrics(self) -> list[Metrics]:
        """Read ``metrics.csv``."""
        return read_metrics(self.folder / "metrics.csv")

    def write_metrics(self, rows: list[Metrics]) -> None:
        """Write all of ``metrics.csv``."""
        with replacing(self.folder / "metrics.csv") as file, file.open("w", newline="", encoding="utf-8") as handle:
            csv.writer(handle).writerows([Metrics._fields, *rows])

    @contextmanager
    def checkpoint(self, step: int, keep: int | None = None) -> Iterator[Path]:
        """Yield a folder to write a checkpoint to. On success it gets its final name, and older ones are deleted.

        The checkpoint of the step ``keep`` stays.
        """
        name = f"{CHECKPOINT}{step:09d}"
        remove(self.folder / name)  # a folder that is not empty cannot be replaced
        with replacing(self.folder / name) as temporary:
            temporary.mkdir(parents=True)
            yield temporary
        for path in self.checkpoints():
            if path.name != name and path != self.checkpoint_of(keep):
                remove(path)

    def checkpoint_of(self, step: int | None) -> Path:
        """Return the folder of a step's checkpoint, whether it is there or not."""
        return self.folder / f"{CHECKPOINT}{step or 0:09d}"

    def checkpoints(self) -> list[Path]:
        """List the folders of checkpoints, the last one last."""
        numbered = "[0-9]" * 9
        return sorted(path for path in self.folder.glob(f"{CHECKPOINT}{numbered}") if path.is_dir())
