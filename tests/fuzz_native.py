"""Random calls of the native operations: right arguments must give what plain PyTorch gives, wrong ones a ValueError.

Each operation has a maker of right arguments with the truth that belongs to them, and a rule that tells right
arguments from wrong ones. Half of the calls have one or two arguments spoiled.
"""

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from fuzz_rules import right
from fuzz_spoil import spoil
from torch import Tensor
from torch.testing import assert_close

from manyclass import importance, kernels, ops
from manyclass.optim import rows as optimiser_rows
from manyclass.samplers import KernelTree, codes, own, partition, pool, search, tree

F64, I64 = torch.float64, torch.int64
Arguments = dict[str, Any]
#: Results of the native call and its arguments afterwards; raises if they are wrong.
Truth = Callable[[tuple[Tensor, ...], Arguments], None]


@contextmanager
def reference() -> Iterator[None]:
    """Run the PyTorch reference."""
    before, ops._NATIVE = ops._NATIVE, False
    try:
        yield
    finally:
        ops._NATIVE = before


# --- right arguments and their truth ------------------------------------------------------------------------------


def alias_draw(rng: random.Random) -> tuple[Arguments, Truth]:
    cells, batch = rng.randint(1, 50), rng.randint(0, 5)
    start = torch.randint(cells, (batch,))
    arguments = {
        "threshold": torch.rand(cells, dtype=F64),
        "alias": torch.randint(cells, (cells,)),
        "start": start,
        "length": (torch.rand(batch) * (cells - start)).long() + 1,
        "uniform": torch.rand(batch, rng.randint(0, 9), dtype=F64),
    }

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        assert torch.equal(results[0], ops.alias_draw_reference(**arguments))

    return arguments, truth


