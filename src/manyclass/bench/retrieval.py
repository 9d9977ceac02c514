"""Recall against time per query: the tree of blocks that training leaves, exact search, and the indexes of faiss."""

import gc
import importlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from .. import functional, samplers
from ..sampled import SampledSoftmax
from .timing import best_of, write_csv

CUTOFFS = (10, 100)
#: From 2,000 classes on, the fewest blocks hold the largest cut-off, together with the outliers.
PROBES = (8, 16, 32, 64, 128, 256, 512)
NPROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
EF_SEARCH = (16, 32, 64, 128, 256, 512, 1024)
HNSW_LINKS = 32
EXACT = "exact"

BATCH, STEPS, LEARNING_RATE = 128, 400, 0.1
#: Columns of the latent vectors. Classes lie around their cluster's centre, and queries around their target.
LATENT, CLASS_NOISE, QUERY_NOISE = 16, 0.5, 0.3


class Row(NamedTuple):
    """One index with one setting."""

    num_classes: int
    k: int
    method: str
    #: What trades recall for time, and its value; empty and 0 for an exact search.
    parameter: str
    value: int
    #: Share of the exact top k that the index returns, mean over queries.
    recall: float
    #: All queries in one call.
    microseconds_per_query: float
    #: 0 for the tree of the trained layer, and for a scan of the class weights.
    build_seconds: float


class Index(NamedTuple):
    """A search for the best classes of all queries."""

    name: str
    parameter: str
    values: tuple[int, ...]
    #: Maps k and a value of the parameter to class ids, shape ``(queries, k)``.
    search: Callable[[int, int], Tensor]
    build_seconds: float


