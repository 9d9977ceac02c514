"""Spherical softmax: p ∝ o² + ε, and its exact update without scoring all classes."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from .quadratic import QuadraticSoftmax

# Rounding errors grow with the condition of U. Beyond this singular value, or after this many steps, U is merged into
# V.
SMALLEST, LARGEST, STEPS = 1e-2, 1e2, 1000


class SphericalSoftmax(QuadraticSoftmax):
    """p_i ∝ o_i² + ε. A step costs O(n·d²); with `SphericalUpdate` its cost does not depend on n.

    For a target with o = 0 the loss is large, ln(1/ε), but its gradient vanishes. So a new layer with small outputs
    learns slowly. A class has the same probability for o and −o.

    Vincent, de Brébisson and Bouthillier, Efficient exact gradient update for training deep networks with very large
    sparse targets (NIPS 2015); de Brébisson and Vincent (ICLR 2016).

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        epsilon: ε > 0.
        options: as in `FullSoftmax`, without ``prediction``, ``classes``, ``cosine`` and ``shard``.
    """

    def __init__(self, in_features: int, num_classes: int, *, epsilon: float = 0.1, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        self.epsilon = _positive("epsilon", epsilon)

    def coefficients(self) -> tuple[float, float, float]:
        """Return those of ``o² + ε``."""
        return self.epsilon, 0.0, 1.0


class SphericalUpdate(nn.Module):
    """Class weights W = V·U under the spherical loss, with exact SGD steps whose cost does not depend on n.

    The loss ln(hᵀQh + n·ε) − ln(o_y² + ε), with Q = WᵀW, needs Q and one row. The gradient by W is W times a d × d
    matrix, which changes U, plus changes in the rows of the targets, which change V through U⁻¹. A step costs
    O(b·d² + d³) for b examples. The result is that of SGD on the full loss. U becomes ill-conditioned over time. If a
    singular value leaves [1/100, 100], and every 1000 steps, V ← V·U and U ← 1 in O(n·d²), and Q is recomputed.
    U and Q are in float64.

    Args:
        weight: initial class weights, shape ``(num_classes, in_features)``; they are copied.
        epsilon: ε > 0.
    """

    v: Tensor
    u: Tensor
    q: Tensor

    def __init__(self, weight: Tensor, epsilon: float = 0.1) -> None:
        super().__init__()
        checks.tables(weight, None)
        self.epsilon = _positive("epsilon", epsilon)
        self.register_buffer("v", weight.detach().clone())
        self.register_buffer("u", torch.eye(weight.shape[1], dtype=torch.float64, device=weight.device))
        self.register_buffer("q", torch.zeros_like(self.u))
        #: Steps since the factors were multiplied out, and how often they were.
        self.age = self.folds = 0
        self._fold()

    def weight(self) -> Tensor:
        """Return W, shape ``(num_classes, in_features)``. O(n·d²)."""
        return self.v @ self.u.to(self.v.dtype)

    @torch.no_grad()
    def step(self, query: Tensor, target: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Take a step of SGD on the mean loss of a batch; query ``(batch, in_features)``, target ``(batch,)``.

        Returns the losses before the step, ``(batch,)``, and the gradient of their mean by the query.
        """
        rate = _positive("lr", lr)
        checks.queries("query", query, self.v.shape[1])
        target = checks.indices("target", target, len(self.v), batch_of=query)
        if query.dim() != 2 or not len(query):
            raise ValueError(f"query must have shape (batch, {self.v.shape[1]}), got {tuple(query.shape)}")
        h, rows = query.double(), self.v[target].double() @ self.u
        smallest = len(self.v) * self.epsilon
        z = ((h @ self.q) * h).sum(dim=-1).clamp(min=0) + smallest  # Q is positive but for rounding
        output = (h * rows).sum(dim=-1)
        mass = output.square() + self.epsilon
        pull, push = 2 * output / mass / len(h), 2 / z / len(h)
        grad = push.unsqueeze(-1) * (h @ self.q) - pull.unsqueeze(-1) * rows
        self._update(h, target, rate * pull, rate * push)
        return (z.log() - mass.log()).to(query.dtype), grad.to(query.dtype)

    def _update(self, h: Tensor, target: Tensor, pull: Tensor, push: Tensor) -> None:
        """Update W ← W·(1 − Σ push·hhᵀ), then add ``pull·h`` to the rows of the targets."""
        shrink = torch.eye(len(self.u), dtype=h.dtype, device=h.device) - h.T @ (push.unsqueeze(-1) * h)
        self.u, self.q = self.u @ shrink, shrink @ self.q @ shrink
        self.age += 1
        values = torch.linalg.svdvals(self.u)
        if self.age >= STEPS or bool((values.amin() < SMALLEST) | (values.amax() > LARGEST)):
            self._fold()
        classes, place = target.unique(return_inverse=True)
        change = h.new_zeros(len(classes), h.shape[1]).index_add(0, place, pull.unsqueeze(-1) * h)
        rows = self.v[classes].double() @ self.u
        self.v[classes] += torch.linalg.solve(self.u, change, left=False).to(self.v.dtype)
        cross = change.T @ rows
        self.q = self.q + cross + cross.T + change.T @ change

    def _fold(self) -> None:
        """Multiply the factors out, and compute Q again."""
        self.v = self.weight()
        self.u = torch.eye(len(self.u), dtype=self.u.dtype, device=self.u.device)
        self.q = sum((part.double().T @ part.double() for part in self.v.split(1 << 16)), torch.zeros_like(self.u))
        self.age, self.folds = 0, self.folds + 1


def _positive(name: str, value: float) -> float:
    if checks.number(name, value) <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return float(value)
