"""The sampled step: losses of examples with their negatives, and gradients of the rows that were drawn."""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from . import functional, ops
from .importance import Note, Squares
from .rows import Exchange, once, row_gradient, select_rows
from .samplers.draw import Draw

# The finite log-count of an empty slot, so that a sum over empty slots has the gradient 0.
EMPTY = 1e30


def sampled_loss(
    query: Tensor,  # shape: (batch, in_features)
    weight: Tensor,  # shape: (num_classes, in_features)
    bias: Tensor | None,  # shape: (num_classes,)
    target: Tensor,  # shape: (batch,), −1 for an example whose positive is not among these classes
    draw: Draw,
    *,
    prediction: str,
    sparse: bool | None,
    exchange: Exchange | None = None,
    note: Note | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `functional.sampled_softmax_loss` of each example and the output of its positive, both ``(batch,)``.

    An example without a positive has the output 0, and its loss is the log-sum-exp of its corrected negatives: one
    shard's part of a loss. With ``sparse=True`` the gradients of ``weight`` and ``bias`` are coalesced sparse tensors
    of the drawn rows. None says that the tables hold the classes of this step only. On the CPU in float32 a native
    kernel reads the rows in place. Elsewhere they are gathered. ``note`` needs a ``sparse`` that is not None.
    """
    if not ops.native_for(query, weight):
        options = {"prediction": prediction, "sparse": sparse, "exchange": exchange, "note": note}
        return reference_loss(query, weight, bias, target, draw, **options)
    classes = torch.cat([target.unsqueeze(-1), draw.ids], dim=-1)
    arguments = (query, weight, bias, classes, *draw[1:], prediction == "absolute", sparse, exchange, note)
    return cast(tuple[Tensor, Tensor], _Native.apply(*arguments))


def reference_loss(
    query: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    draw: Draw,
    *,
    prediction: str,
    sparse: bool | None,
    exchange: Exchange | None = None,
    note: Note | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `sampled_loss` in plain PyTorch."""
    options = {"prediction": prediction, "sparse": sparse, "exchange": exchange, "note": note}
    positive, negative, log_count = gathered_outputs(query, weight, bias, target, draw, **options)
    rest = negative - log_count
    rest = torch.cat([rest, rest.new_full((len(rest), 1), -EMPTY)], dim=-1).logsumexp(dim=-1)
    # softplus instead of log-sum-exp − positive keeps its precision if the positive has nearly all the mass.
    here = target >= 0
    loss = torch.where(here, F.softplus(rest - positive, threshold=50.0), rest)
    return loss, torch.where(here, positive, 0.0)


def gathered_outputs(
    query: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    draw: Draw,
    *,
    prediction: str,
    sparse: bool | None,
    exchange: Exchange | None = None,
    note: Note | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs of positives ``(batch,)`` and negatives ``(batch, own + pool)``, and log-counts of negatives.

    The log-count of a slot that is empty for an example is `EMPTY`. Arguments are those of `sampled_loss`.
    """
    # Each row is read, and gets its gradient, once, however often it was drawn.
    here, classes = target >= 0, torch.cat([draw.ids.flatten(), draw.pool])
    # An example without a positive points to a row that is read anyway, and gives it no gradient.
    known = torch.where(here, target, classes[0]) if len(classes) else target.clamp(min=0)
    rows = place = torch.cat([known, classes])
    if sparse is not None:
        rows, place = torch.unique(place, return_inverse=True)
        weight = select_rows(weight, rows, sparse, exchange)
        bias = None if bias is None else select_rows(bias, rows, sparse, exchange)
    positives, own, pool = place.split([len(known), draw.ids.numel(), len(draw.pool)])
    own = own.view(draw.ids.shape)
    drawn = weight.to(query.dtype)
    positive = (query * F.embedding(positives, drawn)).sum(dim=-1)
    each = torch.einsum("bd,bkd->bk", query, F.embedding(own, drawn))
    pooled = F.embedding(pool, drawn)
    shared = query @ pooled.T
    if note is not None and weight.requires_grad:
        squares = Squares(note, rows, own, pool, draw)
        each.register_hook(partial(squares.of_own, query.detach()))
        pooled.register_hook(squares.of_pool)
        weight.register_hook(squares.of_rows)
    if bias is not None:
        offsets = bias.to(query.dtype)
        positive, each, shared = positive + offsets[positives], each + offsets[own], shared + offsets[pool]
    pool_log_count = draw.pool_log_count.to(query.dtype).clamp(max=EMPTY).expand_as(shared)
    pool_log_count = pool_log_count.masked_fill(draw.hidden_mask(), EMPTY)
    log_count = torch.cat([draw.log_count.clamp(max=EMPTY).to(query.dtype), pool_log_count], dim=-1)
    negative = torch.cat([each, shared], dim=-1)
    return functional.output(positive, prediction), functional.output(negative, prediction), log_count


class _Native(torch.autograd.Function):
    """The native kernel. It computes gradients with the loss, so the backward pass reads no class weights."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        classes: Tensor,  # shape: (batch, 1 + own), the positive first
        log_count: Tensor,
        pool: Tensor,
        pool_log_count: Tensor,
        hidden: Tensor,
        absolute: bool,
        sparse: bool | None,
        exchange: Exchange | None,
        note: Note | None,
    ) -> tuple[Tensor, Tensor]:
        query, offsets = query.contiguous(), query.new_empty(0) if bias is None else bias.contiguous()
        drawn = weight.index_select(0, pool)
        logits = drawn @ query.T  # (pool, batch): this product and those with its result are faster than transposed
        if bias is not None:
            logits += offsets.index_select(0, pool).unsqueeze(-1)
        tables = (query, weight.contiguous(), offsets)
        counts = (log_count.contiguous(), pool_log_count.contiguous(), hidden.contiguous())
        loss, positive, factors, slopes, query_slopes = torch.ops.manyclass.sampled_loss_(
            logits, *tables, classes.contiguous(), *counts, absolute
        )
        # The positive's output depends on the query and its row; −1 is any row, without a gradient.
        target = classes[:, 0]
        positives = weight.index_select(0, target.clamp(min=0))
        sign = (target >= 0).to(query.dtype)
        if absolute:
            logit = (query * positives).sum(dim=-1)
            sign *= (logit if bias is None else logit + offsets[target]).sign()
        draws = (classes, log_count, pool, pool_log_count)
        ctx.save_for_backward(query, *draws, drawn, logits, factors, slopes, query_slopes, positives, sign)
        ctx.weight, ctx.bias, ctx.sparse, ctx.exchange, ctx.note = weight, bias, sparse, exchange, note
        return loss, positive

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, *draws, drawn, logits, factors, slopes, query_slopes, positives, sign = ctx.saved_tensors
        factors = factors.unsqueeze(-1)
        grad, of_positive = grads[0].unsqueeze(-1), grads[1] * sign
        slopes = slopes * grad
        slopes[:, 0] += of_positive
        of_query, of_weight, of_bias = ctx.needs_input_grad[:3]
        query_grad = weight_grad = bias_grad = None
        if of_query:
            query_grad = (logits.T @ drawn).mul_(factors).add_(query_slopes).mul_(grad)
            query_grad.addcmul_(of_positive.unsqueeze(-1), positives)
        if of_weight or of_bias:
            scaled = factors * grad
            pool_bias = (logits @ scaled).squeeze(-1) if of_bias else query.new_zeros(len(logits))
            rows, values, bias_values, excess = torch.ops.manyclass.row_gradients(
                query, slopes, *draws, logits @ (scaled * query), pool_bias, len(ctx.weight)
            )
            if ctx.note is not None:
                ctx.note(rows, excess)
            if of_weight:
                weight_grad = row_gradient(ctx.weight, rows, values, ctx.sparse, ctx.exchange)
            if of_bias:
                bias_grad = row_gradient(ctx.bias, rows, bias_values, ctx.sparse, ctx.exchange)
        return query_grad, weight_grad, bias_grad, *[None] * 9
