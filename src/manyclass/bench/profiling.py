"""Profile of a training step of blocks."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import fused
from ..sampled import SampledSoftmax
from ..samplers import Blocks, blocks
from .timing import settle

# Steps before, and steps that are profiled.
WARM_UP, STEPS = 100, 32
# Where each part of the forward pass is called.
CALLS: dict[str, tuple[Any, str]] = {
    "refresh": (Blocks, "update"),
    "pool draw": (blocks, "pool_draw"),
    "own search": (blocks, "own_draw"),
    "observe": (Blocks, "observe"),
    "loss forward": (fused, "sampled_loss"),
}
# Classes in a cluster.
MEMBERS = 1000
REST = "rest of the forward pass"


class Part(NamedTuple):
    """Mean time of one part of a step."""

    part: str
    milliseconds: float


@torch.no_grad()
def cluster(head: SampledSoftmax, target: Tensor) -> Tensor:
    """Put the classes into clusters, as after a training, and return a query near each ``target``'s cluster.

    A query gives nearly all of its probability to the classes of that cluster.
    """
    clusters = math.ceil(head.num_classes / MEMBERS)
    centre = torch.randn(clusters, head.in_features)
    for first in range(0, head.num_classes, clusters):
        rows = head.weight[first : first + clusters]
        rows.copy_(centre[: len(rows)] + 0.5 * torch.randn(rows.shape))
    return 0.2 * (centre[target % clusters] + 0.5 * torch.randn(len(target), head.in_features))


def profile(num_classes: int, in_features: int, batch: int, own: int, pool: int) -> list[Part]:
    """Time the parts of some training steps with clustered classes; the last part is the whole step."""
    torch.manual_seed(0)
    head = SampledSoftmax(in_features, num_classes, "blocks", pool, own=own)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    target = torch.randint(num_classes, (batch,))
    query = cluster(head, target)
    seconds: dict[str, float] = defaultdict(float)

    def step() -> None:
        optimizer.zero_grad()
        with _timed(seconds, "forward"):
            loss = head(query.detach().requires_grad_(), target)
        with _timed(seconds, "backward"):
            loss.backward()
        with _timed(seconds, "optimiser"):
            optimizer.step()

    for _ in range(WARM_UP):
        step()
    settle(head.sampler)
    seconds.clear()
    with _timed_calls(seconds):
        for _ in range(STEPS):
            step()
    forward = seconds.pop("forward")
    parts = {name: seconds[name] for name in CALLS}
    parts[REST] = forward - sum(parts.values())
    parts |= {name: seconds[name] for name in ("backward", "optimiser")}
    parts["whole step"] = sum(parts.values())
    return [Part(name, total / STEPS * 1e3) for name, total in parts.items()]


def show(parts: list[Part], title: str, console: Console) -> None:
    """Print the parts, and their shares of the step."""
    table = Table(title=title)
    table.add_column("part")
    table.add_column("milliseconds", justify="right")
    table.add_column("share", justify="right")
    for part in parts:
        table.add_row(part.part, f"{part.milliseconds:.2f}", f"{part.milliseconds / parts[-1].milliseconds:.0%}")
    console.print(table)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of a block of code."""
    started = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - started


@contextmanager
def _timed_calls(seconds: dict[str, float]) -> Iterator[None]:
    """Add the time of every call of `CALLS`."""

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with _timed(seconds, name):
                return call(*args, **kwargs)

        return timed

    with ExitStack() as stack:
        for name, (owner, attribute) in CALLS.items():
            stack.enter_context(patch.object(owner, attribute, wrapped(name, getattr(owner, attribute))))
        yield
