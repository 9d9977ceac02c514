"""Distributions to draw negative classes from, and how users name them."""

import inspect
from collections.abc import Callable
from typing import Any

from .. import checks, functional
from ..kernels import Quadratic, Quartic
from .base import Sampler
from .bigram import Bigram
from .blocks import Blocks
from .dense import Dense, Kernel, Softmax
from .draw import Best, Draw, Part
from .static import LogUniform, Uniform, Unigram
from .tree import KernelTree

__all__ = [
    "Best",
    "Bigram",
    "Blocks",
    "Dense",
    "Draw",
    "Kernel",
    "KernelTree",
    "LogUniform",
    "Part",
    "Sampler",
    "Softmax",
    "Uniform",
    "Unigram",
    "create",
    "names",
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


def names() -> tuple[str, ...]:
    """The names that `create` knows."""
    return tuple(_NAMES)


def resolve(
    sampler: str | type[Sampler] | Sampler, num_classes: int, in_features: int, part: Part, **options: Any
) -> Sampler:
    """Make the sampler of a layer that holds ``part`` of the classes; or check the one that was made already."""
    if isinstance(sampler, str) or (isinstance(sampler, type) and issubclass(sampler, Sampler)):
        whole = part.shards == 1
        return create(sampler, num_classes, in_features, part=None if whole else part, **options)
    if not isinstance(sampler, Sampler):
        raise TypeError(f"sampler must be a name or a manyclass.samplers.Sampler, got {sampler!r}")
    held = part.last - part.first
    if unknown := options.keys() - {"prediction", "bias"}:
        raise TypeError(
            f"unknown arguments {', '.join(sorted(unknown))}: options belong to samplers given by name or class"
        )
    if not sampler.adaptive and sampler.num_classes != held:
        raise ValueError(f"sampler is for {sampler.num_classes} classes, but num_classes is {held}")
    return sampler


def create(
    sampler: str | type[Sampler],
    num_classes: int,
    in_features: int,
    *,
    prediction: str = "softmax",
    bias: bool = False,
    part: Part | None = None,
    **options: Any,
) -> Sampler:
    """Make a sampler by its name or of a class of yours, as `SampledSoftmax` does.

    A class gets those of ``num_classes``, ``in_features``, ``prediction`` and ``bias`` that its constructor has.

    Args:
        sampler: ``"uniform"``, ``"log_uniform"``, ``"unigram"``, ``"bigram"``, ``"softmax"``, ``"quadratic"``,
            ``"quartic"`` or ``"blocks"``; or a subclass of `Sampler`.
        num_classes: n.
        in_features: size of the query, d.
        prediction: what ``"softmax"`` imitates, ``"softmax"`` or ``"absolute"``.
        bias: whether the logits have offsets per class.
        part: the classes to make it for, if not all; the options are those for all of them.
        options: ``counts`` and ``power`` for ``"unigram"``, ``pairs`` and ``interpolation`` for ``"bigram"``,
            ``alpha`` for ``"quadratic"``, which is a `KernelTree` from max(4096, D) classes on and a dense `Kernel`
            below (make either yourself to decide otherwise), ``own``, ``probe`` and ``block_size`` for ``"blocks"``,
            ``scope`` for ``"uniform"``, ``"log_uniform"`` and ``"unigram"``.
    """
    name = sampler if isinstance(sampler, str) else sampler.__name__
    if isinstance(sampler, str):
        checks.one_of("sampler", sampler, names())
    kind = _NAMES[sampler] if isinstance(sampler, str) else sampler
    checks.positive_int("num_classes", num_classes)
    checks.positive_int("in_features", in_features)
    checks.one_of("prediction", prediction, functional.PREDICTIONS)
    checks.boolean("bias", bias)
    known = {"num_classes": num_classes, "in_features": in_features, "prediction": prediction, "bias": bias}
    parameters = inspect.signature(kind).parameters
    allowed = [option for option in parameters if option not in known]
    for option in options.keys() - set(allowed):
        hint = f"allowed are {', '.join(allowed)}" if allowed else "it has none"
        raise TypeError(f"sampler={name!r} has no option {option!r}; {hint}")
    for option in allowed:
        if parameters[option].default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"sampler={name!r} needs {option}=…, see manyclass.samplers.{name.capitalize()}")
    if part is not None:
        if isinstance(kind, type):
            kind, options = kind.restrict(options, part)
        known["num_classes"] = part.last - part.first
    parameters = inspect.signature(kind).parameters
    made = kind(**{name: value for name, value in known.items() if name in parameters}, **options)
    if not made.adaptive and made.num_classes != known["num_classes"]:
        raise ValueError(f"counts must have shape ({known['num_classes']},), got ({made.num_classes},)")
    return made
