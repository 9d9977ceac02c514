"""The hot operations, each under one name: a native kernel for the CPU, and a PyTorch reference otherwise."""

import os
import warnings
from pathlib import Path

import torch
from torch import Tensor


def _load() -> bool:
    import manyclass

    # MANYCLASS_NATIVE names another build of the core, such as that of `make asan`, for developers.
    chosen = os.environ.get("MANYCLASS_NATIVE")
    found = [file for folder in manyclass.__path__ for file in sorted(Path(folder).glob("_native.*"))]
    for file in [chosen] if chosen else found[:1]:
        torch.ops.load_library(str(file))
        return True
    warnings.warn(
        "manyclass was installed without its native core (no C++ compiler or no torch at build time); the slower "
        "PyTorch reference serves. Install torch and a C++17 compiler first, then manyclass with --no-build-isolation.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


_NATIVE = _load()


def native_available() -> bool:
    """Return whether the native core was built and loaded; without it the PyTorch reference serves."""
    return _NATIVE


def native_for(*tensors: Tensor) -> bool:
    """Return whether the native kernels serve these tensors: float32 on the CPU."""
    return _NATIVE and all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def alias_draw(
    threshold: Tensor,  # shape: (cells,), float64
    alias: Tensor,  # shape: (cells,), int64
    start: Tensor,  # shape: (batch,), int64
    length: Tensor,  # shape: (batch,), int64
    uniform: Tensor,  # shape: (batch, draws), float64 in [0, 1)
) -> Tensor:
    """Draw cells from alias tables: row ``b`` from the table in cells ``start[b] … start[b] + length[b] − 1``.

    Returns cells of shape ``(batch, draws)``, int64. O(1) per draw.
    """
    arguments = (threshold, alias, start, length, uniform)
    if _NATIVE and uniform.device.type == "cpu":
        return torch.ops.manyclass.alias_draw(*(argument.contiguous() for argument in arguments))
    return alias_draw_reference(*arguments)


def alias_draw_reference(threshold: Tensor, alias: Tensor, start: Tensor, length: Tensor, uniform: Tensor) -> Tensor:
    """Compute `alias_draw` in plain PyTorch."""
    scaled = uniform * length.unsqueeze(-1)
    column = scaled.long().minimum(length.unsqueeze(-1) - 1)
    cell = start.unsqueeze(-1) + column
    return torch.where(scaled - column < threshold[cell], cell, alias[cell])


if _NATIVE:

    @torch.library.register_fake("manyclass::alias_draw")
    def _(threshold: Tensor, alias: Tensor, start: Tensor, length: Tensor, uniform: Tensor) -> Tensor:
        return torch.empty_like(uniform, dtype=torch.long)

    @torch.library.register_fake("manyclass::best_classes")
    def _(
        query,
        mean,
        mean_scale,
        spread,
        code,
        code_scale,
        weight,
        bias,
        order,
        outliers,
        blocks,
        top,
        width,
        k,
        absolute,
    ):
        one = query.new_empty(len(query))
        return query.new_empty(len(query), k), one.new_empty(len(query), k, dtype=torch.long), one, one.clone()

    @torch.library.register_fake("manyclass::bisect")
    def _(rows, borders):
        return rows.new_empty(len(rows), dtype=torch.long)

    @torch.library.register_fake("manyclass::encode_")
    def _(code, code_scale, weight, bias, classes):
        return None

    @torch.library.register_fake("manyclass::node_shares")
    def _(query, cutoff, log_total, mean, mean_scale, spread, nodes, size, absolute):
        return query.new_empty(len(nodes))

    @torch.library.register_fake("manyclass::own_draw")
    def _(query, exclude, uniform, mean, mean_scale, spread, code, code_scale, weight, bias, order, block_of, *rest):
        slots = (len(query), rest[6])
        pairs = torch.library.get_ctx().new_dynamic_size()
        ids, hidden = query.new_empty(slots, dtype=torch.long), query.new_empty(2, pairs, dtype=torch.long)
        return ids, query.new_empty(slots), hidden, query.new_empty(len(query))

    @torch.library.register_fake("manyclass::pool_draw")
    def _(sums, uniform, classes, outliers, samples, share):
        return uniform.new_empty(samples, dtype=torch.long), uniform.new_empty(samples)

    @torch.library.register_fake("manyclass::row_gradients")
    def _(query, slopes, classes, *rest):
        rows = torch.library.get_ctx().new_dynamic_size()
        values = query.new_empty(rows, query.shape[1])
        return classes.new_empty(rows), values, query.new_empty(rows), query.new_empty(rows)

    @torch.library.register_fake("manyclass::sampled_loss_")
    def _(logits, query, weight, bias, classes, log_count, pool_log_count, hidden, absolute):
        each = query.new_empty(len(query))
        return each, each.clone(), each.clone(), query.new_empty(classes.shape), torch.empty_like(query)

    @torch.library.register_fake("manyclass::sum_up_")
    def _(sums, leaves):
        return None

    @torch.library.register_fake("manyclass::summarise_")
    def _(mean, mean_scale, spread, code, code_scale, weight, bias, order, blocks, outliers, num_blocks, top):
        return None

    @torch.library.register_fake("manyclass::tree_draw")
    def _(features, query, top, sums, weight, sizes, leaf_size, branching, uniform, *rest):
        return torch.empty_like(uniform, dtype=torch.long), torch.empty_like(uniform)

    @torch.library.register_fake("manyclass::tree_refresh_")
    def _(sums, weight, sizes, leaf_size, branching, leaves, alpha):
        return None

    @torch.library.register_fake("manyclass::update_rows_")
    def _(weight, first, second, rows, grad, missed, *numbers):
        return None
