"""Checkpoints of a run by `torch.distributed.checkpoint`: every rank writes its part, any number of ranks reads it."""

import io
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from ..distributed import collectives, state
from ..optim.lazy import HISTORY
from .optimizers import state_by_name
from .run import Run

WEIGHTS, OPTIMIZER, COMMON, RANK, STATE = "weights/", "optimizer/", "common", "rank/", "state/"


def save(run: Run, step: int, model: Any, optimizer: Any, common: dict[str, Any], own: dict[str, Any]) -> None:
    """Write a checkpoint; called by all ranks.

    Args:
        run: where to.
        step: its name.
        model: a `Model` with a `ShardedSampledSoftmax`.
        optimizer: of the model.
        common: what all ranks know.
        own: what only this rank knows; ``own["state"]``, hidden states ``(layers, rows, features)``, is kept by row.
    """
    head, rank = model.head, dist.get_rank()
    content = {WEIGHTS + name: _whole(name, value, head) for name, value in model.weights().items()}
    for name, values in state_by_name(model, optimizer).items():
        for key, value in values.items():
            content[f"{OPTIMIZER}{name}/{key}"] = _whole(name, torch.as_tensor(value), head, key)
    own = dict(own)
    content[f"{STATE}{rank}"] = _packed(own.pop("state"))
    content[f"{RANK}{rank}"] = _packed(own)
    content[COMMON] = _packed({**common, "world": dist.get_world_size()})
    group = dist.group.WORLD
    assert group is not None
    with collectives.together("a checkpoint", group):
        if rank == 0:
            with run.checkpoint(step) as folder:
                dist.broadcast_object_list([str(folder)], src=0)
                write(content, checkpoint_id=folder)
        else:
            folders = [None]
            dist.broadcast_object_list(folders, src=0)
            write(content, checkpoint_id=folders[0])
        dist.barrier()


def load(folder: Path, head: Any, part: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and the rest, as `Run.load` gives them: whole, or what the layer ``head`` and ``part`` have of it.

    What belongs to a rank (random numbers, the sampler's statistics) is there only for as many ranks as wrote it.
    """
    reader = FileSystemReader(folder)
    sizes = dict(reader.read_metadata().state_dict_metadata)
    common = _unpacked(_read(reader, {COMMON: sizes[COMMON]}, None)[COMMON])
    same = common.pop("world") == part[1]
    skipped = (RANK, STATE) if same else (RANK,)
    wanted = {key: size for key, size in sizes.items() if not key.startswith(skipped) and key != COMMON}
    if same:
        wanted |= {key: sizes[key] for key in (f"{RANK}{part[0]}", f"{STATE}{part[0]}")}
    found = _read(reader, wanted, head)
    weights = {key.removeprefix(WEIGHTS): value for key, value in found.items() if key.startswith(WEIGHTS)}
    optimizer: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        if key.startswith(OPTIMIZER):
            name, field = key.removeprefix(OPTIMIZER).split("/")
            optimizer.setdefault(name, {})[field] = value
    ranks = sorted(int(key.removeprefix(STATE)) for key in found if key.startswith(STATE))
    states = [_unpacked(found[f"{STATE}{rank}"]) for rank in ranks]
    rest = {**common, "optimizer": optimizer, "random": None}
    if same:
        rest |= _unpacked(found[f"{RANK}{part[0]}"])
        rest["state"] = states[0]
    else:
        rest["state"] = cut_state(_joined(states), part)
    return weights, rest


def cut_optimizer(optimizer: dict[str, Any], head: Any) -> dict[str, Any]:
    """The rows of this rank's classes in what an optimiser remembers of all classes."""
    return {
        name: {
            key: value[head.shard.first : head.shard.last] if _has_rows(name, value, head.num_classes, key) else value
            for key, value in values.items()
        }
        for name, values in optimizer.items()
    }


def cut_state(state: Any, part: tuple[int, int]) -> Any:
    """The rows of one process of hidden states ``(layers, rows, features)``."""
    if state is None:
        return None
    rank, world = part
    rows = state[0].shape[1]
    return tuple(value[:, rank * rows // world : (rank + 1) * rows // world].contiguous() for value in state)


def _joined(states: list[Any]) -> Any:
    if any(state is None for state in states):
        return None
    return tuple(torch.cat(parts, dim=1) for parts in zip(*states, strict=True))


def _of_classes(name: str) -> bool:
    return name in [f"head.{own}" for own in state.NAMES]


def _has_rows(name: str, value: Any, rows: int, key: str = "") -> bool:
    if key == HISTORY:
        return False
    return _of_classes(name) and isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows


def _whole(name: str, value: Tensor, head: Any, key: str = "") -> Tensor:
    return state.as_sharded(value, head) if _has_rows(name, value, head.shard.last - head.shard.first, key) else value


def _read(reader: Any, sizes: dict[str, Any], head: Any) -> dict[str, Tensor]:
    """Tensors of a checkpoint; of those that are sharded, the rows that ``head`` has, or all without it."""
    found: dict[str, Tensor] = {}
    for key, size in sizes.items():
        shape, dtype = list(size.size), size.properties.dtype
        name = key.removeprefix(WEIGHTS) if key.startswith(WEIGHTS) else key.split("/")[-2] if "/" in key else key
        by_class = _of_classes(name) and not key.endswith(f"/{HISTORY}")
        if head is not None and by_class and shape[:1] == [head.num_classes]:
            rows = torch.empty(head.shard.last - head.shard.first, *shape[1:], dtype=dtype)
            found[key] = state.as_sharded(rows, head)
        else:
            found[key] = torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each process reads what it needs: there is nothing to agree on
        read(found, storage_reader=reader, no_dist=True)
    return {key: value.to_local() if hasattr(value, "to_local") else value for key, value in found.items()}  # pyright: ignore


def _packed(content: Any) -> Tensor:
    """Anything that torch can save, as bytes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
