"""A training step of the sharded layer against the number of processes, and a model of it for many machines."""

import math
import os
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import start_processes

from ..budget import NUM_SAMPLES
from ..sampled import SampledSoftmax
from ..samplers.own import TRIED
from ..samplers.partition import BRANCHING, OUTLIERS, TOP
from ..train.processes import leave
from .timing import best_of, write_csv

BATCH, FEATURES, POOL = 512, 64, NUM_SAMPLES["batch"]
ONE = "unsharded"
REPEATS = 40
#: Collectives of a step: numbers of examples, queries, targets, log-sum-exps, slopes, gradients of queries.
COLLECTIVES = 6


class Row(NamedTuple):
    """A step with the same examples in all, on some number of processes of one thread each."""

    layer: str
    processes: int
    num_classes: int
    #: Best of some, from barrier to barrier.
    seconds: float
    #: What a process hands over to others in a step: queries, targets, log-sum-exps, slopes and gradients of queries.
    bytes_sent: int
    #: Class weights, and what the sampler holds, of one process.
    weight_bytes: int
    sampler_bytes: int


def run(out: Path, console: Console, num_classes: int, worlds: list[int]) -> None:
    """Time a step with each number of processes; print a table, write a CSV and a plot; then the model on paper."""
    rows: list[Row] = []
    with console.status("measuring") as status, TemporaryDirectory() as folder:
        for world in worlds:
            status.update(f"{world} processes")
            start_processes(_measure, (world, num_classes, folder), nprocs=world, start_method="spawn")
            rows += [Row(*row) for row in torch.load(f"{folder}/{world}.pt")]
    write_csv(out / "distributed.csv", Row._fields, rows)
    _print(rows, console)
    _plot(rows, out / "distributed.png")
    console.print(f"figures: {out / 'distributed.csv'}\nplot:    {out / 'distributed.png'}", soft_wrap=True)
    here = rates()
    for row in rows:
        if row.layer != ONE and row.processes <= (os.cpu_count() or 1):
            console.print(_check(row, *here), soft_wrap=True)
    console.print(Paper().describe(), soft_wrap=True)


def _measure(rank: int, world: int, num_classes: int, folder: str) -> None:
    """Run one process of a measurement; the first process writes the results."""
    from ..distributed import ShardedSampledSoftmax, collectives

    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    store, patience = f"file://{folder}/store-{world}", timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=patience)
    own = BATCH // world + (rank < BATCH % world)
    query, target = 0.3 * torch.randn(own, FEATURES), torch.randint(num_classes, (own,))
    layers: dict[str, SampledSoftmax] = {"sharded": ShardedSampledSoftmax(FEATURES, num_classes)}
    if world == 1:
        layers[ONE] = SampledSoftmax(FEATURES, num_classes)
    sent: list[int] = []
    collectives.observer = lambda what, size: sent.append(size)
    rows = []
    times: dict[str, list[float]] = {name: [] for name in layers}
    optimizers = {name: torch.optim.SGD(layer.parameters(), lr=0.1) for name, layer in layers.items()}
    for _ in range(3 + REPEATS):
        for name, layer in layers.items():
            dist.barrier()
            sent.clear()
            started = time.perf_counter()
            optimizers[name].zero_grad()
            layer(query.detach().requires_grad_(), target).backward()
            optimizers[name].step()
            dist.barrier()
            times[name].append(time.perf_counter() - started)
    for name, layer in layers.items():
        weight = layer.weight
        memory = sum(buffer.numel() * buffer.element_size() for buffer in layer.sampler.buffers())
        traffic = sum(sent) if name == "sharded" else 0
        rows.append((name, world, num_classes, min(times[name][3:]), traffic, weight.numel() * 4, memory))
    if rank == 0:
        torch.save(rows, f"{folder}/{world}.pt")
    leave(0)


