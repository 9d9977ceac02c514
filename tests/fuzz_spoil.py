"""Spoil one argument of a native call."""

import random
from typing import Any

import torch
from torch import Tensor

INTEGERS = [-(2**63), -(2**40), -2, -1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]
NUMBERS = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-300, 0.5, 1.0, 2.0, 1e300, -3e38, 3e38]
TYPES = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool]


def spoil(rng: random.Random, name: str, value: Any) -> Any:
    """Return another value for an argument; most are wrong, some are right."""
    if isinstance(value, Tensor):
        return spoil_tensor(rng, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        # So many negatives would be right, and need more memory than there is.
        return rng.choice(
            [*(number for number in INTEGERS if name != "number" or number != 2**31 - 1), value - 1, value + 1]
        )
    if isinstance(value, float):
        return rng.choice(NUMBERS)
    changed = [[], value[1:], [1, *value], [*value, 1], [size + 1 for size in value], [2**62] * len(value), [0, *value]]
    return rng.choice([*changed, [-1] * len(value)])


def largest(dtype: torch.dtype) -> float:
    """What a dtype holds; infinity stays what it is in floating point."""
    if dtype.is_floating_point:
        return float("inf")
    return torch.iinfo(dtype).max


def spoil_tensor(rng: random.Random, value: Tensor) -> Tensor:
    kind = rng.choice(["dtype", "more dimensions", "fewer dimensions", "size", "empty", "strides", "offset", "values"])
    if kind == "dtype":
        return value.nan_to_num(0, 0, 0).to(rng.choice(TYPES))
    if kind == "more dimensions":
        return value.unsqueeze(rng.randint(0, value.dim()))
    if kind == "fewer dimensions":
        return value.flatten() if value.dim() > 1 else value.sum()
    if kind == "size":
        dim = rng.randrange(value.dim())
        if rng.random() < 0.5 and value.shape[dim]:
            return value.narrow(dim, 0, value.shape[dim] - 1).contiguous()
        return torch.cat([value, value.narrow(dim, 0, 1) if value.shape[dim] else value], dim)
    if kind == "empty":
        return value.new_empty([0 if rng.random() < 0.7 else size for size in value.shape])
    if kind == "strides":
        return value.repeat_interleave(2, dim=-1)[..., ::2]
    if kind == "offset":  # memory that starts anywhere
        memory = value.new_empty(value.numel() + 1)
        memory[1:] = value.flatten()
        return memory[1:].view(value.shape)
    changed = value.clone()
    if changed.numel():
        numbers = NUMBERS if value.is_floating_point() else INTEGERS
        kept = torch.tensor([number for number in numbers if not abs(number) > largest(value.dtype)], dtype=value.dtype)
        changed.view(-1)[rng.randrange(changed.numel())] = kept[rng.randrange(len(kept))]
    return changed
