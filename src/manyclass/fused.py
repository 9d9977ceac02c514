"""The sampled step: losses of examples with their negatives, and gradients of the rows that were drawn."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import functional, ops


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
    log_count: Tensor,  # shape: (batch, num_samples)
    *,
    prediction: str,
    sparse: bool,
) -> Tensor:
    """`sampled_losses` when all examples share their negatives: one small matrix product."""
    rows, position = torch.unique(torch.cat([target, pool]), return_inverse=True)
    positives, negatives = position[: len(target)], position[len(target) :]
    drawn = _select_rows(weight, rows, sparse).to(query.dtype)
    positive = (query * F.embedding(positives, drawn)).sum(dim=-1)
    negative = query @ F.embedding(negatives, drawn).T
    if bias is not None:
        offsets = _select_rows(bias, rows, sparse).to(query.dtype).squeeze(-1)
        positive, negative = positive + offsets[positives], negative + offsets[negatives]
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
    logits = torch.einsum(
        "bd,bkd->bk", query, F.embedding(position, _select_rows(weight, rows, sparse).to(query.dtype))
    )
    if bias is not None:
        logits = logits + F.embedding(position, _select_rows(bias, rows, sparse).to(query.dtype)).squeeze(-1)
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


class _SelectRows(torch.autograd.Function):
    """``weight[rows]`` for sorted, distinct ``rows``, with a sparse gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight = weight
        return weight[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        (rows,) = ctx.saved_tensors
        return _row_gradient(ctx.weight, rows, grads[0], sparse=True), None


def _select_rows(weight: Tensor, rows: Tensor, sparse: bool) -> Tensor:
    return cast(Tensor, _SelectRows.apply(weight, rows)) if sparse else weight[rows]


def _row_gradient(weight: Tensor, rows: Tensor, values: Tensor, sparse: bool) -> Tensor:
    """The gradient of ``weight`` whose sorted, distinct ``rows`` are ``values``; the others are zero."""
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
    indices, shape = rows.unsqueeze(0), weight.shape
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)
