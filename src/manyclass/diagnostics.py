"""How far the sampled loss is from the full one, estimated from the drawn sample itself."""

from typing import NamedTuple

import torch
from torch import Tensor


class Diagnostics(NamedTuple):
    """What a training step paid for sampling: means over its examples."""

    #: Negatives that were drawn, per example or per pool.
    num_samples: int
    #: Independent draws from the softmax itself that would estimate the partition function as well.
    effective_samples: float
    #: χ²(p‖q) of the classes without the positive; the variance of the estimate of Z is χ²·Z²/draws.
    chi_square: float
    #: Expected log Ẑ − log Z in nats: by how much the loss is too small.
    bias: float
    #: Training steps since the sampler's statistics followed all class weights.
    stale_steps: int
    #: Share of the time from step to step that goes into refreshing the sampler and drawing.
    sampling_share: float


class Estimate(NamedTuple):
    """Quality of the estimate of the partition function, for each example, shape ``(batch,)``."""

    effective_samples: Tensor
    chi_square: Tensor
    bias: Tensor


def estimate(
    positive: Tensor,  # shape: (batch,)
    negative: Tensor,  # shape: (batch, num_samples)
    log_count: Tensor,  # shape: (batch, num_samples)
    unit: int = 1,
    distinct: bool = False,
) -> Estimate:
    """Estimate χ² and the bias of ``log(exp(o_y) + Σ exp(o_k − log_count_k))`` from one sample.

    A sample of units (single classes, or blocks of ``unit`` classes side by side) gives the estimate's variance: that
    of the units' shares for independent draws, and with the factor 1 − π for draws without replacement, of which a
    certain unit adds nothing (Hájek's approximation). The bias is −½·Var(Ẑ)/Z², the second term of the Taylor series.

    What was never drawn is not seen: if a few draws miss most of the mass, the true bias is larger than this.

    Args:
        positive: outputs of the positive classes.
        negative: outputs of the negatives.
        log_count: as in `samplers.Draw`.
        unit: classes that were drawn together.
        distinct: whether units were drawn without replacement, so that their count is a probability.
    """
    corrected = (negative - log_count).double().unflatten(-1, (-1, unit)).logsumexp(dim=-1)
    chance = torch.zeros_like(corrected)
    if distinct:
        chance = log_count.double().unflatten(-1, (-1, unit)).amin(dim=-1).exp().clamp(max=1.0)
    log_rest = corrected.logsumexp(dim=-1)
    share = (corrected - log_rest.unsqueeze(-1)).exp()
    uncertain = (1 - chance) * (chance < 1 - 1e-9)
    units = (uncertain > 0).sum(dim=-1)
    centre = (uncertain * share).sum(dim=-1) / uncertain.sum(dim=-1).clamp(min=1e-30)
    # A single unit tells nothing of its deviation; then its whole share counts.
    centre = torch.where(units > 1, centre, 0.0).unsqueeze(-1)
    variance = (uncertain * (share - centre).square()).sum(dim=-1) * (units / (units - 1).clamp(min=1))
    chi_square = variance * corrected.shape[-1]
    of_all = torch.exp(2 * (log_rest - torch.logaddexp(log_rest, positive.double())))
    return Estimate(log_count.shape[-1] / (1 + chi_square), chi_square, -variance * of_all / 2)
