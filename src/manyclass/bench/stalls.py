"""The slowest training step of blocks, to show that no step stalls while the next tree grows."""

import math
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress

from ..sampled import SampledSoftmax
from ..samplers import Blocks
from ..samplers.partition import SLICE, Partition
from ..train.training import peak_bytes
from .step import BATCH
from .timing import write_csv

IN_FEATURES = 64
# The slowest later step may take this many times as long as the median.
MOST = 10
# Steps after the new tree has replaced the old one.
AFTERWARDS = 10


class Row(NamedTuple):
    """One training step."""

    #: Counted from 1; the first step builds the tree.
    step: int
    #: Slices of the next tree that had grown before, and those of a whole tree.
    grown: int
    slices: int
    seconds: float


def run(out: Path, console: Console, classes: int, steps: int) -> None:
    """Time single steps while a new tree grows and replaces the old one; print the slowest, write a CSV."""
    with Progress(console=console) as progress:
        rows = measure(classes, steps, progress)
    write_csv(out / "stalls.csv", Row._fields, rows)
    first, *later = rows
    middle, slowest = median(row.seconds for row in later), max(later, key=lambda row: row.seconds)
    ratio = slowest.seconds / middle
    for line in [
        f"{classes:,} classes, d = {IN_FEATURES}, batch {BATCH}, {torch.get_num_threads()} threads, {len(rows)} steps",
        f"first step:         {first.seconds * 1e3:9.1f} ms",
        f"median later step:  {middle * 1e3:9.1f} ms, {1 / middle:.1f} steps per second",
        f"slowest later step: {slowest.seconds * 1e3:9.1f} ms, step {slowest.step}, "
        f"{slowest.grown:,} of {slowest.slices:,} slices of the next tree grown",
        f"memory of the process: at most {(peak_bytes() or 0) / 1e9:.2f} GB, of which class weights "
        f"{4 * classes * IN_FEATURES / 1e9:.2f} GB",
        f"figures: {out / 'stalls.csv'}",
        f"{'PASS' if ratio <= MOST else 'FAIL'}  the slowest later step takes {ratio:.1f} times the median, "
        f"at most {MOST} times allowed",
    ]:
        console.print(line, soft_wrap=True)


def measure(classes: int, steps: int, progress: Progress) -> list[Row]:
    """Time training steps that are spread over the growth of a tree.

    A tree of millions of classes grows over thousands of steps. Between timed steps, further slices grow untimed, so
    that the timed steps cover every stage: scanning, halving, finishing, and the swap of the trees.
    """
    torch.manual_seed(0)
    head = SampledSoftmax(IN_FEATURES, classes, "blocks")
    sampler = head.sampler
    assert isinstance(sampler, Blocks)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    stops = [None, *_stops(sampler.growing, steps), *[None] * AFTERWARDS]
    rows: list[Row] = []
    for stop in progress.track(stops, description="steps"):
        if stop is not None:
            sampler._grow(max(0, stop - int(sampler.growing.grown)))
        query, target = torch.randn(BATCH, IN_FEATURES, requires_grad=True), torch.randint(classes, (BATCH,))
        grown = int(sampler.growing.grown)
        started = time.perf_counter()
        optimizer.zero_grad()
        head(query, target).backward()
        optimizer.step()
        rows.append(Row(len(rows) + 1, grown, sampler.growing.slices, time.perf_counter() - started))
    return rows


def _stops(partition: Partition, steps: int) -> list[int]:
    """Return the slices to time: some at even distances, and the first and last ones of the stages."""
    last_scan = math.ceil(partition.num_classes / SLICE) - 1
    first_finish = partition.slices - (1 << partition.stepwise)
    even = torch.linspace(0, partition.slices - 1, steps).long().tolist()
    return sorted({*even, last_scan, last_scan + 1, first_finish, partition.slices - 1})
