"""Whole training steps of the default layer with every optimiser that can train it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from .. import optim
from ..sampled import SampledSoftmax
from .step import BATCH, time_steps
from .timing import settle, write_csv

FEATURES = 64
# Steps before the timing.
WARM_UP = 16
BASELINE = "torch SGD, sparse"
#: Largest time of a step with AdamW that passes, divided by that of the baseline.
BAR = 1.5
#: Optimisers, and whether the layer's gradients are sparse.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], bool]] = {
    BASELINE: (torch.optim.SGD, True),
    "AdamW": (optim.AdamW, True),
    "AdamW, rowwise": (lambda parameters: optim.AdamW(parameters, rowwise=True), True),
    "Adagrad": (optim.Adagrad, True),
    "SGD, momentum": (lambda parameters: optim.SGD(parameters, momentum=0.9), True),
    "torch SparseAdam": (lambda parameters: torch.optim.SparseAdam(list(parameters)), True),
    "torch Adagrad, sparse": (torch.optim.Adagrad, True),
    "torch AdamW, dense": (torch.optim.AdamW, False),
}


class Row(NamedTuple):
    """The step of one optimiser."""

    optimizer: str
    num_classes: int
    seconds: float
    #: Numbers that the optimiser keeps, per class weight.
    state: float


def run(out: Path, console: Console, num_classes: int) -> None:
    """Time the optimisers in turns; print milliseconds and ratios, write a CSV."""
    torch.manual_seed(0)
    query, target = torch.randn(BATCH, FEATURES), torch.randint(num_classes, (BATCH,))
    steps: dict[str, Callable[[], object]] = {}
    state: dict[str, float] = {}
    for name, (kind, sparse) in OPTIMIZERS.items():
        head = SampledSoftmax(FEATURES, num_classes, sparse=sparse)
        optimizer = kind(head.parameters())

        def step(head: SampledSoftmax = head, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            head(query.detach().requires_grad_(), target).backward()
            optimizer.step()

        for _ in range(WARM_UP):
            step()
        settle(head.sampler)
        steps[name] = step
        kept = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
        state[name] = sum(value.numel() for value in kept) / head.weight.numel()
    rows = [Row(name, num_classes, seconds, state[name]) for name, seconds in time_steps(steps).items()]
    write_csv(out / "optim.csv", Row._fields, rows)
    base = next(row.seconds for row in rows if row.optimizer == BASELINE)
    title = f"{num_classes:,} classes, d = {FEATURES}, batch {BATCH}, {torch.get_num_threads()} threads"
    table = Table("optimiser", "milliseconds per step", f"this / {BASELINE}", "state per weight", title=title)
    for row in rows:
        table.add_row(row.optimizer, f"{row.seconds * 1e3:.1f}", f"{row.seconds / base:.2f}", f"{row.state:.2f}")
    console.print(table)
    ratio = next(row.seconds for row in rows if row.optimizer == "AdamW") / base
    verdict = "[green]PASS" if ratio <= BAR else "[red]FAIL"
    console.print(f"AdamW takes {ratio:.2f} times as long as {BASELINE}; at most {BAR}: {verdict}")
    console.print(f"figures: {out / 'optim.csv'}", soft_wrap=True)
