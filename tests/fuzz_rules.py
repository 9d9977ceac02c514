"""What the native operations allow, written down a second time: True, False, or None where either answer will do."""

import math
from typing import Any

import torch
from torch import Tensor

MOST = 2**31 - 1
F32, F64, I8, I32, I64 = torch.float32, torch.float64, torch.int8, torch.int32, torch.int64
TABLES = {
    "mean": (I8, 2), "mean_scale": (F32, 1), "spread": (F32, 1), "code": (I8, 2), "code_scale": (F32, 1),
    "weight": (F32, 2), "bias": (F32, 1), "order": (I32, 1),
}  # fmt: skip
# The dtype and the dimensions of every tensor.
DTYPES = {
    "alias_draw": {
        "threshold": (F64, 1), "alias": (I64, 1), "start": (I64, 1), "length": (I64, 1), "uniform": (F64, 2),
    },
    "bisect": {"rows": (F32, 2), "borders": (I64, 1)},
    "sum_up_": {"sums": (F64, 1), "leaves": (I64, 1)},
    "pool_draw": {"sums": (F64, 1), "uniform": (F64, 1)},
    "summarise_": {**TABLES, "blocks": (I64, 1)},
    "encode_": {
        "code": (I8, 2), "code_scale": (F32, 1), "weight": (F32, 2), "bias": (F32, 1), "classes": (I64, 1),
    },
    "node_shares": {
        "query": (F32, 2), "cutoff": (F32, 1), "log_total": (F32, 1), "mean": (I8, 2), "mean_scale": (F32, 1),
        "spread": (F32, 1), "nodes": (I64, 1),
    },
    "own_draw": {
        "query": (F32, 2), "exclude": (I64, 1), "uniform": (F64, 1), **TABLES, "block_of": (I32, 1), "sums": (F64, 1),
        "pool": (I64, 1),
    },
    "best_classes": {"query": (F32, 2), **TABLES},
    "sampled_loss_": {
        "logits": (F32, 2), "query": (F32, 2), "weight": (F32, 2), "bias": (F32, 1), "classes": (I64, 2),
        "log_count": (F32, 2), "pool_log_count": (F32, 1), "hidden": (I64, 2),
    },
    "row_gradients": {
        "query": (F32, 2), "slopes": (F32, 2), "classes": (I64, 2), "log_count": (F32, 2), "pool": (I64, 1),
        "pool_log_count": (F32, 1), "pool_values": (F32, 2), "pool_bias_values": (F32, 1),
    },
    "tree_draw": {
        "features": (F32, 2), "query": (F32, 2), "top": (F32, 2), "sums": (F32, 2), "weight": (F32, 2),
        "uniform": (F64, 2), "exclude": (I64, 1), "excluded_value": (F32, 1),
    },
    "tree_refresh_": {"sums": (F32, 2), "weight": (F32, 2), "leaves": (I64, 1)},
    "update_rows_": {
        "weight": (F32, 2), "first": (F32, 2), "second": (F32, 2), "rows": (I64, 1), "grad": (F32, 2),
        "missed": (F32, 2),
    },
}  # fmt: skip


def right(name: str, arguments: dict[str, Any]) -> bool | None:
    """Whether an operation must take these arguments."""
    for argument, (dtype, dim) in DTYPES[name].items():
        value = arguments[argument]
        if value.dtype != dtype or value.dim() != dim or not value.is_contiguous():
            return False
    return RULES[name](**arguments)


def inside(ids: Tensor, low: int, limit: int) -> bool:
    return bool(((ids >= low) & (ids < limit)).all())


def unit(uniform: Tensor) -> bool:
    return bool(((uniform >= 0) & (uniform < 1)).all())


def rising(ids: Tensor) -> bool:
    return bool((ids.diff() > 0).all())


def power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def alias_draw(threshold, alias, start, length, uniform):
    return (
        len(alias) == len(threshold)
        and len(start) == len(length) == len(uniform)
        and unit(uniform)
        and all(a >= 0 and b >= 1 and a + b <= len(alias) for a, b in zip(start.tolist(), length.tolist(), strict=True))
    )


