"""Reading tables and sequences of interactions."""

import bz2
import gzip
import io
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from reading import encoded, interactions, labelled, raises, real, rows, write

from manyclass.train.data import (
    Interactions,
    Vocabulary,
    delimited,
    files,
    read_interactions,
    spool,
    tables,
)
from manyclass.train.data.columns import Layout
from manyclass.train.data.files import NOT_UTF_8

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
        ("a.csv", 'user,item\n1,2\n"1,2\n1,2\n', ", line 3: a quote without an end"),
        ("a.csv", "user,item\n\n1,2\n1,\n", ", line 4: no 'item'"),
        ("a.csv", "user,item,x\n1,2,3\n,2,3\n", ", line 3: no 'user'"),
        ("a.csv", 'user,item,x\n1,2,3\n1,"",3\n', ", line 3: no 'item'"),
        ("a.jsonl", '{"user": 1, "item": 2}\n{"item": 2}\n', ", line 2: no 'user'"),
        ("a.jsonl", '{"user": 1, "item": 2}\n{"user": 1, "item": null}\n', ", line 2: no 'item'"),
        ("a.jsonl", '{"user": 1, "item": 2}\n{"user": 1,\n', None),
        ("a.jsonl", '{"user": 1, "item": 2}\n[1]\n', ", line 2: not a JSON object"),
        ("a.csv", b"user,item\n1,2\n1,\xff\n", f", line 3: {NOT_UTF_8}"),
        ("a.jsonl", b'{"user": 1, "item": 2}\n{"user": "\xff"}\n', f", line 2: {NOT_UTF_8}"),
        ("a.txt", b"1 2\n\xff 3\n", f", line 2: {NOT_UTF_8}"),
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


# ---------------------------------------------------------------- other layouts


def names(data: Interactions) -> list[list[str]]:
    """The sequences, by name."""
    return [[data.vocabulary.names[index] for index in row] for row in rows(data.sequences)]


LAYOUTS = {
    "recbole": ("a.inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float\n", "\t", Layout()),
    "movielens 100k": ("u.data", "", "\t", Layout()),
    "movielens 1m": ("ratings.dat", "", "::", Layout()),
    "movielens 10m, compressed": ("ratings.dat.gz", "", "::", Layout()),
    "a header after all": ("a.dat", "user::item::stars::timestamp\n", "::", Layout()),
    "semicolons": ("a.csv", "user;item;stars;timestamp\n", ";", Layout(";")),
    "bars": ("a.txt", "user|item|stars|timestamp\n", "|", Layout("|")),
    "letters that polars cannot split at": ("a.txt", "user→item→stars→timestamp\n", "→", Layout("→")),
    "no header": ("a.csv", "", ",", Layout(headerless=True)),
    "no header, semicolons": ("a.txt", "", ";", Layout(";", headerless=True)),
}


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, monkeypatch, layout, size):
    shrink(monkeypatch, size)
    name, header, separator, options = LAYOUTS[layout]
    table = [("u1", "b", "5", "9"), ("u2", "c", "1", "3"), ("u1", "a", "2", "4")]
    text = header + "".join(separator.join(row) + "\n" for row in table)
    path = write(tmp_path / name, gzip.compress(text.encode()) if name.endswith(".gz") else text)
    data = interactions(path, layout=options)
    assert names(data) == [["a", "b"], ["c"]]
    assert data.facts[0] == f"{path}: 3 rows, 2 users, 3 items, times 3 to 9"
    assert data.facts[1] == "  user 'u1', item 'b', timestamp '9'"
    assert len(data.facts) == (4 if header else 5)
    if not header:
        places = "'user' is column 1, 'item' is column 2, 'timestamp' is column 4"
        assert data.facts[4] == f"{path} has no header: {places}"
    if layout == "a header after all":
        return  # known by its names only
    assert names(interactions(path, layout=options, user="2", item="1")) == [["u1"], ["u2"], ["u1"]]
    held_out = encoded(path, data.vocabulary, [], layout=options)
    assert rows(held_out.sequences) == rows(data.sequences)
    with raises(f"{path}: no column '5'; there are {', '.join(map(repr, header_names(header, separator)))}"):
        interactions(path, layout=options, user="5")


def header_names(header: str, separator: str) -> list[str]:
    return header.strip().split(separator) if header else list("1234")


def test_other_encodings(tmp_path, monkeypatch):
    """As Book-Crossing: latin-1, semicolons, quotes."""
    path = write(tmp_path / "a.csv", '"User-ID";"ISBN"\n"1";"é;ü"\n"1";"b"\n'.encode("latin-1"))
    options = {"user": "User-ID", "item": "ISBN"}
    for size in (1, 3, 1 << 20):
        shrink(monkeypatch, size)
        data = interactions(path, layout=Layout(";", encoding="latin-1"), **options)
        assert names(data) == [["é;ü", "b"]]
    with raises(f"{path}, line 2: {NOT_UTF_8}"):
        interactions(path, layout=Layout(";"), **options)
    path = write(tmp_path / "b.txt", "é b\nb ü\n".encode("utf-16"))
    assert names(interactions(path, layout=Layout(encoding="utf-16"))) == [["é", "b"], ["b", "ü"]]
    path = write(tmp_path / "c.txt", b"a b\n\xff\n")
    with raises(f"{path}: not ascii text"):
        interactions(path, layout=Layout(encoding="ascii"))


