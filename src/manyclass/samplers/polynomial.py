"""The samplers that are named after the paper's kernels."""

from typing import Any

from .. import kernels
from .base import Sampler
from .dense import Kernel
from .tree import KernelTree

# Below this many classes, or below D, scoring all classes is faster than the tree: measured for 16 to 256 features.
TREE_MIN_CLASSES = 4096
# The paper's choice.
ALPHA = 100.0


class QuadraticTree(KernelTree):
    """`KernelTree` with the paper's kernel, α·o² + 1.

    Created by name, it is a dense `Kernel` below max(4096, D) classes. To choose otherwise, construct either class.

    Args:
        num_classes: n.
        in_features: size of the query, d.
        alpha: α.
        bias: whether class weights have offsets, stored as a further column.
    """

    q = "alpha·o² + 1"
    cost = "O(d²·log n)"
    use = 'the paper\'s kernel and its [tree](docs/kernel-tree.md); with `prediction="absolute"`'

    def __init__(self, num_classes: int, in_features: int, alpha: float = ALPHA, *, bias: bool = False) -> None:
        super().__init__(kernels.Quadratic(alpha), num_classes, in_features, bias=bias)

    @classmethod
    def make(cls, **arguments: Any) -> Sampler:
        """Construct the tree, or the dense sampler if there are few classes."""
        kernel = kernels.Quadratic(arguments.get("alpha", ALPHA))
        if arguments["num_classes"] < max(TREE_MIN_CLASSES, kernel.feature_dim(arguments["in_features"])):
            return Kernel(kernel)
        return cls(**arguments)


class QuarticKernel(Kernel):
    """`Kernel` with o⁴ + 1."""

    q = "o⁴ + 1"
    cost = "O(n·d)"
    use = "closer to the softmax than the quadratic kernel"

    def __init__(self) -> None:
        super().__init__(kernels.Quartic())
