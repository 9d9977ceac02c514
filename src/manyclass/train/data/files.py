"""Files, compressed or not, in bounded memory, and errors that name the file and the line."""

import bz2
import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ..records import quoted

#: Bytes of a text that are held at once.
CHUNK = 1 << 22
#: Bytes of the longest line. A longer one is no line: a quote without an end, or a file that expands without end.
LONGEST = 1 << 24
#: The name that stands for the standard input.
STANDARD_INPUT = Path("-")
UTF_8 = "utf-8"
#: What to do about a file in another encoding.
NOT_UTF_8 = "not UTF-8 text; --encoding names another, such as latin-1"
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
    """The decompressed bytes of a file, as UTF-8; reports progress, and names the file in every error."""

    def __init__(self, path: Path, advance: Advance, encoding: str):
        self._path, self._advance, self._encoding = path, advance, encoding
        self._decoder = None if encoding == UTF_8 else codecs.getincrementaldecoder(encoding)()
        self._file = _open(path)
        self._stream = _decompressed(path, self._file)
        self._position, self._waiting = 0, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        while not self._waiting:
            data = self._read(len(buffer))
            self._waiting = data if self._decoder is None else self._transcoded(data)
            if not data:
                break
        data, self._waiting = self._waiting[: len(buffer)], self._waiting[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)

    def _read(self, count: int) -> bytes:
        try:
            data = self._stream.read(count)
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            # gzip and bz2 report broken data as OSError, without the name of the file.
            raise ValueError(f"{self._path}: cannot be read: {error}") from None
        if self._path != STANDARD_INPUT and self._file.seekable():
            position = self._file.tell()
            self._advance(position - self._position)
            self._position = position
        return data

    def _transcoded(self, data: bytes) -> bytes:
        assert self._decoder is not None
        try:
            return self._decoder.decode(data, final=not data).encode()
        except (UnicodeDecodeError, UnicodeEncodeError):
            raise ValueError(f"{self._path}: not {self._encoding} text") from None

    def close(self) -> None:
        if self._path != STANDARD_INPUT:
            self._stream.close()
            self._file.close()
        super().close()


def _open(path: Path) -> BinaryIO:
    if path == STANDARD_INPUT:
        return sys.stdin.buffer
    if path.is_dir():
        raise IsADirectoryError(f"{path}: a folder, not a file")
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None


def check_encoding(name: str) -> str:
    """Return the usual name of an encoding of text; refuse what is none."""
    try:
        "".encode(name)  # raises for what Python encodes, but not from text
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        raise ValueError(f"--encoding must be one that Python knows, such as latin-1, got {quoted(name)}") from None


def open_bytes(path: Path, advance: Advance = ignore, encoding: str = UTF_8) -> BinaryIO:
    """Open a file for reading, decompressed if its name ends in ``.gz``, ``.xz`` or ``.bz2``; ``-`` is standard input.

    Text of another encoding comes as UTF-8. A missing file raises ``OSError``, and reading a broken one ``ValueError``:
    one line that names the file.
    """
    return io.BufferedReader(_Source(path, advance, encoding), 1 << 20)


def bare_suffix(path: Path) -> str:
    """Return the suffix that tells the format: ``.csv`` for both ``a.csv`` and ``a.csv.gz``."""
    return (Path(path.stem) if path.suffix in COMPRESSED else path).suffix.lower()


def read_lines(path: Path, advance: Advance = ignore, encoding: str = UTF_8) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text without their ends, numbered from 1; memory: one line."""
    with open_bytes(path, advance, encoding) as file:
        yield from decode_lines(path, _limited(path, file))


def _limited(path: Path, file: BinaryIO) -> Iterator[bytes]:
    number = 1
    while line := file.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise ValueError(f"{path}, line {number}: no end of the line in {LONGEST >> 20} MB")
        yield line
        number += 1


def decode_lines(path: Path, lines: Iterable[bytes], first: int = 1) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 text without their ends, and their numbers, which begin with ``first``."""
    for number, line in enumerate(lines, first):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}, line {number}: {NOT_UTF_8}") from None
        yield number, text.rstrip("\r\n")


def read_pieces(path: Path, advance: Advance = ignore, encoding: str = UTF_8) -> Iterator[str]:
    """Yield a text in pieces of about ``CHUNK`` bytes that start and end with a whole word; memory: one piece.

    White space between two pieces is at the start of the second. Only a word longer than a piece is cut.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line, rest, started = 1, "", False
    with open_bytes(path, advance, encoding) as file:
        data = b"start"
        while data:
            data = file.read(CHUNK)
            try:
                text = rest + decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise ValueError(f"{path}, line {line}: {NOT_UTF_8}") from None
            line += data.count(b"\n")
            piece, rest = _cut(text, final=not data)
            if piece:
                yield piece if started else piece.lstrip()
                started = True


def _cut(text: str, final: bool) -> tuple[str, str]:
    """Cut a text before its last word, which may be incomplete, and the white space before it."""
    if not text or text.isspace():
        return "", "\n" if "\n" in text else text[:1]
    head, *last = text.rsplit(None, 1)
    if final or text[-1].isspace() or (not last and len(head) > CHUNK):
        head = text.rstrip()
    elif not last:
        return "", text
    return head, text[len(head) :]