@pytest.mark.parametrize("separator", ["\t", "::", ";", ",", "|"])
def test_a_table_is_not_taken_for_sequences(tmp_path, separator):
    path = write(tmp_path / "a.txt", "".join(separator.join(row) + "\n" for row in ("abc", "ade", "bac")))
    option = "tab" if separator == "\t" else repr(separator)
    line = separator.join("abc")
    with raises(
        f"{path}: looks like a table, {line!r}; give --sep {option}, with --no-header if the first line is a row, or "
        "--sequences if each line is a sequence"
    ):
        interactions(path)
    words = 3 if separator == "\t" else 1
    assert [len(row) for row in rows(interactions(path, layout=Layout(sequences=True)).sequences)] == [words] * 3
    write(path, f"a,b c{separator}d e\nf g\n")  # not in every line
    assert len(interactions(path).sequences) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1,2,3\n4,5\n", "looks like a table, '1,2,3'; give --sep ','"),  # not as many in every line
        ("1 7 5 880606923\n2 7 4 880606924\n", "looks like a table, '1 7 5 880606923'; give --sep ' '"),
        ("user item time\n1 7 880606923\n", "looks like a table, 'user item time'; give --sep ' '"),
        ('[{"user": 1, "item": 2},\n{"user": 1, "item": 3}]\n', "looks like JSON, "),
        ('{"user": 1, "item": 2}\n', "looks like JSON, "),
    ],
)
def test_what_else_is_not_taken_for_sequences(tmp_path, content, message):
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'{path}: {message}')}.*--sequences if each line is a sequence$"
    ):
        interactions(path)
    words = [line.split() for line in content.splitlines()]
    assert names(interactions(path, layout=Layout(sequences=True))) == words


def test_long_names_are_no_times(tmp_path):
    path = write(tmp_path / "a.txt", "0387310738 0521642981 0262018020\n0262018020 0387310738\n")
    assert [len(row) for row in names(interactions(path))] == [3, 2]


@pytest.mark.parametrize("header", ["28,25,4,880042450", "1,2,5,4", "1,a,5,4", "1.5,2,3,4"])
def test_a_row_is_not_taken_for_a_header(tmp_path, header):
    """Columns by number are asked for where there is no header; a name that is a number would win over a place."""
    path = write(tmp_path / "a.csv", f"{header}\n9,33,4,880424604\n9,34,4,880424604\n")
    by_place = {"user": "1", "item": "2", "timestamp": "4"}
    with pytest.raises(ValueError, match=r"first line looks like a row, column \d is '[\d.]+'; give --no-header$"):
        interactions(path, **by_place)
    assert (
        interactions(path, layout=Layout(headerless=True), **by_place).facts[0].startswith(f"{path}: 3 rows, 2 users")
    )


def test_columns_by_place_are_said(tmp_path):
    path = write(tmp_path / "a.csv", "0,1,2\n9,33,4\n9,34,4\n")  # as pandas calls columns without a name
    assert names(interactions(path, user="0", item="1", timestamp="2")) == [["33", "34"]]
    path = write(tmp_path / "b.csv", "who,what\n9,33\n9,34\n")
    assert f"{path}: column 1 is 'who'" in interactions(path, user="1", item="what").facts


def test_a_column_that_is_there_twice(tmp_path):
    path = write(tmp_path / "a.csv", "user,item,x,item,x\n1,2,3,4,5\n1,3,3,4,5\n")
    with raises(f"{path}: more than one column is called 'item'"):
        interactions(path)
    write(path, "user,item,x,x\n1,2,3,4\n1,3,3,4\n")
    assert names(interactions(path)) == [["2", "3"]]  # nobody asks for that one


@pytest.mark.parametrize(
    ("name", "content", "option"),
    [
        ("a.csv", "user;item\n1;2\n", "';'"),
        ("a.csv", "user\titem\n1\t2\n", "tab"),
        ("a.dat", "1,2014-04-07T10:51:09.277Z,3\n", "','"),  # YooChoose
    ],
)
def test_another_separator_is_named(tmp_path, name, content, option):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=rf"no column '(user|item)'; there are [^;]*.*; give --sep {option}\?$"):
        interactions(path)


def test_a_missing_time_is_said(tmp_path):
    path = write(tmp_path / "a.csv", "user,item,time,Date_added,x\n1,2,3,4,5\n1,3,2,4,5\n")
    data = interactions(path)
    assert rows(data.sequences) == [[0, 1]]
    assert data.facts[0] == f"{path}: 2 rows, 1 users, 2 items"
    assert data.facts[-1] == (
        f"{path}: no column 'timestamp', using the order of the file; there is 'time', 'Date_added'"
    )
    assert interactions(write(tmp_path / "a.jsonl", '{"user": 1, "item": 2}\n{"user": 1, "item": 3}\n')).facts[-1] == (
        f"{tmp_path / 'a.jsonl'}: no column 'timestamp', using the order of the file"
    )


