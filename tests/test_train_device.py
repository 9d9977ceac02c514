"""Training, evaluation and prediction on a second device, by `--device`."""

import math

import pytest
import torch
from strict_device import DEVICE, StrictTensor, strict_device
from test_safety import call
from test_training import CASES, settings_of, train

from manyclass import ops
from manyclass.cli import options
from manyclass.train import Run, load, training
from manyclass.train.evaluation import evaluate
from manyclass.train.run import Metrics

QUERIES = {"lm": "w1 w2 w3", "next-item": "3 4 5", "classify": "1:1 20:2"}
PLACE = str(DEVICE)


@pytest.fixture
def device(monkeypatch):
    """The strict device; native operations are off, so that the CPU computes the same."""
    monkeypatch.setattr(ops, "_NATIVE", False)
    with torch.sparse.check_sparse_tensor_invariants(False), strict_device() as mode:
        yield mode


def figures(rows):
    """What was measured, without times."""
    names = [name for name in Metrics._fields if "seconds" not in name]
    return [[getattr(row, name) or 0 for name in names] for row in rows]


class Stop(training.Observer):
    """Stop after two steps."""

    def step(self, step, steps, last):
        self.step_done = step

    def stopped(self):
        return getattr(self, "step_done", 0) >= 1


@pytest.mark.parametrize("name", QUERIES)
def test_a_run_on_another_device_is_that_of_the_cpu(device, name, tmp_path):
    found = {}
    for place in ("cpu", PLACE):
        (tmp_path / place).mkdir()
        rows, task = train(name, tmp_path / place, steps=2, evaluations=1, num_samples=8, dropout=0.0, device=place)
        run = Run(tmp_path / place / "run")
        model = load(run, place)[0]
        assert {type(value) is StrictTensor for value in model.state_dict().values() if value.dim()} == {place != "cpu"}
        (best,) = model.predict([QUERIES[name]], 3, exclude_seen=name == "next-item")
        measured = evaluate(model, task, k=(1, 5), test=name == "next-item", exclude_seen=name == "next-item")
        found[place] = figures(rows), [one.score for one in best], list(measured.values())
        elsewhere = load(run)[0].predict([QUERIES[name]], 3, exclude_seen=name == "next-item")[0]
        assert [one.name for one in elsewhere] == [one.name for one in best]
    for here, there in zip(*found.values(), strict=True):
        torch.testing.assert_close(torch.tensor(there), torch.tensor(here), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), [CASES[0], CASES[1], CASES[4], CASES[7], CASES[10], CASES[13]])
def test_a_stopped_run_resumes_on_another_device(device, name, options, tmp_path):
    options = {**options, "num_samples": 5}
    settings = settings_of(name, tmp_path, steps=3, device=PLACE, **options)
    assert len(training.train(training.prepare(name, settings), Stop())) < 4
    for place in (PLACE, "cpu"):
        settings = settings_of(name, tmp_path, steps=3, resume=True, device=place, **options)
        rows = training.train(training.prepare(name, settings))
        assert [row.step for row in rows] == [0, 1, 2, 3]
        assert all(math.isfinite(row.heldout_loss) for row in rows)


def test_a_device_that_is_not_there_ends_the_command_first(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("the device is there")
    (tmp_path / "text.txt").write_text("a b c d " * 200)
    for place in ("cuda", "gpu"):
        code, errors = call("train", "lm", "--text", "text.txt", "--device", place, cwd=tmp_path)
        (error,) = errors.splitlines()
        assert (code, error.startswith(f"manyclass: --device '{place}' cannot be used")) == (2, True)
    assert not (tmp_path / "run").exists()


def test_the_output_says_that_no_gpu_was_tried(capsys):
    options.warn_of_device("meta")
    assert capsys.readouterr().err == (
        "device meta: tested on a simulated device only, not on a GPU; compare with --device cpu\n"
    )
    options.warn_of_device("cpu")
    assert capsys.readouterr().err == ""
