"""The error of the sampled loss, measured against the exact loss on a few examples."""

import copy
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Number of examples that the bias is measured on, and of draws for each of them.
MEASURED, DRAWS = 16, 8


class Diagnostics(NamedTuple):
    """Errors and cost of sampling in a training step, measured on a few of its examples."""

    #: Negatives that were drawn for each example alone, and for the pool that all share.
    own: int
    pool: int
    #: Mean of sampled minus exact loss in nats. It is negative where the sampled loss is too small.
    bias: float
    #: Standard error of ``bias``, from the spread over examples and over draws.
    bias_error: float
    #: Root mean square of sampled minus exact loss.
    error: float
    #: Root mean square of ‖g − g_exact‖ / ‖g_exact‖ for the gradient by the query.
    gradient_error: float
    #: Mean age of the sampler's statistics in training steps.
    stale_steps: float
    #: Share of a step's time that is spent on refreshing the sampler and drawing.
    sampling_share: float


class Measured(NamedTuple):
    """Sampled against exact losses of some examples, shapes ``(draws, examples)``."""

    #: Sampled minus exact loss.
    difference: Tensor
    #: Relative error of the gradient by the query.
    gradient: Tensor

    def diagnostics(self, own: int, pool: int, stale_steps: float, sampling_share: float) -> Diagnostics:
        """Summarise."""
        return Diagnostics(
            own=own,
            pool=pool,
            bias=float(self.difference.mean()),
            bias_error=standard_error(self.difference),
            error=float(self.difference.square().mean().sqrt()),
            gradient_error=float(self.gradient.square().mean().sqrt()),
            stale_steps=stale_steps,
            sampling_share=sampling_share,
        )


class Monitor:
    """The last batch, for `diagnostics`, and the share of a step's time that is spent on sampling."""

    def __init__(self) -> None:
        self.last: tuple[Tensor, Tensor, Tensor | None] | None = None
        #: A running mean over steps.
        self.share = math.nan
        self._began = math.nan
        self._sampling = 0.0

    def begin(self, query: Tensor, target: Tensor, context: Tensor | None) -> None:
        """Record that a step begins with this batch."""
        now = time.perf_counter()
        share = self._sampling / (now - self._began)
        self.share = 0.9 * self.share + 0.1 * share if math.isfinite(self.share) else share
        self._began = now
        self.last = (query, target, context)

    def sampled(self) -> None:
        """Record that the step has its negatives."""
        self._sampling = time.perf_counter() - self._began

    def size(self) -> int:
        """Return how many examples the last batch had."""
        return 0 if self.last is None else len(self.last[0])

    def some(self, examples: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return at most ``examples`` examples of the last batch, evenly spaced."""
        assert self.last is not None
        query, target, context = self.last
        every = max(1, math.ceil(len(query) / examples))
        # Copies, since the batch may be of inference mode.
        return query[::every].clone(), target[::every].clone(), None if context is None else context[::every].clone()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the batch out of pickles."""
        return {**self.__dict__, "last": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Monitor":
        """Copy the batch, too."""
        other = Monitor()
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


def measure(
    query: Tensor,  # shape: (examples, in_features)
    exact_losses: Callable[[Tensor], Tensor],
    sampled_losses: Callable[[Tensor], Tensor],
    draws: int,
) -> Measured:
    """Compare losses ``(examples,)`` of queries and their gradients; each call of ``sampled_losses`` is a new draw."""

    def of(losses: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        # torch.utils.checkpoint must not count the tensors that are saved here: it would run them again.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            leaf = query.detach().requires_grad_()
            values = losses(leaf)
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach(), gradient

    exact, slope = of(exact_losses)
    found = [of(sampled_losses) for _ in range(draws)]
    size = slope.norm(dim=-1).clamp(min=torch.finfo(slope.dtype).tiny)
    differences = torch.stack([loss - exact for loss, _ in found])
    return Measured(differences, torch.stack([(gradient - slope).norm(dim=-1) / size for _, gradient in found]))


def each(losses: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of each example, ``(examples,)``; of several targets ``(examples, k)``, −1 is none."""
    if target.dim() == 1:
        return losses
    here = target >= 0
    return losses.where(here, 0.0).sum(dim=-1) / here.sum(dim=-1)


def _same(saved: Tensor) -> Tensor:
    return saved


def standard_error(difference: Tensor) -> float:  # shape: (draws, examples)
    """Return the standard error of the mean, from the spread over examples and over draws of the shared pool.

    A single example, or a single draw, has no spread and adds 0.
    """
    parts = [difference.mean(dim=dim) for dim in (0, 1)]
    return float(sum((part.var() / len(part) for part in parts if len(part) > 1), torch.zeros(())).sqrt())


def steady_bias(difference: Tensor) -> float:
    """Return the mean of ``difference``, the error of log Ẑ, with less noise where errors are small.

    Ẑ/Z has the mean 1, so E[log Ẑ/Z] is also the mean of ``log Ẑ/Z − Ẑ/Z + 1``. This is never positive and varies
    little near 1. Where errors are large, the rare draws that make the mean 1 may be missing, so use the plain mean.
    """
    if float(difference.square().mean()) > 0.1:
        return float(difference.mean())
    return float((difference - difference.expm1()).mean())