def bisect(rng: random.Random) -> tuple[Arguments, Truth]:
    n, columns, blocks = rng.choice([0, 1, 2, 30, 900]), rng.randint(1, 20), 1 << rng.randint(0, 5)
    borders = torch.arange(blocks + 1) * n // blocks
    if rng.random() < 0.3:
        borders[1:-1] = torch.randint(n + 1, (blocks - 1,)).sort().values
    rows = torch.randn(n, columns) * 10.0 ** rng.randint(-20, 20)
    if rng.random() < 0.2:
        rows = rows.round(decimals=0)

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        (order,) = results
        assert torch.equal(order.sort().values, torch.arange(n))
        sizes = borders.diff().tolist()
        for block in order.split(sizes):
            assert torch.equal(block, block.sort().values)
        if columns == 1 and blocks > 1:  # one column: the halves are the lower and the upper values
            halves = rows[order, 0].split([sum(sizes[: blocks // 2]), sum(sizes[blocks // 2 :])])
            low, high = sorted(halves, key=lambda half: float(half.sum()) / max(1, len(half)))
            assert 0 in (len(low), len(high)) or low.max() <= high.min()

    return {"rows": rows, "borders": borders}, truth


def sum_up_(rng: random.Random) -> tuple[Arguments, Truth]:
    blocks = 1 << rng.randint(0, 7)
    arguments = {"sums": torch.rand(2 * blocks, dtype=F64), "leaves": torch.randint(blocks, (rng.randint(0, 20),))}
    expected = arguments["sums"].clone()
    above = {int(leaf) + blocks for leaf in arguments["leaves"]}
    for _ in range(blocks.bit_length() - 1):
        above = {node // 2 for node in above}
        for node in above:
            expected[node] = expected[2 * node] + expected[2 * node + 1]

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        assert_close(after["sums"], expected, rtol=0, atol=0)

    return arguments, truth


def tree_of_sums(blocks: int, rng: random.Random) -> Tensor:
    sums = torch.rand(2 * blocks, dtype=F64) ** rng.choice([1, 10]) * (rng.random() < 0.9)
    for node in range(blocks - 1, 0, -1):
        sums[node] = sums[2 * node] + sums[2 * node + 1]
    return sums


def pool_draw(rng: random.Random) -> tuple[Arguments, Truth]:
    blocks, outliers = 1 << rng.randint(0, 6), rng.randint(0, 9)
    inside = rng.randint(max(2, blocks), 4 * blocks + 5)
    arguments = {
        "sums": tree_of_sums(blocks, rng),
        "uniform": torch.rand(1, dtype=F64),
        "classes": inside + outliers,
        "outliers": outliers,
        "samples": rng.randint(1, inside - 1),
        "share": rng.choice([0.5, 1.0, rng.uniform(1e-6, 1)]),
    }

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        def border(block):
            return outliers + block * inside // blocks

        layout = SimpleNamespace(border=border, inside=inside, sums=arguments["sums"], blocks=blocks)
        before, pool.UNIFORM = pool.UNIFORM, arguments["share"]
        try:
            position, log_count = pool.pool_draw_reference(layout, arguments["uniform"], arguments["samples"])  # type: ignore
        finally:
            pool.UNIFORM = before
        same = results[0] == position
        assert int((~same).sum()) <= 1  # a point that falls within rounding of a border
        assert_close(results[1][same], log_count[same], rtol=1e-9, atol=1e-9)

    return arguments, truth


def blocks_of(rng: random.Random) -> search.Index:
    n, width, with_bias = rng.choice([1, 2, 17, 60, 300]), rng.randint(1, 9), rng.random() < 0.5
    before, partition.TOP = partition.TOP, rng.choice([8, 512])
    try:
        layout = partition.Partition(n, width + with_bias, rng.choice([1, 2, 5, 8]))
    finally:
        partition.TOP = before
    weight, bias = torch.randn(n, width), torch.randn(n) if with_bias else None
    layout.order.copy_(torch.randperm(n))
    sizes = layout.border(torch.arange(layout.blocks + 1)).diff()
    inside = layout.order[layout.outliers :].long()
    layout.block_of[inside] = torch.arange(layout.blocks, dtype=torch.int32).repeat_interleave(sizes)
    classes = codes.Codes(n, layout.columns)
    with reference():
        layout.summarise(weight, bias, torch.arange(layout.blocks), classes)
        codes.encode(classes, weight, bias, torch.arange(n))
    layout.sums.copy_(tree_of_sums(layout.blocks, rng))
    return search.Index(layout, classes, weight, bias, rng.choice(["softmax", "absolute"]))


TABLES = ("mean", "mean_scale", "spread", "code", "code_scale", "weight", "bias", "order")


def summarise_(rng: random.Random) -> tuple[Arguments, Truth]:
    index = blocks_of(rng)
    layout = index.partition
    for buffer in (layout.mean.code, layout.mean.scale, layout.spread, index.codes.code, index.codes.scale):
        buffer.fill_(1)
    blocks = torch.randperm(layout.blocks)[: rng.randint(0, layout.blocks)].sort().values
    expected = copy.deepcopy(index)
    with reference():
        expected.partition.summarise(index.weight, index.bias, blocks, expected.codes)
    arguments = dict(zip(TABLES, index.native(), strict=True)) | {"blocks": blocks}
    sizes = dict(zip(("outliers", "num_blocks", "top"), index.sizes(), strict=True))

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        same_codes(after["mean"], after["mean_scale"], expected.partition.mean)
        same_codes(after["code"], after["code_scale"], expected.codes)
        assert_close(after["spread"], expected.partition.spread, rtol=0.02, atol=0.02)

    return arguments | sizes, truth


def same_codes(code: Tensor, scale: Tensor, expected: codes.Codes) -> None:
    """Sums in another order may round to the next code; nodes above add such differences up."""
    assert int((code.int() - expected.code.int()).abs().max()) <= 2
    assert_close(scale, expected.scale, rtol=0.02, atol=1e-6)


def encode_(rng: random.Random) -> tuple[Arguments, Truth]:
    index = blocks_of(rng)
    index.codes.code.fill_(1)
    chosen = torch.randperm(len(index.weight))[: rng.randint(0, len(index.weight))].sort().values
    expected = copy.deepcopy(index.codes)
    with reference():
        codes.encode(expected, index.weight, index.bias, chosen)
    tables = dict(zip(TABLES, index.native(), strict=True))
    arguments = {name: tables[name] for name in ("code", "code_scale", "weight", "bias")} | {"classes": chosen}
    return arguments, lambda results, after: same_codes(after["code"], after["code_scale"], expected)


def searched(rng: random.Random) -> tuple[search.Index, Tensor, Arguments, Arguments]:
    index = blocks_of(rng)
    layout = index.partition
    # More than `own.TRIED` examples, and flat ones, are searched in other ways.
    query = torch.randn(rng.choice([rng.randint(0, 6), 40]), layout.columns) * rng.choice([1, 0.1])
    if index.bias is not None:
        query[:, -1] = 1  # where the offsets are
    tables = dict(zip(TABLES, index.native(), strict=True))
    width = rng.randint(1, layout.blocks)
    sizes = dict(zip(("outliers", "blocks", "top"), index.sizes(), strict=True)) | {"width": width}
    return index, query, tables, sizes


def nudged(index: search.Index, query: Tensor, factor: float) -> Tensor:
    """The query times a factor, but for the one that belongs to the offsets."""
    return torch.cat([query[:, : index.weight.shape[1]] * factor, query[:, index.weight.shape[1] :]], 1)


def agreed(compute: Callable[[float], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Tensor]:
    """The reference's results, and which rows do not change if its input changes within rounding."""
    exact, more, less = compute(1.0), compute(1 + 1e-5), compute(1 - 1e-5)
    rows = (exact[0] == more[0]) & (exact[0] == less[0])
    return exact, rows.all(dim=-1)


def best_classes(rng: random.Random) -> tuple[Arguments, Truth]:
    index, query, tables, sizes = searched(rng)
    layout, width = index.partition, sizes["width"]
    most = layout.outliers + (layout.inside // layout.blocks * width if width < layout.blocks else layout.inside)
    k = rng.randint(1, most)
    arguments = {"query": query, **tables, **sizes, "k": k, "absolute": index.prediction == "absolute"}

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        def compute(factor: float) -> tuple[Tensor, ...]:
            best = search.best_classes(index, nudged(index, query, factor), width, k)
            return best.ids, best.outputs, best.log_total, best.cutoff

        with reference():
            expected, rows = agreed(compute)
        assert torch.equal(results[1][rows], expected[0][rows])
        for mine, other in zip((results[0], *results[2:]), expected[1:], strict=True):
            assert_close(mine[rows], other[rows], rtol=1e-4, atol=1e-4)

    return arguments, truth


def node_shares(rng: random.Random) -> tuple[Arguments, Truth]:
    index, query, tables, _ = searched(rng)
    query = torch.cat([query, torch.randn(1, query.shape[1])])
    cutoff = torch.randn(len(query))
    arguments = {"query": query, "cutoff": cutoff, "log_total": cutoff + torch.randn(len(query)) + 2}
    arguments |= {name: tables[name] for name in ("mean", "mean_scale", "spread")}
    nodes = torch.randint(len(tables["mean"]), (rng.randint(0, 200),))
    arguments |= {"nodes": nodes, "size": rng.uniform(1, 9), "absolute": index.prediction == "absolute"}

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        norm = query.square().sum(dim=-1, keepdim=True)
        variance = norm * tables["spread"][nodes]
        mass = search.log_mass(query @ index.partition.mean.read(nodes).T, variance, after["size"], index.prediction)
        share = (mass.minimum(cutoff[:, None]) - after["log_total"][:, None]).clamp(max=0).exp()
        expected = share.square().mean(dim=0).sqrt().nan_to_num(0.0)
        assert_close(results[0], expected, rtol=1e-2, atol=1e-4)

    return arguments, truth


def own_draw(rng: random.Random) -> tuple[Arguments, Truth]:
    index, query, tables, sizes = searched(rng)
    layout, batch = index.partition, len(query)
    uniform, exclude = torch.rand(batch, dtype=F64), torch.randint(-1, layout.num_classes, (batch,))
    with reference():
        samples = rng.choice([1, layout.inside, rng.randint(1, layout.inside)])
        position, _ = pool.pool_draw(layout, torch.rand(1, dtype=F64), samples)
    number = rng.randint(1, 40)
    arguments = {
        "query": query,
        "exclude": exclude,
        "uniform": uniform,
        **tables,
        "block_of": layout.block_of,
        "sums": layout.sums,
        "pool": position,
    }
    arguments |= {**sizes, "number": number, "share": pool.UNIFORM, "absolute": index.prediction == "absolute"}

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        def compute(factor: float) -> tuple[Tensor, ...]:
            # The last factor of the chances: some ids stay, but points between them move.
            shifted = (uniform + (factor - 1)).clamp(0, 1 - 2**-53)
            found = own.own_draw(
                index, nudged(index, query, factor), exclude, shifted, position, sizes["width"], number
            )
            shown = torch.ones(batch, len(position)).index_put(tuple(found.hidden), torch.tensor(0.0))
            return (
                torch.cat([found.ids.double(), shown, (found.log_count == math.inf).double()], 1),
                found.log_count,
                found.log_total,
            )

        if layout.num_classes == 1 and bool((exclude == 0).any()):
            return  # nothing is left, which the reference refuses
        with reference():
            expected, rows = agreed(compute)
        shown = torch.ones(batch, len(position)).index_put(tuple(results[2]), torch.tensor(0.0))
        mine = torch.cat([results[0].double(), shown, (results[1] == math.inf).double()], 1)
        assert torch.equal(mine[rows], expected[0][rows])
        assert_close(results[1][rows], expected[1][rows], rtol=1e-3, atol=1e-3)
        assert_close(results[3][rows], expected[2][rows], rtol=1e-4, atol=1e-4)

    return arguments, truth


def sampled_loss_(rng: random.Random) -> tuple[Arguments, Truth]:
    batch, n, columns = rng.choice([*range(6), 17, 70]), rng.randint(1, 40), rng.randint(1, 40)
    own, scale = rng.randint(0, 20), rng.choice([0.1, 1, 10])
    shared = rng.choice([rng.randint(0, 40), 64, 65, 150])  # slices of 64 are summed one by one
    log_count = torch.randn(batch, own)
    log_count[torch.rand(batch, own) < 0.1] = math.inf
    arguments = {
        "logits": torch.randn(shared, batch) * scale,
        "query": torch.randn(batch, columns) * scale,
        "weight": torch.randn(n, columns),
        "bias": torch.randn(rng.choice([0, n])),
        "classes": torch.randint(0, n, (batch, 1 + own)),
        "log_count": log_count,
        "pool_log_count": torch.randn(shared),
        "hidden": (torch.rand(batch, shared) < 0.2).nonzero().T.contiguous(),
        "absolute": rng.random() < 0.5,
    }
    arguments["classes"][torch.rand(batch, 1 + own) < 0.1] = -1

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        query, weight, classes = arguments["query"].double(), arguments["weight"].double(), arguments["classes"]
        rows, none = weight[classes.clamp(min=0)], classes < 0
        raw = torch.einsum("bd,bkd->bk", query, rows)
        if len(arguments["bias"]):
            raw = raw + arguments["bias"].double()[classes.clamp(min=0)]
        raw, pooled = raw.requires_grad_(), arguments["logits"].T.double().requires_grad_()
        outputs = [part.abs() if arguments["absolute"] else part for part in (raw, pooled)]
        shared_terms = (outputs[1] - arguments["pool_log_count"].double()).index_put(
            tuple(arguments["hidden"]), torch.tensor(-math.inf, dtype=F64)
        )
        own_terms = torch.cat([outputs[0][:, :1], outputs[0][:, 1:] - arguments["log_count"].double()], 1)
        terms = torch.cat([own_terms.masked_fill(none, -math.inf), shared_terms], 1)
        something = (terms > -math.inf).any(-1)
        positive = outputs[0][:, 0].masked_fill(none[:, 0], 0.0)
        total = torch.where(something, terms.masked_fill(~something[:, None], 0.0).logsumexp(-1), -1e30)
        loss = torch.where(something, total - positive, total)
        slopes, pool_slopes = torch.autograd.grad(loss.sum(), (raw, pooled))
        close = {"rtol": 1e-4, "atol": 1e-3 * max(1.0, scale)}
        assert_close(results[0].double(), loss.detach(), **close)
        assert_close(results[1].double(), positive.detach(), **close)
        assert_close((after["logits"] * results[2]).double().T, pool_slopes, rtol=1e-3, atol=2e-3)
        assert_close(results[3].double(), slopes, rtol=1e-3, atol=2e-3)
        expected = torch.einsum("bk,bkd->bd", results[3].double(), rows)
        assert_close(results[4].double(), expected, rtol=1e-4, atol=1e-4)

    return arguments, truth


def row_gradients(rng: random.Random) -> tuple[Arguments, Truth]:
    batch, n, columns = rng.randint(0, 6), rng.choice([1, 7, 3000, 10**6]), rng.randint(1, 20)
    slots, shared = rng.randint(1, 12), rng.randint(0, 12)
    arguments = {
        "query": torch.randn(batch, columns),
        "slopes": torch.randn(batch, slots) * (torch.rand(batch, slots) < 0.8),
        "classes": torch.randint(-1, n, (batch, slots)),
        "log_count": 3 * torch.randn(batch, slots - 1),
        "pool": torch.randint(n, (shared,)),
        "pool_log_count": 3 * torch.randn(shared),
        "pool_values": torch.randn(shared, columns),
        "pool_bias_values": torch.randn(shared),
        "num_classes": n,
    }

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        query, slopes, classes = arguments["query"].double(), arguments["slopes"].double(), arguments["classes"]
        real = (classes >= 0) & (slopes != 0)
        example, slot = real.nonzero(as_tuple=True)
        ids = torch.cat([classes[real], arguments["pool"]])
        rows, place = ids.unique(return_inverse=True)
        each = slopes[example, slot].unsqueeze(-1)
        values = torch.cat([query[example] * each, arguments["pool_values"].double()])
        biases = torch.cat([each, arguments["pool_bias_values"].double().unsqueeze(-1)])
        assert torch.equal(results[0], rows)
        for mine, parts in ((results[1], values), (results[2].unsqueeze(-1), biases)):
            expected = torch.zeros(len(rows), parts.shape[1], dtype=F64).index_add(0, place, parts)
            assert_close(mine.double(), expected, rtol=1e-4, atol=1e-4)
        sums = torch.zeros(len(rows), columns, dtype=F64).index_add(0, place, values)
        counts = torch.cat([torch.zeros(batch, 1), arguments["log_count"]], 1)[real]
        (own, pool), (parts, shared_parts) = (value.split([len(slot), shared]) for value in (place, values))
        drawn = (own[slot > 0], parts.square().sum(1)[slot > 0], counts[slot > 0].double())
        excess = importance.excess_of(
            sums, drawn, (pool, shared_parts.norm(dim=1), arguments["pool_log_count"].double())
        )
        assert_close(1 / results[3].double(), 1 / excess, rtol=1e-2, atol=1e-3)

    return arguments, truth


def kernel_tree(rng: random.Random, degree: int) -> KernelTree:
    n, columns = rng.choice([1, 2, 13, 100, 400]), rng.randint(1, 8)
    before, tree.MAX_TOP = tree.MAX_TOP, rng.choice([1, 2, 9, 2048])
    try:
        kernel = kernels.Polynomial(degree, rng.choice([0.1, 1.0, 100.0]))
        leaf_size, branching = rng.choice([1, 3, 16, 500]), rng.choice([2, 3, 7])
        sampler = KernelTree(kernel, n, columns, leaf_size, branching, rng.choice(["class", "leaf"]))
    finally:
        tree.MAX_TOP = before
    with reference():
        sampler.update(torch.randn(n, columns) / math.sqrt(columns))
    return sampler


def kernel_value(sampler: KernelTree, query: Tensor, classes: Tensor) -> Tensor:
    return kernels.evaluate(sampler.kernel, query, sampler.weight[classes])


def tree_draw(rng: random.Random) -> tuple[Arguments, Truth]:
    sampler = kernel_tree(rng, rng.choice([2, 4]))
    n, batch = sampler.num_classes, rng.randint(0, 4)
    query, uniform = torch.randn(batch, sampler.columns), torch.rand(batch, rng.randint(0, 12), dtype=F64)
    exclude = torch.randint(n, (batch,)) if n > 1 and rng.random() < 0.5 else None
    features = sampler._features(query)
    arguments = {
        "features": features,
        "query": query,
        "top": sampler._masses(features, 0),
        "sums": sampler.sums,
        "weight": sampler.weight,
        "sizes": sampler.sizes,
        "leaf_size": sampler.leaf_size,
        "branching": sampler.branching,
        "uniform": uniform,
        "exclude": torch.empty(0, dtype=I64) if exclude is None else exclude,
        "excluded_value": torch.empty(0) if exclude is None else kernel_value(sampler, query, exclude),
        "degree": sampler.kernel.degree,
        "alpha": sampler.kernel.alpha,
        "floor": tree.FLOOR,
        "whole_leaf": sampler.ending == "leaf",
    }

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        def compute(shift: float) -> tuple[Tensor, Tensor]:
            return sampler._draw_reference(query, (uniform + shift).clamp(0, 1 - 2**-53), exclude)

        with reference():
            (ids, log_prob), *others = (compute(shift) for shift in (0, 1e-3, -1e-3))
        # Sums in float32 leave a probability of a deep path uncertain by more than rounding.
        stable = (ids == others[0][0]) & (ids == others[1][0])
        assert torch.equal(results[0][stable], ids[stable])
        assert_close(results[1][stable], log_prob[stable], rtol=1e-2, atol=1e-2)
        assert bool(((results[0] >= 0) & (results[0] < n)).all())
        if exclude is not None and not arguments["whole_leaf"]:
            assert not bool((results[0] == exclude.unsqueeze(-1)).any())

    return arguments, truth


def tree_refresh_(rng: random.Random) -> tuple[Arguments, Truth]:
    sampler = kernel_tree(rng, 2)
    sampler.weight.add_(1.0)
    leaves = torch.randperm(sampler.sizes[-1])[: rng.randint(0, sampler.sizes[-1])].sort().values
    arguments = {"sums": sampler.sums.clone(), "weight": sampler.weight, "sizes": sampler.sizes}
    arguments |= {"leaf_size": sampler.leaf_size, "branching": sampler.branching, "leaves": leaves}
    with reference():
        sampler._refresh(leaves)

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        assert_close(after["sums"], sampler.sums, rtol=1e-4, atol=1e-4 * float(sampler.sums.abs().max()))

    return arguments | {"alpha": sampler.kernel.alpha}, truth


def update_rows_(rng: random.Random) -> tuple[Arguments, Truth]:
    size, columns = rng.randint(1, 20), rng.randint(1, 40)
    rows = torch.randperm(size)[: rng.randint(0, size)].sort().values
    first = torch.randn(size if rng.random() < 0.7 else 0, columns)
    second = torch.rand(size if rng.random() < 0.7 else 0, rng.choice([1, columns]))
    arguments = {
        "weight": torch.randn(size, columns), "first": first, "second": second, "rows": rows,
        "grad": torch.randn(len(rows), columns), "missed": torch.rand(len(rows), 5),
    }  # fmt: skip
    numbers = {name: rng.random() + 0.1 for name in ("gain1", "gain2", "rate", "root", "eps")}
    expected = {name: value.clone() for name, value in arguments.items()}
    update = optimiser_rows.RowUpdate(**numbers)
    moments = [expected[name] if len(expected[name]) else None for name in ("first", "second")]
    others = [expected[name] for name in ("rows", "grad", "missed")]
    optimiser_rows.update_rows_reference_(expected["weight"], *moments, *others, update)

    def truth(results: tuple[Tensor, ...], after: Arguments) -> None:
        for name in ("weight", "first", "second"):
            assert_close(after[name], expected[name], rtol=1e-4, atol=1e-5)

    return arguments | numbers, truth


MAKERS = {
    make.__name__: make
    for make in (
        alias_draw, best_classes, bisect, encode_, node_shares, own_draw, pool_draw, row_gradients, sampled_loss_,
        sum_up_, summarise_, tree_draw, tree_refresh_, update_rows_,
    )
}  # fmt: skip


# --- one call -----------------------------------------------------------------------------------------------------


def one_call(rng: random.Random) -> None:
    """Call one operation, with right or with spoiled arguments; raise if the result is wrong."""
    name = rng.choice(sorted(MAKERS))
    arguments, truth = MAKERS[name](rng)
    spoiled = rng.choices([0, 1, 2], [10, 8, 2])[0]
    for argument in rng.sample(sorted(arguments), spoiled):
        arguments[argument] = spoil(rng, argument, arguments[argument])
    given = {key: value.clone() if isinstance(value, Tensor) and value.is_contiguous() else value
             for key, value in arguments.items()}  # fmt: skip
    expected = right(name, arguments)
    operation = getattr(torch.ops.manyclass, name)
    try:
        results = operation(*given.values())
    except ValueError as error:
        if expected is True or not str(error).startswith(f"{name}: "):
            raise AssertionError(f"refused right arguments, or names no operation: {error}") from error
        return
    assert expected is not False, f"{name} took wrong arguments"
    results = results if isinstance(results, tuple) else (() if results is None else (results,))
    if spoiled == 0:
        truth(results, given)
