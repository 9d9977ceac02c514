"""The state that a run needs to resume, and how to write it to a checkpoint and read it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.state import NAMES
from ..optim.lazy import HISTORY
from .checkpoint import STATE, WEIGHTS, Header, Reader, Rows, save
from .model import Model
from .optimizers import load_state_by_name, state_by_name
from .processes import Processes
from .records import typed
from .run import Metrics, Run


@dataclass
class State:
    """What changes while a run trains, besides the model and the optimiser."""

    step: int = 0
    #: Training time, without evaluations and checkpoints.
    seconds: float = 0.0
    #: CPU time of this process in the same steps.
    cpu_seconds: float = 0.0
    #: Sum and number of the training losses since the last evaluation.
    total: float = 0.0
    count: int = 0
    #: All evaluations.
    rows: list[Metrics] = field(default_factory=list)
    #: Step and value of the best evaluation so far, if the best checkpoint is kept.
    best: tuple[int, float] | None = None
    #: State of a recurrent trunk, each ``(layers, rows of this process, features)``.
    hidden: tuple[Tensor, ...] | None = None
    #: Where the run computes, so that the random numbers of this device are saved, too.
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as dicts, lists, numbers and tensors."""
        random = {"cpu": torch.get_rng_state()}
        if self.device.type != "cpu":
            random[self.device.type] = torch.get_device_module(self.device).get_rng_state(self.device)
        rows = [list(row) for row in self.rows]
        return {**vars(self), "device": self.device.type, "rows": rows, "random": random}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; generators that it has no state of stay as they are."""
        self.step, self.count = (typed(content[name], int, name) for name in ("step", "count"))
        self.seconds, self.total = (typed(content[name], float, name) for name in ("seconds", "total"))
        self.cpu_seconds = typed(content.get("cpu_seconds", 0.0), float, "cpu_seconds")
        self.rows = [Metrics(*row) for row in content["rows"]]
        self.best = _best(content)
        self.hidden = None if content["hidden"] is None else tuple(one.to(self.device) for one in content["hidden"])
        random = typed(content["random"], dict, "random")
        if "cpu" in random:
            torch.set_rng_state(random["cpu"])
        if self.device.type != "cpu" and self.device.type in random:
            torch.get_device_module(self.device).set_rng_state(random[self.device.type], self.device)


def write(run: Run, model: Model, optimizer: Any, state: State, processes: Processes) -> None:
    """Write a checkpoint; called by all ranks."""
    shard = model.shard
    weights = {name: _by_class(name, value, shard) for name, value in model.weights().items()}
    if not processes.first:
        weights = {name: value for name, value in weights.items() if isinstance(value, Rows)}
    content = {
        "training": state.state_dict(),
        "model": model.buffers_and_extras(),
        "shard": model.head.shard_state() if hasattr(model.head, "shard_state") else None,
        "optimizer": {
            name: {key: value if key == HISTORY else _by_class(name, value, shard) for key, value in values.items()}
            for name, values in state_by_name(model, optimizer).items()
        },
    }
    header = Header(processes.world, shard.first, shard.last)
    with processes.shared_folder(lambda: run.checkpoint(state.step, state.best and state.best[0])) as folder:
        save(folder, processes.rank, header, weights, content)
    if processes.first:
        run.write_metrics(state.rows)


def restore(folder: Path, model: Model, optimizer: Any, state: State, processes: Processes) -> None:
    """Restore a checkpoint of any number of ranks into the model, the optimiser and the state of this rank.

    State of single ranks (random numbers, the sampler's statistics) is restored only for the same number of ranks.
    """
    reader, shard = Reader(folder), model.shard
    rows = shard.first, shard.last
    _check_classes(reader, model)
    same = reader.world == processes.world
    content = reader.load(STATE, processes.rank if same else 0, rows)
    model.restore(reader.load(WEIGHTS, 0, rows), content["model"])
    load_state_by_name(model, optimizer, content["optimizer"])
    if not same:
        everyone = [reader.load(STATE, rank, rows)["training"]["hidden"] for rank in range(reader.world)]
        content["training"] |= {"random": {}, "hidden": _cut(everyone, processes)}
        content["shard"] = None
    if content["shard"] is not None and processes.world > 1:
        model.head.load_shard_state(content["shard"])
    state.load_state_dict(content["training"])


def restore_model(run: Run, model: Model) -> int:
    """Restore the weights and statistics of the best checkpoint, if the run selects it, or of the last one.

    Any number of ranks may have written it. Returns its step.
    """
    last = run.checkpoints()[-1:]
    if not last:
        raise ValueError(f"{run.folder} has no checkpoint yet")
    reader = Reader(last[0])
    best = _best(reader.content["training"])
    if best is not None:
        reader = Reader(run.checkpoint_of(best[0]))
    _check_classes(reader, model)
    rows = 0, reader.num_classes
    content = reader.load(STATE, 0, rows)
    model.restore(reader.load(WEIGHTS, 0, rows), content["model"])
    return typed(content["training"]["step"], int, "step")


def _best(content: dict[str, Any]) -> tuple[int, float] | None:
    if content["best"] is None:
        return None
    step, value = content["best"]
    return typed(step, int, "the best step"), typed(value, float, "the best value")


def _check_classes(reader: Reader, model: Model) -> None:
    if reader.num_classes != model.task.num_classes:
        raise ValueError(f"{reader.folder}: has {reader.num_classes} classes, the run {model.task.num_classes}")


def _by_class(name: str, value: Any, shard: Any) -> Any:
    """Mark tensors that have a row for each class of the shard."""
    own = name in [f"head.{each}" for each in NAMES] and isinstance(value, Tensor) and value.dim() > 0
    return Rows(value) if own and len(value) == shard.last - shard.first else value


def _cut(everyone: list[Any], processes: Processes) -> list[Tensor] | None:
    """Return this rank's rows of the hidden states ``(layers, rows, features)`` that all ranks wrote."""
    if any(hidden is None for hidden in everyone):
        return None
    whole = [torch.cat(parts, dim=1) for parts in zip(*everyone, strict=True)]
    rows, rank, world = whole[0].shape[1], processes.rank, processes.world
    return [value[:, rank * rows // world : (rank + 1) * rows // world].contiguous() for value in whole]
