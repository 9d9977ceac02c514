"""Random Fourier features through the kernel tree."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .positive import orthogonal_directions
from .tree import KernelTree


class FourierKernel:
    """K(h, w) = (1/D)·Σ_i cos(√ν·⟨ω_i, ĥ − ŵ⟩) + floor, with ĥ = h/‖h‖, ŵ = w/‖w‖ and random ω_i.

    The mean of the cosines over ω is exp(−ν·‖ĥ − ŵ‖²/2) ∝ exp(ν·⟨ĥ, ŵ⟩). One choice of ω may make it negative by
    about 1/√D, which ``floor`` ≥ 1 prevents.

    Args:
        columns: of the vectors.
        features: D; the feature map has twice as many, and one for the floor.
        nu: ν, the sharpness of the kernel.
        floor: added to the kernel.
        seed: of ω.
    """

    def __init__(self, columns: int, features: int, nu: float, floor: float, seed: int) -> None:
        self.features = checks.positive_int("features", features)
        self.nu, self.floor = checks.number("nu", nu), checks.number("floor", floor)
        for name, value in {"nu": nu, "floor": floor}.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.direction = orthogonal_directions(columns, features, checks.integer("seed", seed, 0)) * math.sqrt(nu)

    def __repr__(self) -> str:
        return f"FourierKernel(features={self.features}, nu={self.nu}, floor={self.floor})"

    def feature_dim(self, in_features: int) -> int:
        """Return the number of cosines and sines, plus one for the floor."""
        return 2 * self.features + 1

    def feature_map(self, vectors: Tensor) -> Tensor:
        """Map vectors ``(*batch, columns)`` to features φ ``(*batch, 2·features + 1)``."""
        angle = F.normalize(vectors, dim=-1) @ self.direction.to(vectors).T
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1) / math.sqrt(self.features)
        return torch.cat([waves, waves.new_full((*waves.shape[:-1], 1), math.sqrt(self.floor))], dim=-1)


class FourierTree(KernelTree):
    """`KernelTree` with random Fourier features of normalised vectors, and a floor.

    q follows exp(ν·⟨ĥ, ŵ⟩), so it suits normalised class embeddings. Features can be negative: a node with a negative
    sum gets a small minimum share. The reported q is the probability of the path, so it is exact.
    There is no native kernel: each example computes the masses of all nodes, O(n·D/leaf_size).

    After Rawat, Chen, Yu, Suresh and Kumar, Sampled softmax with random Fourier features (NeurIPS 2019). The method is
    the subject of US patent 12205005; no default uses it.

    Args:
        num_classes: n.
        in_features: size of the query, d.
        features: D, pairs of a cosine and a sine.
        nu: ν, the sharpness of the kernel.
        floor: share of the uniform distribution, relative to a class in the direction of the query.
        seed: of the features.
        bias: whether class weights have offsets, stored as a further column.
    """

    q = "exp(nu·cos(h, w)) by random Fourier features, and a floor"
    cost = "O(features·n/leaf)"
    use = "normalised embeddings; see [related work](docs/related-work.md) for a patent"

    def __init__(
        self,
        num_classes: int,
        in_features: int,
        features: int = 128,
        nu: float = 4.0,
        floor: float = 0.05,
        seed: int = 0,
        *,
        bias: bool = False,
    ) -> None:
        columns = checks.positive_int("in_features", in_features) + checks.boolean("bias", bias)
        super().__init__(FourierKernel(columns, features, nu, floor, seed), num_classes, in_features, bias=bias)
