"""Distributions to draw negative classes from, and how users name them."""

import inspect
from collections.abc import Callable
from typing import Any

from .. import checks
from ..kernels import Quadratic, Quartic
from .base import Draw, Sampler
from .bigram import Bigram
from .dense import Dense, Kernel, Softmax
from .static import LogUniform, Uniform, Unigram

__all__ = ["Bigram", "Dense", "Draw", "Kernel", "LogUniform", "Sampler", "Softmax", "Uniform", "Unigram", "create"]

_NAMES: dict[str, Callable[..., Sampler]] = {
    "uniform": Uniform,
    "log_uniform": LogUniform,
    "unigram": lambda num_classes, counts, power=1.0: Unigram(counts, power),
    "bigram": lambda num_classes, pairs, interpolation=0.1: Bigram(pairs, num_classes, interpolation),
    "softmax": lambda num_classes, prediction="softmax": Softmax(prediction),
    "quadratic": lambda num_classes, alpha=100.0: Kernel(Quadratic(alpha)),
    "quartic": lambda num_classes: Kernel(Quartic()),
}


def create(name: str, num_classes: int, *, prediction: str = "softmax", **options: Any) -> Sampler:
    """Make a sampler by its name, as `SampledSoftmax` does.

    Args:
        name: ``"uniform"``, ``"log_uniform"``, ``"unigram"``, ``"bigram"``, ``"softmax"``, ``"quadratic"`` or
            ``"quartic"``.
        num_classes: n.
        prediction: what ``"softmax"`` imitates, ``"softmax"`` or ``"absolute"``.
        options: ``counts`` and ``power`` for ``"unigram"``, ``pairs`` and ``interpolation`` for ``"bigram"``,
            ``alpha`` for ``"quadratic"``.
    """
    checks.one_of("sampler", name, tuple(_NAMES))
    checks.positive_int("num_classes", num_classes)
    parameters = dict(inspect.signature(_NAMES[name]).parameters)
    del parameters["num_classes"]
    if parameters.pop("prediction", None):
        options["prediction"] = prediction
    for option in options.keys() - parameters.keys() - {"prediction"}:
        allowed = f"allowed are {', '.join(parameters)}" if parameters else "it has none"
        raise TypeError(f"sampler={name!r} has no option {option!r}; {allowed}")
    for option, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"sampler={name!r} needs {option}=…, see manyclass.samplers.{name.capitalize()}")
    sampler = _NAMES[name](num_classes, **options)
    if not sampler.adaptive and sampler.num_classes != num_classes:
        raise ValueError(f"counts must have shape ({num_classes},), got ({sampler.num_classes},)")
    return sampler
