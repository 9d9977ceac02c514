"""The command line and the examples of the README."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from manyclass import demo
from manyclass.bench import bias, draws, step, tree
from manyclass.data import prepare_text, python_sources

ROOT = Path(__file__).parent.parent


def manyclass(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manyclass", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def write_text(folder: Path, words: int, classes: int) -> Path:
    numbers = torch.randint(classes, (words,), generator=torch.Generator().manual_seed(0)).tolist()
    file = folder / "text.txt"
    file.write_text(" ".join(f"word{number}" for number in numbers))
    return file


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


def test_demo(tmp_path):
    console = Console(record=True, width=200)
    text = write_text(tmp_path, 9000, 50)
    for _ in range(2):  # the second time it begins anew
        demo.run(6, tmp_path / "out", 0, console, [text])
    printed = console.export_text()
    assert str(tmp_path / "out" / "demo.html") in printed
    assert "1.0×" in printed
    losses = {}
    for name in demo.SAMPLERS:
        with (tmp_path / "out" / name / "metrics.csv").open() as file:
            losses[name] = [float(row["heldout_loss"]) for row in csv.DictReader(file)]
    assert {len(own) for own in losses.values()} == {6}
    # The same start for all: the first loss is that of the untrained model.
    assert len({round(own[0], 4) for own in losses.values()}) == 1
    assert (tmp_path / "out" / "demo.png").read_bytes()[:4] == b"\x89PNG"


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
    text = write_text(tmp_path, 24_000, 300)
    console = Console(record=True, width=200)
    bias.run(tmp_path, console, [text], steps=2, seed=0)
    with (tmp_path / "bias.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["sampler"] for row in rows}) == 9
    assert {row["prediction"] for row in rows} == {"softmax", "absolute"}
    # 300 classes, hardly trained: nobody is far off, and a pool of all classes has no bias at all.
    assert all(-0.5 < float(row["bias"]) < 0.1 for row in rows)
    everything = [row for row in rows if row["sampler"] == "blocks, one pool" and int(row["negatives"]) > 1000]
    assert everything
    assert all(abs(float(row["bias"])) < 1e-5 for row in everything)
    assert all(float(row["chi_square"]) > -1e-6 for row in rows)
    assert (tmp_path / "bias.png").read_bytes()[:4] == b"\x89PNG"
    text = write_text(tmp_path, 10_000, 300)
    with pytest.raises(ValueError, match="490 held out; at least 1024 are needed there"):
        bias.run(tmp_path, console, [text], steps=2, seed=0)


def test_the_python_sources_have_many_classes(tmp_path):
    vocabulary = prepare_text(list(python_sources()), tmp_path / "tokens.npy")
    assert len(vocabulary.names) > 10_000
    assert vocabulary.counts.sum() > 500_000


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
