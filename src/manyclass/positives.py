"""The sampled loss of examples whose positives are scored separately: with a margin, or several per example."""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import functional, fused
from .functional import Margin
from .samplers.draw import Draw


def sampled_loss(
    query: Tensor,  # shape: (batch, in_features)
    weight: Tensor,  # shape: (classes, in_features)
    bias: Tensor | None,  # shape: (classes,)
    target: Tensor,  # shape: (batch,) or (batch, k), −1 for none
    draw: Draw,
    *,
    prediction: str,
    margin: Margin | None,
) -> tuple[Tensor, Tensor]:
    """Compute `fused.sampled_loss` and the output after the margin of each target, shaped as ``target``.

    Tables hold the classes of this step only. Gradients are dense. Slots that hold a target must be empty.
    """
    labels = target if target.dim() == 2 else target.unsqueeze(-1)
    nobody = labels.new_full((len(labels),), -1)
    rest, _ = fused.sampled_loss(query, weight, bias, nobody, draw, prediction=prediction, sparse=None)
    here, known = labels >= 0, labels.clamp(min=0)
    positive = torch.einsum("bd,bkd->bk", query, F.embedding(known, weight))
    if bias is not None:
        positive = positive + bias.to(query.dtype)[known]
    positive = functional.output(positive, prediction)
    positive = positive if margin is None else margin(positive)
    rest = rest.unsqueeze(-1).expand_as(positive)
    # Padding must not put 0 · NaN into the gradient.
    loss = torch.where(here, F.softplus(rest - positive, threshold=50.0), rest)
    return loss.reshape(target.shape), torch.where(here, positive, 0.0).reshape(target.shape)
