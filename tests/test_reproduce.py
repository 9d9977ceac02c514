"""The paper's experiments, in miniature: real processes, tiny data."""

import dataclasses
import signal
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from manyclass.experiments import figures, reproduce, times
from manyclass.experiments.reproduce import BLOCKS, FULL, Curve, Metrics, Point, Preset
from manyclass.train.data.synth import synthesise
from manyclass.train.tasks import TASKS

TINY = Preset((2,), 2, 1, True, "tiny")
SHORT = "--features 8 --steps 4 --evaluations 2 --eval-examples 50"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Three small data sets, one of them made, and a single sampler besides blocks."""
    words = " ".join(f"w{number * number % 37}" for number in range(2000))
    (tmp_path / "data" / "ptb").mkdir(parents=True)
    (tmp_path / "data" / "ptb" / "ptb.train.txt").write_text(words)
    (tmp_path / "data" / "ptb" / "ptb.valid.txt").write_text(words[:900])
    (tmp_path / "data" / "amazon-beauty").mkdir()
    lines = [" ".join(str((user + place) % 29) for place in range(6)) for user in range(30)]
    (tmp_path / "data" / "amazon-beauty" / "sequences.txt").write_text("\n".join(lines))
    small = {
        "ptb": "lm --split blanks --batch 4 --length 5 " + SHORT,
        "beauty": "next-item --model feed-forward --user-first " + SHORT,
        "synth": "next-item --model feed-forward " + SHORT,
    }
    for name, options in small.items():
        made = reproduce.DATASETS[name].made and (40, 30, 6)
        changed = reproduce.DATASETS[name]._replace(options=options, presets={"quick": ""}, made=made, seeds=2)
        monkeypatch.setitem(reproduce.DATASETS, name, changed)
    monkeypatch.setattr(reproduce, "DECISIVE", (BLOCKS,))
    monkeypatch.setattr(reproduce, "SAMPLERS", ("quadratic",))
    monkeypatch.setattr(figures, "FIXED", TINY.negatives)
    monkeypatch.setitem(reproduce.PRESETS, "quick", TINY)
    return tmp_path / "data"


def test_a_sweep_goes_on_where_it_was(tmp_path, data, monkeypatch):
    console, out = Console(width=200, quiet=True), tmp_path / "out"
    before = signal.getsignal(signal.SIGTERM)
    launched = []
    launch = reproduce._launch

    def broken_once(job):
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        launched.append((job.folder.parent.name, job.folder.name))
        process = launch(job)
        if len(launched) == 3:
            process.kill()
        return process

    monkeypatch.setattr(reproduce, "_launch", broken_once)
    with pytest.raises(ValueError, match="ended with code -9"):
        reproduce.sweep(["ptb", "synth"], "quick", data, out, 1, console)
    partial = reproduce.finished(["ptb", "synth"], "quick", out)
    assert [curve.point for curve in partial] == [curve.point for curve in reproduce.read("quick", out)]
    assert [curve.point.sampler for curve in partial] == [FULL, FULL]
    assert figures.draw("bias", partial, tmp_path, "nothing to compare yet") == []
    reproduce.sweep(["ptb", "synth"], "quick", data, out, 2, console)
    curves = reproduce.finished(["ptb", "synth"], "quick", out)
    points = [curve.point for curve in curves]
    assert set(points) == {*reproduce.points("ptb", TINY), *reproduce.points("synth", TINY)}
    assert len(points) == (3 + 1 + 1) + (2 * 2 + 1 + 1)  # full softmax, quadratic, blocks
    names = [(point.dataset, point.name) for point in points]
    assert sorted(launched) == sorted([*names, launched[2]])  # one of them twice
    assert not any((out / "quick" / "ptb").iterdir())
    reproduce.sweep(["synth", "ptb"], "quick", data, out, 1, console)
    assert len(launched) == len(points) + 1, "a finished sweep trains nothing"
    for curve in curves:
        assert [row.step for row in curve.rows] == [0, 2, 4]
    # Two seeds of the full softmax differ; the symmetric kernel is trained with the absolute softmax.
    finals = {curve.point: curve.rows[-1].heldout_loss for curve in curves}
    assert finals[Point("ptb", FULL, "softmax", None, 0)] != finals[Point("ptb", FULL, "softmax", None, 1)]
    assert {point.prediction for point in points if point.sampler == "quadratic"} == {"absolute"}
    reproduce.write(curves, "quick", tmp_path)
    assert reproduce.read("quick", tmp_path) == curves
    changed = reproduce.DATASETS["synth"]._replace(presets={"quick": "--lr 1"})
    monkeypatch.setitem(reproduce.DATASETS, "synth", changed)
    with pytest.raises(ValueError, match=r"reproduce-quick\.csv has runs of synth with other options"):
        reproduce.sweep(["ptb"], "quick", data, out, 1, console)
    for figure in ("bias", "samples", "distributions"):
        for image in figures.draw(figure, curves, tmp_path, "a note"):
            assert image.read_bytes()[:4] == b"\x89PNG"
    assert signal.getsignal(signal.SIGTERM) is before


def test_times_are_of_trained_weights_and_of_one_run_of_the_command(tmp_path, data, monkeypatch):
    console, out = Console(width=200, quiet=True), tmp_path / "out"
    monkeypatch.setattr(times, "STEPS", 4)
    monkeypatch.setattr(times, "ROUNDS", 2)
    launched = []
    launch = reproduce._launch
    monkeypatch.setattr(reproduce, "_launch", lambda job: launched.append(job) or launch(job))
    times.write(
        {Point("ptb", "gone", "softmax", 3, 0): 1.0, Point("beauty", FULL, "softmax", None, 0): 2.5}, "quick", out
    )
    times.measure(["ptb"], "quick", data, out, console)
    found = times.read("quick", out)
    kept = found.pop(Point("beauty", FULL, "softmax", None, 0))
    assert kept == 2.5, "other data sets keep their times"
    wanted = {point for point in reproduce.points("ptb", TINY) if point.seed == 0}
    assert found.keys() == wanted
    assert all(0 < value < 1000 for value in found.values())
    first, *others = launched
    assert len(others) == 2 * len(wanted)
    assert first.folder.name == "start"
    assert "--init" not in first.commands[0]
    for job in others:
        arguments = job.commands[0]
        assert arguments[arguments.index("--init") + 1] == str(first.folder)
    assert [entry.name for entry in first.folder.parent.iterdir()] == ["start"]

    rows = [Metrics(step, 0.1 * step, 0.0, 0.0, 0.0, 5.0 - step, None, 2) for step in (0, 2, 4)]
    curves = [Curve(Point("ptb", BLOCKS, "softmax", 2, seed), rows) for seed in (0, 1)]
    curves.append(Curve(Point("ptb", FULL, "softmax", None, 0), rows))
    each = {curves[0].point: 500.0, curves[2].point: 2000.0}
    timed = times.timed(curves, each)
    assert [[row.cpu_seconds for row in curve.rows] for curve in timed] == [[0, 1, 2], [0, 1, 2], [0, 4, 8]]
    assert len(figures.draw("samples", timed, tmp_path, "a note")) == 2
    del each[curves[0].point]
    without = figures.draw("samples", times.timed(curves, each), tmp_path, "a note")
    assert [file.name for file in without] == ["samples-ptb.png"]
    changed = reproduce.DATASETS["ptb"]._replace(presets={"quick": "--lr 1"})
    monkeypatch.setitem(reproduce.DATASETS, "ptb", changed)
    with pytest.raises(ValueError, match=r"reproduce-quick-times\.csv has runs of ptb with other options"):
        times.read("quick", out)


def test_what_is_trained(data, tmp_path):
    def options(*point):
        files = reproduce.sources(point[0], data, tmp_path / "out")
        return " ".join(reproduce.command(Point(*point), "quick", files, tmp_path))

    # An example sees m negatives in all.
    assert "--own 8 --num-samples 8" in options("beauty", BLOCKS, "softmax", 16, 0)
    assert "--own 32 --num-samples 608" in options("beauty", BLOCKS, "softmax", 640, 0)
    assert "--num-samples 640 --seed" in options("beauty", "uniform", "softmax", 640, 0)
    full = options("ptb", FULL, "absolute", None, 1)
    assert "--num-samples" not in full
    assert "--prediction absolute --seed 1 --threads 1" in full
    with pytest.raises(FileNotFoundError, match=r"no file train\.txt\* in"):
        options("diginetica", FULL, "softmax", None, 0)


def test_interactions_are_made_once_and_need_no_files(data, tmp_path):
    made = reproduce.sources("synth", None, tmp_path)["--interactions"]
    again = tmp_path / "again.txt"
    synthesise(again, items=40, users=30, length=6)
    assert made.read_bytes() == again.read_bytes()
    made.write_text("kept")
    assert reproduce.sources("synth", data, tmp_path)["--interactions"].read_text() == "kept"
    with pytest.raises(ValueError, match="--data must be the folder with the files of ptb; only --dataset synth"):
        reproduce.sources("ptb", None, tmp_path)


def test_a_symmetric_kernel_has_its_own_baseline():
    found = reproduce.points("diginetica", reproduce.PRESETS["quick"])
    assert {point.prediction for point in found if point.sampler == FULL} == {"softmax", "absolute"}
    assert len({point.name for point in found}) == len(found)


def test_only_the_setting_of_the_paper_has_slow_samplers_on_large_data():
    every = {*reproduce.SAMPLERS, FULL, "blocks"}
    for preset, hurry in (("quick", True), ("converged", True), ("paper", False)):
        for name, dataset in reproduce.DATASETS.items():
            points = reproduce.points(name, reproduce.PRESETS[preset])
            assert {point.sampler for point in points} == every - set(dataset.slow if hurry else ())
    assert {name for name, dataset in reproduce.DATASETS.items() if dataset.slow} == {"diginetica", "synth"}


def test_decisive_runs_come_first_and_have_several_seeds():
    preset = reproduce.PRESETS["converged"]
    found = reproduce._wanted(["beauty", "ptb"], "converged")
    each, again = len(preset.negatives), sum(map(len, reproduce.DATASETS["ptb"].repeated.values()))
    assert len(set(found)) == len(found) == 2 * (2 + each * (3 + 4)) + 2 * (2 + 3 * each) + 2 * (1 + again)
    full = [point for point in found if point.sampler == FULL]
    assert [point.seed for point in full if point[:3] == ("ptb", FULL, "absolute")] == [0]
    assert [point.seed for point in full if point[:3] == ("ptb", FULL, "softmax")] == [0, 1, 2]
    assert Point("ptb", "quadratic", "absolute", 10, 2) in found
    assert Point("ptb", "quadratic", "absolute", 40, 2) not in found
    first = found[: 2 * (2 + 3 * len(preset.negatives))]
    assert {point.sampler for point in first} == {FULL, *reproduce.DECISIVE}
    assert {point.seed for point in first} == {0}
    assert [point.dataset for point in first] == sorted(point.dataset for point in first)
    assert {point.sampler for point in found if point.seed == 2} == {FULL, *reproduce.DECISIVE}
    once = reproduce._wanted(["synth"], "converged")
    assert len(set(once)) == len(once) == 2 + 5 * len(preset.negatives)
    assert {point.seed for point in once} == {0}


def test_seeds_are_kept_apart_in_rising_order_of_negatives():
    def curve(negatives, seed, loss):
        rows = [Metrics(step, 0.1 * step, step, 0.1, 0.0, loss, None, 10) for step in (0, 5)]
        return Curve(Point("beauty", "uniform", "softmax", negatives, seed), rows)

    curves = [curve(40, 0, 1.0), curve(10, 0, 2.0), curve(10, 1, 4.0)]
    assert list(figures._finals(curves, "uniform").items()) == [(10, [2.0, 4.0]), (40, [1.0])]


@pytest.mark.parametrize("name", list(reproduce.DATASETS))
def test_the_presets_are_options_that_exist(name):
    dataset = reproduce.DATASETS[name]
    known = {field.name for field in dataclasses.fields(TASKS[dataset.options.split()[0]][0])}
    assert {"quick", "paper"} <= dataset.presets.keys() <= reproduce.PRESETS.keys()
    for options in dataset.presets.values():
        words = f"{dataset.options} {options} {' '.join(dataset.files)}".split()
        assert {word[2:].replace("-", "_") for word in words if word.startswith("--")} <= known


def test_the_csv_in_the_docs_is_of_the_converged_sweep():
    folder = Path(__file__).parent.parent / "docs" / "results"
    points = {curve.point for curve in reproduce.read("converged", folder)}
    assert Point("beauty", FULL, "softmax", None, 0) in points
    assert points <= set(reproduce._wanted(["beauty", "ptb", "synth"], "converged"))


def test_the_legend_has_the_samplers_of_all_panels():
    figure = Figure()
    panels = figure.subplots(1, 2)
    panels[0].plot([1], label="blocks")
    panels[0].plot([1], label="full softmax")
    panels[1].plot([1], label="uniform")
    figures._legend(figure, panels)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["uniform", "blocks", "full softmax"]
