"""Reading labelled documents; synthetic data."""

import json
import lzma
from itertools import pairwise
from zlib import crc32

import numpy as np
import pytest
from reading import interactions, labelled, raises, real, rows, write
from scipy import stats

from manyclass.train.data import (
    Vocabulary,
    synth,
    synthesise,
)
from manyclass.train.data.files import NOT_UTF_8
from manyclass.train.data.texts import Texts

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
        ("1,x 1:2\n", ", line 1: label 'x' is not a number; texts have labels like __label__sport"),
        ("1,2 1:2\n1:2 3:4\n", ", line 2: label '1:2' is not a number; a line without labels starts with a blank"),
        ("1 5 9\n1,2 5:2\n", ", line 2: feature 5 is not in [0, 5)"),
        ("1 5 9\n1,9 4:2\n", ", line 2: label 9 is not in [0, 9)"),
        ("3 5 9\n1,2 4:2\n 1:1\n\n", ": the header says 3 documents, but there are 2"),
        (b"1,2 1:2\n1 \xff\n", f", line 2: {NOT_UTF_8}"),
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


# ---------------------------------------------------------------- texts

TEXTS = [(["sport", "news"], "the ball is round"), (["cooking"], "boil the egg"), (["sport"], "the ball again")]


def write_texts(folder, suffix):
    """The same texts in every format."""
    path = folder / f"texts{suffix}"
    if suffix == ".txt":
        lines = [" ".join([*(f"__label__{label}" for label in labels), text]) for labels, text in TEXTS]
    elif suffix == ".jsonl":
        lines = [json.dumps({"id": 1, "label": labels, "text": text}) for labels, text in TEXTS]
    else:
        separator = {".csv": ",", ".tsv": "\t"}[suffix]
        lines = [separator.join(("text", "label"))]
        lines += [separator.join((f'"{text}"', "|".join(labels))) for labels, text in TEXTS]
    return write(path, "\n".join(lines) + "\n")


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".tsv", ".jsonl"])
def test_texts(tmp_path, suffix):
    texts = Texts(ngrams=2, buckets=1000, separator="|")
    path = write_texts(tmp_path, suffix)
    data = labelled(path, texts=texts)
    assert data.hashed
    assert data.num_features == 1000
    assert data.vocabulary.names == ["sport", "news", "cooking"]
    assert data.vocabulary.counts.tolist() == [2, 1, 1]
    assert rows(data.labels) == [[0, 1], [2], [0]]
    for row, (_, text) in zip(rows(data.features), TEXTS, strict=True):
        words = text.split()
        spans = [*words, *(" ".join(pair) for pair in pairwise(words))]
        assert sorted(row) == sorted({crc32(span.encode()) % 1000 for span in spans})
    assert data.facts[0] == f"{path}: 3 documents, 3 labels, words hashed to 1,000 features"
    assert data.facts[1].startswith("  labels 'sport', 'news': ")
    assert "the ball is round" in data.facts[1]
    held_out = labelled(path, data.vocabulary, 1000, texts=texts)
    assert rows(held_out.features) == rows(data.features)


def test_words_of_a_text_are_counted():
    ids, values = Texts(buckets=10**6).features("__label__x b a b __label__y")
    assert dict(zip(ids, values.tolist(), strict=True)) == {crc32(b"a") % 10**6: 1.0, crc32(b"b") % 10**6: 2.0}
    assert Texts(ngrams=3).features("")[0] == []
    assert len(Texts(ngrams=3, buckets=2**30).features("a b c d")[0]) == 4 + 3 + 2


def test_texts_without_labels_are_left_out(tmp_path):
    path = write(tmp_path / "a.txt", "__label__a one\nno label here\n\n__label__b\n__label__a __label__a two\n")
    data = labelled(path)
    assert rows(data.labels) == [[0], [1], [0]]
    assert data.facts[0].endswith("dropped 1 documents without a label that is a class")
    assert data.facts[2] == "  labels none: 'no label here'"
    path = write(tmp_path / "a.csv", 'label,text\n"a ""b""","two\nlines"\nc,\n,none\n')
    data = labelled(path)
    assert data.vocabulary.names == ['a "b"', "c"]
    assert [len(row) for row in rows(data.features)] == [2, 0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "body,label\nx,y\n", ", line 2: no column 'text'; there are 'body', 'label'"),
        ("a.csv", "text,label\nx,y\nx\n", ", line 3: 1 fields, but the header has 2"),
        ("a.csv", "text,label\nx,\n", ": no document has a label"),
        ("a.csv", "text,label\n", ": no documents in the file"),
        ("a.csv", "text,label\nx,y\n", ": only one label, 'y'; at least 2 are needed"),
        ("a.csv", 'text,label\n"x,y\n', ", line 2: unexpected end of data"),
        ("a.jsonl", '{"text": 1, "label": "a"}\n', ", line 1: text must be a text, got 1"),
        ("a.jsonl", "[1]\n", ", line 1: not a JSON object"),
        ("a.txt", "__label__a x\n__label__a y\n", ": only one label, 'a'; at least 2 are needed"),
    ],
)
def test_text_errors(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with raises(f"{path}{message}"):
        labelled(path)
