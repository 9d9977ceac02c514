"""Time to quality, in miniature: real processes, a tiny text."""

import math

import pytest
from rich.console import Console

from manyclass.experiments import pace, reproduce
from manyclass.experiments.pace import Dataset, Row
from manyclass.train.settings import LanguageSettings
from manyclass.train.training import TASKS

METHODS = ("full", "blocks")


@pytest.fixture
def data(tmp_path, monkeypatch):
    words = " ".join(f"w{number * number % 37}" for number in range(3000))
    (tmp_path / "words.txt").write_text(words)
    monkeypatch.setitem(pace.DATASETS, "text8", Dataset("words", "--batch 4 --length 5", "words.txt", 4))
    return tmp_path


def test_methods_are_trained_once_and_compared(data, tmp_path, monkeypatch):
    out, console = tmp_path / "out", Console(width=200, record=True)
    out.mkdir()
    pace.sweep(["text8"], METHODS, data, out, None, console)
    rows = pace.read(out)
    assert [row.step for row in rows] == [*range(5), *range(13)]  # the sampled run is three times as long
    assert {row.classes for row in rows} == {len({f"w{number * number % 37}" for number in range(37)}) + 1}
    assert [path.name for path in (out / "pace").iterdir()] == []
    monkeypatch.setattr(reproduce, "_launch", lambda job: pytest.fail("trained again"))
    pace.sweep(["text8"], METHODS, data, out, None, console)
    pace.summarise(["text8"], None, out, console)
    text = console.export_text()
    assert "loss in 4 steps" in text
    assert "blocks" in text
    assert (out / pace.PLOT).read_bytes()[:4] == b"\x89PNG"


def test_other_numbers_of_steps_are_other_runs(data, tmp_path):
    rows = [Row("text8", "full", 7, 10, 0, 0.0, 0.0, 2.0)]
    pace.write(rows, tmp_path)
    assert pace.read(tmp_path) == rows
    assert "--steps 9 " in " ".join(pace.arguments("text8", "full", 9, data, tmp_path))
    assert "--steps 27 " in " ".join(pace.arguments("text8", "in_batch", 9, data, tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no file words\.txt below --data None"):
        pace.arguments("text8", "full", 9, None, tmp_path)


def test_time_to_the_goal_lies_between_two_evaluations():
    def curve(method, step_seconds, losses):
        return [
            Row("text8", method, 2, 10, step, 2 * step * step_seconds, step * step_seconds, loss)
            for step, loss in enumerate(losses)
        ]

    full = curve("full", 10.0, [5.0, 3.0, 4.0])  # the lowest loss is the goal, not the last
    blocks = curve("blocks", 1.0, [5.0, 3.5, 4.5, 2.5])
    uniform = curve("unigram pool", 0.5, [5.0, 4.9, 4.8, 4.7])
    assert pace.results([*blocks, *uniform]) == []
    found = {one.method: one for one in pace.results([*full, *blocks, *uniform])}
    assert found["full"].cpu_seconds == 10.0
    assert found["blocks"].cpu_seconds == 2.75
    assert found["blocks"].seconds == 5.5
    assert (found["blocks"].same_steps, found["blocks"].lowest) == (3.5, 2.5)
    assert found["blocks"].milliseconds == 1000.0
    assert math.isinf(found["unigram pool"].cpu_seconds)


@pytest.mark.parametrize("name", pace.DATASETS)
def test_the_options_exist(name, tmp_path):
    (tmp_path / "text8").mkdir()
    (tmp_path / "text8" / "text8.xz").touch()
    (tmp_path / "linux-identifiers").mkdir()
    (tmp_path / "linux-identifiers" / "idents.txt").touch()
    fields = set(LanguageSettings.__dataclass_fields__)
    assert TASKS["lm"][0] is LanguageSettings
    for method in pace.METHODS:
        words = pace.arguments(name, method, 5, tmp_path, tmp_path / "run")
        assert {word[2:].replace("-", "_") for word in words if word.startswith("--")} <= fields
