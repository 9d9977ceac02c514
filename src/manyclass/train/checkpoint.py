"""The files of a checkpoint: safetensors and JSON, so that reading them runs no code.

Each rank writes its weights to ``model-RANK.safetensors`` and all other state to ``state-RANK.safetensors``. Tensors
with a row per class are written in parts, one per rank. Any number of ranks can read the rows that it needs.
"""

import hashlib
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .records import first_line, quoted, regular, typed

#: Version of the format; another one is refused.
FORMAT = 3
WEIGHTS, STATE = "model", "state"
#: How the JSON text refers to a tensor of the file, and to one that has the rows of this rank's classes.
TENSOR, ROWS = "$tensor", "$rows"


class Rows(NamedTuple):
    """A tensor that has a row for each of this rank's classes."""

    local: Tensor


class Header(NamedTuple):
    """The header of a rank's files."""

    world: int
    #: First class of the rank, and the one after its last.
    first: int
    last: int


def save(folder: Path, rank: int, header: Header, weights: dict[str, Any], state: dict[str, Any]) -> None:
    """Write the files of one rank; values may be nested dicts and lists of numbers, strings, tensors and `Rows`."""
    for kind, content in ((WEIGHTS, weights), (STATE, state)):
        file = _file(folder, kind, rank)
        tensors: dict[str, Tensor] = {}
        text = json.dumps({"format": FORMAT, **header._asdict(), "content": _pack(content, "", tensors)})
        metadata = {"manyclass": text, "sha256": _digest(text)}
        try:
            save_file(_separate(tensors), file, metadata)
        except SafetensorError as error:  # a full disk
            raise OSError(f"{file} cannot be written: {first_line(error)}") from error


class Reader:
    """A checkpoint of any number of ranks.

    Args:
        folder: where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        first, self.content = self._read(STATE, 0)
        self.world = first.world
        self._headers = [first, *(self._read(STATE, rank)[0] for rank in range(1, self.world))]
        end = 0
        for header in self._headers:
            if header.world != self.world or header.first != end or header.last < end:
                raise ValueError(f"{folder}: its files are not of one checkpoint")
            end = header.last
        self.num_classes = end

    def load(self, kind: str, rank: int, rows: tuple[int, int]) -> Any:
        """Return what a rank wrote, with `Rows` replaced by those of the classes ``rows[0]`` to ``rows[1] − 1``."""
        content = self._read(kind, rank)[1]
        with _opened(_file(self.folder, kind, rank)) as file:
            return self._unpack(content, file, kind, rows)

    def _read(self, kind: str, rank: int) -> tuple[Header, Any]:
        file = _file(self.folder, kind, rank)
        with _opened(file) as opened:
            metadata = opened.metadata() or {}
        text = metadata.get("manyclass", "")
        if _digest(text) != metadata.get("sha256"):
            raise ValueError(f"{file}: not written by manyclass, or changed afterwards")
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise ValueError(f"{file}: has format {quoted(found['format'])}, but this version reads format {FORMAT}")
        return Header(*(typed(found[name], int, name) for name in Header._fields)), found["content"]

    def _unpack(self, value: Any, file: Any, kind: str, rows: tuple[int, int]) -> Any:
        if isinstance(value, list):
            return [self._unpack(one, file, kind, rows) for one in value]
        if not isinstance(value, dict):
            return value
        if TENSOR in value:
            return file.get_tensor(value[TENSOR])
        if ROWS in value:
            return self._rows(value[ROWS], kind, *rows)
        return {key: self._unpack(one, file, kind, rows) for key, one in value.items()}

    def _rows(self, key: str, kind: str, first: int, last: int) -> Tensor:
        parts = []
        for rank, header in enumerate(self._headers):
            low, high = max(first, header.first), min(last, header.last)
            if low < high:
                with _opened(_file(self.folder, kind, rank)) as file:
                    parts.append(file.get_slice(key)[low - header.first : high - header.first])
        if sum(map(len, parts)) != last - first:
            raise ValueError(f"{self.folder}: {quoted(key)} has no rows for the classes {first} to {last - 1}")
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _file(folder: Path, kind: str, rank: int) -> Path:
    return folder / f"{kind}-{rank}.safetensors"


@contextmanager
def _opened(file: Path) -> Any:
    try:
        with safe_open(regular(file), "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{file}: {first_line(error)}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Move the tensors of nested dicts and lists to ``tensors``, and return the rest as JSON types."""
    if isinstance(value, Tensor | Rows):
        tensors[path] = value.local if isinstance(value, Rows) else value
        return {ROWS if isinstance(value, Rows) else TENSOR: path}
    if isinstance(value, dict):
        return {key: _pack(one, f"{path}/{key}" if path else key, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(one, f"{path}/{number}", tensors) for number, one in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold {path}: {type(value).__name__}")


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy what shares memory: safetensors writes each tensor once."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    return separate
