"""Reading files and text: small ones made here, every error message, and real data where it is present."""

import bz2
import gzip
import lzma
import re

import numpy as np
import pytest
from reading import interactions, labelled, raises, real, rows, write

from manyclass.train.atomic import replacing
from manyclass.train.data import (
    Ragged,
    Vocabulary,
    encode_text,
    files,
    prepare_text,
    python_sources,
    spool,
    text,
)
from manyclass.train.data.files import NOT_UTF_8
from manyclass.train.data.spool import RaggedWriter

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
        with raises(f"{path}, line 3: {NOT_UTF_8}"):
            list(files.read_pieces(path))
    with raises(f"{path}, line 3: {NOT_UTF_8}"):
        list(files.read_lines(path))
    with raises(f"{write(path, 'ä'.encode()[:1])}, line 1: {NOT_UTF_8}"):
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
    np.save(tmp_path / "items.values.npy", np.arange(3, dtype=np.int32))
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
