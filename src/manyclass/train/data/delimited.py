"""Tables as text, ``.csv`` and the like: cut at line ends into pieces, which polars reads one by one."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from ..records import first_line
from ..records import quoted as quote
from .columns import SEPARATORS, Batch, Columns, Layout, Record, shell
from .files import LONGEST, Advance, bare_suffix, decode_lines, open_bytes

#: What is between the fields, and whether the first line has names. Two are RecBole's, the last two MovieLens's.
SUFFIXES = {
    ".csv": (",", True),
    ".tsv": ("\t", True),
    ".inter": ("\t", True),
    ".item": ("\t", True),
    ".data": ("\t", False),
    ".dat": ("::", False),
}
#: Fields between these may be in quotes.
QUOTED = (",", ";")
#: Bytes of a piece, but for a line that is longer.
PIECE = 1 << 23
#: Stands for a separator that polars cannot split at, inside of this module.
UNIT = "\x1f"


def read_delimited(file: Path, columns: Columns, advance: Advance, layout: Layout) -> Iterator[Batch]:
    """Yield tables of strings, so that names stay as written in the file. Memory: one piece."""
    usual, named = SUFFIXES.get(bare_suffix(file), (",", True))
    separator = layout.separator or usual
    quoted = separator in QUOTED
    options: dict[str, Any] = {"separator": separator, "quote_char": '"' if quoted else None, "infer_schema": False}
    if len(separator.encode()) > 1:
        options["separator"] = UNIT
    header, names, chosen = b"", [], {}
    for line, rows in _pieces(file, quoted, advance, layout.encoding):
        if options["separator"] != separator:
            if UNIT.encode() in rows:
                raise ValueError(f"{file}: has the character {UNIT!r}, which cannot be read with --sep {separator}")
            rows = rows.replace(separator.encode(), UNIT.encode())
        if not names:
            end = _header_end(rows, quoted)
            header = rows[:end]
            if not header.strip(b"\r\n"):  # nothing but blank lines so far
                continue
            names = _names(file, header, line, options)
            fields = names
            headerless = layout.headerless or not (named or {columns.user, columns.item} <= set(names))
            if headerless:
                names = [str(number) for number in range(1, len(names) + 1)]
                header = options["separator"].join(names).encode() + b"\n"
            else:
                rows = rows[end:]
                line += header.count(b"\n")
                _check_header(file, names, columns)
            try:
                chosen = columns.find(file, names, headerless)
            except ValueError as error:
                raise ValueError(f"{error}{_separated(fields)}") from None
        if rows:
            yield _read(_Piece(file, rows, line, options, names, chosen), header)
    if not names:
        raise ValueError(f"{file}: the file is empty")


class _Piece:
    """Rows as they are in the file; ``line`` is the number of the first."""

    def __init__(
        self, file: Path, rows: bytes, line: int, options: dict[str, Any], names: list[str], chosen: dict[str, str]
    ):
        self.file, self.rows, self.line, self.options = file, rows, line, options
        self.names, self.chosen = names, chosen

    def records(self) -> Iterator[tuple[str, Record]]:
        """See `Batch.records`."""
        lines = (text for _, text in decode_lines(self.file, io.BytesIO(self.rows), self.line))
        delimiter = self.options["separator"]
        if self.options["quote_char"]:
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
        else:
            reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE)
        before = 0  # lines that were read before the row, which may have several
        try:
            for row in reader:
                if row and len(row) != len(self.names):
                    raise csv.Error(f"{len(row)} fields, but the header has {len(self.names)}")
                if row:
                    record = dict(zip(self.names, row, strict=True))
                    place = f"line {self.line + reader.line_num - 1}"
                    yield place, {wanted: record[found] for wanted, found in self.chosen.items()}
                before = reader.line_num
        except csv.Error as error:
            raise ValueError(f"{self.file}, line {self.line + before}: {_reason(error)}") from None

    def check(self) -> None:
        """Raise if a line is broken."""
        for _ in self.records():
            pass


def _read(piece: _Piece, header: bytes) -> Batch:
    last = piece.names[-1]
    try:
        wanted = list({*piece.chosen.values(), last})
        frame = pl.read_csv(header + piece.rows, columns=wanted, **piece.options)
    except pl.exceptions.PolarsError as error:
        piece.check()
        raise ValueError(f"{piece.file}, line {piece.line} or after it: {first_line(error)}") from None
    if frame[last].null_count():  # polars fills short lines up with nulls; the last column shows them
        piece.check()
    return Batch(frame.select(pl.col(found).alias(name) for name, found in piece.chosen.items()), piece.records)


def _names(file: Path, header: bytes, line: int, options: dict[str, Any]) -> list[str]:
    for _ in decode_lines(file, io.BytesIO(header), line):  # polars does not mind what is no text
        pass
    try:
        return pl.read_csv(header, n_rows=0, **options).columns
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{file}, line {line}: {first_line(error)}") from None


def _reason(error: csv.Error) -> str:
    return "a quote without an end" if "unexpected end of data" in str(error) else str(error)


def _check_header(file: Path, names: list[str], columns: Columns) -> None:
    """Raise if the first line is a row, or if it names a wanted column twice."""
    wanted = (columns.user, columns.item, columns.timestamp, *columns.features)
    numbered = [[str(first + place) for place in range(len(names))] for first in (0, 1)]
    for name in wanted:
        if f"{name}_duplicated_0" in names:  # the name that polars gives to the second
            raise ValueError(f"{file}: more than one column is called {quote(name)}")
        place = int(name) if name.isdecimal() else 0
        taken = name if name in names else names[place - 1] if 1 <= place <= len(names) else ""
        if place and taken.replace(".", "", 1).isdecimal() and names not in numbered:
            raise ValueError(
                f"{file}: its first line looks like a row, column {name} is {quote(taken)}; give --no-header"
            )


def _separated(names: list[str]) -> str:
    """Say what may separate the fields of a file that was read as one column."""
    if len(names) != 1:
        return ""
    likely = max(SEPARATORS, key=names[0].count)
    return f"; give --sep {shell(likely)}?" if likely in names[0] else ""


def _pieces(file: Path, quoted: bool, advance: Advance, encoding: str) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of a file in pieces that end where a line does, each with the number of its first line."""
    rest, line = b"", 1
    with open_bytes(file, advance, encoding) as source:
        while data := source.read(PIECE):
            rest += data
            end = _last_end(rest, quoted)
            if end:
                yield line, rest[:end]
                line += rest.count(b"\n", 0, end)
                rest = rest[end:]
            elif len(rest) > LONGEST:
                raise ValueError(f"{file}, line {line}: no end of the line in {LONGEST >> 20} MB; is a quote missing?")
    if rest:
        yield line, rest


def _last_end(data: bytes, quoted: bool) -> int:
    """Return where the last whole line of ``data`` ends, or 0; line ends between quotes do not count."""
    end = data.rfind(b"\n") + 1
    inside = quoted and data.count(b'"', 0, end) % 2 == 1
    while end and inside:
        before = data.rfind(b"\n", 0, end - 1) + 1
        inside ^= data.count(b'"', before, end) % 2 == 1
        end = before
    return end


def _header_end(data: bytes, quoted: bool) -> int:
    """Return where the first line that is not blank ends; ``data`` holds whole lines."""
    end = len(data) - len(data.lstrip(b"\r\n"))
    quotes = 0
    while end < len(data):
        start, end = end, data.find(b"\n", end) + 1 or len(data)
        quotes += data.count(b'"', start, end)
        if not quoted or quotes % 2 == 0:
            break
    return end
