"""JSON files of a run: objects of known types, and errors that name the file and the entry."""

import json
import stat
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

#: Largest accepted file in bytes, far above the size of any file of a run.
LARGEST = 1 << 26
#: Characters of a value that messages quote.
QUOTED = 100
#: Characters of a message of another library.
LONGEST = 400


def quoted(value: object) -> str:
    """Return a value as messages show it, cut to `QUOTED` characters."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 2]}…{text[-1]}"


def regular(file: Path) -> Path:
    """Return the file if it can be read like one. A pipe would wait forever, and a folder has no content."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{file}: not a regular file")
    return file


def read_json(file: Path) -> dict[str, Any]:
    """Read the one object of a JSON file."""
    if regular(file).stat().st_size > LARGEST:
        raise ValueError(f"{file}: larger than {LARGEST >> 20} MB, so no file of a run")
    try:
        content = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold an object, not {type(content).__name__}")
    return content


def typed(value: Any, kind: Any, what: str) -> Any:
    """Check a JSON value against a type annotation, and return it as that type.

    Args:
        value: what `json.loads` returned.
        kind: bool, int, float, str, Path, dict, or a Literal, an optional or a list of these.
        what: how messages call the value.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (kind,) = (one for one in arguments if one is not NoneType)
        return typed(value, kind, what)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{what} must be one of {', '.join(map(repr, arguments))}, got {quoted(value)}")
        return value
    if origin is list:
        return [typed(one, arguments[0], what) for one in typed(value, list, what)]
    if kind is Path:
        return Path(typed(value, str, what))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{what} must be of type {kind.__name__}, got {quoted(value)}")
    return value


def first_line(error: BaseException) -> str:
    """Return the first line of a message, or the name of the error if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:LONGEST] if lines else type(error).__name__