class Paper(NamedTuple):
    """What a step needs on many machines, by counting. Every machine has examples and classes."""

    machines: int = 64
    num_classes: int = 100_000_000
    features: int = 128
    #: Examples of each machine, and the pool of negatives of all of them.
    batch: int = 256
    pool: int = 65_536
    #: Bytes per second that a machine sends, and receives at the same time; seconds that a collective takes at least.
    network: float = 25e9 / 8
    latency: float = 100e-6
    #: Floating point operations, and bytes of memory traffic, per second that a machine really reaches.
    arithmetic: float = 1e12
    memory: float = 100e9
    #: Examples that search the tree; None for all. If the softmax is flat, a few are tried, and no others are searched.
    searching: int | None = None

    @property
    def examples(self) -> int:
        """Of all machines."""
        return self.machines * self.batch

    @property
    def weight_bytes(self) -> float:
        """Class weights of a machine; Adagrad has as much again."""
        return self.num_classes / self.machines * self.features * 4

    @property
    def sampler_bytes(self) -> float:
        """Codes of the classes, a byte per number, and two trees: codes of nodes, 8 bytes per class, 24 per block."""
        classes, nodes = self.num_classes / self.machines, self.blocks * BRANCHING / (BRANCHING - 1)
        return classes * (self.features + 4) + 2 * (nodes * (self.features + 8) + 8 * classes + 24 * self.blocks)

    @property
    def blocks(self) -> int:
        """Of a machine, each of about 8 classes."""
        return 2 ** round(math.log2(self.num_classes / self.machines / 8))

    @property
    def sent_bytes(self) -> float:
        """Queries to all others, their gradients back; a target, two terms and two slopes for each example."""
        others = (self.machines - 1) / self.machines
        return others * self.examples * (2 * self.features * 4 + 8 + 4 * 4)

    @property
    def seconds(self) -> dict[str, float]:
        """Of the parts of a step, one after the other; the tree is that of `samplers.Blocks`."""
        levels = max(0, math.ceil(math.log(self.blocks / TOP, BRANCHING)))
        searching = self.examples if self.searching is None else self.searching
        probe, own = (math.ceil(total / self.machines) for total in (96, 32))
        own_pool, row = self.pool / self.machines, self.features * 4
        # Nodes of the top level and outliers stay in the cache; the others are read for each example.
        cached = 2 * (searching * TOP + self.examples * OUTLIERS) * self.features / self.arithmetic
        walked = searching * probe * (levels * BRANCHING / 2 + 8) * self.features  # int8 codes
        # Rows of the pool, of own negatives and of targets: logits, gradient, optimiser, summary of 8 neighbours.
        passes = 8 * (own_pool + own * searching + self.batch) * row
        return {
            "network": self.sent_bytes / self.network + COLLECTIVES * self.latency,
            "walking down the tree": cached + walked / self.memory,
            "logits of the pool and gradients": 3 * 2 * self.examples * own_pool * self.features / self.arithmetic,
            "rows of weights, optimiser, summaries": passes / self.memory,
        }

    def describe(self) -> str:
        """Describe the estimate for readers."""
        parts = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in self.seconds.items())
        return (
            f"on paper: {self.num_classes:.0e} classes of {self.features} features on {self.machines} machines, "
            f"{self.batch} examples each, a pool of {self.pool:,}: per machine {self.weight_bytes / 1e9:.2f} GB of "
            f"class weights, {self.sampler_bytes / 1e9:.2f} GB of the sampler, {self.sent_bytes / 1e6:.1f} MB sent per "
            f"step; {1e3 * sum(self.seconds.values()):.0f} ms per step ({parts}); assumed: "
            f"{self.network * 8 / 1e9:.0f} Gbit/s, {1e6 * self.latency:.0f} µs per collective, "
            f"{self.arithmetic / 1e12:.0f} Tflop/s and {self.memory / 1e9:.0f} GB/s per machine"
        )


def rates() -> tuple[float, float]:
    """Return floating point operations and bytes of random rows per second of one thread of this machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    query, pool, table = (torch.randn(rows, FEATURES) for rows in (BATCH, POOL, 1 << 20))
    ids = torch.randint(len(table), (1 << 16,))
    seconds = best_of({"products": lambda: pool @ query.T, "rows": lambda: table.index_select(0, ids)})
    torch.set_num_threads(threads)
    return 2 * BATCH * POOL * FEATURES / seconds["products"], len(ids) * FEATURES * 4 / seconds["rows"]


def _check(row: Row, arithmetic: float, memory: float) -> str:
    """Compare the model on paper with a measurement. Random queries have a flat softmax, so few are searched."""
    sizes = {"batch": BATCH // row.processes, "pool": POOL, "features": FEATURES, "searching": TRIED}
    paper = Paper(row.processes, row.num_classes, arithmetic=arithmetic, memory=memory, **sizes)
    if row.processes == 1:
        paper = paper._replace(latency=0.0)
    expected = sum(paper.seconds.values())
    who = "1 process" if row.processes == 1 else f"{row.processes} processes"
    return (
        f"the model, {who} at {arithmetic / 1e9:.0f} Gflop/s and {memory / 1e9:.1f} GB/s each: "
        f"{1e3 * expected:.1f} ms, {row.seconds / expected:.1f} times as long measured; sampler "
        f"{paper.sampler_bytes / 1e6:.0f} MB, {row.sampler_bytes / paper.sampler_bytes:.2f} times as large measured"
    )


def _print(rows: list[Row], console: Console) -> None:
    table = Table(
        title=f"A step of {BATCH} examples in all, pool of {POOL}, {rows[0].num_classes:,} classes, 1 thread each"
    )
    for column in (
        "layer",
        "processes",
        "ms per step",
        "unsharded / this",
        "kB sent by each",
        "MB of weights and sampler",
    ):
        table.add_column(column, justify="left" if column == "layer" else "right")
    base = next((row.seconds for row in rows if row.layer == ONE), None)
    for row in rows:
        ratio = "" if base is None else f"{base / row.seconds:.2f}×"
        memory = f"{row.weight_bytes / 1e6:.0f} + {row.sampler_bytes / 1e6:.0f}"
        table.add_row(
            row.layer, str(row.processes), f"{1e3 * row.seconds:.1f}", ratio, f"{row.bytes_sent / 1e3:.0f}", memory
        )
    console.print(table)
    console.print(f"{os.cpu_count()} cores: more processes than cores take turns")


def _plot(rows: list[Row], file: Path) -> None:
    from matplotlib.figure import Figure

    own = [row for row in rows if row.layer != ONE]
    worlds = [row.processes for row in own]
    panels = (
        ("milliseconds per step", [1e3 * row.seconds for row in own]),
        ("kilobytes sent by a process per step", [row.bytes_sent / 1e3 for row in own]),
        ("megabytes of weights and sampler per process", [(row.weight_bytes + row.sampler_bytes) / 1e6 for row in own]),
    )
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (label, values) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.plot(worlds, values, marker="o", label="sharded")
        axes.set(xlabel="processes", ylabel=label, xticks=worlds)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    first = figure.axes[0]
    for row in rows:
        if row.layer == ONE:
            first.axhline(1e3 * row.seconds, color="black", linestyle="--", label=ONE)
    first.legend()
    figure.suptitle(f"{rows[0].num_classes:,} classes, {BATCH} examples in all, 1 thread each, {os.cpu_count()} cores")
    figure.savefig(file, dpi=120)