def bisect(rows, borders):
    blocks, ends = len(borders) - 1, borders.tolist()
    return power_of_two(blocks) and ends[0] == 0 and ends[-1] == len(rows) and ends == sorted(ends)


def tree_of_sums(sums):
    return len(sums) % 2 == 0 and power_of_two(len(sums) // 2)


def sum_up_(sums, leaves):
    return tree_of_sums(sums) and inside(leaves, 0, len(sums) // 2)


def pool_draw(sums, uniform, classes, outliers, samples, share):
    blocks = len(sums) // 2
    if not (tree_of_sums(sums) and len(uniform) == 1 and unit(uniform) and 1 <= classes <= MOST):
        return False
    if not (0 <= outliers < classes and blocks <= classes - outliers and 1 <= samples < classes - outliers):
        return False
    if not 1e-6 <= share <= 1 or not 0 <= float(sums[1]) < math.inf:
        return False
    return None if not bool(((sums >= 0) & (sums < math.inf)).all()) else True


def layout(classes: int, outliers: int, blocks: int, top: int, nodes: int) -> bool:
    if not (
        1 <= classes <= MOST
        and 0 <= outliers < classes
        and 1 <= blocks <= classes - outliers
        and 1 <= top <= blocks
        and blocks & (blocks - 1) == 0
    ):
        return False
    widths = [blocks]
    while widths[-1] > top and widths[-1] % 8 == 0:
        widths.append(widths[-1] // 8)
    return widths[-1] == top and sum(widths) == nodes


def encodes(code, code_scale, weight, bias):
    columns = weight.shape[1] + (len(bias) > 0)
    return (
        len(weight) > 0
        and columns > 0
        and len(bias) in (0, len(weight))
        and code.shape == (len(weight), stride(columns))
        and len(code_scale) == len(weight)
    )


def stride(columns):
    return -(-columns // 32) * 32


def fits(mean, mean_scale, spread, code, code_scale, weight, bias, order):
    return (
        encodes(code, code_scale, weight, bias)
        and mean.shape[1] == code.shape[1]
        and len(spread) == len(mean_scale) == len(mean)
        and len(order) == len(weight)
    )


def encode_(code, code_scale, weight, bias, classes):
    return encodes(code, code_scale, weight, bias) and inside(classes, 0, len(weight)) and rising(classes)


def summarise_(mean, mean_scale, spread, code, code_scale, weight, bias, order, blocks, outliers, num_blocks, top):
    if not fits(mean, mean_scale, spread, code, code_scale, weight, bias, order):
        return False
    if not layout(len(weight), outliers, num_blocks, top, len(mean)):
        return False
    if not (inside(blocks, 0, num_blocks) and rising(blocks)):
        return False
    return True if inside(order, 0, len(weight)) else None  # only the blocks that are summarised are looked at


def node_shares(query, cutoff, log_total, mean, mean_scale, spread, nodes, size, absolute):
    return (
        len(query) == len(cutoff) == len(log_total) > 0
        and query.shape[1] > 0
        and mean.shape[1] == -(-query.shape[1] // 32) * 32
        and len(mean) == len(mean_scale) == len(spread)
        and inside(nodes, 0, len(mean))
        and 1 <= size <= MOST
    )


def own_draw(
    query, exclude, uniform, mean, mean_scale, spread, code, code_scale, weight, bias, order, block_of, sums, pool,
    outliers, blocks, top, width, number, share, absolute,
):  # fmt: skip
    n = len(order)
    return (
        fits(mean, mean_scale, spread, code, code_scale, weight, bias, order)
        and layout(n, outliers, blocks, top, len(mean))
        and inside(order[:outliers], 0, n)
        and query.shape[1] == weight.shape[1] + (len(bias) > 0)
        and len(exclude) == len(uniform) == len(query)
        and len(block_of) == n
        and len(sums) == 2 * blocks
        and tree_of_sums(sums)
        and 1 <= width <= MOST
        and 1 <= number <= MOST
        and 0 <= share <= 1
        and inside(exclude, -1, n)
        and inside(block_of[exclude[exclude >= 0]], -1, blocks)
        and inside(pool, 0, n)
        and pool.tolist() == sorted(pool.tolist())
        and unit(uniform)
    )


def best_classes(
    query, mean, mean_scale, spread, code, code_scale, weight, bias, order, outliers, blocks, top, width, k, absolute
):
    n = len(order)
    if not fits(mean, mean_scale, spread, code, code_scale, weight, bias, order):
        return False
    if not (layout(n, outliers, blocks, top, len(mean)) and inside(order[:outliers], 0, n)):
        return False
    most = outliers + ((n - outliers) // blocks * width if width < blocks else n - outliers)
    return query.shape[1] == weight.shape[1] + (len(bias) > 0) and 1 <= width <= MOST and 1 <= k <= most


def sampled_loss_(logits, query, weight, bias, classes, log_count, pool_log_count, hidden, absolute):
    shared, batch = logits.shape
    return (
        len(weight) > 0
        and weight.shape[1] == query.shape[1]
        and len(bias) in (0, len(weight))
        and len(query) == len(classes) == len(log_count) == batch
        and log_count.shape[1] + 1 == classes.shape[1]
        and len(pool_log_count) == shared
        and inside(classes, -1, len(weight))
        and len(hidden) == 2
        and inside(hidden[0], 0, batch)
        and inside(hidden[1], 0, shared)
    )


def row_gradients(
    query, slopes, classes, log_count, pool, pool_log_count, pool_values, pool_bias_values, num_classes
):  # fmt: skip
    return (
        len(classes) == len(query)
        and slopes.shape == classes.shape
        and log_count.shape == (len(query), classes.shape[1] - 1)
        and len(pool_log_count) == len(pool)
        and pool_values.shape == (len(pool), query.shape[1])
        and len(pool_bias_values) == len(pool)
        and 1 <= num_classes <= MOST
        and inside(classes, -1, num_classes)
        and inside(pool, 0, num_classes)
    )


def kernel_tree(sums, weight, sizes, leaf_size, branching):
    n = len(weight)
    if not (n >= 1 and 1 <= leaf_size <= n and 2 <= branching <= MOST and sizes and sums.shape[1] % 64 == 0):
        return False
    span, expected = leaf_size, [-(-n // leaf_size)]
    while len(expected) < len(sizes):
        if span >= n:
            return False
        span *= branching
        expected.insert(0, -(-n // span))
    return sizes == expected and len(sums) == sum(sizes)


def tree_draw(
    features, query, top, sums, weight, sizes, leaf_size, branching, uniform, exclude, excluded_value, degree, alpha,
    floor, whole_leaf,
):  # fmt: skip
    batch = len(uniform)
    return (
        kernel_tree(sums, weight, sizes, leaf_size, branching)
        and features.shape == (batch, sums.shape[1])
        and query.shape == (batch, weight.shape[1])
        and top.shape == (batch, sizes[0])
        and len(exclude) in (0, batch)
        and len(exclude) == len(excluded_value)
        and 1 <= degree <= 64
        and 0 <= alpha <= 1e30
        and 0 <= floor <= 1
        and unit(uniform)
        and inside(exclude, 0, len(weight))
        and (len(exclude) == 0 or len(weight) > 1)
    )


def tree_refresh_(sums, weight, sizes, leaf_size, branching, leaves, alpha):
    columns = weight.shape[1]
    return (
        kernel_tree(sums, weight, sizes, leaf_size, branching)
        and inside(leaves, 0, sizes[-1])
        and rising(leaves)
        and 0 <= alpha <= 1e30
        and columns * (columns + 1) // 2 < sums.shape[1]
    )


def update_rows_(weight, first, second, rows, grad, missed, gain1, gain2, rate, root, eps):
    size, columns = weight.shape
    firsts = len(first) == 0 or first.shape == weight.shape
    seconds = len(second) == 0 or tuple(second.shape) in ((size, columns), (size, 1))
    shapes = tuple(grad.shape) == (len(rows), columns) and tuple(missed.shape) == (len(rows), 5)
    return firsts and seconds and shapes and rising(rows) and inside(rows, 0, size)


RULES = {
    rule.__name__: rule
    for rule in (
        alias_draw, best_classes, bisect, encode_, node_shares, own_draw, pool_draw, row_gradients, sampled_loss_,
        sum_up_, summarise_, tree_draw, tree_refresh_, update_rows_,
    )
}  # fmt: skip
