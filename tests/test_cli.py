"""The command line and the examples of the README."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from manyclass import SampledSoftmax, demo, training
from manyclass.bench import bias, draws, step, tree
from manyclass.data import Corpus, corpus, python_corpus
from manyclass.models import LanguageModel

ROOT = Path(__file__).parent.parent


def manyclass(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manyclass", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def small_corpus() -> Corpus:
    generator = torch.Generator().manual_seed(0)
    return Corpus(torch.randint(50, (9000,), generator=generator), [str(i) for i in range(50)])


def test_help_teaches():
    run = manyclass("--help")
    assert run.returncode == 0
    assert "demo" in run.stdout
    assert "bench" in run.stdout


@pytest.mark.parametrize("arguments", [["demo", "--steps", "0"], ["nonsense"], ["demo", "--threads", "none"]])
def test_wrong_usage(arguments):
    run = manyclass(*arguments)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr


def test_errors_are_one_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    run = manyclass("bench", "draws", "--out", str(blocked))
    assert run.returncode == 2
    assert run.stderr.startswith("manyclass: ")
    assert run.stderr.count("\n") == 1
    assert str(blocked) in run.stderr


def test_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "python_corpus", small_corpus)
    console = Console(record=True, width=200)
    demo.run(6, tmp_path, 0, console)
    text = console.export_text()
    assert str(tmp_path / "demo.png") in text
    assert "1.0×" in text
    with (tmp_path / "demo.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"full softmax", "unigram", "blocks"}
    assert all(float(row["loss"]) > 0 for row in rows)
    # The same start for all: the first loss is that of the untrained model.
    assert len({round(float(row["loss"]), 4) for row in rows if row["step"] == "0"}) == 1
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(draws, "SIZES", (100, 1000))
    draws.run(tmp_path, Console(width=200), batch=4, num_samples=3)
    with (tmp_path / "draws.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert all(float(row["seconds"]) > 0 for row in rows)


def test_bench_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "CLASSES", (100, 1000))
    monkeypatch.setattr(tree, "FEATURES", (2, 3, 4))
    console = Console(record=True, width=200)
    tree.run(tmp_path, console)
    text = console.export_text()
    assert "d = 4: a draw takes" in text
    with (tmp_path / "tree.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["what"] for row in rows} == {*tree.PARTS, *tree.STEPS}
    assert len(rows) == 2 * 3 * 8
    assert (tmp_path / "tree.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_step(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "CLASSES", {16: (500, 5000), 32: (500, 5000, 9000)})
    monkeypatch.setattr(step, "LARGEST", 5000)
    console = Console(record=True, width=250)
    step.run(tmp_path, console)
    assert "in units of the class weights: unigram" in console.export_text()
    with (tmp_path / "step.csv").open() as file:
        rows = list(csv.DictReader(file))
    layers = {"full softmax", "adaptive softmax", "uniform", "unigram", "quadratic", "blocks"}
    assert {row["layer"] for row in rows} == layers
    assert len(rows) == 4 * len(layers) + 4  # beyond the largest there is no tree and no adaptive softmax
    assert all(float(row["sampler_memory"]) > 0 for row in rows if row["layer"] == "blocks")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_bias(tmp_path, monkeypatch):
    monkeypatch.setattr(bias, "REPEATS", 20)
    words = torch.randint(300, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{number}" for number in words))
    console = Console(record=True, width=200)
    bias.run(tmp_path, console, [text], steps=2, seed=0)
    with (tmp_path / "bias.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["sampler"] for row in rows}) == 8
    assert {row["prediction"] for row in rows} == {"softmax", "absolute"}
    # 300 classes, hardly trained: nobody is far off, and a pool of all classes has no bias at all.
    assert all(-0.5 < float(row["bias"]) < 0.1 for row in rows)
    everything = [row for row in rows if row["sampler"] == "blocks, one pool" and int(row["negatives"]) > 1000]
    assert everything
    assert all(abs(float(row["bias"])) < 1e-5 for row in everything)
    assert all(float(row["chi_square"]) > -1e-6 for row in rows)
    assert (tmp_path / "bias.png").read_bytes()[:4] == b"\x89PNG"
    text.write_text("too short")
    with pytest.raises(ValueError, match="the text has 2 words; at least 12800 are needed"):
        bias.run(tmp_path, console, [text], steps=2, seed=0)


def test_training_learns_and_repeats():
    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        tokens = torch.arange(7).repeat(2000)  # every token follows from the one before
        model = LanguageModel(7, 16, SampledSoftmax(16, 7, "uniform", 3))
        records = training.train_language_model(model, tokens, tokens[:800], steps=60)
        assert [record.step for record in records] == [0, 12, 24, 36, 48, 60]
        return [record.loss for record in records]

    first = losses(0)
    assert first[0] > 1.5
    assert first[-1] < 0.1
    assert losses(0) == first
    assert losses(1) != first


def test_windows_walk_along_the_text():
    tokens = torch.arange(101)
    batches = training.windows(tokens, batch=2, length=10)
    x, y = next(batches)
    assert x.shape == y.shape == (2, 10)
    assert torch.equal(y, x + 1)
    assert x[:, 0].tolist() == [0, 50]
    assert torch.equal(next(batches)[0], x + 10)
    with pytest.raises(ValueError, match="a text of 101 tokens is too short for batch=50 and length=10"):
        next(training.windows(tokens, batch=50, length=10))


def test_corpus():
    text = Corpus.from_texts(["a b, a", "b a once"])
    assert text.vocabulary == [corpus.RARE, "a", "b"]
    assert text.tokens.tolist() == [1, 2, 0, 1, 2, 1, 0]
    assert text.counts().tolist() == [2, 3, 2]


def test_python_corpus_has_many_classes():
    text = python_corpus()
    assert len(text.vocabulary) > 10_000
    assert len(text.tokens) > 500_000
    assert int(text.tokens.max()) == len(text.vocabulary) - 1


def examples() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [block for page in pages for block in re.findall(r"```python\n(import.*?)```", page.read_text(), re.S)]


@pytest.mark.parametrize("block", examples(), ids=lambda block: block.splitlines()[-1][:40])
def test_documented_examples_run(block):
    names: dict[str, object] = {}
    exec(block, names)
    tensors = [value for value in names.values() if isinstance(value, torch.Tensor)]
    assert tensors
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
