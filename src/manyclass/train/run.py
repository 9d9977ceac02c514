"""A run's folder: settings, metrics, classes, and checkpoints that are whole or not there."""

import csv
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .atomic import replacing

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no locks that end with their process
    fcntl = None

CHECKPOINT = "checkpoint-"


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


class Run:
    """The folder of a run.

    Args:
        folder: the folder; not made before something is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.vocabulary = folder / "vocabulary.parquet"

    def exists(self) -> bool:
        """Whether a run has begun here."""
        return (self.folder / "config.json").exists()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from writing a run into this folder at the same time; whoever dies lets go of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            yield
            return
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self.folder}: another process is writing a run there") from None
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(descriptor)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write ``name``, such as ``config.json``."""
        with replacing(self.folder / name) as file:
            file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")

    def config(self) -> dict[str, Any]:
        """What ``config.json`` says."""
        file = self.folder / "config.json"
        if not file.exists():
            raise FileNotFoundError(f"{self.folder} is not the folder of a run: it has no config.json")
        try:
            return json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is broken: {error}") from error

    def write_metrics(self, rows: list[Metrics]) -> None:
        """Write all of ``metrics.csv``."""
        with replacing(self.folder / "metrics.csv") as file, file.open("w", newline="") as handle:
            csv.writer(handle).writerows([Metrics._fields, *rows])

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to write a checkpoint to. If all goes well it gets its name, and the ones before it are dropped."""
        # Of a process that was killed while it wrote, too.
        before = [*self._checkpoints(), *self.folder.glob(f".*.{CHECKPOINT}*")]
        with replacing(self.folder / f"{CHECKPOINT}{step:09d}") as temporary:
            temporary.mkdir(parents=True)
            yield temporary
        for path in before:
            if path.name != f"{CHECKPOINT}{step:09d}":
                shutil.rmtree(path)

    def save(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint of one process."""
        with self.checkpoint(step) as folder:
            save_file(weights, folder / "model.safetensors")
            torch.save(state, folder / "state.pt")

    def load(self, head: Any = None, part: tuple[int, int] = (0, 1)) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint: weights and the rest; None if there is none yet.

        It may have been written by any number of processes. For one of several, ``part``, the rest is what its sharded
        layer ``head`` and its rows of the batch have of it.
        """
        found = self._checkpoints()
        if not found:
            return None
        folder = found[-1]
        try:
            if (folder / ".metadata").exists():
                from . import checkpoint

                return checkpoint.load(folder, head, part)
            weights = load_file(folder / "model.safetensors")
            rest = torch.load(folder / "state.pt", weights_only=True)
        except Exception as error:  # a broken pickle can raise anything
            raise ValueError(f"the checkpoint {folder} is broken: {f'{error} '.splitlines()[0]}") from error
        if head is not None:
            from . import checkpoint

            rest["optimizer"] = checkpoint.cut_optimizer(rest["optimizer"], head)
            rest["state"], rest["random"] = checkpoint.cut_state(rest["state"], part), None
        return weights, rest

    def _checkpoints(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"{CHECKPOINT}*") if path.is_dir())
