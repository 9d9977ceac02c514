"""The sampled step: losses of examples with their negatives, and gradients of the rows that were drawn."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import functional, ops

#: Makes the gradients of rows, sorted and distinct, of one process those of all that have the same class weights.
Exchange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def sampled_losses(
    query: Tensor,  # shape: (batch, in_features)
    weight: Tensor,  # shape: (num_classes, in_features)
    bias: Tensor | None,  # shape: (num_classes, 1)
    target: Tensor,  # shape: (batch,)
    ids: Tensor,  # shape: (batch, num_samples)
    log_count: Tensor,  # shape: (batch, num_samples)
    *,
    prediction: str,
    sparse: bool,
) -> Tensor:
    """`functional.sampled_softmax_loss` of each example, shape ``(batch,)``, straight from the class weights.

    With ``sparse=True`` the gradients of ``weight`` and ``bias`` are coalesced sparse tensors of the drawn rows. On the
    CPU in float32 a native kernel reads the rows where they lie; elsewhere they are gathered.
    """
    classes = torch.cat([target.unsqueeze(-1), ids], dim=-1)
    if ops.native_for(query, weight):
        return cast(Tensor, _Native.apply(query, weight, bias, classes, log_count, prediction == "absolute", sparse))
    return reference_losses(query, weight, bias, classes, log_count, prediction=prediction, sparse=sparse)


def pooled_losses(
    query: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pool: Tensor,  # shape: (num_samples,)
    log_count: Tensor,  # shape: (num_samples,)
    *,
    prediction: str,
    sparse: bool,
) -> Tensor:
    """`sampled_losses` when all examples share their negatives: one small matrix product.

    The pool may hold the positive of an example, which then does not count as its negative.
    """
    if ops.native_for(query, weight):
        absolute = prediction == "absolute"
        return native_pool(query, weight, bias, target, pool, log_count, absolute, sparse, None)[0]
    return reference_pooled_losses(query, weight, bias, target, pool, log_count, prediction=prediction, sparse=sparse)


def reference_pooled_losses(
    query: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pool: Tensor,
    log_count: Tensor,
    *,
    prediction: str,
    sparse: bool,
) -> Tensor:
    """`pooled_losses` in plain PyTorch."""
    rows, position = torch.unique(torch.cat([target, pool]), return_inverse=True)
    positives, negatives = position[: len(target)], position[len(target) :]
    drawn = select_rows(weight, rows, sparse).to(query.dtype)
    positive = (query * F.embedding(positives, drawn)).sum(dim=-1)
    negative = query @ F.embedding(negatives, drawn).T
    if bias is not None:
        offsets = select_rows(bias, rows, sparse).to(query.dtype).squeeze(-1)
        positive, negative = positive + offsets[positives], negative + offsets[negatives]
    log_count = log_count.masked_fill(pool == target.unsqueeze(-1), torch.inf)
    return functional.sampled_softmax_loss(positive, negative, log_count, "none", prediction=prediction)


def reference_losses(
    query: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    classes: Tensor,  # shape: (batch, 1 + num_samples), the positive first
    log_count: Tensor,
    *,
    prediction: str,
    sparse: bool,
) -> Tensor:
    """`sampled_losses` in plain PyTorch."""
    # Each row is read, and gets its gradient, once, however often it was drawn.
    rows, position = torch.unique(classes, return_inverse=True)
    logits = torch.einsum("bd,bkd->bk", query, F.embedding(position, select_rows(weight, rows, sparse).to(query.dtype)))
    if bias is not None:
        logits = logits + F.embedding(position, select_rows(bias, rows, sparse).to(query.dtype)).squeeze(-1)
    return functional.sampled_softmax_loss(logits[:, 0], logits[:, 1:], log_count, "none", prediction=prediction)


class _Native(torch.autograd.Function):
    """The native kernel: slopes of the loss are found along with it, so the backward pass reads no class weights."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        classes: Tensor,
        log_count: Tensor,
        absolute: bool,
        sparse: bool,
    ) -> Tensor:
        query, offsets = query.contiguous(), query.new_empty(0) if bias is None else bias.flatten()
        losses, slopes, query_slopes = torch.ops.manyclass.sampled_loss(
            query, weight.contiguous(), offsets, classes, log_count.contiguous(), absolute
        )
        ctx.save_for_backward(query, classes, slopes, query_slopes)
        ctx.weight, ctx.bias, ctx.sparse = weight, bias, sparse
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, classes, slopes, query_slopes = ctx.saved_tensors
        grad = grads[0].unsqueeze(-1)
        rows, values, bias_values = torch.ops.manyclass.sampled_loss_rows(
            query, classes, slopes * grad, len(ctx.weight)
        )
        weight_grad = _row_gradient(ctx.weight, rows, values, ctx.sparse)
        bias_grad = None if ctx.bias is None else _row_gradient(ctx.bias, rows, bias_values, ctx.sparse)
        return query_slopes * grad, weight_grad, bias_grad, None, None, None, None


