"""Time a training step of manyclass beside other libraries' output layers, all in one run. See README.md."""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import faiss
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyclass
from manyclass.bench import tensorflow_step
from manyclass.bench.step import WARM_UP, time_steps, training_step
from manyclass.bench.timing import settle
from manyclass.pages import keep_memory

POOL, OWN = 4096, 32
#: The index of mined negatives is rebuilt after so many steps; a step carries its share of that.
REBUILD = 1000
#: Classes that an example finds by the index, and the part of the index that it searches.
MINED, LISTS, PROBE = 32, 1024, 16

#: Steps until the exact layers find all their memory among what the process has kept.
GROWTH = 6

Step = Callable[[], object]


def manyclass_step(num_classes: int, query: Tensor, target: Tensor) -> Step:
    """Take the default layer, as late in a long training."""
    head = manyclass.SampledSoftmax(query.shape[1], num_classes)
    step = training_step(head.parameters(), lambda q: head(q, target), query)
    for _ in range(WARM_UP):
        step()
    settle(head.sampler)
    return step


def linear_cross_entropy_step(num_classes: int, query: Tensor, target: Tensor, dtype: torch.dtype) -> Step:
    """Compute the exact loss by torch's fused function."""
    weight = nn.Parameter(table(num_classes, query.shape[1]).to(dtype))
    return training_step([weight], lambda q: F.linear_cross_entropy(q, weight, target), query.to(dtype))


def adaptive_step(num_classes: int, query: Tensor, target: Tensor) -> Step:
    """Take torch's adaptive softmax with two clusters of rare classes."""
    cutoffs = [num_classes // 50, num_classes // 5]
    layer = nn.AdaptiveLogSoftmaxWithLoss(query.shape[1], num_classes, cutoffs)
    return training_step(layer.parameters(), lambda q: layer(q, target).loss, query)


def mined_step(num_classes: int, query: Tensor, target: Tensor) -> tuple[Step, Step]:
    """A step on negatives that a faiss index finds, without any correction, and the rebuild of that index.

    A uniform pool keeps the classes that no query finds from growing.
    """
    embedding = nn.Embedding(num_classes, query.shape[1], sparse=True)
    embedding.weight.data = table(num_classes, query.shape[1])
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(query.shape[1]), query.shape[1], LISTS, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = PROBE
    index.train(embedding.weight.detach()[:: max(1, num_classes // (64 * LISTS))].numpy())

    def rebuild() -> None:
        index.reset()
        index.add(embedding.weight.detach().numpy())

    def loss(q: Tensor) -> Tensor:
        ids = torch.from_numpy(index.search(q.detach().numpy(), MINED)[1]).clamp(min=0)
        pool = torch.randint(num_classes, (POOL,))
        mined = torch.einsum("bd,bmd->bm", q, embedding(ids)).masked_fill(ids == target[:, None], -torch.inf)
        shared = (q @ embedding(pool).T).masked_fill(pool == target[:, None], -torch.inf)
        positive = (q * embedding(target)).sum(-1, keepdim=True)
        return F.cross_entropy(torch.cat([positive, mined, shared], dim=1), torch.zeros_like(target))

    rebuild()
    return training_step(embedding.parameters(), loss, query), rebuild


def table(num_classes: int, in_features: int) -> Tensor:
    """Return random class weights."""
    return (torch.rand(num_classes, in_features) - 0.5) * 2 / in_features**0.5


def measure(num_classes: int, in_features: int, batch: int) -> dict[str, float]:
    """Return seconds per step of every layer."""
    torch.manual_seed(0)
    query, target = torch.randn(batch, in_features), torch.randint(num_classes, (batch,))
    seconds = {}
    # One after the other: in turns, the gaps that one leaves in memory would slow down the next.
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        exact = linear_cross_entropy_step(num_classes, query, target, dtype)
        for _ in range(GROWTH):
            exact()
        seconds |= time_steps({f"F.linear_cross_entropy, {name}": exact})
    mined, rebuild = mined_step(num_classes, query, target)
    seconds |= time_steps(
        {
            "nn.AdaptiveLogSoftmaxWithLoss": adaptive_step(num_classes, query, target),
            "faiss, mined and uniform negatives": mined,
            "faiss, rebuild of the index": rebuild,
            "TensorFlow, sampled_softmax_loss": tensorflow_step.make(num_classes, POOL, query, target),
            "manyclass, default": manyclass_step(num_classes, query, target),
        }
    )
    seconds["faiss, mined and uniform negatives"] += seconds.pop("faiss, rebuild of the index") / REBUILD
    return seconds


def main() -> None:
    """Print a table for each number of classes, and write a CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("peers.csv"))
    given = parser.parse_args()
    keep_memory()
    torch.set_num_threads(given.threads)
    faiss.omp_set_num_threads(given.threads)
    rows = []
    for num_classes in given.classes:
        seconds = measure(num_classes, given.features, given.batch)
        print(f"{num_classes:,} classes, d = {given.features}, batch {given.batch}, {given.threads} threads")
        for name, value in seconds.items():
            rows.append((num_classes, given.features, given.batch, given.threads, name, value))
            print(f"  {name:36} {value * 1e3:9.1f} ms, {value / seconds['manyclass, default']:7.2f} × manyclass")
    with given.out.open("w", newline="") as handle:
        header = ("num_classes", "in_features", "batch", "threads", "layer", "seconds")
        csv.writer(handle).writerows([header, *rows])


if __name__ == "__main__":
    main()