class Examples:
    """Queries and their target classes, from clustered latent vectors and Zipf popularity, made by a seed.

    Args:
        num_classes: n; there are √n clusters.
        in_features: size of the query, d.
        seed: of everything.
    """

    def __init__(self, num_classes: int, in_features: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        clusters = math.isqrt(num_classes)
        cluster = torch.randint(clusters, (num_classes,), generator=self.generator)
        self.latent = self._normal(clusters, LATENT)[cluster] + CLASS_NOISE * self._normal(num_classes, LATENT)
        self.mapping = self._normal(LATENT, in_features) / math.sqrt(LATENT)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw queries ``(count, in_features)`` and targets ``(count,)``; class c has a popularity of about 1/(c+1)."""
        num_classes = len(self.latent)
        uniform = torch.rand(count, dtype=torch.float64, generator=self.generator)
        target = (num_classes**uniform).long().clamp(max=num_classes) - 1
        query = (self.latent[target] + QUERY_NOISE * self._normal(count, LATENT)) @ self.mapping
        return query, target

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def run(out: Path, console: Console, classes: list[int], in_features: int, queries: int, seed: int) -> None:
    """Train a layer for each number of classes and search it; print tables, write a CSV and a plot."""
    faiss = _faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    rows: list[Row] = []
    with Progress(console=console) as progress:
        for num_classes in classes:
            head, query, summary = _train(num_classes, in_features, queries, seed, progress)
            console.print(summary, soft_wrap=True)
            rows += _measure(head, query, faiss, progress)
            del head
            gc.collect()
    write_csv(out / "retrieval.csv", Row._fields, rows)
    setting = f"{in_features} features, {queries:,} queries per call, {torch.get_num_threads()} threads"
    console.print(f"{setting}, best of up to 7", soft_wrap=True)
    for num_classes in classes:
        _print([row for row in rows if row.num_classes == num_classes], console)
    _plot(rows, setting, out / "retrieval.png")
    console.print(f"figures: {out / 'retrieval.csv'}\nplot:    {out / 'retrieval.png'}", soft_wrap=True)


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ModuleNotFoundError as error:
        raise ValueError("bench retrieval compares with faiss: pip install 'manyclass[faiss]'") from error


def _train(
    num_classes: int, in_features: int, queries: int, seed: int, progress: Progress
) -> tuple[SampledSoftmax, Tensor, str]:
    """Train a layer with blocks; return it, held-out queries ``(queries, in_features)``, and a line about it."""
    torch.manual_seed(seed)
    examples = Examples(num_classes, in_features, seed)
    head = SampledSoftmax(in_features, num_classes, "blocks")
    optimizer = torch.optim.Adagrad(head.parameters(), lr=LEARNING_RATE)
    # A new tree grows by a slice per step or more, so the first one, built from random weights, is replaced.
    steps = STEPS + head.sampler.partition.slices  # pyright: ignore
    started = time.perf_counter()
    for _ in progress.track(range(steps), description=f"training, {num_classes:,} classes"):
        optimizer.zero_grad()
        head(*examples.draw(BATCH)).backward()
        optimizer.step()
    seconds = time.perf_counter() - started
    query, target = examples.draw(queries)
    with torch.no_grad():
        loss = float(head.eval()(query, target))
    summary = (
        f"{num_classes:,} classes: trained for {steps:,} steps of {BATCH} examples in {seconds:.0f} s; "
        f"held-out loss {loss:.2f} nats, {math.log(num_classes):.2f} for a uniform guess; seed {seed}"
    )
    return head, query, summary


def _measure(head: SampledSoftmax, query: Tensor, faiss: Any, progress: Progress) -> Iterator[Row]:
    """Build all indexes of one layer, then let them take turns."""
    description = f"indexes, {head.num_classes:,} classes"
    indexes = list(progress.track(_indexes(head, query, faiss), total=6, description=description))
    for k in progress.track(CUTOFFS, description=f"searches, {head.num_classes:,} classes"):
        exact = indexes[0].search(k, 0)
        settings = [(index, value) for index in indexes for value in index.values]
        # faiss searches with max(efSearch, k).
        settings = [(index, value) for index, value in settings if index.parameter != "efSearch" or value >= k]
        recalls = [_recall(index.search(k, value), exact) for index, value in settings]
        seconds = best_of(
            {f"{index.name} {value}": partial(index.search, k, value) for index, value in settings}
        ).values()
        for (index, value), recall, elapsed in zip(settings, recalls, seconds, strict=True):
            cost = elapsed / len(query) * 1e6
            yield Row(head.num_classes, k, index.name, index.parameter, value, recall, cost, index.build_seconds)


def _recall(ids: Tensor, exact: Tensor) -> float:
    """Share of ``exact (queries, k)`` that is among ``ids (queries, k)``."""
    return float((ids.unsqueeze(1) == exact.unsqueeze(-1)).any(dim=-1).float().mean())


def _indexes(head: SampledSoftmax, query: Tensor, faiss: Any) -> Iterator[Index]:
    """Yield the exact search, the tree that training left, a new tree of the same classes, and the indexes of faiss."""
    weight = head.weight.detach()
    # `head.topk` without `probe` would compute the log-partition, too.
    yield Index(EXACT, "", (0,), lambda k, _: functional.topk(query, weight, k)[1], 0.0)
    yield Index("blocks", "probe", PROBES, lambda k, probe: head.topk(query, k, probe=probe)[1], 0.0)

    sampler = samplers.Blocks(head.num_classes, head.in_features)
    seconds = _seconds(lambda: sampler.update(weight))
    yield Index("blocks rebuilt", "probe", PROBES, lambda k, probe: sampler.search(query, k, probe).ids, seconds)

    yield from _faiss_indexes(weight, query, faiss)


def _faiss_indexes(weight: Tensor, query: Tensor, faiss: Any) -> Iterator[Index]:
    """Yield indexes by inner product of ``weight (num_classes, in_features)``."""
    num_classes, columns = weight.shape
    rows, queries = weight.numpy(), query.numpy()

    def search(index: Any, k: int) -> Tensor:
        return torch.from_numpy(index.search(queries, k)[1])

    flat = faiss.IndexFlatIP(columns)
    seconds = _seconds(lambda: flat.add(rows))
    yield Index("faiss flat", "", (0,), lambda k, _: search(flat, k), seconds)

    # faiss asks for at least 39 rows per list.
    lists = min(round(4 * math.sqrt(num_classes)), num_classes // 39)
    inverted = faiss.IndexIVFFlat(faiss.IndexFlatIP(columns), columns, lists, faiss.METRIC_INNER_PRODUCT)
    seconds = _seconds(lambda: (inverted.train(rows), inverted.add(rows)))

    def search_lists(k: int, nprobe: int) -> Tensor:
        inverted.nprobe = nprobe
        return search(inverted, k)

    values = tuple(value for value in NPROBES if value <= lists)
    yield Index("faiss IVF", "nprobe", values, search_lists, seconds)

    graph = faiss.IndexHNSWFlat(columns, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    seconds = _seconds(lambda: graph.add(rows))

    def search_graph(k: int, ef_search: int) -> Tensor:
        graph.hnsw.efSearch = ef_search
        return search(graph, k)

    yield Index("faiss HNSW", "efSearch", EF_SEARCH, search_graph, seconds)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _print(rows: list[Row], console: Console) -> None:
    """Print the rows of one number of classes, one line per setting of an index."""
    table = Table(title=f"Recall, and µs per query (exact / this): {rows[0].num_classes:,} classes")
    table.add_column("method")
    for k in CUTOFFS:
        table.add_column(f"recall@{k}", justify="right")
        table.add_column(f"µs, k = {k}", justify="right")
    table.add_column("build s", justify="right")
    measured = {(row.method, row.value, row.k): row for row in rows}
    for row in {(row.method, row.value): row for row in rows}.values():
        cells = []
        for k in CUTOFFS:
            found, exact = measured.get((row.method, row.value, k)), measured[EXACT, 0, k]
            if found is None:
                cells += ["", ""]
                continue
            cost = found.microseconds_per_query
            cells += [f"{found.recall:.4f}", f"{cost:.1f} ({exact.microseconds_per_query / cost:.1f}×)"]
        method = f"{row.method}, {row.parameter} {row.value}" if row.parameter else row.method
        table.add_row(method, *cells, f"{row.build_seconds:.1f}")
    console.print(table)


def _plot(rows: list[Row], setting: str, file: Path) -> None:
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(row.num_classes for row in rows))
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row.method for row in rows))}
    figure = Figure(figsize=(1 + 5.5 * len(sizes), 4 * len(CUTOFFS) + 1), layout="constrained")
    panels = figure.subplots(len(CUTOFFS), len(sizes), sharey=True, sharex="col", squeeze=False)
    for k, line in zip(CUTOFFS, panels, strict=True):
        for num_classes, axes in zip(sizes, line, strict=True):
            for name, colour in colours.items():
                points = [row for row in rows if (row.num_classes, row.k, row.method) == (num_classes, k, name)]
                first, last = points[0], points[-1]
                label = f"{name}, {first.parameter} {first.value} … {last.value}" if first.parameter else name
                x, y = [row.microseconds_per_query for row in points], [row.recall for row in points]
                marker = "o" if first.parameter else "*"
                axes.plot(x, y, marker=marker, markersize=5 if first.parameter else 12, color=colour, label=label)
            axes.set(xscale="log", xlabel="microseconds per query", ylabel=f"recall@{k}", ylim=(0, 1.03))
            axes.set_title(f"the best {k} of {num_classes:,} classes", fontsize=10)
            axes.grid(alpha=0.3, which="both")
            axes.legend(fontsize=7, loc="lower right")
    figure.suptitle(f"Up and to the left is better: share of the exact best classes that a search finds\n{setting}")
    figure.savefig(file, dpi=120)
