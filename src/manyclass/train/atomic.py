"""Files that are whole or not there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write a file or a folder to; takes its place at once if all went well.

    What was written is on the disk before it gets its name, so a crash leaves the old or the new, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # the same ending: some writers look at it
    try:
        yield temporary
        for written in [*temporary.rglob("*"), temporary]:
            if written.is_file():
                with written.open("rb") as file:
                    os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)
