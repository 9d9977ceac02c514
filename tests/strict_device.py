"""A second device for tests: it refuses what a GPU refuses, and counts how often the host waits for it.

A tensor on it is a wrapper of a CPU tensor. Its device is `DEVICE`, so the product takes the path of any device but the
CPU. The rules:

- An operation on its tensors and on CPU tensors raises. As on CUDA, a CPU tensor without dimensions may stand for a
  number in pointwise operations, and `copy_` and `to` move between devices. Stricter than CUDA: indices may not be on
  the CPU.
- Random numbers on it need a generator of it.
- Native operations of manyclass refuse it.
- A synchronisation is counted where CUDA makes the host wait: a value or a size is read on the host (`item`, `tolist`,
  `bool`, `equal`, `nonzero`, `unique`, boolean indices, `masked_select`, `repeat_interleave` without ``output_size``,
  `bincount`, `coalesce` of a sparse tensor that is not), or a tensor is copied to the CPU.
- Copies from the CPU are not counted: small ones do not make the host wait.
"""

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

aten = torch.ops.aten

# Operations whose result has a size, or is a number, that depends on values.
WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.unique_dim_consecutive,
    aten.masked_select,
    aten.equal,
    aten.bincount,
    aten.histc,
    aten._coalesce,
}
INDEXED = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# Besides pointwise operations, these take a CPU tensor without dimensions for a number.
TAKES_NUMBERS = {
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten.masked_fill,
    aten.masked_fill_,
    aten.fill_,
}
MOVES = {aten._to_copy, aten.copy_}


class _Module(_DummyBackendModule):
    """What `torch.strict` is; outside of `strict_device` other tests shall see no accelerator."""

    def is_available(self) -> bool:
        return Strict.active is not None

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    # torch saves and restores the generators of all devices that are registered.
    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return Strict.active is not None


_setup_privateuseone_for_python_backend("strict", _Module(), _Hook())
DEVICE = torch.device("strict", 0)
_Generator = torch.Generator


class MixedDevicesError(RuntimeError):
    """An operation got tensors of two devices."""


