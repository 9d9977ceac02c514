"""Files of a run that somebody planted, cut short or edited: no code runs, and errors are one line."""

import io
import json
import os
import pickle
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_torchrun import run as torchrun
from test_training import settings_of, write_documents, write_items, write_sequences, write_text

from manyclass import __main__
from manyclass.train import training
from manyclass.train.run import CHECKPOINT, Run

TASKS = ("lm", "next-item", "classify")
#: Runs with further files, and what task they are of: several ranks, and attributes of items.
OTHERS = {"sharded": "lm", "tower": "next-item"}
TOWER = ("--items", "items.csv", *(part for name in ("kind", "title:text") for part in ("--item-feature", name)))
QUERIES = {"lm": "w1 w2", "next-item": "3 4", "classify": "1:1 20:2"}
CLASSES = {"lm": "w1", "next-item": "3", "classify": "1"}
FILES = {
    "lm": ("--text", write_text),
    "next-item": ("--interactions", write_sequences),
    "classify": ("--data", write_documents),
}
SMALL = ("--features", 8, "--batch", 4, "--steps", 4, "--evaluations", 2, "--num-samples", 16, "--threads", 1)


def options(task, folder):
    """The command that trains a small run on the files in a folder."""
    name, _ = FILES[task]
    more = {"lm": ("--length", 5), "next-item": ("--history", 5), "classify": ()}[task]
    (data,) = folder.glob("*.txt")
    tower = TOWER if (folder / "items.csv").exists() else ()
    return ["train", task, name, data.name, *SMALL, *more, *tower, "--out", "run"]


def call(*arguments, cwd):
    """Run a command in this process: its exit code, and its errors."""
    errors, before, here = io.StringIO(), sys.argv, Path.cwd()
    sys.argv = ["manyclass", *map(str, arguments)]
    os.chdir(cwd)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            __main__.main()
    finally:
        sys.argv = before
        os.chdir(here)
    return ended.value.code, errors.getvalue()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each task, one of two processes, and one of an item tower."""
    made = {}
    for name in (*TASKS, *OTHERS):
        made[name] = folder = tmp_path_factory.mktemp(name)
        task = OTHERS.get(name, name)
        FILES[task][1](folder)
        if name == "tower":
            write_items(folder)
        command = options(task, folder)
        if name == "sharded":
            torchrun(2, *command, cwd=folder)
        else:
            assert call(*command, cwd=folder) == (0, "")
        assert call("evaluate", "run", cwd=folder) == (0, "")
    return made


def uses(task, folder):
    """Everything that reads a run."""
    yield ["evaluate", "run", "--k", 3]
    yield ["predict", "run", QUERIES[task]]
    yield ["export", "run", "--out", "export"]
    yield ["report", "run", "--out", "report.html"]
    yield [*options(task, folder), "--resume"]
    yield ["similar", "run", CLASSES[task]]
    if not (folder / "items.csv").exists():  # a tower takes no weights of another run
        yield [*options(task, folder)[:-1], "other", "--init", "run"]


def copied(runs, name, folder):
    """A copy of a run, its task, and its files."""
    shutil.copytree(runs[name], folder, symlinks=True)
    files = sorted(path for path in (folder / "run").rglob("*") if path.is_file())
    return OTHERS.get(name, name), files


class Attack:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def attacks(marker):
    """Bytes that run code in readers that trust them."""
    yield pickle.dumps(Attack(marker))
    for save in (torch.save, lambda content, file: np.save(file, np.array([content, None], dtype=object))):
        file = io.BytesIO()
        save(Attack(marker), file)
        yield file.getvalue()


def test_the_attack_is_real(tmp_path):
    for number, content in enumerate(attacks(tmp_path / "marker")):
        file = io.BytesIO(content)
        if number == 0:
            pickle.load(file)
        elif number == 1:
            torch.load(file, weights_only=False)
        else:
            np.load(file, allow_pickle=True)
        (tmp_path / "marker").unlink()


@pytest.mark.parametrize("name", [*TASKS, *OTHERS])
def test_no_file_of_a_run_can_execute_code(runs, name, tmp_path):
    """The attack stands in place of each file, and under names that torch's readers look for."""
    marker = tmp_path / "marker"
    task, files = copied(runs, name, tmp_path / "copy")
    checkpoints = Run(tmp_path / "copy" / "run").checkpoints()
    names = (".metadata", "state.pt", "model.pt", "__0_0.distcp")
    extra = [checkpoint / other for checkpoint in checkpoints for other in names]
    for file in [*files, *extra]:
        before = file.read_bytes() if file in files else None
        for content in attacks(marker):
            file.write_bytes(content)
            # The others load as evaluate does.
            evaluate, _, _, report, resume, *_ = uses(task, tmp_path / "copy")
            for command in (evaluate, resume, report)[: 3 if file.parent.name == "run" else 2]:
                code, errors = call(*command, cwd=tmp_path / "copy")
                assert not marker.exists(), file
                assert code in (0, 2), (file, command, errors)
                if file in extra:
                    assert (code, errors) == (0, ""), (file, command)
        if before is not None:
            file.write_bytes(before)


