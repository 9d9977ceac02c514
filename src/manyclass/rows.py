"""Rows of parameters, with gradients of these rows only."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .untraced import untraced

#: Averages gradients of rows, sorted and distinct, over the processes that hold the same class weights.
Exchange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a backward pass without a graph, and refuse create_graph=True: second derivatives would lack terms."""

    @untraced  # the number of rows depends on the draw
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the sampled softmax loss has no second derivatives: leave out create_graph=True, or use eval()"
            )
        return backward(ctx, *grads)

    return checked


class _SelectRows(torch.autograd.Function):
    """``weight[rows]`` for sorted, distinct ``rows``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, sparse: bool, exchange: Exchange | None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.sparse, ctx.exchange = weight, sparse, exchange
        return weight[rows]

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        (rows,) = ctx.saved_tensors
        return row_gradient(ctx.weight, rows, grads[0], ctx.sparse, ctx.exchange), None, None, None


def select_rows(weight: Tensor, rows: Tensor, sparse: bool, exchange: Exchange | None = None) -> Tensor:
    """Return ``weight[rows]`` for sorted, distinct ``rows``; its gradient is sparse or dense."""
    if not torch.is_grad_enabled():  # vmap takes no autograd.Function of this kind
        return weight[rows]
    return cast(Tensor, _SelectRows.apply(weight, rows, sparse, exchange))


def after_backward(call: Callable[[], None]) -> None:
    """In a backward pass: call something when the pass is over, and the gradients are in their places."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # pyright: ignore


def row_gradient(
    weight: Tensor, rows: Tensor, values: Tensor, sparse: bool | None, exchange: Exchange | None = None
) -> Tensor:
    """Return the gradient of ``weight`` whose sorted, distinct ``rows`` are ``values``; the others are zero."""
    if exchange is not None:
        rows, values = exchange(rows, values)
    if not sparse:
        return torch.zeros_like(weight).index_copy_(0, rows, values)

    def mark_coalesced() -> None:
        # autograd moves our indices into ``weight.grad`` but forgets that they are sorted and distinct, and the
        # optimizer would sort them again. The same memory proves that nothing was added to the gradient.
        grad = weight.grad
        if grad is not None and grad.is_sparse and grad._indices().data_ptr() == rows.data_ptr():
            grad._coalesced_(True)

    if weight.is_leaf:
        after_backward(mark_coalesced)
    return sparse_rows(rows, values, weight.shape)


def sparse_rows(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Return a coalesced sparse matrix of sorted, distinct ``rows``, which are not checked."""
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False)


class _Offsets(torch.autograd.Function):
    """The column ``(n, 1)`` of a table as ``(n,)``, also for sparse gradients."""

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        ctx.table = table
        return table.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore
        grad = grads[0]
        if not grad.is_sparse:
            return grad.unsqueeze(-1)
        return row_gradient(ctx.table, grad._indices()[0], grad._values().unsqueeze(-1), sparse=True)


def offsets_of(table: Tensor) -> Tensor:
    """Return the offsets of a table ``(n, 1)``, shape ``(n,)``, whose gradient may be sparse."""
    return cast(Tensor, _Offsets.apply(table)) if torch.is_grad_enabled() else table.squeeze(-1)