class _NativePool(torch.autograd.Function):
    """The same for a pool: torch's matrix products, and one native pass over the logits that leaves their slopes.

    Returns the losses and the outputs of the positives, both ``(batch,)``. An example with target −1 has no positive:
    the log-sum-exp of its corrected negatives stands for its loss, and its output is 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        pool: Tensor,
        log_count: Tensor,
        absolute: bool,
        sparse: bool,
        exchange: Exchange | None,
    ) -> tuple[Tensor, Tensor]:
        # Where there is no positive, the kernel does not look at it: then −1 may stand for any row.
        drawn, positives = weight[pool], weight[target]
        logits, positive = query @ drawn.T, (query * positives).sum(dim=-1)
        if bias is not None:
            logits += bias[pool].T
            positive += bias[target].squeeze(-1)
        losses, slopes = torch.ops.manyclass.pooled_loss_(
            logits, positive, log_count.contiguous(), pool.contiguous(), target.contiguous(), absolute
        )
        sign = torch.where(target >= 0, positive.sign() if absolute else 1.0, 0.0)
        ctx.save_for_backward(query, target, pool, positives, drawn, logits, slopes, sign)
        ctx.weight, ctx.bias, ctx.sparse, ctx.exchange = weight, bias, sparse, exchange
        return losses, positive * sign

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, target, pool, positives, drawn, logits, slopes, sign = ctx.saved_tensors
        grad, of_positive = grads[0].unsqueeze(-1), (grads[0] * slopes + grads[1] * sign).unsqueeze(-1)
        query_grad = (logits @ drawn).mul_(grad).addcmul_(of_positive, positives)
        rows, position = torch.unique(torch.cat([target, pool]), return_inverse=True)
        start = int((rows[:1] < 0).sum())  # −1 is no row

        def gradient(table: Tensor, of_target: Tensor, of_pool: Tensor) -> Tensor:
            values = of_pool.new_zeros(len(rows), of_pool.shape[1])
            values.index_add_(0, position, torch.cat([of_target, of_pool]))
            return _row_gradient(table, rows[start:], values[start:], ctx.sparse, ctx.exchange)

        weight_grad = gradient(ctx.weight, of_positive * query, logits.T @ (grad * query))
        bias_grad = None if ctx.bias is None else gradient(ctx.bias, of_positive, logits.T @ grad)
        return query_grad, weight_grad, bias_grad, None, None, None, None, None, None


native_pool: Callable[..., tuple[Tensor, Tensor]] = _NativePool.apply  # pyright: ignore[reportAssignmentType]


class _SelectRows(torch.autograd.Function):
    """``weight[rows]`` for sorted, distinct ``rows``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, sparse: bool, exchange: Exchange | None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.sparse, ctx.exchange = weight, sparse, exchange
        return weight[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        (rows,) = ctx.saved_tensors
        return _row_gradient(ctx.weight, rows, grads[0], ctx.sparse, ctx.exchange), None, None, None


def select_rows(weight: Tensor, rows: Tensor, sparse: bool, exchange: Exchange | None = None) -> Tensor:
    """``weight[rows]`` for sorted, distinct ``rows``, whose gradient is sparse or dense."""
    return cast(Tensor, _SelectRows.apply(weight, rows, sparse, exchange))


def _row_gradient(
    weight: Tensor, rows: Tensor, values: Tensor, sparse: bool, exchange: Exchange | None = None
) -> Tensor:
    """The gradient of ``weight`` whose sorted, distinct ``rows`` are ``values``; the others are zero."""
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
        torch.autograd.Variable._execution_engine.queue_callback(mark_coalesced)  # pyright: ignore
    return sparse_rows(rows, values, weight.shape)


def sparse_rows(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """A coalesced sparse matrix of sorted, distinct ``rows``, which are not checked."""
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False)