def test_facts_tell_dates_and_what_was_dropped(tmp_path):
    table = pl.DataFrame(
        {
            "user": ["u"] * 5,
            "item": ["a", "b", "a", "b", "rare"],
            "timestamp": [f"2020-01-0{day}" for day in (5, 2, 3, 4, 1)],
        }
    )
    for suffix in (".csv", ".parquet"):
        path = write_table(tmp_path, suffix, table.with_columns(pl.col("timestamp").str.to_datetime()))
        data = interactions(path, min_count=2)
        assert data.facts[0] == (
            f"{path}: 5 rows, 1 users, 3 items, times 2020-01-01 00:00:00 to 2020-01-05 00:00:00, "
            "dropped 1 rows of items seen less than 2 times"
        )
    path = write(tmp_path / "a.txt", f"u {'x' * 500} b c d e f g h i\nv b\n")
    data = interactions(path, user_first=True)
    assert data.facts[0] == f"{path}: 10 rows, 2 users, 9 items"
    assert data.facts[1].endswith("x…' 'b' 'c' 'd' 'e' 'f' 'g' 'h' …")
    assert data.facts[2] == "  user 'v': 'b'"
    held_out = encoded(write(tmp_path / "b.txt", "u b new new\n"), data.vocabulary, [], user_first=True)
    assert held_out.facts[0].endswith("3 rows, 1 users, 2 items, dropped 2 rows of items that are no class")


def test_the_standard_input(tmp_path, monkeypatch):
    content = io.TextIOWrapper(io.BytesIO(b"user;item\n1;2\n1;3\n"))
    monkeypatch.setattr("sys.stdin", content)
    (tmp_path / "read").mkdir()
    data = read_interactions(Path("-"), tmp_path / "read", "x", layout=Layout(";"))
    assert names(data) == [["2", "3"]]
    assert not content.buffer.closed


def test_files_that_are_none(tmp_path):
    for name in ("a.csv", "a.jsonl", "a.txt", "a.parquet", "a.txt.gz"):
        with pytest.raises(OSError, match=rf"{re.escape(str(tmp_path / name))}"):
            interactions(tmp_path / name)
        (tmp_path / name).mkdir()
        with pytest.raises((OSError, ValueError), match=rf"^{re.escape(str(tmp_path / name))}: (a folder, )?not a"):
            interactions(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.gz", "a.txt.gz", "a.documents.gz"])
def test_a_line_without_an_end_takes_little_memory(tmp_path, monkeypatch, name):
    path = write(tmp_path / name, gzip.compress(b"a" * (3 << 20)))
    for module in (files, delimited):
        monkeypatch.setattr(module, "LONGEST", 1 << 20)
    monkeypatch.setattr(delimited, "PIECE", 1 << 18)
    with pytest.raises(ValueError, match=r"line 1: no end of the line in 1 MB"):
        (labelled if "documents" in name else interactions)(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "user,item,timestamp\n1,2,3\n1,3,{}\n"),
        ("a.csv", "user,{}\n1,2\n"),
        ("a.csv", "user,item\n1,{0}\n1,{0}\n"),
        ("a.jsonl", '{{"{}": 1}}\n'),
        ("a.jsonl", '{{"user": 1, "item": 2, "timestamp": "{}"}}\n'),
        ("a.documents", "1 {}:1\n"),
        ("a.documents", "{} 1:1\n"),
        ("a.documents", "1 1:{}\n"),
    ],
)
def test_messages_quote_little(tmp_path, name, content):
    path = write(tmp_path / name, content.format("x" * 100_000))
    with pytest.raises(ValueError, match="xxx") as caught:
        (labelled if "documents" in name else interactions)(path)
    assert len(str(caught.value)) < len(str(path)) + 250


# ---------------------------------------------------------------- bounded memory


def shrink(monkeypatch, size: int) -> None:
    """Hold so little at once, wherever a file is read in parts."""
    monkeypatch.setattr(delimited, "PIECE", size)
    monkeypatch.setattr(tables, "OBJECTS", size)
    monkeypatch.setattr(tables, "ROWS", size)
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
from manyclass.train.data import delimited, read_interactions, read_labelled, spool, tables

delimited.PIECE, tables.OBJECTS, tables.ROWS, spool.CHUNK = 1 << 17, 1 << 12, 1 << 14, 1 << 15
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
    # Memory that each of several threads keeps would vary.
    alone = {**os.environ, "POLARS_MAX_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=alone)
    for line in done.stdout.splitlines():
        suffix, small, large = line.split()
        assert int(large) - int(small) < 5 * 1024, f"{suffix}: {small} kB for the small file, {large} kB for the large"
    assert len(done.stdout.splitlines()) == len(suffixes)
