"""Distributions to draw negative classes from, and how users name them."""

import inspect
from collections.abc import Callable
from typing import Any

from .. import checks, functional
from ..kernels import Quadratic, Quartic
from .base import Draw, Sampler
from .bigram import Bigram
from .blocks import Blocks
from .dense import Dense, Kernel, Softmax
from .static import LogUniform, Uniform, Unigram
from .tree import KernelTree

__all__ = [
    "Bigram",
    "Blocks",
    "Dense",
    "Draw",
    "Kernel",
    "KernelTree",
    "LogUniform",
    "Sampler",
    "Softmax",
    "Uniform",
    "Unigram",
    "create",
]

# Below this many classes, or below D, scoring all classes is faster than the tree: measured for 16 to 256 features.
TREE_MIN_CLASSES = 4096


def _quadratic(num_classes: int, in_features: int, bias: bool, alpha: float = 100.0) -> Sampler:
    kernel = Quadratic(alpha)
    if num_classes < max(TREE_MIN_CLASSES, kernel.feature_dim(in_features)):
        return Kernel(kernel)
    return KernelTree(kernel, num_classes, in_features, bias=bias)


_NAMES: dict[str, Callable[..., Sampler]] = {
    "uniform": Uniform,
    "log_uniform": LogUniform,
    "unigram": Unigram,
    "bigram": Bigram,
    "softmax": Softmax,
    "quadratic": _quadratic,
    "quartic": lambda: Kernel(Quartic()),
    "blocks": Blocks,
}


def create(
    name: str, num_classes: int, in_features: int, *, prediction: str = "softmax", bias: bool = False, **options: Any
) -> Sampler:
    """Make a sampler by its name, as `SampledSoftmax` does.

    Args:
        name: ``"uniform"``, ``"log_uniform"``, ``"unigram"``, ``"bigram"``, ``"softmax"``, ``"quadratic"``,
            ``"quartic"`` or ``"blocks"``.
        num_classes: n.
        in_features: size of the query, d.
        prediction: what ``"softmax"`` imitates, ``"softmax"`` or ``"absolute"``.
        bias: whether the logits have offsets per class.
        options: ``counts`` and ``power`` for ``"unigram"``, ``pairs`` and ``interpolation`` for ``"bigram"``,
            ``alpha`` for ``"quadratic"``, which is a `KernelTree` from max(4096, D) classes on and a dense `Kernel`
            below (make either yourself to decide otherwise), ``own``, ``probe`` and ``block_size`` for ``"blocks"``,
            ``scope`` for ``"uniform"``, ``"log_uniform"`` and ``"unigram"``.
    """
    checks.one_of("sampler", name, tuple(_NAMES))
    checks.positive_int("num_classes", num_classes)
    checks.positive_int("in_features", in_features)
    checks.one_of("prediction", prediction, functional.PREDICTIONS)
    checks.boolean("bias", bias)
    known = {"num_classes": num_classes, "in_features": in_features, "prediction": prediction, "bias": bias}
    parameters = inspect.signature(_NAMES[name]).parameters
    allowed = [option for option in parameters if option not in known]
    for option in options.keys() - set(allowed):
        hint = f"allowed are {', '.join(allowed)}" if allowed else "it has none"
        raise TypeError(f"sampler={name!r} has no option {option!r}; {hint}")
    for option in allowed:
        if parameters[option].default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"sampler={name!r} needs {option}=…, see manyclass.samplers.{name.capitalize()}")
    sampler = _NAMES[name](**{k: v for k, v in known.items() if k in parameters}, **options)
    if not sampler.adaptive and sampler.num_classes != num_classes:
        raise ValueError(f"counts must have shape ({num_classes},), got ({sampler.num_classes},)")
    return sampler
