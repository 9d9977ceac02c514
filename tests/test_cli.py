"""The command line and the examples of the README."""

import csv
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

import manyclass as manyclass_package
from manyclass import functional, samplers
from manyclass.bench import (
    bias,
    draws,
    identifiers,
    judges,
    optim,
    profiling,
    settings,
    stalls,
    step,
    tensorflow_step,
    towers,
    tree,
)
from manyclass.cli import demo
from manyclass.samplers import blocks
from manyclass.train import Run, training
from manyclass.train.data import prepare_text, python_sources
from manyclass.train.settings import LanguageSettings

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


def test_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "ITEMS", 300)
    monkeypatch.setattr(demo, "USERS", 100)
    console = Console(record=True, width=200)
    text = write_text(tmp_path, 9000, 50)
    for _ in range(2):  # the second time it starts again
        demo.run(6, tmp_path / "out", 0, console, [text])
    printed = console.export_text()
    assert "1.0×" in printed
    for part in ("words", "recommender"):
        assert str(tmp_path / "out" / f"{part}.html") in printed
        losses = {}
        for name in demo.SAMPLERS:
            with (tmp_path / "out" / part / name / "metrics.csv").open() as file:
                losses[name] = [float(row["heldout_loss"]) for row in csv.DictReader(file)]
        assert {len(each) for each in losses.values()} == {6}
        # The same start for all: the first loss is that of the untrained model.
        assert len({round(each[0], 4) for each in losses.values()}) == 1
        gap = losses["blocks"][-1] - losses["full"][-1]
        assert f"blocks ends {abs(gap):.2f} {'above' if gap > 0 else 'below'} it" in printed
        assert (tmp_path / "out" / f"{part}.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(draws, "SIZES", (100, 1000))
    draws.run(tmp_path, Console(width=200), batch=4, num_samples=3)
    with (tmp_path / "draws.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert all(float(row["seconds"]) > 0 for row in rows)


def test_bench_optim(tmp_path, monkeypatch):
    monkeypatch.setattr(optim, "WARM_UP", 1)
    monkeypatch.setattr(optim, "time_steps", lambda steps: dict.fromkeys(steps, 1.0))
    console = Console(record=True, width=120)
    optim.run(tmp_path, console, 2000)
    with (tmp_path / "optim.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["optimizer"] for row in rows] == list(optim.OPTIMIZERS)
    state = {row["optimizer"]: float(row["state"]) for row in rows}
    assert state["AdamW"] > 2 > state["AdamW, rowwise"] > 1 > state[optim.BASELINE] == 0
    printed = console.export_text()
    assert "torch SparseAdam" in printed
    assert "AdamW takes 1.00 times as long as torch SGD, sparse; at most 1.5: PASS" in printed


def test_bench_identifiers(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(" ".join(f"word{number % 40}" for number in range(6000)))
    arguments = [tmp_path / "text.txt"], 1, 8, 0.05, 2, 60
    console = Console(record=True, width=150)
    identifiers.run(tmp_path, console, *arguments)
    with (tmp_path / "identifiers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(dict.fromkeys(row["method"] for row in rows)) == list(identifiers.METHODS)
    assert all(0 < float(row["heldout_loss"]) < 9 for row in rows)
    encoded = {row["method"]: float(row["encoded"]) for row in rows}
    assert encoded["full softmax"] == 41 > encoded["in-batch, logQ by a stream"]  # 40 words and <rare>
    assert (tmp_path / "identifiers.png").exists()
    curve = [identifiers.Row("blocks", 41, 2 * place, 10.0 * place, 5.0 - place, 9) for place in (1, 2)]
    assert [identifiers._at(curve, seconds) for seconds in (5.0, 12.5, 20.0)] == [None, 3.75, 3.0]
    # What is done is not done again; what takes too long is left out.
    monkeypatch.setattr(identifiers, "_train", lambda name, *rest: pytest.fail(name))
    identifiers.run(tmp_path, console, *arguments)
    assert console.export_text(clear=False).count("already") == len(identifiers.METHODS)
    monkeypatch.setattr(identifiers, "FITS", 40)
    identifiers.run(tmp_path, console, *arguments)
    assert "full softmax: left out, since each step would encode 41 words" in console.export_text()
    monkeypatch.undo()
    monkeypatch.setattr(identifiers, "_train", lambda name, *rest: pytest.fail(name))
    with pytest.raises(pytest.fail.Exception, match="full softmax"):  # longer than before
        identifiers.run(tmp_path, console, *arguments[:3], 50.0, *arguments[4:])
    for place, name in ((1, "min_count"), (2, "features"), (4, "every"), (5, "eval_examples")):
        changed = [value + 1 if place == index else value for index, value in enumerate(arguments)]
        with pytest.raises(ValueError, match=f"{name}=.* give another --out"):
            identifiers.run(tmp_path, console, *changed)


def test_bench_towers(tmp_path, monkeypatch):
    monkeypatch.setattr(towers, "EXAMPLES", 2000)
    monkeypatch.setattr(towers, "HELDOUT", 200)
    monkeypatch.setattr(towers, "SIZES", ((500, 100, 32), (500, 200, 32)))
    console = Console(record=True, width=150)
    towers.run(tmp_path, console, 200, 20, 2)
    with (tmp_path / "towers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == 2 * list(towers.LAYERS)
    assert all(0 < float(row["heldout_loss"]) < 6 for row in rows)
    with (tmp_path / "towers_memory.csv").open() as file:
        assert [int(row["pool"]) for row in csv.DictReader(file)] == [100, 200]
    assert "Memory of a step" in console.export_text()


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


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


def test_bench_step(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "CLASSES", {16: (500, 5000), 32: (500, 5000, 9000)})
    monkeypatch.setattr(step, "LARGEST", 5000)
    monkeypatch.setattr(step, "GROWTH", (500, 5000))
    monkeypatch.setattr(step, "CONSECUTIVE", 1)
    plain = step._plain(500, 16)
    assert 0 < plain < 1
    monkeypatch.setattr(step, "_plain", lambda num_classes, in_features: plain)
    for module in (step, profiling):
        monkeypatch.setattr(module, "WARM_UP", 16)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    console = Console(record=True, width=250)
    step.run(tmp_path, console)
    printed = console.export_text()
    assert "in units of the class weights: unigram" in printed
    assert "pip install tensorflow-cpu" in printed
    rows = read_csv(tmp_path / "step.csv")
    pools = {step.EQUAL_NEGATIVES, step.EQUAL_ROWS, step.LOG_UNIFORM}
    blocks = {step.BLOCKS, step.CLUSTERED}
    layers = {step.PLAIN, step.FULL, "adaptive softmax", "uniform", "unigram", "quadratic", *blocks, *pools}
    assert {row["layer"] for row in rows} == layers
    assert len(rows) == 4 * len(layers) + 9  # beyond the largest there is no tree and no adaptive softmax
    assert all(float(row["sampler_memory"]) > 0 for row in rows if row["layer"] == step.BLOCKS)
    seconds = {(row["in_features"], row["num_classes"], row["layer"]): float(row["seconds"]) for row in rows}
    small, large = (seconds["16", n, step.BLOCKS] for n in ("500", "5000"))
    assert f"d = 16: 10 times the classes, 500 to 5,000, take {large / small:.2f} times as long" in printed
    for pool in pools:
        ratio = seconds["32", "9000", step.BLOCKS] / seconds["32", "9000", pool]
        assert f"{ratio:.2f} ({pool})" in printed
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    *parts, whole = read_csv(tmp_path / "profile.csv")
    assert [part["part"] for part in parts] == [*profiling.CALLS, profiling.REST, "backward", "optimiser"]
    assert all(float(part["milliseconds"]) > 0 for part in parts)
    assert sum(float(part["milliseconds"]) for part in parts) == pytest.approx(float(whole["milliseconds"]))


def test_the_benches_measure_the_default_setting():
    head = manyclass_package.SampledSoftmax(8, 1000)
    assert (head.sampler.own, head.num_samples) == (step.OWN, step.POOL)
    assert step.OWN + step.POOL in bias.TOTALS


def test_timing_counts_every_kind_of_step():
    calls = {"uneven": 0, "slow": 0}

    def wait(name: str, durations: tuple[float, ...]) -> None:
        time.sleep(durations[calls[name] % len(durations)])
        calls[name] += 1

    durations = {"uneven": (0.001, 0.009), "slow": (0.3,)}
    found = step.time_steps({name: lambda name=name, some=some: wait(name, some) for name, some in durations.items()})
    assert found["uneven"] >= 0.005  # the mean, not the best
    assert found["slow"] >= 0.3
    assert calls["slow"] <= 8  # not several times in a round


def test_tensorflow_learns():
    pytest.importorskip("tensorflow")
    torch.manual_seed(0)
    train = tensorflow_step.make(1000, 64, torch.randn(32, 16), torch.randint(1000, (32,)))
    losses = [train() for _ in range(300)]
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])


@pytest.mark.parametrize("stalls_at_the_swap", [False, True])
def test_bench_stalls(tmp_path, monkeypatch, stalls_at_the_swap):
    monkeypatch.setattr(blocks, "FASTEST", 1)  # so that timed steps meet every slice
    swap = samplers.Blocks._swap

    def slow_swap(sampler: samplers.Blocks) -> None:
        time.sleep(2.0)
        swap(sampler)

    if stalls_at_the_swap:
        monkeypatch.setattr(samplers.Blocks, "_swap", slow_swap)
    console = Console(record=True, width=200)
    stalls.run(tmp_path, console, 20_000, 5)
    rows = read_csv(tmp_path / "stalls.csv")
    grown = [int(row["grown"]) for row in rows]
    slices = int(rows[0]["slices"])
    # The first step, then those before each stop up to the last slice, then those with the new tree.
    last = grown.index(slices - 1)
    assert grown[1 : last + 1] == sorted(set(grown[1 : last + 1]))
    assert len(grown) == last + 1 + stalls.AFTERWARDS
    if stalls_at_the_swap:
        printed = console.export_text()
        assert "FAIL  the slowest later step" in printed
        assert f"{slices - 1} of {slices} slices" in printed


@pytest.fixture
def small_judges(monkeypatch):
    """Judges that are trained in a second, with few other batches."""
    for name, value in {"ITEMS": 400, "USERS": 1100, "LENGTH": 6, "OTHERS": 3}.items():
        monkeypatch.setattr(judges, name, value)
    monkeypatch.setattr(bias, "WARM_UP", 3)
    monkeypatch.setattr(step, "CONSECUTIVE", 1)


def test_bench_bias(tmp_path, small_judges, monkeypatch):
    orders, reordered = [], judges.reordered
    monkeypatch.setattr(judges, "reordered", lambda judge, seed: orders.append(seed) or reordered(judge, seed))
    text = write_text(tmp_path, 24_000, 300)
    console = Console(record=True, width=200)
    bias.run(tmp_path, console, [text], steps=2, epochs=0.5, seed=0)
    assert orders == 3 * [*range(1, bias.TREES)]  # blocks on each of three judges
    rows = read_csv(tmp_path / "bias.csv")
    named = {(row["model"], row["prediction"]): set() for row in rows}
    for row in rows:
        named[row["model"], row["prediction"]].add(row["sampler"])
    common = {bias.UNIFORM, bias.UNIGRAM, bias.BLOCKS, "uniform", "unigram", "softmax", "quadratic tree"}
    assert named == {
        ("words", "softmax"): {*common, "bigram"},
        ("words", "absolute"): {bias.BLOCKS, "quartic", "quadratic tree"},
        ("sessions", "softmax"): common,
    }
    for model in ("words", "sessions"):  # equal negatives per example
        for sampler in (bias.UNIFORM, bias.UNIGRAM, bias.BLOCKS):
            own = [row for row in rows if row["sampler"] == sampler and row["prediction"] == "softmax"]
            totals = [int(row["own"]) + int(row["pool"]) for row in own if row["model"] == model]
            assert totals == list(bias.TOTALS)
    each = [int(row["own"]) for row in rows if row["sampler"] == "uniform"]
    assert each == [*bias.FEW, *bias.FEW]
    # Few classes, hardly trained: nobody is far off, and a pool of all classes has no error at all.
    assert all(-0.5 < float(row["bias"]) < 0.1 for row in rows)
    assert all(float(row["error"]) >= abs(float(row["bias"])) * 0.999 for row in rows)
    everything = [row for row in rows if row["sampler"] == bias.BLOCKS and int(row["pool"]) > 1000]
    assert len(everything) == 6
    assert all(float(row["error"]) < 1e-5 and float(row["gradient_error"]) < 1e-4 for row in everything)
    assert console.export_text().count("PASS") == 4
    assert (tmp_path / "bias.png").read_bytes()[:4] == b"\x89PNG"
    text = write_text(tmp_path, 10_000, 300)
    with pytest.raises(ValueError, match="500 held out; at least 1024 are needed there"):
        bias.run(tmp_path, console, [text], steps=2, epochs=0.5, seed=0)


def test_bench_bias_catches_a_wrong_sampler(small_judges):
    class Wrong(samplers.Uniform):
        def _log_prob(self, query, ids, exclude, context):
            return super()._log_prob(query, ids, exclude, context) + 0.5

    with Progress(console=Console(quiet=True)) as progress:
        judge = judges.sessions(0.5, 0, progress)
    batches = [judge.measured, *judge.others]
    assert len(batches) == 4
    queries = torch.cat([batch.query for batch in batches])
    assert len(queries) == 4 * judges.EXAMPLES
    assert len(queries.unique(dim=0)) > 0.9 * len(queries)  # other users, though some have the same history
    other = judges.reordered(judge, 1)
    assert not torch.equal(other.weight, judge.weight)
    for before, after in zip(batches, [other.measured, *other.others], strict=True):
        losses = [
            functional.full_softmax_loss(batch.query, weight, batch.target, reduction="none")
            for batch, weight in ((before, judge.weight), (after, other.weight))
        ]
        torch.testing.assert_close(*losses)
        assert torch.equal(other.weight[after.context], judge.weight[before.context])
    assert torch.equal(other.weight[other.pairs], judge.weight[judge.pairs])
    right, wrong = (
        next(iter(bias.measure(judge, bias.Alternative("", sampler(len(judge.weight), "batch"), (4096,)), 1.0)))
        for sampler in (samplers.Uniform, Wrong)
    )
    assert abs(right.bias) < 0.02
    assert -0.5 < wrong.bias < -0.4  # all negatives count too little, the positive does not
    assert wrong.error > 5 * right.error


def test_bench_settings(tmp_path, small_judges, monkeypatch):
    monkeypatch.setattr(settings, "SETTINGS", settings.SETTINGS[:2])
    text, folder = write_text(tmp_path, 24_000, 300), tmp_path / "words"
    options = LanguageSettings(text=[text], sampler="unigram", features=8, steps=2, evaluations=1, out=folder)
    training.train(training.prepare("lm", options))
    console = Console(record=True, width=200)
    settings.run(tmp_path, console, [folder])
    rows = read_csv(tmp_path / "settings.csv")
    assert [row["model"] for row in rows] == ["words"] * (2 + len(settings.SETTINGS))
    assert [row["sampler"] for row in rows[:2]] == [bias.UNIFORM, bias.UNIGRAM]
    assert [(int(row["own"]), int(row["pool"])) for row in rows[2:]] == [(s.own, s.pool) for s in settings.SETTINGS]
    assert all(float(row["error"]) < 1e-5 for row in rows[2:])  # pools of all classes
    assert float(rows[0]["error"]) > 1e-3
    model, _, _ = training.load(Run(folder))
    judge = settings.judge_of(folder)
    assert torch.equal(judge.weight, model.head.weight)
    batches = [judge.measured, *judge.others]
    assert all(len(batch.query) == len(batch.target) == judges.EXAMPLES for batch in batches)
    text = write_text(tmp_path, 500, 50)
    small = LanguageSettings(text=[text], features=8, steps=1, batch=2, evaluations=1, out=tmp_path / "small")
    training.train(training.prepare("lm", small))
    with pytest.raises(ValueError, match="has too few examples: at least 512 are needed"):
        settings.judge_of(tmp_path / "small")


@pytest.mark.parametrize(("of_blocks", "error", "expected"), [(-0.019, 0.05, "PASS"), (-0.021, 0.051, "FAIL")])
def test_verdicts_compare_with_the_better_static_pool(of_blocks, error, expected):
    def row(model: str, sampler: str, own: int, bias_: float, error: float) -> bias.Row:
        return bias.Row(model, "softmax", sampler, own, step.OWN + step.POOL - own, bias_, 0.0, error, 0.1, 10.0, 2.0)

    rows = [row(model, bias.UNIFORM, 0, -0.1, 0.9) for model in ("words", "sessions")]
    rows += [row(model, bias.UNIGRAM, 0, -0.1, 0.1) for model in ("words", "sessions")]
    rows += [row(model, bias.BLOCKS, step.OWN, of_blocks, error) for model in ("words", "sessions")]
    lines = bias.verdicts(rows)
    assert [line.split()[0] for line in lines] == [expected] * 4
    assert all("unigram pool of 4,128" in line for line in lines[1::2])


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
