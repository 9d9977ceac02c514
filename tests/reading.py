"""What tests of reading data share: files, real data, folders in which only results are left."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from manyclass.train.data import (
    Interactions,
    Labelled,
    Ragged,
    Vocabulary,
    encode_interactions,
    read_interactions,
    read_labelled,
)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def real(name: str) -> Path:
    """A folder of real data, which is not part of the repository."""
    folder = Path(os.environ.get("MANYCLASS_DATA", "nowhere")) / name
    if not folder.exists():
        pytest.skip(f"needs real data: set MANYCLASS_DATA to a folder that has {name}")
    return folder


def raises(message: str):
    """The whole message, in one line."""
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def rows(ragged: Ragged) -> list[list[int]]:
    return [ragged.row(index).tolist() for index in range(len(ragged))]


def interactions(path: Path, folder: Path | None = None, **options) -> Interactions:
    """Read into a folder of its own; leaves the result there, or nothing."""
    with only_results(folder or path.parent, ["values", "offsets", "users"]) as folder:
        return read_interactions(path, folder, "x", **options)


def encoded(path: Path, vocabulary: Vocabulary, feature_names: list[str], **options) -> Interactions:
    with only_results(path.parent, ["values", "offsets", "users"]) as folder:
        return encode_interactions(path, folder, "x", vocabulary, feature_names, **options)


def labelled(path: Path, *arguments, folder: Path | None = None, **options) -> Labelled:
    results = ["labels.values", "labels.offsets", "features.values", "features.offsets", "values"]
    with only_results(folder or path.parent, results) as folder:
        return read_labelled(path, folder, "x", *arguments, **options)


@contextmanager
def only_results(parent: Path, names: list[str]) -> Iterator[Path]:
    """A new folder, in which these files are afterwards, or none after an error; no other in it is still open."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="read-"))
    wanted: list[str] = []
    try:
        yield folder
        wanted = [f"x.{name}.npy" for name in names]
    finally:
        assert sorted(file.name for file in folder.iterdir()) == sorted(wanted)
        # A file without a name is gone when it is closed.
        assert not [file for file in open_files() if file.startswith(str(folder)) and not file.endswith(".npy")]


def open_files() -> list[str]:
    """What the process has open, where the system tells."""
    found = []
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            found.append(str(link.readlink()))
    return found
