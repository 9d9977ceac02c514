"""Classes that an encoder makes: sampled training against the full softmax, and the memory of a step."""

import ctypes
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..full import FullSoftmax
from ..pages import MMAP_MAX
from ..sampled import SampledSoftmax
from .timing import write_csv

FEATURES, INPUTS, ATTRIBUTES = 32, 16, 16
BATCH, EXAMPLES, HELDOUT = 256, 30_000, 4096
LEARNING_RATE = 2e-3
#: Layers that are compared: the sampler, its ``num_samples``, and its options; None for the full softmax.
LAYERS: dict[str, tuple[str, int, dict[str, Any]] | None] = {
    "full softmax": None,
    "blocks, 8 own and a pool of 512": ("blocks", 512, {"own": 8}),
    "in-batch, logQ by counts": ("in_batch", BATCH, {"counts": True}),
    "in-batch, logQ by a stream": ("in_batch", BATCH, {}),
    "in-batch and 512 uniform": ("in_batch", BATCH, {"counts": True, "uniform": 512}),
    "uniform, a pool of 768": ("uniform", 768, {"scope": "batch"}),
}
#: Sizes of the memory measurement: classes, pool, and chunk; the first is what the others are compared with.
SIZES = (
    (50_000, 2048, 1024),
    (500_000, 2048, 1024),
    (50_000, 8192, 1024),
    (50_000, 16384, 1024),
    (50_000, 16384, 1 << 20),
)
HIDDEN, OWN = 2048, 4
#: Measured steps: more than one, since blocks spread work on their tree over several.
STEPS = 20
# A parameter of glibc's mallopt: larger blocks have a mapping of their own.
MMAP_THRESHOLD = -3


class Problem(NamedTuple):
    """Examples from a softmax over classes with attributes: a network of each side, and popular classes."""

    attributes: Tensor  # shape: (num_classes, ATTRIBUTES)
    inputs: Tensor  # shape: (EXAMPLES + HELDOUT, INPUTS)
    target: Tensor  # shape: (EXAMPLES + HELDOUT,)

    @staticmethod
    def make(num_classes: int, seed: int) -> "Problem":
        """Draw weights of the true networks, then inputs, then targets."""
        generator = torch.Generator().manual_seed(seed)
        attributes = torch.randn(num_classes, ATTRIBUTES, generator=generator)
        first, second = (torch.randn(ATTRIBUTES, 64, generator=generator) / 4 for _ in range(2))
        inputs = torch.randn(EXAMPLES + HELDOUT, INPUTS, generator=generator)
        weight = (attributes @ first).tanh() @ torch.randn(64, 16, generator=generator) / 4
        query = (inputs @ second).tanh() @ torch.randn(64, 16, generator=generator) / 4
        popular = 1.5 * attributes[:, 0]
        target = []
        for part in query.split(1024):
            logits = part @ weight.T + popular
            noise = torch.rand(logits.shape, generator=generator).log().neg_().log_()
            target.append((logits - noise).argmax(dim=1))  # the Gumbel trick
        return Problem(attributes, inputs, torch.cat(target))


class Tower(nn.Module):
    """Class ids to embeddings: two layers on the attributes."""

    def __init__(self, attributes: Tensor, features: int, hidden: int = 64) -> None:
        super().__init__()
        self.register_buffer("attributes", attributes)
        self.layers = nn.Sequential(nn.Linear(attributes.shape[1], hidden), nn.Tanh(), nn.Linear(hidden, features))

    def forward(self, ids: Tensor) -> Tensor:
        """Encode ids ``(k,)`` to ``(k, features)``."""
        return self.layers(self.attributes[ids])  # pyright: ignore


class Outcome(NamedTuple):
    """A training."""

    layer: str
    seed: int
    #: Exact, in nats.
    heldout_loss: float
    seconds: float


class Peak(NamedTuple):
    """Memory that a training step needs beyond what is there before it, in MiB."""

    num_classes: int
    pool: int
    chunk_size: int
    #: Distinct classes that the step encodes.
    encoded: int
    cache: float
    peak: float


