"""Files that are whole or not there."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Temporary names of `replacing`: the id of the process, and the final name.
_TEMPORARY = re.compile(r"\.(\d+)\..+")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` to write to, and rename it to ``path`` on success.

    The contents are synchronised to disk before the rename, so a crash leaves the old or the new version, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # the same ending: some writers look at it
    remove(temporary)  # of a process that was killed and had the same id, as in a container
    try:
        yield temporary
        for written in [*temporary.rglob("*"), temporary]:
            if written.is_file():
                with written.open("rb") as file:
                    os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Delete the temporary files in a folder whose processes are gone."""
    for path in folder.glob(".*"):
        found = _TEMPORARY.fullmatch(path.name)
        if found and not _alive(int(found[1])):
            remove(path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return process != os.getpid()
