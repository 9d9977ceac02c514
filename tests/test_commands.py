"""Every command on small files, in a process of its own; errors are one line with exit code 2."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from manyclass import __main__
from manyclass.train.settings import PRESETS

# A crash of native code tells where it was.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def command(*arguments):
    return [sys.executable, "-m", "manyclass", *map(str, arguments)]


def manyclass(*arguments, cwd, stdin=None):
    """Run a command that must succeed; returns what it printed."""
    run = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=240, cwd=cwd, env=ENVIRONMENT, input=stdin
    )
    assert run.returncode == 0, run.stderr + run.stdout
    assert run.stderr == ""
    return run.stdout


def fails(monkeypatch, capsys, *arguments):
    """Run a command that must fail, in this process; returns its one line."""
    monkeypatch.setattr(sys, "argv", ["manyclass", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("manyclass: ")
    assert error.count("\n") == 1, error
    return error


def write_text(folder):
    file = folder / "text.txt"
    file.write_text("\n".join(f"the {name} of word{number % 40} ." for number in range(900) for name in ("cat", "dog")))
    return file


def test_a_language_model_from_a_text_to_predictions(tmp_path):
    write_text(tmp_path)
    (tmp_path / "more.txt").write_text("another file\nwith another cat\n" * 30)
    small = ("--features", 16, "--threads", 1)
    run = ("--steps", 40, "--evaluations", 2, "--out", "run")
    printed = manyclass("train", "lm", "--text", "text.txt", "more.txt", *small, *run, cwd=tmp_path)
    assert "classes" in printed
    assert "perplexity" in printed
    folder = tmp_path / "run"
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"]["text"] == ["text.txt", "more.txt"]
    assert config["num_classes"] == len(pl.read_parquet(folder / "vocabulary.parquet"))
    printed = manyclass("evaluate", "run", "--k", 1, "--k", 3, cwd=tmp_path)
    measured = json.loads((folder / "evaluation.json").read_text())
    assert {"loss", "perplexity", "recall@1", "mrr@3", "ndcg@3"} <= measured.keys()
    assert f"{measured['loss']:.4f}" in printed
    assert measured["recall@3"] > 0.4
    printed = manyclass("predict", "run", "the cat", "--k", 2, cwd=tmp_path)
    assert printed.splitlines()[0] == "the cat"
    assert printed.splitlines()[1].split()[1] == "of"
    lines = manyclass("predict", "run", "--json", cwd=tmp_path, stdin="the dog\nof\n").splitlines()
    found = [json.loads(line) for line in lines]
    assert [one["query"] for one in found] == ["the dog", "of"]
    assert found[0]["predictions"][0]["class"] == "of"
    assert 0 < found[0]["predictions"][0]["p"] <= 1
    manyclass("export", "run", "--to", "safetensors", "--out", "exported", cwd=tmp_path)
    weight = load_file(tmp_path / "exported" / "classes.safetensors")["weight"]
    saved = load_file(next(folder.glob("checkpoint-*")) / "model-0.safetensors")
    assert torch.equal(weight, saved["head.embedding.weight"])
    second = ("--sampler", "full", "--steps", 3, "--evaluations", 1, "--out", "second")
    manyclass("train", "lm", "--text", "text.txt", *small, *second, cwd=tmp_path)
    printed = manyclass("report", "run", "second", "--out", "page.html", cwd=tmp_path)
    assert "1.0×" in printed
    assert "speed-up" in printed
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_recommender_from_synthetic_clicks(tmp_path):
    printed = manyclass("synth", "clicks.parquet", "--items", 200, "--users", 300, "--length", 8, cwd=tmp_path)
    assert "2,400 interactions" in printed
    options = ("--features", 16, "--threads", 1, "--epochs", 20, "--lr", 0.02, "--sampler", "unigram", "--out", "run")
    manyclass("train", "next-item", "--interactions", "clicks.parquet", *options, cwd=tmp_path)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        losses = [float(row["heldout_loss"]) for row in csv.DictReader(file)]
    assert losses[-1] < losses[0] - 0.2
    manyclass("evaluate", "run", "--limit", 50, cwd=tmp_path)
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["examples"] == 50
    items = pl.read_parquet(tmp_path / "run" / "vocabulary.parquet")["name"].to_list()
    printed = manyclass("predict", "run", f"{items[0]} {items[1]}", "--k", 4, cwd=tmp_path)
    assert printed.startswith("items that a user had before are part of the ranking\n")
    assert {line.split()[1] for line in printed.splitlines()[2:]} <= set(items)
    printed = manyclass("predict", "run", items[0], "--k", 1, "--exclude-seen", "--json", cwd=tmp_path)
    assert json.loads(printed)["exclude_seen"] is True
    lines = manyclass("similar", "run", items[0], "nothing", items[1], "--k", 2, cwd=tmp_path).splitlines()
    assert lines[3:6] == ["nothing", "  error: unknown class 'nothing'", items[1]]
    assert len(lines) == 8
    files = manyclass("export", "run", cwd=tmp_path).split()
    assert np.load(tmp_path / files[0]).shape == (len(items), 16)


def test_a_classifier_from_labelled_documents(tmp_path):
    lines = [f"{number % 9} {number % 9}:1 {9 + number % 4}:0.5" for number in range(200)]
    (tmp_path / "documents.txt").write_text("200 13 9\n" + "\n".join(lines) + "\n")
    (tmp_path / "heldout.txt").write_text("\n".join(lines[:30]) + "\n")
    options = ("--heldout", "heldout.txt", "--features", 16, "--threads", 1, "--epochs", 20, "--out", "run")
    manyclass("train", "classify", "--data", "documents.txt", *options, cwd=tmp_path)
    manyclass("evaluate", "run", cwd=tmp_path)
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["precision@1"] > 0.9
    printed = manyclass("predict", "run", "4:1 11:0.5", "--k", 1, cwd=tmp_path)
    assert printed.splitlines()[1].split()[1] == "4"


def test_a_classifier_from_texts(tmp_path):
    words = {"fruit": "apple pear plum", "tool": "hammer saw nail", "sea": "wave salt fish"}
    lines = [f"__label__{label} some {text}" for label, text in words.items() for _ in range(30)]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    cells = [f'"some {text}",{label}' for label, text in words.items()]
    (tmp_path / "test.csv").write_text("text,label\n" + "\n".join(cells) + "\n")
    options = ("--test", "test.csv", "--ngrams", 2, "--buckets", 500, "--features", 16, "--threads", 1, "--epochs", 20)
    printed = manyclass("train", "classify", "--data", "train.txt", *options, cwd=tmp_path)
    assert "train.txt: 90 documents, 3 labels, words hashed to 500 features" in printed
    manyclass("evaluate", "run", "--k", 1, cwd=tmp_path)
    measured = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (measured["on"], measured["examples"], measured["precision@1"]) == ("test", 3, 1.0)
    lines = manyclass("predict", "run", "--k", 1, cwd=tmp_path, stdin="a hammer and a saw\n\nwave\n").splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("    0.")] == ["tool", "sea"]
    assert "  error: no words to predict from" in lines


def test_tables_from_the_standard_input(tmp_path):
    rows = "".join(f"{user};{(user + step) % 7};{step}\n" for user in range(30) for step in range(5))
    options = ("--sep", ";", "--no-header", "--features", 8, "--steps", 2, "--threads", 1, "--encoding", "latin1")
    printed = manyclass("train", "next-item", "--interactions", "-", *options, cwd=tmp_path, stdin=rows)
    assert printed.splitlines()[:2] == [
        "-: 150 rows, 30 users, 7 items, times 0 to 4",
        "  user '0', item '0', timestamp '0'",
    ]
    assert "- has no header: 'user' is column 1, 'item' is column 2, 'timestamp' is column 3" in printed
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["settings"]["encoding"] == "iso8859-1"
    again = manyclass("train", "next-item", "--interactions", "-", *options, "--resume", cwd=tmp_path, stdin="")
    assert "rows" not in again
    printed = manyclass(
        "train", "lm", "--text", "/dev/stdin", "--steps", 1, "--out", "lm", cwd=tmp_path, stdin="a b " * 2000
    )
    assert "/dev/stdin: 4,000 words, 0 of them rare" in printed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stopped, and how it was made."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = ["train", "lm", "--text", write_text(folder), "--features", 32, "--dropout", 0.2, "--threads", 1]
    arguments += ["--steps", 400, "--evaluations", 4, "--checkpoint-every", 20]
    manyclass(*arguments, "--out", folder / "run", cwd=folder)
    return folder / "run", arguments


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_process_loses_nothing_that_was_saved(tmp_path, whole, number):
    expected, arguments = whole
    folder = tmp_path / "parts"
    process = subprocess.Popen(
        command(*arguments, "--out", "parts"), cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoint-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    code = process.wait(timeout=60)
    (saved,) = sorted(folder.glob("checkpoint-*"))[-1:]
    step = int(saved.name.split("-")[1])
    assert 20 <= step < 400
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    printed = manyclass(*arguments, "--out", "parts", "--resume", cwd=tmp_path)
    assert "step 400" in printed
    rows = []
    for run in (expected, folder):
        with (run / "metrics.csv").open() as file:
            rows.append([{**row, "seconds": "", "cpu_seconds": ""} for row in csv.DictReader(file)])
    assert rows[0] == rows[1]
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-000000400"]
    weights = [load_file(run / "checkpoint-000000400" / "model-0.safetensors") for run in (expected, folder)]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_broken_files_get_one_line(tmp_path, monkeypatch, capsys):
    def wrong(name, content, *arguments):
        file = tmp_path / name
        file.write_bytes(content)
        return fails(monkeypatch, capsys, "train", *arguments, file, "--out", tmp_path / "run")

    lm, items, classify = ("lm", "--text"), ("next-item", "--interactions"), ("classify", "--data")
    assert "line 2: not UTF-8" in wrong("latin.txt", b"one\ntw\xff\n", *lm)
    assert "no words" in wrong("empty.txt", b"", *lm)
    assert "only one class" in wrong("same.txt", b"a b c d e f", *lm)
    assert "no column 'user'; there are 'person', 'item'" in wrong("a.csv", b"person,item\n1,2\n", *items)
    assert "line 3" in wrong("b.csv", b"user,item\n1,2\n1,2,3,4\n1,5\n", *items)
    assert "line 2" in wrong("c.jsonl", b'{"user": 1, "item": 2}\n{"user": 1,\n', *items)
    assert "line 2" in wrong("d.txt", b"1 0:1\n2 zero:1\n", *classify)
    assert not (tmp_path / "run" / "config.json").exists()
    out = ("--out", tmp_path / "run")
    assert "none.txt: no such file" in fails(monkeypatch, capsys, "train", *lm, tmp_path / "none.txt", *out)
    for arguments in (lm, items, classify):
        assert f"{tmp_path}: a folder, not a file" in fails(monkeypatch, capsys, "train", *arguments, tmp_path, *out)
    for other in (("--heldout", "-"), ("--test", "-"), ("--items", "-", "--item-feature", "kind")):
        twice = ("--interactions", "-", *other)
        message = fails(monkeypatch, capsys, "train", "next-item", *twice, *out)
        assert "only one file can be the standard input" in message
    file = tmp_path / "a.csv"
    file.write_text("no table at all")  # which none of these may get to read
    for wrong, message in (
        (("--encoding", "rot13"), "--encoding must be one that Python knows"),
        (("--sep", ""), "--sep must be characters within a line"),
        (("--sep", ";", "--sequences"), "--sequences is for one sequence per line"),
        (("--device", "nowhere"), "--device 'nowhere' cannot be used"),
        (("--init", tmp_path), "is not the folder of a run"),
    ):
        assert message in fails(monkeypatch, capsys, "train", *items, file, *wrong, *out)


def test_wrong_folders_get_one_line(tmp_path, monkeypatch, capsys):
    for name in ("evaluate", "predict", "export", "report"):
        assert "is not the folder of a run" in fails(monkeypatch, capsys, name, tmp_path)
    assert "no file ptb.train.txt* in" in fails(
        monkeypatch, capsys, "reproduce", "bias", "--data", tmp_path, "--out", tmp_path / "out"
    )
    assert "--data must be the folder with the files of ptb" in fails(
        monkeypatch, capsys, "reproduce", "bias", "--out", tmp_path / "out"
    )
    assert "--dataset must be one of" in fails(
        monkeypatch, capsys, "reproduce", "bias", "--dataset", "x", "--data", tmp_path, "--out", tmp_path / "out"
    )
    assert "give a text" in fails(monkeypatch, capsys, "train", "lm", "--out", tmp_path / "run")
    assert "suffix" in fails(monkeypatch, capsys, "synth", tmp_path / "a.xlsx")


@pytest.mark.parametrize("name", ["lm", "next-item", "classify"])
def test_help_teaches(name):
    run = subprocess.run(command("train", name, "--help"), capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert "Needs only" in run.stdout
    places = [run.stdout.index(f"─ {panel} ─") for panel in ("Data", "Model", "Output layer", "Training", "Run")]
    assert places == sorted(places)


def test_a_preset_gives_way_to_what_was_given(tmp_path):
    """`--layers 1` is the default, too, but here it was asked for."""
    write_text(tmp_path)
    options = ["--features", 8, "--layers", 1, "--steps", 2, "--evaluations", 1, "--threads", 1]
    manyclass("train", "lm", "--preset", "ptb-medium", "--text", "text.txt", *options, cwd=tmp_path)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    given = {"features": 8, "layers": 1, "evaluations": 1, "steps": 2}
    assert {name: settings[name] for name in PRESETS["lm"]["ptb-medium"] | given} == PRESETS["lm"]["ptb-medium"] | given
