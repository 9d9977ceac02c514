"""Distributions to draw negative classes from, and how users name them."""

from typing import Any

from .. import checks, functional
from . import description
from .base import Sampler
from .bigram import Bigram
from .blocks import Blocks
from .dense import Dense, Kernel, Softmax
from .draw import Best, Draw, Part
from .fourier import FourierTree
from .head_tail import HeadTail
from .in_batch import InBatch
from .lsh import SimHash
from .multi_index import MultiIndex
from .ngram import AdaptiveNgram
from .polynomial import QuadraticTree, QuarticKernel
from .positive import PositiveFeatures
from .static import LogUniform, Uniform, Unigram
from .tree import KernelTree
from .two_pass import TwoPass

__all__ = [
    "AdaptiveNgram",
    "Best",
    "Bigram",
    "Blocks",
    "Dense",
    "Draw",
    "FourierTree",
    "HeadTail",
    "InBatch",
    "Kernel",
    "KernelTree",
    "LogUniform",
    "MultiIndex",
    "Part",
    "PositiveFeatures",
    "Sampler",
    "SimHash",
    "Softmax",
    "TwoPass",
    "Uniform",
    "Unigram",
    "create",
    "named",
    "names",
    "options",
    "table",
]

_NAMED: dict[str, type[Sampler]] = {
    "blocks": Blocks,
    "uniform": Uniform,
    "log_uniform": LogUniform,
    "unigram": Unigram,
    "bigram": Bigram,
    "ngram": AdaptiveNgram,
    "in_batch": InBatch,
    "quadratic": QuadraticTree,
    "quartic": QuarticKernel,
    "head_tail": HeadTail,
    "two_pass": TwoPass,
    "lsh": SimHash,
    "multi_index": MultiIndex,
    "positive_features": PositiveFeatures,
    "fourier": FourierTree,
    "softmax": Softmax,
}


def names() -> tuple[str, ...]:
    """Return the names that `create` takes."""
    return tuple(_NAMED)


def named(name: str) -> type[Sampler]:
    """Return the class of the sampler with this name."""
    return _NAMED[checks.one_of("sampler", name, names())]


def options(sampler: str | type[Sampler]) -> dict[str, Any]:
    """Return the options of a sampler, which `create` and `SampledSoftmax` take, and their defaults.

    The default of a required option is ``inspect.Parameter.empty``.
    """
    return description.options(named(sampler) if isinstance(sampler, str) else sampler)


def table() -> str:
    """Return a Markdown table of all samplers that have a name: distribution, scope, options, cost and use."""
    return description.table(_NAMED)


def resolve(
    sampler: str | type[Sampler] | Sampler, num_classes: int, in_features: int, part: Part, **options: Any
) -> Sampler:
    """Create the sampler of a layer that holds ``part`` of the classes, or check a sampler object."""
    if isinstance(sampler, str) or (isinstance(sampler, type) and issubclass(sampler, Sampler)):
        whole = part.shards == 1
        return create(sampler, num_classes, in_features, part=None if whole else part, **options)
    if not isinstance(sampler, Sampler):
        raise TypeError(f"sampler must be a name, or a class or object of samplers.Sampler, got {sampler!r}")
    if unknown := options.keys() - {"prediction", "bias"}:
        raise TypeError(
            f"unknown arguments {', '.join(sorted(unknown))}: options belong to samplers given by name or class"
        )
    return _checked(sampler, part.last - part.first)


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
    """Create a sampler by its name, or from a subclass of `Sampler`, as `SampledSoftmax` does.

    The constructor receives ``num_classes``, ``in_features``, ``prediction`` and ``bias`` if it takes them.

    Args:
        sampler: one of `names`, or a subclass of `Sampler`. `table` describes those with a name.
        num_classes: n.
        in_features: size of the query, d.
        prediction: the distribution of the model, ``"softmax"`` or ``"absolute"``, for samplers that follow it.
        bias: whether the logits have offsets per class.
        part: the classes to sample from; default: all. The options are those for all classes.
        options: all other arguments of the class's constructor; see `samplers.options`.
    """
    kind = named(sampler) if isinstance(sampler, str) else sampler
    if not (isinstance(kind, type) and issubclass(kind, Sampler)):
        raise TypeError(f"sampler must be a name or a subclass of samplers.Sampler, got {sampler!r}")
    if not isinstance(part, Part | None):
        raise TypeError(f"part must be a samplers.Part or None, got {part!r}")
    checks.positive_int("num_classes", num_classes)
    checks.positive_int("in_features", in_features)
    checks.one_of("prediction", prediction, functional.PREDICTIONS)
    checks.boolean("bias", bias)
    description.check_options(repr(sampler) if isinstance(sampler, str) else sampler.__name__, kind, options)
    if part is not None:
        kind, options = kind.restrict(options, part)
        num_classes = part.last - part.first
    known = {"num_classes": num_classes, "in_features": in_features, "prediction": prediction, "bias": bias}
    return _checked(kind.make(**description.passed(kind, known), **options), num_classes)


def _checked(sampler: Sampler, num_classes: int) -> Sampler:
    """Return a sampler if it fits this many classes; an adaptive one takes the number from the weights."""
    name, made_for = type(sampler).__name__, num_classes if sampler.adaptive else getattr(sampler, "num_classes", None)
    if made_for != num_classes:
        raise ValueError(f"sampler {name} must have num_classes = {num_classes}, as the layer has, got {made_for}")
    return sampler
