"""Errors that name the argument, the value and what is allowed."""

from collections.abc import Sequence

import torch
from torch import Tensor


def positive_int(name: str, value: object, minimum: int = 1) -> int:
    """Return ``value`` if it is an integer of at least ``minimum``."""
    number = integer(name, value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def integer(name: str, value: object) -> int:
    """Return ``value`` if it is an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    return value


def number(name: str, value: object) -> float:
    """Return ``value`` if it is an int or a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return value


def boolean(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
    return value


def floating_dtype(name: str, value: object) -> None:
    """Raise unless ``value`` is a floating point dtype or None."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name} must be a floating point dtype, got {value!r}")


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """Return ``value`` if it is one of the strings in ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def floating(name: str, value: object) -> Tensor:
    """Return ``value`` if it is a floating point tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must have a floating point dtype, got {value.dtype}")
    return value


def queries(name: str, value: object, in_features: int | None = None) -> Tensor:
    """Return ``value`` if it is a finite floating point tensor ``(*batch, in_features)``."""
    query = floating(name, value)
    if query.dim() == 0 or (in_features is not None and query.shape[-1] != in_features):
        features = "in_features" if in_features is None else in_features
        raise ValueError(f"{name} must have shape (*batch, {features}), got {tuple(query.shape)}")
    if readable(query) and not bool(torch.isfinite(query).all()):
        raise ValueError(f"{name} holds NaN or infinite values; every value must be finite")
    return query


def readable(value: Tensor) -> bool:
    """Whether values can be looked at: not while torch compiles, exports or maps over a batch."""
    return not (torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(value))  # pyright: ignore


def indices(
    name: str,
    value: object,
    limit: int | None,
    *,
    batch_of: Tensor | None = None,
    ignore: int | None = None,
) -> Tensor:
    """Return ``value`` as int64 if it is an integer tensor with values in ``[0, limit)``, or ``ignore``.

    With ``batch_of``, queries of shape ``(*batch, in_features)``, it must have shape ``(*batch)`` and their device.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must have an integer dtype, got {value.dtype}")
    if batch_of is not None:
        same_device(name, value, "the query", batch_of)
        if value.shape != batch_of.shape[:-1]:
            raise ValueError(f"{name} must have shape {tuple(batch_of.shape[:-1])}, got {tuple(value.shape)}")
    counted = value if ignore is None or not readable(value) else value[value != ignore]
    if counted.numel() and readable(value):
        low, high = (int(x) for x in torch.aminmax(counted))
        if low < 0 or (limit is not None and high >= limit):
            allowed = "non-negative" if limit is None else f"in [0, {limit})"
            or_ignored = "" if ignore is None else f" or ignore_index = {ignore}"
            raise ValueError(f"{name} must be {allowed}{or_ignored}, got {low if low < 0 else high}")
    return value.long()


def same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless both tensors are on one device."""
    if value.device != other.device:
        raise ValueError(f"{name} is on {value.device} but {other_name} is on {other.device}; both must be on the same")