class StrictTensor(Tensor):
    """A tensor on the strict device."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "StrictTensor":
        options: dict[str, Any] = {"dtype": inner.dtype, "layout": inner.layout, "device": DEVICE}
        if inner.layout == torch.strided:
            options |= {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, inner.size(), **options)  # pyright: ignore
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # pyright: ignore
        return f"StrictTensor({self.inner!r})"


class StrictGenerator(torch.Generator):
    """A generator of either device; it draws what a CPU generator with the same seed draws."""

    #: Operations see another Python object, of the same C++ one.
    places: ClassVar[dict[int, torch.device]] = {}

    def __new__(cls, device: Any = "cpu") -> "StrictGenerator":
        made = super().__new__(cls)
        cls.places[made._cdata] = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self.places[self._cdata]


class Strict(TorchDispatchMode):
    """Lets `DEVICE` be used; ``waits`` counts synchronisations by the line of the product that they happen in."""

    active: ClassVar["Strict | None"] = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    @property
    def count(self) -> int:
        return self.waits.total()


@contextlib.contextmanager
def strict_device() -> Iterator[Strict]:
    """Make the strict device usable."""
    mode, lifted = Strict(), torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(…, device=…) shows the mode its copy
    try:
        with mock.patch.object(torch, "Generator", StrictGenerator), mode:
            Strict.active = mode
            yield mode
    finally:
        Strict.active = None
        torch._C._set_only_lift_cpu_tensors(lifted)


def _place(generator: torch.Generator) -> torch.device:
    return StrictGenerator.places.get(generator._cdata, generator.device)


def _wait(func: Any) -> None:
    if Strict.active is not None:
        lines = [frame for frame in traceback.extract_stack() if "/manyclass/" in frame.filename]
        line = f"{Path(lines[-1].filename).name}:{lines[-1].lineno} {lines[-1].line}" if lines else "elsewhere"
        Strict.active.waits[f"{func} at {line}"] += 1


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat = _flat((args, kwargs))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    strict = [value for value in tensors if isinstance(value, StrictTensor)]
    packet, device = func.overloadpacket, kwargs.get("device")
    there = bool(strict) if device is None else torch.device(device).type == DEVICE.type
    for value in flat:
        if isinstance(value, _Generator) and (_place(value).type == DEVICE.type) != there:
            raise MixedDevicesError(f"{func} got a generator of {_place(value)}")
    if not strict and not there:
        return func(*args, **kwargs)
    if func.namespace == "manyclass":
        raise MixedDevicesError(f"{func} is a native operation of the CPU")
    if packet not in MOVES:
        _check(func, tensors, strict)
    if packet is aten.copy_ and not isinstance(args[0], StrictTensor):
        there = False
    if strict and (not there or _waits(func, args, kwargs)):
        _wait(func)
    wrappers = {id(value.inner): value for value in strict}
    args, kwargs = _map(StrictTensor, lambda value: value.inner, (args, kwargs))
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    found = CELLS.get(packet, func)(*args, **kwargs)
    if packet is aten._to_copy and any(found is value for value in args):
        found = found.clone()
    if not there:
        return found

    def wrapped(value: Tensor) -> StrictTensor:
        return wrappers[id(value)] if id(value) in wrappers else StrictTensor(value)

    result = _map(Tensor, wrapped, found)
    for wrapper in strict:
        if wrapper.shape != wrapper.inner.shape:
            raise NotImplementedError(f"{func} changes the shape of a tensor in place")
    return result


def _cell(input: Tensor, hidden: Tensor, before: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """An LSTM's step: torch takes this fused operation on every device but the CPU, which lacks it."""
    gates = input + hidden + sum(bias for bias in biases if bias is not None)
    enter, forget, new, out = gates.chunk(4, dim=1)
    enter, forget, new, out = enter.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    cell = forget * before + enter * new
    return out * cell.tanh(), cell, torch.cat([enter, forget, new, out], dim=1)


def _cell_backward(
    outer: Tensor | None, inner: Tensor | None, before: Tensor, cell: Tensor, gates: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    enter, forget, new, out = gates.chunk(4, dim=1)
    outer = torch.zeros_like(cell) if outer is None else outer
    down = outer * out * (1 - cell.tanh() ** 2) + (0 if inner is None else inner)
    parts = [
        down * new * enter * (1 - enter),
        down * before * forget * (1 - forget),
        down * enter * (1 - new**2),
        outer * cell.tanh() * out * (1 - out),
    ]
    grads = torch.cat(parts, dim=1)
    return grads, down * forget, grads.sum(dim=0) if biased else None


CELLS = {aten._thnn_fused_lstm_cell: _cell, aten._thnn_fused_lstm_cell_backward_impl: _cell_backward}


def _flat(value: Any) -> list[Any]:
    """Return the leaves of lists, tuples and dictionaries, several times as fast as torch's pytree."""
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in _flat(part)]
    return [leaf for part in value.values() for leaf in _flat(part)] if isinstance(value, dict) else [value]


def _map(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the leaves of one type."""
    if isinstance(value, (tuple, list)):
        return type(value)([_map(kind, function, part) for part in value])
    if isinstance(value, dict):
        return {name: _map(kind, function, part) for name, part in value.items()}
    return function(value) if isinstance(value, kind) else value


def _check(func: Any, tensors: list[Tensor], strict: list[StrictTensor]) -> None:
    numbers = torch.Tag.pointwise in func.tags or func.overloadpacket in TAKES_NUMBERS
    for value in tensors:
        if (
            not isinstance(value, StrictTensor)
            and value.device.type != "meta"
            and strict
            and (value.dim() or not numbers)
        ):
            raise MixedDevicesError(f"{func} got tensors of {DEVICE} and {value.device}, shape {tuple(value.shape)}")


def _waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    packet = func.overloadpacket
    if packet in WAITS:
        return True
    if packet in INDEXED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
