"""The command line under torchrun: every task, resuming, faults."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_commands import ENVIRONMENT, command, manyclass, write_text
from test_training import write_documents, write_sequences

from manyclass.train import training
from manyclass.train.run import Run

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")


def torchrun(processes, *arguments, restarts=0):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *launch, "--max-restarts", str(restarts), "-m", "manyclass", *map(str, arguments)]


def run(processes, *arguments, cwd, code=0):
    """Run a command on some processes; returns what it printed and its errors."""
    found = subprocess.run(
        torchrun(processes, *arguments), capture_output=True, text=True, timeout=240, cwd=cwd, env=ENVIRONMENT
    )
    assert (found.returncode == 0) == (code == 0), found.stderr + found.stdout
    return found.stdout, found.stderr


def start(arguments, cwd):
    """A command that goes on by itself."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, cwd=cwd, env=ENVIRONMENT, **pipes)


def metrics(folder):
    """What a run measured, without its times."""
    with (folder / "metrics.csv").open() as file:
        return [
            {key: value for key, value in row.items() if key not in ("seconds", "cpu_seconds")}
            for row in csv.DictReader(file)
        ]


def workers(launcher):
    """The processes that a torchrun started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def wait_for_step(folder, step, launcher):
    """Until a run has a checkpoint of at least this step."""
    for _ in range(1200):
        found = [int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")]
        if max(found, default=-1) >= step:
            return
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    raise AssertionError("the run does not go on")


# AdamW has more state than the other optimisers, and some of it is not by rows.
LONG = ("--features", 16, "--batch", 8, "--num-samples", 64, "--length", 5, "--timeout", 20, "--optimizer", "adamw")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of two processes, and the options that it had."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_text(folder)
    options = (
        "train",
        "lm",
        "--text",
        "text.txt",
        *LONG,
        "--lr",
        0.01,
        "--steps",
        200,
        "--evaluations",
        3,
        "--checkpoint-every",
        20,
    )
    printed, _ = run(2, *options, "--out", "run", cwd=folder)
    assert printed.count("held-out examples") == 1  # the first process speaks, the other does not
    return folder, options


@pytest.mark.parametrize("task", ["next-item", "classify"])
def test_every_task(task, tmp_path):
    """Batches whose last one leaves a process without examples; the run is evaluated and used by one process."""
    if task == "next-item":
        data = ("--interactions", write_sequences(tmp_path, 33), "--history", 5)
    else:
        data = ("--data", write_documents(tmp_path, 82))  # 73 to train on, 8 in a batch
    options = ("--batch", 8, "--features", 16, "--epochs", 2, "--evaluations", 2, "--out", "run")
    run(2, "train", task, *data, *options, cwd=tmp_path)
    rows = metrics(tmp_path / "run")
    assert float(rows[-1]["heldout_loss"]) < float(rows[0]["heldout_loss"])
    model, loaded, _ = training.load(Run(tmp_path / "run"))
    assert len(loaded.batch(loaded.steps_per_epoch - 1).target) == 1 or task == "next-item"
    found = training.evaluate(model, loaded)["loss"]
    assert found == pytest.approx(float(rows[-1]["heldout_loss"]), abs=1e-5)


def test_a_seed_gives_the_same_run(uninterrupted, tmp_path):
    folder, options = uninterrupted
    write_text(tmp_path)
    run(2, *options, "--out", "run", cwd=tmp_path)
    assert metrics(tmp_path / "run") == metrics(folder / "run")


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_process_that_dies(restarts, uninterrupted, tmp_path):
    """The job ends with a message and is resumed by hand, or torchrun starts it anew: the same numbers either way."""
    folder, options = uninterrupted
    write_text(tmp_path)
    launcher = start(torchrun(2, *options, "--out", "run", restarts=restarts), tmp_path)
    wait_for_step(tmp_path / "run", 40, launcher)
    os.kill(workers(launcher)[1], signal.SIGKILL)
    printed, errors = launcher.communicate(timeout=120)
    assert (launcher.returncode == 0) == bool(restarts), errors + printed
    if not restarts:
        assert len(metrics(tmp_path / "run")) < 4
        with pytest.raises(AssertionError, match="holds a run already"):
            run(2, *options, "--out", "run", cwd=tmp_path)
        run(2, *options, "--out", "run", "--resume", cwd=tmp_path)
    assert metrics(tmp_path / "run") == metrics(folder / "run")
    weights = [training.load(Run(place / "run"))[0].weights() for place in (tmp_path, folder)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_a_process_that_hangs_ends_the_job(uninterrupted, tmp_path):
    """Within the timeout, and the others say so."""
    _, options = uninterrupted
    write_text(tmp_path)
    launcher = start(torchrun(2, *options, "--out", "run"), tmp_path)
    wait_for_step(tmp_path / "run", 20, launcher)
    hanging = workers(launcher)[1]
    os.kill(hanging, signal.SIGSTOP)
    started = time.monotonic()
    try:
        while "lost contact" not in (line := launcher.stderr.readline()):
            assert line, "the job ended without a message"
        assert time.monotonic() - started < 60
        assert re.search(
            r"manyclass: rank 0 of 2 lost contact while it exchanged .*: another process died, hangs", line
        )
    finally:
        os.kill(hanging, signal.SIGCONT)
    launcher.communicate(timeout=100)
    assert launcher.returncode != 0


def test_stopped_and_resumed_by_another_number_of_processes(uninterrupted, tmp_path):
    """Ctrl-C writes a checkpoint; one process goes on from it, then three; it learns about as well."""
    folder, options = uninterrupted
    write_text(tmp_path)
    launcher = start(torchrun(2, *options, "--out", "run"), tmp_path)
    wait_for_step(tmp_path / "run", 20, launcher)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=100)
    model, _, step = training.load(Run(tmp_path / "run"))
    before = model.head.weight.detach().clone()
    assert 20 < step < 200
    single = start(command(*options, "--out", "run", "--resume"), tmp_path)
    wait_for_step(tmp_path / "run", step + 1, single)
    single.send_signal(signal.SIGINT)
    single.communicate(timeout=60)
    model, _, later = training.load(Run(tmp_path / "run"))
    assert step < later < 200
    assert 0 < float((model.head.weight - before).detach().abs().max()) < 1
    run(3, *options, "--out", "run", "--resume", cwd=tmp_path)
    losses = [float(metrics(place / "run")[-1]["heldout_loss"]) for place in (tmp_path, folder)]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    printed = manyclass("evaluate", "run", cwd=tmp_path)
    assert "step 200" in printed


def test_refused(tmp_path):
    write_text(tmp_path)
    _, errors = run(2, "train", "lm", "--text", "text.txt", "--tied", cwd=tmp_path, code=2)
    assert "manyclass: --tied needs all class weights in every process" in errors
    assert "Traceback" not in errors.split("ChildFailedError")[0].split("torch/distributed")[0]
    _, errors = run(2, "train", "lm", "--text", "missing.txt", cwd=tmp_path, code=2)
    assert errors.count("missing.txt") == 1


@pytest.mark.parametrize(
    ("name", "processes", "printed"), [("train.py", 2, "on rank 1 of 2"), ("mesh.py", 4, "[50000, 64]")]
)
def test_scripts_of_the_docs(name, processes, printed, tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "scaling-out.md").read_text()
    (block,) = re.findall(rf"```python\n# {name}\n(.*?)```", page, re.S)
    script = tmp_path / name
    # Ends as processes of gloo should in tests: torch's teardown can deadlock.
    script.write_text(block + "\nfrom manyclass.train.processes import leave\nleave(0)\n")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(script)]
    found = subprocess.run(
        [sys.executable, "-u", *launch],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
    )
    assert found.returncode == 0, found.stderr
    assert printed in found.stdout


def test_bench_distributed(tmp_path):
    options = ("--classes", 2000, "--processes", 1, "--processes", 2, "--out", "out")
    printed = manyclass("bench", "distributed", *options, cwd=tmp_path)
    assert "on paper: 1e+08 classes" in printed
    with (tmp_path / "out" / "distributed.csv").open() as file:
        one, unsharded, two = csv.DictReader(file)
    assert [row["layer"] for row in (one, unsharded, two)] == ["sharded", "unsharded", "sharded"]
    assert one["bytes_sent"] == unsharded["bytes_sent"] == "0"
    # 256 examples each: queries there and gradients back, a target, two terms and two slopes, and a count.
    assert int(two["bytes_sent"]) == 256 * (2 * 64 * 4 + 8 + 4 * 4) + 8
    assert 2 * int(two["weight_bytes"]) == int(one["weight_bytes"]) == 2000 * 64 * 4
    assert (tmp_path / "out" / "distributed.png").stat().st_size > 10_000