#: More are tried with other numbers: MUTATIONS=5000 pytest tests/test_safety.py -k changed
MUTATIONS = int(os.environ.get("MUTATIONS", "60"))
DEEP = b"[" * 100_000
CONTENTS = [
    b"",
    b"\x00" * 64,
    b"{}",
    b"[]",
    b"null",
    b'{"format": 99}',
    DEEP,
    b"\xff\xfe",
    b"PAR1" + b"\0" * 20 + b"PAR1",
]
VALUES = [None, True, -1, 0, 1, 3, 10**30, 1.5, float("nan"), float("inf"), "", "x", "../x", [], ["x"], {}, {"a": {}}]


def edited(data, file):
    """A JSON file with one entry changed, dropped or added."""
    content = json.loads(file.read_text())
    places = [(content, key) for key in content]
    for value in content.values():
        if isinstance(value, dict):
            places += [(value, key) for key in value]
    where, key = data.draw(st.sampled_from(places))
    what = data.draw(st.sampled_from(["change", "drop", "add"]))
    if what == "drop":
        del where[key]
    else:
        where[key if what == "change" else f"{key}2"] = data.draw(st.sampled_from(VALUES))
    return json.dumps(content).encode()


def mutate(data, file):
    """Change a file as accidents and people do."""
    content = file.read_bytes()
    kinds = ["cut", "flip", "replace", "delete", "folder", "link", *["edit"] * (3 * (file.suffix == ".json"))]
    kind = data.draw(st.sampled_from(kinds))
    if kind == "edit":
        file.write_bytes(edited(data, file))
    elif kind == "cut":
        file.write_bytes(content[: data.draw(st.integers(0, max(0, len(content) - 1)))])
    elif kind == "flip":
        changed = bytearray(content)
        end = data.draw(st.sampled_from([200, 2000, len(content)]))  # headers are where the structure is
        for place in data.draw(st.lists(st.integers(0, min(len(content), end) - 1), min_size=1, max_size=4)):
            changed[place] = data.draw(st.integers(0, 255))
        file.write_bytes(changed)
    elif kind == "replace":
        file.write_bytes(data.draw(st.sampled_from(CONTENTS)))
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
        elif kind == "link":
            file.symlink_to(data.draw(st.sampled_from([file.name, "/dev/null", "/dev/zero", "/nowhere"])))
    return kind


@settings(
    max_examples=MUTATIONS,
    deadline=None,
    derandomize=MUTATIONS == 60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), name=st.sampled_from([*TASKS, *OTHERS]))
def test_a_changed_file_never_gives_a_traceback(runs, tmp_path_factory, data, name):
    folder = tmp_path_factory.mktemp("mutated") / "copy"
    task, files = copied(runs, name, folder)
    file = data.draw(st.sampled_from(files))
    kind = mutate(data, file)
    command = data.draw(st.sampled_from(list(uses(task, folder))))
    code, errors = call(*command, cwd=folder)
    where = f"{file.relative_to(folder)}, {kind}, {command[0]}: {errors}"
    if code != 0:
        assert code == 2, where
        assert errors.startswith("manyclass: "), where
        assert errors.count("\n") == 1, where
        assert len(errors) < 600, where
    shutil.rmtree(folder)


