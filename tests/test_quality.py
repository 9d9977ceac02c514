"""The comparison with the full softmax, in miniature: real processes, tiny data."""

import csv
import io
import json
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from manyclass import __main__
from manyclass.experiments import quality, reproduce
from manyclass.experiments.quality import Estimate, Trial


@pytest.fixture
def data(tmp_path, monkeypatch):
    """One small data set, and two samplers that are trained for a moment."""
    folder = tmp_path / "data" / "amazon-beauty"
    folder.mkdir(parents=True)
    lines = [" ".join([f"u{user}", *(f"i{(user + 3 * place) % 61}" for place in range(7))]) for user in range(80)]
    (folder / "sequences.txt").write_text("\n".join(lines))
    monkeypatch.setattr(quality, "COMMON", {"evaluations": 2, "features": 8})
    monkeypatch.setattr(quality, "NEXT_ITEM", {**quality.NEXT_ITEM, "batch": 40})
    monkeypatch.setitem(quality.DATASETS, "beauty", {**quality.NEXT_ITEM, "epochs": 2, "user_first": True})
    monkeypatch.setattr(quality, "SAMPLERS", {name: quality.SAMPLERS[name] for name in ("full", "blocks")})
    return tmp_path / "data"


def compare(data, out):
    """Train what is missing of the first seed, one run at a time; returns the report."""
    trials = quality.trials(["beauty"], ["adagrad"], list(quality.SAMPLERS), 1)
    quality.sweep(trials, data, out, 1, Console(file=io.StringIO()))
    return summarise(out)


def summarise(out, seeds=1):
    """Return the report of the finished runs."""
    console = Console(width=80, file=io.StringIO())
    quality.summarise(["beauty"], ["adagrad"], list(quality.SAMPLERS), seeds, out, console)
    return console.file.getvalue()


