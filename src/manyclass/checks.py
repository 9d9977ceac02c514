"""Errors that name the argument, the value and what is allowed."""

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

# Limit for samplers that keep tables of classes or negatives: the native core counts them in 32 bits.
MAX_CLASSES = 2**31 - 1
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Options of `torch.nn.CrossEntropyLoss` that a sampled loss cannot have, and what to do instead.
_REFUSED = {
    "label_smoothing": "smoothed targets need the logits of all classes",
    "weight": "for class weights use reduction='none' and average: (w[target] * loss).sum() / w[target].sum()",
}


def positive_int(name: str, value: object, minimum: int = 1, maximum: int = 2**53) -> int:
    """Return ``value`` if it is an integer of at least ``minimum``; up to ``maximum`` a float64 holds it exactly."""
    return integer(name, value, minimum, maximum)


def integer(name: str, value: object, minimum: int = -(2**53), maximum: int = 2**53) -> int:
    """Return ``value`` if it is an integer in ``[minimum, maximum]``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value}")
    return value


def refused_options(options: Iterable[str]) -> None:
    """Raise if there is an option that a sampled loss cannot have."""
    for name in set(options) & _REFUSED.keys():
        raise TypeError(f"SampledSoftmax does not take {name}: {_REFUSED[name]}")


def boolean(name: str, value: object) -> bool:
    """Return ``value`` if it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r} of type {type(value).__name__}")
    return value


def instance(name: str, value: Any, kind: type) -> Any:
    """Return ``value`` if it is an object of ``kind`` or None."""
    if not isinstance(value, kind | None):
        raise TypeError(f"{name} must be a {kind.__name__} or None, got {value!r}")
    return value


def number(name: str, value: object) -> float:
    """Return ``value`` if it is a finite real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """Return ``value`` if it is one of the strings in ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def floating(name: str, value: object) -> Tensor:
    """Return ``value`` if it is a dense floating point tensor."""
    dense(name, value)
    assert isinstance(value, Tensor)
    if value.dtype not in FLOATING:
        raise TypeError(f"{name} must have a floating point dtype, got {value.dtype}; it has 16, 32 or 64 bits")
    return value


def device(name: str, value: Any) -> torch.device:
    """Return the device that ``value`` names, or torch's default device for None."""
    try:
        return torch.get_default_device() if value is None else torch.device(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} must be a device of torch, got {value!r}: {error}") from error


def dense(name: str, value: object) -> None:
    """Raise unless ``value`` is a dense tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {value.layout}")


def with_values(name: str, value: Tensor) -> Tensor:
    """Return ``value`` if it is not on the meta device."""
    if value.is_meta:
        raise ValueError(f"{name} is on the device meta, where tensors have no values")
    return value


def counts(name: str, value: object, num_classes: int | None = None) -> Tensor:
    """Return ``value`` as float64 if it can be counts of ``num_classes`` classes, or of any number of them."""
    if not isinstance(value, Tensor) or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of numbers, got {getattr(value, 'dtype', type(value).__name__)}")
    dense(name, with_values(name, value))
    size = max(1, value.numel()) if num_classes is None else num_classes
    if tuple(value.shape) != (size,):
        raise ValueError(f"{name} must have shape ({num_classes or 'num_classes'},), got {tuple(value.shape)}")
    numbers = value.double()
    low, high = (float(x) for x in torch.aminmax(numbers))
    if not (low >= 0 and high < math.inf):
        raise ValueError(f"{name} must be finite and not negative, got values from {low} to {high}")
    return numbers


def tables(weight: object, bias: object) -> tuple[Tensor, Tensor | None]:
    """Return both if ``weight`` is ``(num_classes, in_features)`` and ``bias`` is ``(num_classes,)`` or None."""
    rows = floating("weight", weight)
    if rows.dim() != 2 or rows.numel() == 0:
        raise ValueError(f"weight must have shape (num_classes, in_features), got {tuple(rows.shape)}")
    if bias is None:
        return rows, None
    offsets = floating("bias", bias)
    if offsets.shape != rows.shape[:1]:
        raise ValueError(f"bias must have shape ({len(rows)},), got {tuple(offsets.shape)}")
    same_device("bias", offsets, "weight", rows)
    return rows, offsets


def queries(name: str, value: object, in_features: int | None = None, *, validate: bool = True) -> Tensor:
    """Return ``value`` if it is a finite floating point tensor ``(*batch, in_features)``.

    Without ``validate`` values are not read.
    """
    query = floating(name, value)
    if query.dim() == 0 or (in_features is not None and query.shape[-1] != in_features):
        features = "in_features" if in_features is None else in_features
        raise ValueError(f"{name} must have shape (*batch, {features}), got {tuple(query.shape)}")
    if validate and readable(query):
        with_values(name, query)
        if not all_finite(query):
            raise ValueError(f"{name} holds NaN or infinite values; every value must be finite")
    return query


def all_finite(value: Tensor) -> bool:
    """Return whether every number is finite. It is if their sum is, which takes less time; the sum may overflow."""
    return math.isfinite(float(value.detach().sum())) or bool(torch.isfinite(value).all())


def readable(value: Tensor) -> bool:
    """Return whether values can be read: not while torch compiles, exports or maps over a batch."""
    return not (torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(value))  # pyright: ignore


def indices(
    name: str,
    value: object,
    limit: int | None,
    *,
    batch_of: Tensor | None = None,
    several: bool = False,
    ignore: int | None = None,
    validate: bool = True,
) -> Tensor:
    """Return ``value`` as int64 if it is an integer tensor with values in ``[0, limit)``, or ``ignore``.

    With ``batch_of``, queries of shape ``(*batch, in_features)``, it must have their device and shape ``(*batch)``, or
    ``(*batch, k)`` if there may be ``several``.
    Without ``validate`` values are not read.
    """
    dense(name, value)
    assert isinstance(value, Tensor)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must have an integer dtype, got {value.dtype}")
    if batch_of is not None:
        same_device(name, value, "the query", batch_of)
        batch = batch_of.shape[:-1]
        if value.shape != batch and not (several and value.dim() == batch_of.dim() and value.shape[:-1] == batch):
            others = f" or ({''.join(f'{size}, ' for size in batch)}k)" if several else ""
            raise ValueError(f"{name} must have shape {tuple(batch)}{others}, got {tuple(value.shape)}")
    if not (validate and readable(value)):
        return value.long()
    value = with_values(name, value).long()
    counted = value if ignore is None else value[value != ignore]
    if counted.numel():
        low, high = (int(x) for x in torch.aminmax(counted))
        if low < 0 or (limit is not None and high >= limit):
            allowed = "non-negative" if limit is None else f"in [0, {limit})"
            or_ignored = "" if ignore is None else f" or ignore_index = {ignore}"
            raise ValueError(f"{name} must be {allowed}{or_ignored}, got {low if low < 0 else high}")
    return value


def same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless both tensors are on one device."""
    if value.device != other.device:
        raise ValueError(f"{name} is on {value.device} but {other_name} is on {other.device}; both must be on the same")