def lines(run, *, array=None, config=None, setting=None):
    """Change a number of an array, or entries of the config, and return what `evaluate` says."""
    if array:
        name, place, value = array
        numbers = np.load(run / "data" / name)
        numbers[place] = value
        np.save(run / "data" / name, numbers)
    content = json.loads((run / "config.json").read_text())
    content |= config or {}
    content["settings"] |= setting or {}
    (run / "config.json").write_text(json.dumps(content))
    code, errors = call("evaluate", "run", cwd=run.parent)
    assert code == 2
    return errors


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("lm", {"array": ("train.npy", 5, 12)}, r"data/train.npy: 12 is not in \[0, 12\)"),
        ("lm", {"array": ("train.npy", 5, -1)}, r"data/train.npy: -1 is not in \[0, 12\)"),
        ("next-item", {"array": ("train.values.npy", 0, 99)}, r"train.values.npy: 99 is not in \[0, 23\)"),
        ("next-item", {"array": ("train.offsets.npy", 1, 10**6)}, "data/train: the offsets do not fit the values"),
        ("classify", {"array": ("train.features.values.npy", 0, 99)}, r"99 is not in \[0, 35\)"),
        ("lm", {"config": {"format": 1}}, "config.json: has format 1, but this version reads 3"),
        ("lm", {"config": {"task": "paint"}}, "config.json: unknown task 'paint'"),
        ("lm", {"config": {"num_classes": 13}}, "vocabulary.parquet: has 12 classes, the run 13"),
        ("lm", {"config": {"vocabulary": "0"}}, "vocabulary.parquet: not the file that the run was begun with"),
        ("lm", {"setting": {"features": "8"}}, "setting 'features' must be of type int, got '8'"),
        ("lm", {"setting": {"features": True}}, "setting 'features' must be of type int, got True"),
        ("lm", {"setting": {"sampler": "x" * 500}}, "setting 'sampler' must be one of 'full', .*x…'$"),
        ("lm", {"setting": {"dropout": 2}}, r"setting 'dropout' must be in \[0.0, 0.95\], got 2"),
        ("lm", {"setting": {"color": "red"}}, "unknown setting 'color'; a newer version may have written it"),
        ("lm", {"setting": {"features": 16}}, "cannot be used: RuntimeError: Error.* in loading state_dict"),
    ],
)
def test_what_is_wrong_is_said(runs, task, change, message, tmp_path):
    copied(runs, task, tmp_path / "copy")
    errors = lines(tmp_path / "copy" / "run", **change)
    assert re.search(message, errors.rstrip()), errors


def test_a_checkpoint_of_another_run_is_refused(runs, tmp_path):
    copied(runs, "lm", tmp_path / "copy")
    copied(runs, "classify", tmp_path / "other")
    (ours,), (theirs,) = ((tmp_path / name / "run").glob(f"{CHECKPOINT}*") for name in ("copy", "other"))
    shutil.rmtree(ours)
    theirs.rename(ours)
    code, errors = call("evaluate", "run", cwd=tmp_path / "copy")
    assert code == 2
    assert f"{ours.name}: has 10 classes, the run 12" in errors


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path):
    """The limit of the size of files stands for the end of the disk; the child lowers it after its first checkpoint."""
    resource = pytest.importorskip("resource")
    settings = settings_of("lm", tmp_path, steps=3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fill(training.Observer):
        def step(self, step, steps, last):
            if step == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))

    try:
        with pytest.raises(OSError, match=r"model-0.safetensors cannot be written: .*too large"):
            training.train(training.prepare("lm", settings), Fill())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run = Run(tmp_path / "run")
    assert [path.name for path in run.checkpoints()] == [f"{CHECKPOINT}000000001"]
    assert training.load(run)[2] == 1
    assert not list(run.folder.glob(".*"))