def rows(out):
    with (out / "quality.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def finished(folder, trial, *, loss=5.0, recall=0.3, seconds=10.0):
    """Write a run folder as `manyclass train` and `evaluate` leave it, without its checkpoint."""
    folder = folder / "runs" / trial.name
    folder.mkdir(parents=True)
    settings = quality.NextItemSettings(interactions=Path("elsewhere.txt"), **trial.settings).to_json()
    config = {"task": "next-item", "num_classes": 61, "heldout_examples": 70, "settings": settings}
    (folder / "config.json").write_text(json.dumps(config))
    epochs = trial.settings["epochs"]
    lines = ["step,epoch,seconds,lr,train_loss,heldout_loss,bias,num_samples", "0,0.0,0.0,0.1,,6.0,,"]
    lines += [f"{step},{step * epochs / 8},{seconds * step / 8},0.1,5.5,{loss},0.01,4096" for step in (4, 8)]
    (folder / "metrics.csv").write_text("\n".join(lines))
    measures = {"loss": loss, "recall@20": recall, "mrr@20": 0.1, "ndcg@20": 0.2}
    (folder / "evaluation.json").write_text(json.dumps({"step": 8, "examples": 70, **measures}))
    return folder


def test_a_sweep_is_trained_once_and_reported(tmp_path, data, launched):
    out = tmp_path / "out"
    printed = compare(data, out)
    names = ["beauty-full-adagrad-0", "beauty-blocks-adagrad-0"]
    assert launched == [(command, name) for name in names for command in ("train", "evaluate")]
    full, blocks = rows(out)
    assert tuple(full) == quality.HEADER
    assert (full["sampler"], blocks["sampler"], full["bias"]) == ("full", "blocks", "")
    assert math.isfinite(float(blocks["bias"]))
    evaluations = [json.loads((out / "runs" / name / "evaluation.json").read_text()) for name in names]
    for row, evaluation in zip((full, blocks), evaluations, strict=True):
        assert float(row["heldout_loss"]) == pytest.approx(evaluation["loss"], abs=1e-5)
        assert float(row["recall@20"]) == pytest.approx(evaluation["recall@20"], abs=1e-5)
        assert int(row["steps"]) == evaluation["step"]
    assert "Amazon Beauty, 12k items, adagrad" in printed
    assert f"{evaluations[1]['loss'] - evaluations[0]['loss']:+.4f}" in printed
    assert "missing" not in printed
    assert "PASS" in printed or "FAIL" in printed
    assert (out / "quality.png").read_bytes()[:4] == b"\x89PNG"
    # A second call needs no data and starts no process.
    launched.clear()
    assert compare(None, out) == printed
    assert launched == []
    # A run that was trained, but not evaluated, is not trained again.
    (out / "runs" / names[1] / "evaluation.json").unlink()
    assert compare(None, out) == printed
    assert launched == [("evaluate", names[1])]


def test_a_failed_run_keeps_the_others(tmp_path, data, monkeypatch):
    launch = reproduce._launch

    def broken(job):
        process = launch(job)
        if "blocks" in job.folder.name:
            process.kill()
        return process

    monkeypatch.setattr(reproduce, "_launch", broken)
    with pytest.raises(ValueError, match=r"beauty-blocks-adagrad-0 ended with code -9"):
        compare(data, tmp_path / "out")
    assert [row["sampler"] for row in rows(tmp_path / "out")] == ["full"]


def test_a_folder_that_is_there_is_used(tmp_path, data, launched):
    out = tmp_path / "out"
    for sampler in ("full", "blocks"):
        finished(out, Trial("beauty", sampler, "adagrad", 0))
    (out / "runs" / "notes-1a").mkdir()
    printed = compare(None, out)
    assert launched == []
    assert [row["seconds"] for row in rows(out)] == ["10.00", "10.00"]
    assert printed.count("PASS") == 2


def test_results_of_another_session_are_used(tmp_path, data, launched):
    """The tables alone say what is finished, and draw the same figure; a folder comes before them."""
    there, out = tmp_path / "there", tmp_path / "out"
    for sampler in ("full", "blocks"):
        finished(there, Trial("beauty", sampler, "adagrad", 0))
    printed = compare(None, there)
    out.mkdir()
    for name in (quality.FILE, quality.CURVES):
        (out / name).write_bytes((there / name).read_bytes())
    assert compare(None, out).replace(str(out), str(there)) == printed
    assert launched == []
    assert quality.results(out) == quality.results(there)
    assert (out / "quality.png").read_bytes() == (there / "quality.png").read_bytes()
    finished(out, Trial("beauty", "full", "adagrad", 0), loss=4.0)
    assert [result.loss for result in quality.results(out)] == [4.0, 5.0]
    (out / quality.FILE).write_text("dataset,loss\nbeauty,3\n")
    with pytest.raises(ValueError, match="must have the columns dataset, sampler, optimizer, seed, heldout_loss"):
        quality.results(out)


def test_a_folder_with_other_settings_is_refused(tmp_path, data, monkeypatch):
    out = tmp_path / "out"
    trial = Trial("beauty", "full", "adagrad", 0)
    finished(out, trial)
    monkeypatch.setitem(quality.DATASETS, "beauty", {**quality.DATASETS["beauty"], "epochs": 3})
    with pytest.raises(ValueError, match=r"beauty-full-adagrad-0 was trained with epochs=2 instead of epochs=3"):
        compare(data, out)


@pytest.mark.parametrize(
    "change", ["fewer steps", "an earlier evaluation", "a part of the examples", "a probe", "another cut-off"]
)
def test_only_complete_runs_count(tmp_path, data, change):
    folder = finished(tmp_path, Trial("beauty", "full", "adagrad", 0))
    assert len(quality.results(tmp_path)) == 1
    evaluation = json.loads((folder / "evaluation.json").read_text())
    if change == "fewer steps":
        lines = (folder / "metrics.csv").read_text().splitlines()
        (folder / "metrics.csv").write_text("\n".join(lines[:-1]))
        evaluation["step"] = 4
    elif change == "an earlier evaluation":
        evaluation["step"] = 4
    elif change == "a part of the examples":
        evaluation["examples"] = 50
    elif change == "a probe":
        evaluation["probe"] = 4
    else:
        evaluation["recall@10"] = evaluation.pop("recall@20")
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    assert quality.results(tmp_path) == []


def test_missing_runs_are_shown_as_missing(tmp_path, data):
    out = tmp_path / "out"
    assert summarise(out, 2).count("missing │") == 2 * 8
    assert not (out / "quality.png").exists()
    assert rows(out) == []
    finished(out, Trial("beauty", "blocks", "adagrad", 1))
    finished(out, Trial("beauty", "full", "adagrad", 0))
    printed = summarise(out, 2)
    assert "1 (0 missing)" in printed
    assert "PASS" not in printed
    assert "FAIL" not in printed
    assert (out / "quality.png").exists()


def results(sampler, losses, recalls, seconds=10.0):
    found = []
    for seed, (loss, recall) in enumerate(zip(losses, recalls, strict=True)):
        trial = Trial("beauty", sampler, "adam", seed)
        found.append(quality.Result(trial, loss, recall, 0.1, 0.2, seconds, 8, 0.01, ()))
    return found


def test_verdicts():
    full = results("full", (5.0, 5.2, 5.1), (0.30, 0.32, 0.31), seconds=20.0)
    near = quality.compare(results("blocks", (5.01, 5.22, 5.12), (0.30, 0.31, 0.32)), full)
    assert near.loss.mean == pytest.approx(0.05 / 3)
    assert near.loss.error == pytest.approx(0.01 / 3)
    assert near.time == 0.5
    assert near.loss_passes
    assert near.recall_passes  # the differences 0, -0.01 and 0.01 have the mean 0
    far = quality.compare(results("uniform", (5.03, 5.23, 5.13), (0.29, 0.31, 0.30)), full)
    assert not far.loss_passes
    assert not far.recall_passes
    below = quality.compare(results("blocks", (4.0, 4.0, 4.0), (0.31, 0.32, 0.29)), full)
    assert below.loss_passes
    assert below.recall_passes  # 0.0033 below in the mean, less than its standard error
    diverged = quality.compare(results("blocks", (math.nan,), (math.nan,)), full)
    assert not diverged.loss_passes
    assert not diverged.recall_passes
    assert quality.compare([], full) is None


def test_estimates():
    assert quality.estimate([1.0, 3.0]) == Estimate(2.0, 1.0)
    assert quality.estimate([1.0]).text() == "1.0000"
    assert quality.estimate([1.0, 3.0]).text("+") == "+2.0000 ± 1.0000"


def test_what_is_trained():
    found = quality.trials(list(quality.DATASETS), list(quality.OPTIMIZERS), list(quality.SAMPLERS), 3)
    assert len(found) == len({trial.name for trial in found}) == 6 * 3 * 3
    assert found[0].name == "dig-full-adagrad-0"
    files = {"--interactions": Path("train.txt"), "--heldout": Path("test.txt")}
    options = " ".join(quality._training(Trial("diginetica", "uniform", "adam", 1), files, Path("folder")))
    assert options == (
        "train next-item --interactions train.txt --heldout test.txt --evaluations 4 --model feed-forward "
        "--batch 512 --split last --dropout 0.1 --epochs 3 --sampler uniform --scope batch --num-samples 4096 "
        "--optimizer adam --lr 0.002 --seed 1 --threads 1 --out folder --resume"
    )
    assert "--dropout 0.5 --epochs 20 --user-first --sampler blocks --optimizer adagrad --lr 0.01" in " ".join(
        quality._training(Trial("beauty", "blocks", "adagrad", 0), files, Path("folder"))
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "DATA"], "no file train.txt* in"),
        ([], "--data must be the folder with the files of diginetica"),
        (["--datasets", "synth"], "--datasets must be one of 'diginetica', 'beauty', 'ptb', got 'synth'"),
        (["--datasets", "ptb", "--optimizers", "adam"], "nothing compares adam on ptb"),
        (["--samplers", "full"], "--samplers must be one of 'blocks', got 'full'"),
        (["--optimizers", "sgd"], "--optimizers must be one of"),
    ],
)
def test_errors_are_one_line(tmp_path, data, launched, monkeypatch, capsys, options, message):
    options = [str(data) if option == "DATA" else option for option in options]
    monkeypatch.setattr(sys, "argv", ["manyclass", "reproduce", "quality", "--out", str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert launched == []


def test_only_report_trains_nothing(tmp_path, data, launched, monkeypatch, capsys):
    out = tmp_path / "out"
    finished(out, Trial("beauty", "full", "adam", 0))
    arguments = ["manyclass", "reproduce", "quality", "--out", str(out), "--only-report", "--datasets", "beauty"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    assert stopped.value.code == 0
    assert launched == []
    printed = capsys.readouterr().out
    assert printed.count("Amazon Beauty") == 3
    assert "missing" in printed


def test_language_models_are_compared_too(tmp_path, data, launched, monkeypatch):
    """A text is trained by another command, whose AdamW is torch's own with the full softmax: no row waits."""
    folder = data / "ptb"
    folder.mkdir()
    for name in ("ptb.train.txt", "ptb.valid.txt"):
        (folder / name).write_text(" ".join(f"w{place * place % 37}" for place in range(1500)))
    monkeypatch.setitem(quality.DATASETS, "ptb", {**quality.DATASETS["ptb"], "batch": 8, "length": 10})
    out = tmp_path / "out"
    wanted = quality.trials(["ptb"], ["adamw"], ["full", "blocks"], 1)
    quality.sweep(wanted, data, out, 2, Console(file=io.StringIO()))
    assert {(row["dataset"], row["sampler"]) for row in rows(out)} == {("ptb", "full"), ("ptb", "blocks")}
    for trial in wanted:
        settings = json.loads((out / "runs" / trial.name / "config.json").read_text())["settings"]
        assert (settings["optimizer"], settings["tied"]) == ("adamw", True)
        saved = load_file(next((out / "runs" / trial.name).glob("checkpoint-*/state-*.safetensors")))
        waiting = [name for name in saved if name.endswith("row_step")]
        assert bool(waiting) == (trial.sampler == "blocks")
