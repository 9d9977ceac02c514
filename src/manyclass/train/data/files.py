"""Files, compressed or not, in bounded memory, and errors that name the file and the line."""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

#: Bytes of a text that are held at once.
CHUNK = 1 << 22
COMPRESSED = (".gz", ".xz", ".bz2")

#: Told how many more bytes of a file on disk have been read: what a progress bar needs.
Advance = Callable[[int], object]


def ignore(count: int) -> None:
    """Report progress to nobody."""


def _decompressed(path: Path, file: BinaryIO) -> io.BufferedIOBase | BinaryIO:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if path.suffix == ".xz":
        return lzma.LZMAFile(file)
    if path.suffix == ".bz2":
        return bz2.BZ2File(file)
    return file


class _Source(io.RawIOBase):
    """The decompressed bytes of a file; reports progress, and names the file in every error."""

    def __init__(self, path: Path, advance: Advance):
        self._path, self._advance = path, advance
        self._file = path.open("rb")
        self._stream = _decompressed(path, self._file)
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        try:
            data = self._stream.read(len(buffer))
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            # gzip and bz2 report broken data as OSError, without the name of the file.
            raise ValueError(f"{self._path}: cannot be read: {error}") from None
        buffer[: len(data)] = data
        position = self._file.tell()
        self._advance(position - self._position)
        self._position = position
        return len(data)

    def close(self) -> None:
        self._stream.close()
        self._file.close()
        super().close()


def open_bytes(path: Path, advance: Advance = ignore) -> BinaryIO:
    """Open a file for reading, decompressed if its name ends in ``.gz``, ``.xz`` or ``.bz2``.

    A missing file raises ``OSError``, and reading a broken one ``ValueError``: one line that names the file.
    """
    return io.BufferedReader(_Source(path, advance), 1 << 20)


def bare_suffix(path: Path) -> str:
    """The suffix that tells the format: ``.csv`` for both ``a.csv`` and ``a.csv.gz``."""
    return (Path(path.stem) if path.suffix in COMPRESSED else path).suffix.lower()


def read_lines(path: Path, advance: Advance = ignore) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 text without their ends, numbered from 1; memory: one line."""
    with open_bytes(path, advance) as file:
        yield from decode_lines(path, file)


def decode_lines(path: Path, lines: Iterable[bytes], first: int = 1) -> Iterator[tuple[int, str]]:
    """Lines of a UTF-8 text without their ends, and their numbers, which begin with ``first``."""
    for number, line in enumerate(lines, first):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}, line {number}: not UTF-8 text") from None
        yield number, text.rstrip("\r\n")


def read_pieces(path: Path, advance: Advance = ignore) -> Iterator[str]:
    """A UTF-8 text in pieces of about ``CHUNK`` bytes that start and end with a whole word; memory: one piece.

    White space between two pieces comes at the start of the second. Only a word longer than a piece is cut.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line, rest, started = 1, "", False
    with open_bytes(path, advance) as file:
        data = b"start"
        while data:
            data = file.read(CHUNK)
            try:
                text = rest + decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise ValueError(f"{path}, line {line}: not UTF-8 text") from None
            line += data.count(b"\n")
            piece, rest = _cut(text, final=not data)
            if piece:
                yield piece if started else piece.lstrip()
                started = True


def _cut(text: str, final: bool) -> tuple[str, str]:
    """Cut a text before its last word, which may go on, and the white space before it."""
    if not text or text.isspace():
        return "", "\n" if "\n" in text else text[:1]
    head, *last = text.rsplit(None, 1)
    if final or text[-1].isspace() or (not last and len(head) > CHUNK):
        head = text.rstrip()
    elif not last:
        return "", text
    return head, text[len(head) :]
