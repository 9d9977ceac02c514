"""Reading data: small files made here, every error message, and real data where it is present."""

import bz2
import gzip
import json
import lzma
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy import stats

from manyclass.atomic import replacing
from manyclass.data import (
    Interactions,
    Labelled,
    Ragged,
    Vocabulary,
    delimited,
    encode_interactions,
    encode_text,
    files,
    json_lines,
    parquet,
    prepare_text,
    python_sources,
    read_interactions,
    read_labelled,
    spool,
    synth,
    synthesise,
    text,
)
from manyclass.data.ragged import RaggedWriter

REAL = Path("/work/shared/data")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def real(name: str) -> Path:
    if not (REAL / name).exists():
        pytest.skip(f"{REAL / name} is not on this machine")
    return REAL / name


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


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_open_bytes(tmp_path, suffix, compress):
    content = b"one\r\ntwo\n" * 100_000
    path = write(tmp_path / f"a.txt{suffix}", compress(content))
    told = []
    with files.open_bytes(path, told.append) as file:
        assert file.read() == content
    assert sum(told) == path.stat().st_size
    assert list(files.read_lines(path))[:2] == [(1, "one"), (2, "two")]
    assert files.bare_suffix(path) == ".txt"


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_broken_compression(tmp_path, suffix, compress):
    whole = compress(np.random.default_rng(0).bytes(10_000))
    for content in (b"plain text", whole[: len(whole) // 2]):
        path = write(tmp_path / f"a{suffix}", content)
        with (
            files.open_bytes(path) as file,
            pytest.raises(ValueError, match=f"^{re.escape(str(path))}: cannot be read: [^\n]+$"),
        ):
            file.read()


def test_missing_file(tmp_path):
    path = tmp_path / "nowhere.csv"
    for read in (interactions, labelled, Vocabulary.read, lambda path: prepare_text([path], tmp_path / "t")):
        with pytest.raises(FileNotFoundError, match=r"nowhere\.csv"):
            read(path)


def test_not_utf8_has_a_line(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", b"one\ntwo\nthr\xffee\n")
    for chunk in (2, 5, 1 << 20):
        monkeypatch.setattr(files, "CHUNK", chunk)
        with raises(f"{path}, line 3: not UTF-8 text"):
            list(files.read_pieces(path))
    with raises(f"{path}, line 3: not UTF-8 text"):
        list(files.read_lines(path))
    with raises(f"{write(path, 'ä'.encode()[:1])}, line 1: not UTF-8 text"):
        list(files.read_pieces(path))


def test_pieces_are_bounded_and_cut_at_blanks(tmp_path, monkeypatch):
    content = "\ufeff \n\n ab cde\n\n\n  é fgh ij   \n\t klm \n"
    path = write(tmp_path / "a.txt", content)
    words = content[1:].split()
    for chunk in range(4, 40):
        monkeypatch.setattr(files, "CHUNK", chunk)
        pieces = list(files.read_pieces(path))
        assert [word for piece in pieces for word in piece.split()] == words
        assert all(piece[-1].strip() for piece in pieces)
        assert pieces[0][0] == "a"
    # One line of 10,000 words, and one word of 10,000 letters: no piece is much longer than a chunk.
    monkeypatch.setattr(files, "CHUNK", 100)
    for content in ("word " * 10_000, "x" * 10_000):
        pieces = list(files.read_pieces(write(path, content)))
        assert len(pieces) >= 50
        assert max(map(len, pieces)) <= 200
        assert "".join(pieces) == content.rstrip()
    # So it is for blanks, of which a single one is kept, and that there was a line end.
    pieces = list(files.read_pieces(write(path, f"a{' ' * 10_000}\n{' ' * 10_000}b")))
    assert max(map(len, pieces)) <= 200
    assert re.sub(r"[ ]+", " ", "".join(pieces)) in ("a\n b", "a \n b", "a\nb")


def test_replacing_leaves_the_old_file_on_failure(tmp_path):
    path = write(tmp_path / "a", "old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------- vocabulary and ragged rows


def test_vocabulary(tmp_path):
    vocabulary = Vocabulary(["<rare>", "ä", 'b"\n', ""], np.array([0, 5, 3, 1]))
    assert vocabulary.ids() == {"<rare>": 0, "ä": 1, 'b"\n': 2, "": 3}
    path = tmp_path / "v.parquet"
    vocabulary.write(path)
    again = Vocabulary.read(path)
    assert again.names == vocabulary.names
    assert again.counts.dtype == np.int64
    assert again.counts.tolist() == [0, 5, 3, 1]
    assert list(tmp_path.iterdir()) == [path]
    for content in (b"", b"no parquet at all"):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: not a vocabulary: [^\n]+$"):
            Vocabulary.read(write(path, content))


def test_ragged(tmp_path):
    content = [[3, 1, 4], [], [1], [5, 9, 2, 6]]
    ragged = Ragged.from_rows(content)
    assert len(ragged) == 4
    assert rows(ragged) == content
    assert ragged.values.dtype == np.int32
    assert ragged.offsets.dtype == np.int64
    with RaggedWriter(tmp_path) as writer:
        for part in (content[:1], [], content[1:]):
            writer.append(Ragged.from_rows(part))
        assert len(writer) == 4
        loaded = writer.save("items")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["items.offsets.npy", "items.values.npy"]
    assert isinstance(loaded.values, np.memmap)
    assert rows(loaded) == content
    padded = loaded.padded(np.array([3, 1, 0, 2]), 2, -1)
    assert padded.tolist() == [[2, 6], [-1, -1], [1, 4], [-1, 1]]
    assert padded.dtype == np.int32
    assert loaded.padded(np.array([0]), 5, 7).tolist() == [[7, 7, 3, 1, 4]]
    assert rows(ragged.keep(ragged.values > 2)) == [[3, 4], [], [], [5, 9, 6]]
    assert rows(Ragged.from_rows([])) == []
    assert Ragged.from_rows([[]]).padded(np.array([0]), 2, 8).tolist() == [[8, 8]]
    np.save(tmp_path / "items.values.npy", np.arange(3))
    with raises(f"{tmp_path / 'items'}: the offsets do not fit the values"):
        Ragged.load(tmp_path, "items")


# ---------------------------------------------------------------- text


def test_prepare_text(tmp_path):
    path = write(tmp_path / "a.txt", "b a, a\nc_1 b! a <rare>")
    tokens = tmp_path / "tokens.npy"
    vocabulary = prepare_text([path], tokens)
    assert vocabulary.names == ["<rare>", "a", "b"]
    assert vocabulary.counts.tolist() == [6, 3, 2]
    assert np.load(tokens).tolist() == [2, 1, 0, 1, 0, 2, 0, 1, 0, 0, 0]
    assert np.load(tokens, mmap_mode="r").dtype == np.int32
    everything = prepare_text([path], tokens, min_count=1)
    assert everything.names == ["<rare>", "a", "b", ",", "c_1", "!", "<", "rare", ">"]  # ties by first sight
    assert everything.counts[0] == 0
    held_out = write(tmp_path / "b.txt.gz", gzip.compress(b"a new b"))
    encode_text([held_out, path], tokens, vocabulary)
    assert np.load(tokens).tolist() == [1, 0, 2, 2, 1, 0, 1, 0, 2, 0, 1, 0, 0, 0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.txt", "b.txt.gz", "tokens.npy"]


def test_blanks_end_lines(tmp_path):
    tokens = tmp_path / "tokens.npy"
    paths = [write(tmp_path / "a", "\n\n the cat, \n\r\n \nthe <rare> dog\r\n"), write(tmp_path / "b", "cat,")]
    vocabulary = prepare_text([*paths, write(tmp_path / "empty", " \n\n")], tokens, split="blanks", min_count=1)
    assert vocabulary.names == ["<rare>", "<eos>", "the", "cat,", "dog"]
    words = [vocabulary.names[index] for index in np.load(tokens)]
    assert words == ["the", "cat,", "<eos>", "the", "<rare>", "dog", "<eos>", "cat,", "<eos>"]
    assert vocabulary.counts.tolist() == [1, 3, 2, 2, 1]  # a word of that name is a rare word


@pytest.mark.parametrize("split", text.SPLITS)
def test_chunk_borders_do_not_matter(tmp_path, monkeypatch, split):
    rng = np.random.default_rng(0)
    words = [f"w{number}" + " \n,é"[kind] * 2 for number, kind in rng.integers((30, 4), size=(400, 2))]
    path = write(tmp_path / "a", "".join(f"{word} " if word[-1] in ",é" else word for word in words))
    tokens = tmp_path / "tokens.npy"
    expected = prepare_text([path], tokens, split=split)
    ids = np.load(tokens)
    assert len(ids) > 400
    monkeypatch.setattr(spool, "CHUNK", 7)
    for chunk in (12, 13, 50):
        monkeypatch.setattr(files, "CHUNK", chunk)
        vocabulary = prepare_text([path], tokens, split=split)
        assert vocabulary.names == expected.names
        assert vocabulary.counts.tolist() == expected.counts.tolist()
        assert np.array_equal(np.load(tokens), ids)


def test_text_errors(tmp_path):
    tokens = tmp_path / "tokens.npy"
    path = write(tmp_path / "a", " \n")
    with raises(f"{path}: no words"):
        prepare_text([path], tokens)
    with raises(f"{path}: no words"):
        encode_text([path], tokens, Vocabulary(["<rare>", "a"], np.ones(2)))
    for content in ("a a a", "a b c"):
        write(path, content)
        with raises(f"{path}: only one class in the text: too few words occur min_count=2 times"):
            prepare_text([path], tokens)
    with raises("split must be one of 'words', 'blanks', got 'lines'"):
        prepare_text([path], tokens, split="lines")
    with raises("min_count must be at least 1, got 0"):
        prepare_text([path], tokens, min_count=0)
    assert list(tmp_path.iterdir()) == [path]


def test_python_sources_can_be_prepared(tmp_path):
    sources = list(python_sources())[:200]
    vocabulary = prepare_text(sources, tmp_path / "tokens.npy")
    assert len(vocabulary.names) > 1000
    assert vocabulary.counts.sum() == len(np.load(tmp_path / "tokens.npy", mmap_mode="r"))


def test_penn_tree_bank(tmp_path):
    path = real("ptb/ptb.valid.txt.xz")
    vocabulary = prepare_text([path], tmp_path / "tokens.npy", split="blanks", min_count=1)
    assert len(np.load(tmp_path / "tokens.npy", mmap_mode="r")) == 73_760
    assert vocabulary.counts[vocabulary.ids()["<eos>"]] == len(list(files.read_lines(path)))


# ---------------------------------------------------------------- interactions

TABLE = pl.DataFrame(
    {
        "user": ["u1", "u2", "u1", "u1", "u2", "u3"],
        "item": [7, 8, 9, 7, 7, 8],
        "timestamp": [30, 5, 10, 30, 4, 1],
        "age": [None, "old", "young", "old", None, None],
        "town": ["x", "x", "x", "x", "y", None],
    }
)


def write_table(folder: Path, suffix: str, table: pl.DataFrame = TABLE) -> Path:
    path = folder / f"table{suffix}"
    if suffix == ".parquet":
        table.write_parquet(path)
    elif suffix == ".csv":
        table.write_csv(path)
    elif suffix == ".tsv":
        table.write_csv(path, separator="\t")
    elif suffix == ".csv.bz2":
        write(path, bz2.compress(table.write_csv().encode()))
    elif suffix == ".jsonl.xz":
        write(path, lzma.compress(table.write_ndjson().encode()))
    else:
        table.write_ndjson(path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.bz2", ".parquet", ".jsonl", ".ndjson", ".jsonl.xz"])
def test_tables(tmp_path, suffix):
    path = write_table(tmp_path, suffix)
    data = interactions(path, features=["age", "town"])
    assert data.vocabulary.names == ["7", "8", "9"]
    assert data.vocabulary.counts.tolist() == [3, 2, 1]
    assert rows(data.sequences) == [[2, 0, 0], [0, 1], [1]]
    assert data.sequences.values.dtype == np.int32
    assert data.feature_names == ["<unknown>", "age=old", "age=young", "town=x", "town=y"]
    assert data.features.tolist() == [[2, 3], [1, 3], [0, 0]]
    assert data.features.dtype == np.int32
    assert interactions(path, features=["user"]).features.tolist() == [[1], [2], [3]]
    common = interactions(path, min_count=2)
    assert common.vocabulary.names == ["7", "8"]
    assert rows(common.sequences) == [[0, 0], [0, 1], [1]]
    assert common.features.shape == (3, 0)
    # The other way round: items are users. No time: the order of the file.
    turned = interactions(write_table(tmp_path, suffix, TABLE.drop("timestamp")), user="item", item="user")
    assert turned.vocabulary.names == ["u1", "u2", "u3"]
    assert rows(turned.sequences) == [[0, 0, 1], [1, 2], [0]]
    # Held-out data: item 9 is new, and so is the town.
    new = TABLE.with_columns(town=pl.lit("z"), age=pl.lit("old"))
    held_out = encoded(
        write_table(tmp_path, suffix, new), common.vocabulary, data.feature_names, features=["age", "town"]
    )
    assert rows(held_out.sequences) == [[0, 0], [0, 1], [1]]
    assert held_out.features.tolist() == [[1, 0]] * 3
    unknown = Vocabulary(["x", "y"], np.ones(2))
    with raises(f"{path}: none of its items is in the vocabulary"):
        encoded(path, unknown, [])


def test_equal_times_keep_the_order_of_the_file(tmp_path):
    count = 200
    table = pl.DataFrame({"user": ["u"] * count, "item": range(count), "timestamp": [i % 3 for i in range(count)]})
    data = interactions(write_table(tmp_path, ".csv", table))
    assert data.sequences.row(0).tolist() == sorted(range(count), key=lambda i: i % 3)


@pytest.mark.parametrize(
    "times",
    [
        ["9", "10", "8"],
        ["9.5", "10", "-1e3"],
        ["9", "10", "-0.5"],
        ["1700000000000000001", "1700000000000000002", "1700000000000000000"],  # not the same as doubles
        ["2020-01-09", "2020-01-10", "2019-12-31"],
        ["2020-01-09T10:00:00Z", "2020-01-10T01:00:00Z", "2020-01-09T09:00:00Z"],
        ["2020-01-09 10:00:00", "2020-01-10 01:00:00", "2020-01-09 09:00:00"],
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_times(tmp_path, monkeypatch, times, size):
    shrink(monkeypatch, size)
    table = pl.DataFrame({"user": ["u"] * 3, "item": ["b", "c", "a"], "timestamp": times})
    for suffix in (".csv", ".jsonl"):
        data = interactions(write_table(tmp_path, suffix, table))
        assert [data.vocabulary.names[index] for index in data.sequences.row(0)] == ["a", "b", "c"]
    if "-" in times[0]:
        real_times = table.with_columns(table["timestamp"].str.to_datetime())
        data = interactions(write_table(tmp_path, ".parquet", real_times))
        assert [data.vocabulary.names[index] for index in data.sequences.row(0)] == ["a", "b", "c"]


def test_names_are_what_the_file_says(tmp_path):
    path = write(tmp_path / "a.csv", '\ufeffuser,item\r\n007,"a ""b"", c"\r\n\r\n7,1.50\r\n')
    data = interactions(path)
    assert data.vocabulary.names == ['a "b", c', "1.50"]
    assert rows(data.sequences) == [[0], [1]]  # the users are two, and the blank line is none
    path = write(tmp_path / "a.jsonl", '{"user": 7, "item": 1.50}\n\n{"user": "7", "item": 12345678901234567890}\n')
    data = interactions(path)
    assert data.vocabulary.names == ["1.50", "12345678901234567890"]
    assert rows(data.sequences) == [[0, 1]]
    path = write(tmp_path / "a.tsv", 'user\titem\nu\t"x\nu\ty"\n')  # quotes are letters in .tsv
    assert interactions(path).vocabulary.names == ['"x', 'y"']


def test_sequences(tmp_path):
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"u1 b a\n\nu2 b\nu1  c b\n"))
    data = interactions(path, user_first=True)
    assert data.vocabulary.names == ["b", "a", "c"]
    assert rows(data.sequences) == [[0, 1, 2, 0], [0]]  # a user may come back
    assert data.feature_names == ["<unknown>"]
    data = interactions(path)
    assert data.vocabulary.names == ["b", "u1", "a", "u2", "c"]
    assert rows(data.sequences) == [[1, 0, 2], [3, 0], [1, 4, 0]]
    held_out = encoded(write(tmp_path / "b.txt", "x\na x b\n"), data.vocabulary, data.feature_names)
    assert rows(held_out.sequences) == [[], [2, 0]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", ": the file is empty"),
        ("a.jsonl", "\n", ": the file is empty"),
        ("a.txt", "\n \n", ": no sequences in the file"),
        ("a.csv", "user,item\n", ": no rows in the file"),
        ("a.csv", "user,item\n\n\n", ": no rows in the file"),
        ("a.csv", "who,item,\n1,2,\n", ": no column 'user'; there are 'who', 'item', ''"),
        ("a.jsonl", '{"user": 1, "what": 2}\n', ": no column 'item'; there are 'user', 'what'"),
        ("a.csv", "user,item\n1,2\n1,2,3\n", ", line 3: 3 fields, but the header has 2"),
        ("a.csv", "user,item,x\n1,2,\n1,2\n", ", line 3: 2 fields, but the header has 3"),
        ("a.tsv", "user\titem\n1\t2\n\n1\n", ", line 4: 1 fields, but the header has 2"),
        ("a.csv", 'user,item\n1,2\n"1,2\n1,2\n', ", line 4: unexpected end of data"),
        ("a.csv", "user,item\n\n1,2\n1,\n", ", line 4: no 'item'"),
        ("a.csv", "user,item,x\n1,2,3\n,2,3\n", ", line 3: no 'user'"),
        ("a.csv", 'user,item,x\n1,2,3\n1,"",3\n', ", line 3: no 'item'"),
        ("a.jsonl", '{"user": 1, "item": 2}\n{"item": 2}\n', ", line 2: no 'user'"),
        ("a.jsonl", '{"user": 1, "item": 2}\n{"user": 1, "item": null}\n', ", line 2: no 'item'"),
        ("a.jsonl", '{"user": 1, "item": 2}\n{"user": 1,\n', None),
        ("a.jsonl", '{"user": 1, "item": 2}\n[1]\n', ", line 2: not a JSON object"),
        ("a.csv", b"user,item\n1,2\n1,\xff\n", ", line 3: not UTF-8 text"),
        ("a.jsonl", b'{"user": 1, "item": 2}\n{"user": "\xff"}\n', ", line 2: not UTF-8 text"),
        ("a.txt", b"1 2\n\xff 3\n", ", line 2: not UTF-8 text"),
        ("a.csv", "user,item\n1,2\n3,2\n", ": only one item, '2'; at least 2 are needed"),
        ("a.txt", "a a\n", ": only one item, 'a'; at least 2 are needed"),
        (
            "a.csv",
            "user,item,timestamp\n1,2,3\n1,2,soon\n",
            ", line 3: timestamp 'soon' is not a number, or a date like the others",
        ),
        (
            "a.csv",
            "user,item,timestamp\n1,2,2020-01-01\n1,2,2020-01-01\n1,2,7\n",
            ", line 4: timestamp '7' is not a number, or a date like the others",
        ),
        (
            "a.jsonl",
            '{"user": 1, "item": 2, "timestamp": 1}\n{"user": 1, "item": 2, "timestamp": NaN}\n',
            ", line 2: timestamp 'NaN' is not a number, or a date like the others",
        ),
        ("a.csv", "user,item,timestamp\n1,2,3\n1,2,\n", ", line 3: no 'timestamp'"),
    ],
)
@pytest.mark.parametrize("size", [1, 20, 1 << 20])
def test_interaction_errors(tmp_path, monkeypatch, name, content, message, size):
    shrink(monkeypatch, size)
    path = write(tmp_path / name, content)
    if message is None:  # the rest of the message is Python's own
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line 2: not JSON: [^\n]+$"):
            interactions(path)
    else:
        with raises(f"{path}{message}"):
            interactions(path)


def test_more_interaction_errors(tmp_path):
    path = write_table(tmp_path, ".csv")
    columns = "'user', 'item', 'timestamp', 'age', 'town'"
    with raises(f"{path}: no column 'time'; there are {columns}"):
        interactions(path, timestamp="time")  # only the usual name may be missing
    with raises(f"{path}: no column 'size'; there are {columns}"):
        interactions(path, features=["size"])
    with raises(f"{path}: 1 of 3 items seen min_count=3 times; at least 2 are needed"):
        interactions(path, min_count=3)
    with raises("min_count must be at least 1, got 0"):
        interactions(path, min_count=0)
    with raises(f"{path}: user_first is for one sequence per line, but this file has columns"):
        interactions(path, user_first=True)
    path = write(tmp_path / "a.txt", "u 1 2\nv\n")
    with raises(f"{path}, line 2: user 'v' has no items"):
        interactions(path, user_first=True)
    with raises(f"{path}: features ['age'] need columns, but this file has one sequence per line"):
        interactions(path, features=["age"])
    path = write_table(tmp_path, ".parquet", TABLE.with_columns(item=pl.Series([1, 2, None, 3, 4, 5])))
    with raises(f"{path}, row 3: no 'item'"):
        interactions(path)
    with pytest.raises(ValueError, match=r"^[^\n]*a\.parquet: [^\n]+$"):
        interactions(write(tmp_path / "a.parquet", b"no parquet at all"))
    with pytest.raises(ValueError, match=r"^[^\n]*a\.jsonl, line 1: not JSON: [^\n]+$"):
        interactions(write(tmp_path / "a.jsonl", '{"user": ' + "[" * 100_000))
    path = write_table(tmp_path, ".parquet", TABLE.with_columns(timestamp=pl.Series([[1]] * 6)))
    with raises(f"{path}: timestamp must be numbers or dates, not List(Int64)"):
        interactions(path)


def test_diginetica(tmp_path):
    data = interactions(real("diginetica/test.txt.xz"), tmp_path)
    # The first item of a session is no target.
    assert len(data.sequences.values) - len(data.sequences) == 60_858
    assert (np.diff(data.vocabulary.counts) <= 0).all()


def test_amazon_beauty(tmp_path):
    data = interactions(real("amazon-beauty/sequences.txt.xz"), tmp_path, user_first=True)
    assert (len(data.sequences), len(data.vocabulary.names), len(data.sequences.values)) == (22_363, 12_101, 198_502)


# ---------------------------------------------------------------- bounded memory


def shrink(monkeypatch, size: int) -> None:
    """Hold so little at once, wherever a file is read in parts."""
    monkeypatch.setattr(delimited, "PIECE", size)
    monkeypatch.setattr(json_lines, "ROWS", size)
    monkeypatch.setattr(parquet, "ROWS", size)
    monkeypatch.setattr(spool, "CHUNK", size)


def content(data: Interactions) -> tuple:
    return rows(data.sequences), data.vocabulary.names, data.features.tolist(), data.feature_names


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.bz2", ".parquet", ".jsonl", ".jsonl.xz"])
def test_borders_of_batches_do_not_matter(tmp_path, monkeypatch, suffix):
    rng = np.random.default_rng(0)
    count = 100
    letters = ["a", "é", "b"] if suffix == ".tsv" else ["a\nb", 'c"', "d,\r\n", '"\n"', "é"]
    users, items, ages = (np.array([*letters, *"123"])[rng.integers(len(letters) + 3, size=count)] for _ in range(3))
    table = pl.DataFrame(
        {
            "user": users,
            "item": items,
            "timestamp": rng.integers(9, size=count),
            "age": [None if rng.random() < 0.7 else age for age in ages],
        }
    )
    path = write_table(tmp_path, suffix, table)
    options = {"features": ["age", "user"], "min_count": 14}
    expected = content(interactions(path, **options))
    assert len(expected[0]) == len(letters) + 3 > len(expected[1])
    for size in (1, 7, 50, 1000):
        shrink(monkeypatch, size)
        told = []
        assert content(interactions(path, advance=told.append, **options)) == expected
        assert sum(told) == path.stat().st_size


@pytest.mark.parametrize("user_first", [True, False])
def test_borders_in_sequences_do_not_matter(tmp_path, monkeypatch, user_first):
    rng = np.random.default_rng(0)
    lines = [" ".join(map(str, rng.integers(9, size=rng.integers(2, 12)))) for _ in range(50)]
    path = write(tmp_path / "a.txt.gz", gzip.compress("\n".join(lines).encode()))
    expected = content(interactions(path, user_first=user_first, min_count=20))
    for size in (1, 2, 7, 50):
        shrink(monkeypatch, size)
        assert content(interactions(path, user_first=user_first, min_count=20)) == expected


def test_borders_in_labelled_documents_do_not_matter(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(60):
        labels = ",".join(map(str, rng.integers(9, size=rng.integers(0, 3))))
        lines.append(" ".join([labels, *(f"{one}:{one / 3}" for one in rng.integers(9, size=rng.integers(0, 4)))]))
    path = write(tmp_path / "a.txt", "\n".join(lines) + "\n")

    def everything() -> tuple:
        data = labelled(path, min_count=8)
        return rows(data.labels), rows(data.features), data.values.tolist(), data.vocabulary.names

    expected = everything()
    assert 5 < len(expected[0]) < 60
    for size in (1, 2, 7, 50):
        shrink(monkeypatch, size)
        assert everything() == expected


def test_columns_that_come_late(tmp_path, monkeypatch):
    first, second = '{"user": 1, "item": 2}\n', '{"user": 1, "item": 3, "age": 5, "timestamp": 1, "at": 1}\n'
    for size in (1, 100):
        shrink(monkeypatch, size)
        path = write(tmp_path / "a.jsonl", first + second.replace("timestamp", "other"))
        assert interactions(path, features=["age"]).features.tolist() == [[1]]
        with raises(f"{path}: no column 'size'; there are 'user', 'item', 'age', 'other', 'at'"):
            interactions(path, features=["size"])
        with raises(f"{path}, line 1: no 'age'"):
            interactions(path, item="age")
        with raises(f"{path}, line 1: no 'at'"):
            interactions(path, timestamp="at")
        with raises(f"{write(path, first + second)}, line 1: no 'timestamp'"):
            interactions(path)


def test_a_quote_without_an_end(tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", 'user,item\n1,2\n1,"2\n' + "1,2\n" * 400_000)
    shrink(monkeypatch, 1 << 16)
    monkeypatch.setattr(delimited, "LONGEST", 1 << 20)
    with raises(f"{path}, line 3: no end of the line in 1 MB; is a quote missing?"):
        interactions(path)


def test_blank_lines_before_the_header(tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", '\n\r\n"user",item\n1,2\n1,3\n1,2,3\n')
    for size in (1, 100):
        shrink(monkeypatch, size)
        with raises(f"{path}, line 6: 3 fields, but the header has 2"):
            interactions(path)


MEMORY = """
import sys
from pathlib import Path
from manyclass.data import delimited, json_lines, parquet, read_interactions, read_labelled, spool

delimited.PIECE, json_lines.ROWS, parquet.ROWS, spool.CHUNK = 1 << 17, 1 << 12, 1 << 14, 1 << 15
folder = Path(sys.argv[1])


def peak(file):
    Path("/proc/self/clear_refs").write_text("5")
    (read_labelled if file.suffix == ".documents" else read_interactions)(file, folder, "x")
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))


for suffix in sys.argv[2:]:
    peak(folder / f"small{suffix}")  # what is used for the first time, and stays
    print(suffix, peak(folder / f"small{suffix}"), peak(folder / f"large{suffix}"))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak of memory")
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Held whole, as once they were, the large files took 10 MB (documents) to 40 MB (json) more than the small."""
    rng = np.random.default_rng(0)
    for name, count in (("small", 20_000), ("large", 300_000)):
        users, items, times = rng.integers((500, 500, 10**9), size=(count, 3)).T
        table = pl.DataFrame({"user": users, "item": items, "timestamp": times})
        table.write_csv(tmp_path / f"{name}.csv")
        table.write_parquet(tmp_path / f"{name}.parquet", row_group_size=10_000)
        table[: count // 3].write_ndjson(tmp_path / f"{name}.jsonl")
        items = items.reshape(-1, 20).tolist()
        write(tmp_path / f"{name}.txt", "".join(f"{' '.join(map(str, row))}\n" for row in items))
        write(tmp_path / f"{name}.documents", "".join(f"{row[0]} {':1 '.join(map(str, row))}:1\n" for row in items))
    # In this order: memory that was given back, and is used again, would hide growth.
    suffixes = [".documents", ".txt", ".jsonl", ".parquet", ".csv"]
    command = [sys.executable, "-c", MEMORY, str(tmp_path), *suffixes]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        suffix, small, large = line.split()
        assert int(large) - int(small) < 5 * 1024, f"{suffix}: {small} kB for the small file, {large} kB for the large"
    assert len(done.stdout.splitlines()) == len(suffixes)


# ---------------------------------------------------------------- labelled documents

DOCUMENTS = "4 10 100\n7,3 0:1.5 9:-2\n 1:1\n3 \n3,99 4:1e-3\n"


@pytest.mark.parametrize("header", [True, False])
def test_labelled(tmp_path, header):
    path = write(tmp_path / "a.txt", DOCUMENTS if header else DOCUMENTS.split("\n", 1)[1])
    data = labelled(path)
    assert data.vocabulary.names == ["3", "7", "99"]
    assert data.vocabulary.counts.tolist() == [3, 1, 1]
    assert rows(data.labels) == [[1, 0], [0], [0, 2]]
    assert rows(data.features) == [[0, 9], [], [4]]
    assert data.values.tolist() == [1.5, -2.0, np.float32(1e-3)]
    assert data.values.dtype == np.float32
    assert data.labels.values.dtype == data.features.values.dtype == np.int32
    assert data.num_features == 10
    held_out = labelled(path, Vocabulary(["99", "7"], np.ones(2)), num_features=9)
    assert rows(held_out.labels) == [[1], [0]]
    assert rows(held_out.features) == [[0], [4]]
    assert held_out.values.tolist() == [1.5, np.float32(1e-3)]
    assert held_out.num_features == 9


def test_rare_labels_are_dropped(tmp_path):
    path = write(tmp_path / "a.txt.xz", lzma.compress(b"1,2 0:1\n5 1:1\n2 0:2\n1 0:3\n"))
    told = []
    data = labelled(path, min_count=2, advance=told.append)
    assert data.vocabulary.names == ["1", "2"]
    assert rows(data.labels) == [[0, 1], [1], [0]]
    assert rows(data.features) == [[0], [0], [0]]
    assert data.values.tolist() == [1.0, 2.0, 3.0]
    assert sum(told) == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ": no documents in the file"),
        ("0 5 5\n", ": no documents in the file"),
        (" 1:2\n", ": no document has a label"),
        ("3 1:2\n3 1:2\n", ": only one label, 3; at least 2 are needed"),
        ("1,2 1:2\n3 4\n", ", line 2: '4' is not feature:value"),
        ("1,2 1:2\n3 4:5 4:5:6\n", ", line 2: '4:5:6' is not feature:value"),
        ("1,2 1:2\n3 x:5\n", ", line 2: 'x:5' is not feature:value"),
        ("1,2 1:2\n3 1.5:5\n", ", line 2: '1.5:5' is not feature:value"),
        ("1,2 1:2\n3 4:\n", ", line 2: '4:' is not feature:value"),
        ("1,2 1:2 3:nan\n", ", line 1: '3:nan' is not a finite number in 32 bits"),
        ("1,2 1:2 3:1e39\n", ", line 1: '3:1e39' is not a finite number in 32 bits"),
        ("1,2 -1:2\n", ", line 1: feature -1 is not in [0, 2147483648)"),
        ("1,-2 1:2\n", ", line 1: label -2 is not in [0, 2147483648)"),
        ("1,x 1:2\n", ", line 1: label 'x' is not a number"),
        ("1,2 1:2\n1:2 3:4\n", ", line 2: label '1:2' is not a number; a line without labels starts with a blank"),
        ("1 5 9\n1,2 5:2\n", ", line 2: feature 5 is not in [0, 5)"),
        ("1 5 9\n1,9 4:2\n", ", line 2: label 9 is not in [0, 9)"),
        ("3 5 9\n1,2 4:2\n 1:1\n\n", ": the header says 3 documents, but there are 2"),
        (b"1,2 1:2\n1 \xff\n", ", line 2: not UTF-8 text"),
    ],
)
def test_labelled_errors(tmp_path, content, message):
    path = write(tmp_path / "a.txt", content)
    with raises(f"{path}{message}"):
        labelled(path)


def test_more_labelled_errors(tmp_path):
    path = write(tmp_path / "a.txt", DOCUMENTS)
    with raises(f"{path}: 1 of 3 labels seen min_count=2 times; at least 2 are needed"):
        labelled(path, min_count=2)
    with raises(f"{path}: none of its labels is in the vocabulary"):
        labelled(path, Vocabulary(["1", "2"], np.ones(2)))


def test_eurlex(tmp_path):
    data = labelled(real("eurlex-4k/eurlex_test.txt.xz"), folder=tmp_path)
    assert data.num_features == 5000
    assert 3700 < len(data.labels) <= 3809
    assert len(data.labels) == len(data.features)
    assert data.values.min() > 0


# ---------------------------------------------------------------- synthetic data

SIGNIFICANCE = 1e-4


def exact(model: synth.LatentFactors, items: int, exponent: float, user: np.ndarray, before: int | None) -> np.ndarray:
    """The formula of the docstring, item by item."""
    weights = []
    for item in range(items):
        what = model.what[item % model.clusters]
        affinity = user @ what + (0.0 if before is None else model.next[before % model.clusters] @ what)
        weights.append((item + 1) ** -exponent * np.exp(synth.STRENGTH * affinity))
    return np.array(weights) / np.sum(weights)


@pytest.mark.parametrize(("items", "clusters", "exponent"), [(53, 8, 1.0), (40, 8, 0.0), (5, 8, 2.0)])
def test_synthetic_distribution(monkeypatch, items, clusters, exponent):
    monkeypatch.setattr(synth, "CLUSTERS", clusters)
    rng = np.random.default_rng(1)
    model = synth.LatentFactors(items, 4, exponent, rng)
    user = model.users(1, rng)
    draws = model.sequences(np.repeat(user, 100_000, axis=0), 3, rng)

    def p_value(drawn: np.ndarray, truth: np.ndarray) -> float:
        expected = truth * len(drawn)
        counts = np.bincount(drawn, minlength=items)
        common = expected >= 5  # the chi-square law is poor for rare events: put them together
        seen, expected = (np.append(x[common], x[~common].sum()) for x in (counts, expected))
        return float(stats.chisquare(seen[expected > 0], expected[expected > 0]).pvalue)

    first = exact(model, items, exponent, user[0], None)
    assert p_value(draws[:, 0], first) > SIGNIFICANCE
    for before in np.argsort(-np.bincount(draws[:, 1]))[:2]:
        then = exact(model, items, exponent, user[0], int(before))
        after = draws[draws[:, 1] == before, 2]
        assert len(after) > 1000
        assert p_value(after, then) > SIGNIFICANCE
        # The check can fail: without the item before, the law is another one.
        assert p_value(after, first) < SIGNIFICANCE


def test_synthetic_data_can_be_learned():
    """Knowing the item before tells much about the next one: measured over clusters, where counts are large."""
    rng = np.random.default_rng(0)
    model = synth.LatentFactors(10_000, 16, 1.0, rng)
    clusters = model.sequences(model.users(20_000, rng), 20, rng) % model.clusters
    pairs = np.zeros((model.clusters, model.clusters))
    np.add.at(pairs, (clusters[:, :-1].ravel(), clusters[:, 1:].ravel()), 1)
    joint = pairs / pairs.sum()
    unigram = stats.entropy(joint.sum(0))
    conditional = stats.entropy(joint.ravel()) - stats.entropy(joint.sum(1))
    # The items in a cluster do not depend on the one before, so this is the difference for items as well.
    assert unigram - conditional > 1
    popular = np.sort(np.bincount(clusters.ravel()))[::-1]
    assert popular[0] < 0.5 * popular.sum()


@pytest.mark.parametrize("suffix", synth.SUFFIXES)
def test_synthesise(tmp_path, monkeypatch, suffix):
    path, told = tmp_path / f"a{suffix}", []
    monkeypatch.setattr(synth, "ROWS", 40)
    options = {"items": 30, "users": 25, "length": 6, "factors": 3}
    synthesise(path, **options, advance=told.append)
    assert list(tmp_path.iterdir()) == [path]
    assert told == [36, 36, 36, 36, 6]
    data = interactions(path)
    assert data.sequences.lengths().tolist() == [6] * 25
    assert {int(name) for name in data.vocabulary.names} <= set(range(30))
    # Every format has the same content, and the users are all there.
    rng = np.random.default_rng(0)
    model = synth.LatentFactors(30, 3, 1.0, rng)
    expected = np.concatenate([model.sequences(model.users(count, rng), 6, rng) for count in (6, 6, 6, 6, 1)])
    assert [int(data.vocabulary.names[index]) for index in data.sequences.values] == expected.ravel().tolist()
    once = path.read_bytes()
    synthesise(path, **options)
    assert path.read_bytes() == once
    synthesise(path, **options, seed=1)
    assert path.read_bytes() != once
    if suffix == ".jsonl":
        assert list(json.loads(once.splitlines()[0])) == ["user", "item", "timestamp"]


def test_synthesise_ten_million_items(tmp_path):
    synthesise(tmp_path / "a.txt", items=10**7, users=50, length=20, exponent=0.5)
    items = np.array((tmp_path / "a.txt").read_text().split(), dtype=np.int64)
    assert items.max() < 10**7
    assert items.max() > 5 * 10**6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"items": 1}, "items must be at least 2, got 1"),
        ({"items": 10**7 + 1}, "items must be at most 10000000, got 10000001"),
        ({"users": 0}, "users must be at least 1, got 0"),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"factors": 0}, "factors must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"exponent": -0.1}, "exponent must be in [0, 4], got -0.1"),
        ({"exponent": float("nan")}, "exponent must be in [0, 4], got nan"),
        (
            {"file": "a.xls"},
            "the suffix of the file must be one of '.csv', '.tsv', '.parquet', '.jsonl', '.txt', got '.xls'",
        ),
    ],
)
def test_synthesise_errors(tmp_path, options, message):
    arguments = {"items": 10, "users": 2, "length": 2, "file": "a.csv", **options}
    with raises(message):
        synthesise(tmp_path / arguments.pop("file"), **arguments)
    assert not list(tmp_path.iterdir())
