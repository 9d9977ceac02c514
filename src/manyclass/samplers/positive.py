"""Positive random features: a mixture over features, with an alias table for each."""

import math

import torch
from torch import Tensor

from .. import checks
from ..alias import AliasTable
from .draw import redrawn
from .snapshot import Snapshot

# Share of the uniform distribution in every table, relative to the features. It bounds the importance weights of
# classes that the features miss.
UNIFORM = 0.1
# Most and fewest bits of the integer masses of an alias table; fewer would round too much.
MOST_BITS, FEWEST_BITS = 30, 8


class PositiveFeatures(Snapshot):
    """q_j ∝ Σ_i φ_i(h)·φ_i(w_j) with φ_i(x) = exp(⟨ω_i, x⟩ − ‖x‖²/2) and random ω_i, by alias tables. O(D) per draw.

    The features are positive and E Σ_i φ_i(h)·φ_i(w)/D = exp(⟨h, w⟩), so q tends to the softmax as D grows. For large
    logits this needs a very large D. Since φ ≥ 0, q is a mixture: choose feature i with probability ∝
    φ_i(h)·Σ_j φ_i(w_j), then a class from its alias table. Each table has a uniform share of a tenth. Its masses are
    rounded to integers, so that the tables are exact. The reported q is this mixture, in O(D) per class.

    Section 6 of the paper suggests alias tables for non-negative maps; the features are those of Choromanski et al.,
    Rethinking attention with Performers (ICLR 2021), with orthogonal ω in blocks.

    Args:
        num_classes: n.
        in_features: size of the query, d.
        features: D.
        every: updates between rebuilds of all tables, which cost O(n·D·d): a changed row changes every table.
        seed: of ω.
        bias: whether class weights have offsets, stored as a further column.

    Memory: 32 bytes for each class and feature, and the class weights.
    """

    q = "exp(o) by positive random features"
    cost = "O(features·d) per example and O(features) per draw"
    use = "the paper's outlook: alias tables for each feature; for small logits"
    uniforms_per_draw = 3

    direction: Tensor
    log_unit: Tensor

    def __init__(
        self,
        num_classes: int,
        in_features: int,
        features: int = 64,
        every: int = 100,
        seed: int = 0,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(num_classes, in_features, every, bias)
        self.features = checks.positive_int("features", features)
        bits = int(math.log2(2**61 / (features * num_classes**2)))
        if bits < FEWEST_BITS:
            most = math.isqrt(2 ** (61 - FEWEST_BITS) // features)
            raise ValueError(f"num_classes must be at most {most:,} with features = {features}, got {num_classes:,}")
        self.bits = min(MOST_BITS, bits)
        direction = orthogonal_directions(self.columns, features, checks.integer("seed", seed, 0))
        self.register_buffer("direction", direction, persistent=False)
        self.register_buffer("log_unit", torch.zeros(features, dtype=torch.float64), persistent=False)

    def _rebuild(self) -> None:
        log_feature = self.direction @ self.weight.T - self.weight.square().sum(dim=-1) / 2
        top = log_feature.amax(dim=-1, keepdim=True)
        mass = ((log_feature - top).double().exp() * 2**self.bits).round()
        mass = (mass + (UNIFORM * mass.mean(dim=-1, keepdim=True)).ceil()).long()
        offsets = torch.arange(self.features + 1, device=mass.device) * self.num_classes
        self.table = AliasTable(mass.flatten(), offsets, persistent=False)
        self.log_unit = top.squeeze(-1).double()

    def _shares(self, query: Tensor) -> Tensor:
        """Return φ(h) in the units of the tables, with one scale per example, shape ``(batch, features)``."""
        log_share = self._extended(query, self.weight) @ self.direction.T + self.log_unit
        return (log_share - log_share.amax(dim=-1, keepdim=True)).double().exp()

    def _totals(self, exclude: Tensor | None) -> Tensor:
        """Return the masses of the tables without ``exclude``, shape ``(batch or 1, features)``."""
        row = torch.arange(self.features, device=self.log_unit.device)
        total = self.table.total(row).unsqueeze(0)
        return total if exclude is None else total - self._masses(exclude)

    def _masses(self, ids: Tensor) -> Tensor:
        """Return the masses of classes in all tables; one more dimension of ``features``."""
        first = torch.arange(self.features, device=ids.device) * self.num_classes
        return self.table.weight[ids.unsqueeze(-1) + first]

    def _draw(self, query, uniform, exclude, context):
        ends = (self._shares(query) * self._totals(exclude)).cumsum(dim=-1)
        feature = torch.searchsorted(ends, uniform[..., 0] * ends[:, -1:], right=True).clamp(max=self.features - 1)
        cell = self.table.draw(feature.flatten(), uniform[..., 1].reshape(-1, 1)).view(feature.shape)
        ids = cell - feature * self.num_classes
        if exclude is not None:
            # A hit on the excluded class is drawn once more from the others of its table.
            def again(example: Tensor, slot: Tensor) -> Tensor:
                first = feature[example, slot] * self.num_classes
                skip, number = first + exclude[example], uniform[example, slot, 2]
                return self.table.draw_without(feature[example, slot], skip, number) - first

            ids = redrawn(ids, ids == exclude.unsqueeze(-1), again)
        return ids, self._log_prob(query, ids, exclude, context)

    def _log_prob(self, query, ids, exclude, context):
        found = []
        for part, chunk, positive in self._chunks(self.features * max(1, ids.shape[1]), query, ids, exclude):
            share = self._shares(part)
            total = (share * self._totals(positive)).sum(dim=-1, keepdim=True)
            mass = torch.einsum("bkf,bf->bk", self._masses(chunk), share)
            found.append(mass.log() - total.log())
        return torch.cat(found)

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"num_classes={self.num_classes}, in_features={self.in_features}, features={self.features}"


def orthogonal_directions(columns: int, number: int, seed: int) -> Tensor:
    """Draw ``number`` Gaussian vectors, orthogonal in groups of ``columns``, shape ``(number, columns)``.

    Each has the distribution of independent normal numbers, so means over them keep their expectation.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(math.ceil(number / columns), 2, columns, columns, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal[:, 0])
    # Signs as in r make q uniform over the rotations; the lengths are those of independent Gaussian vectors.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return (q.mT * normal[:, 1].norm(dim=-1, keepdim=True)).flatten(0, 1)[:number].float()