def train(name: str, problem: Problem, steps: int, seed: int) -> Outcome:
    """Train one layer; all see the same batches."""
    num_classes = len(problem.attributes)
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, FEATURES))
    tower = Tower(problem.attributes, FEATURES)
    layer = LAYERS[name]
    if layer is None:
        head = FullSoftmax(FEATURES, num_classes, classes=tower, chunk_size=num_classes)
    else:
        sampler, number, chosen = layer
        options: dict[str, Any] = {**chosen}
        if "counts" in options:
            options["counts"] = problem.target[:EXAMPLES].bincount(minlength=num_classes)
        head = SampledSoftmax(FEATURES, num_classes, sampler, number, classes=tower, chunk_size=num_classes, **options)
    parameters = [*trunk.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    generator = torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    for _ in range(steps):
        rows = torch.randint(EXAMPLES, (BATCH,), generator=generator)
        loss = head(trunk(problem.inputs[rows]), problem.target[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - began
    head.refresh()
    head.eval()
    with torch.no_grad():
        loss = head(trunk(problem.inputs[EXAMPLES:]), problem.target[EXAMPLES:])
    return Outcome(name, seed, float(loss), seconds)


def peak_of(step: Callable[[], object]) -> float:
    """Return the MiB of resident memory that a call adds at its peak; NaN if the system cannot tell."""

    def status(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(MMAP_MAX, 1 << 16)  # `keep_memory` may have been called
        libc.mallopt(MMAP_THRESHOLD, 1 << 16)  # large blocks are returned when freed, so that holes do not count
        libc.malloc_trim(0)  # freed memory stays resident otherwise
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
        before = status("VmRSS")
        step()
        return status("VmHWM") - before
    except (OSError, AttributeError):
        return math.nan


def memory(num_classes: int, pool: int, chunk_size: int) -> Peak:
    """Measure a step, forward and backward."""
    torch.manual_seed(0)
    tower = Tower(torch.randn(num_classes, ATTRIBUTES), FEATURES, HIDDEN)
    head = SampledSoftmax(FEATURES, num_classes, "blocks", pool, own=OWN, classes=tower, chunk_size=chunk_size)
    query, target = torch.randn(16, FEATURES), torch.randint(num_classes, (16,))
    asked = []
    tower.register_forward_pre_hook(lambda module, ids: asked.append(len(ids[0])) if torch.is_grad_enabled() else None)
    head(query, target)  # the first one encodes all classes
    encoded = sum(asked)
    # The first makes gradients, too.
    _, *peaks = (peak_of(lambda: head(query, target).backward()) for _ in range(1 + STEPS))
    peak = max(peaks)
    return Peak(num_classes, pool, chunk_size, encoded, head.weight.numel() * 4 / 2**20, peak)


def run(out: Path, console: Console, num_classes: int, steps: int, seeds: int) -> None:
    """Train every layer with some seeds, measure memory; print tables, write CSVs."""
    outcomes = []
    for seed in range(seeds):
        problem = Problem.make(num_classes, seed)
        for name in LAYERS:
            outcomes.append(train(name, problem, steps, seed))
            console.print(f"seed {seed}, {name}: {outcomes[-1].heldout_loss:.4f}")
    write_csv(out / "towers.csv", Outcome._fields, outcomes)
    base = {one.seed: one.heldout_loss for one in outcomes if LAYERS[one.layer] is None}
    title = f"{num_classes:,} classes, a tower of 2 layers, batch {BATCH}, {steps} steps, seeds 0 … {seeds - 1}"
    table = Table("layer", "held-out loss", "above the full softmax, each seed", "milliseconds per step", title=title)
    for name in LAYERS:
        own = [one for one in outcomes if one.layer == name]
        gaps = "  ".join(f"{one.heldout_loss - base[one.seed]:+.3f}" for one in own)
        mean, seconds = sum(one.heldout_loss for one in own) / len(own), min(one.seconds for one in own)
        table.add_row(name, f"{mean:.3f}", gaps, f"{seconds / steps * 1e3:.1f}")
    console.print(table)
    memory(*SIZES[0])  # libraries allocate what they need only once
    peaks = [memory(*sizes) for sizes in SIZES]
    write_csv(out / "towers_memory.csv", Peak._fields, peaks)
    table = Table("classes", "pool", "chunk", "encoded", "cache, MiB", "a step adds, MiB", title="Memory of a step")
    for row in peaks:
        sizes = (row.num_classes, row.pool, row.chunk_size, row.encoded)
        table.add_row(*(f"{size:,}" for size in sizes), f"{row.cache:.1f}", f"{row.peak:.1f}")
    console.print(table)
    console.print(f"figures: {out / 'towers.csv'}, {out / 'towers_memory.csv'}", soft_wrap=True)
