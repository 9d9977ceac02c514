"""Tasks, models and the training loop, in this process."""

import csv
import errno
import math
import os
import subprocess

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from manyclass import functional
from manyclass.train import baselines, checkpoint, evaluation, settings, training
from manyclass.train.checkpoint import Header
from manyclass.train.data.spool import Ragged
from manyclass.train.models import LSTM, FeedForward, Transformer
from manyclass.train.run import Run, best
from manyclass.train.settings import ClassifySettings, LanguageSettings, NextItemSettings
from manyclass.train.tasks import TASKS
from manyclass.train.tasks.base import IGNORE, every
from manyclass.train.tasks.next_item import _Part


def write_text(folder, words=3000):
    """A text in which every word follows from the one before."""
    file = folder / "text.txt"
    file.write_text(" ".join(f"w{number % 11}" for number in range(words)))
    return file


def write_sequences(folder, users=60):
    generator = np.random.default_rng(0)
    file = folder / "items.txt"
    lines = [
        " ".join(str((start + step) % 23) for step in range(length))
        for start, length in generator.integers(1, 23, (users, 2))
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def write_items(folder, items=30):
    """Attributes of the items of `write_sequences`, and of some that nobody takes."""
    file = folder / "items.csv"
    lines = [f"{item},{'ab'[item % 2]},{item},thing {item} {item % 5}" for item in range(items)]
    file.write_text("\n".join(["item,kind,price,title", *lines]) + "\n")
    return file


def write_documents(folder, documents=80):
    file = folder / "documents.txt"
    lines = [
        f"{number % 7},{7 + number % 3} {number % 7}:1.5 {20 + number % 3}:2 {30 + number % 5}:0.1"
        for number in range(documents)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def settings_of(name, folder, **options):
    common = {"features": 16, "threads": 1, "evaluations": 3, "out": folder / "run", **options}
    if name == "lm":
        return LanguageSettings(text=[write_text(folder)], batch=4, length=5, **common)
    if common.get("item_feature"):
        common["items"] = write_items(folder)
    if name == "next-item":
        return NextItemSettings(interactions=write_sequences(folder), batch=8, **{"history": 5, **common})
    return ClassifySettings(data=write_documents(folder), batch=8, **common)


def train(name, folder, **options):
    settings = settings_of(name, folder, **options)
    task = training.prepare(name, settings)
    return training.train(task), task


CASES = [
    ("lm", {"dropout": 0.1, "layers": 2}),
    ("lm", {"sampler": "bigram", "num_samples": 3, "tied": True}),
    ("lm", {"sampler": "full", "optimizer": "adam", "lr": 0.01}),
    ("lm", {"tolerance": 0.05, "optimizer": "sgd", "lr": 5.0, "schedule": "exponential"}),
    ("next-item", {"sampler": "uniform", "num_samples": 5}),
    (
        "next-item",
        {"model": "feed-forward", "sampler": "quadratic", "prediction": "absolute", "history": 3, "lr": 0.02},
    ),
    ("next-item", {"sampler": "full", "tied": True, "schedule": "constant"}),
    ("classify", {"sampler": "unigram", "scope": "batch", "power": 0.75}),
    ("classify", {"sampler": "full", "prediction": "absolute"}),
    ("classify", {"optimizer": "adam", "lr": 0.01}),
    ("next-item", {"optimizer": "adamw", "lr": 0.01, "tied": True}),
    ("lm", {"output": "characters", "num_samples": 5, "own": 2, "layers": 2}),
    ("lm", {"output": "characters", "sampler": "in_batch", "tied": True}),
    ("next-item", {"item_feature": ["kind", "price:number", "title:text"], "num_samples": 5, "own": 2}),
    (
        "next-item",
        {"item_feature": ["title:text"], "sampler": "full", "model": "feed-forward", "tied": True, "lr": 0.02},
    ),
    ("lm", {"offsets": True, "num_samples": 5, "own": 2}),
    ("classify", {"offsets": True, "sampler": "full"}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_task_learns_and_writes_its_run(tmp_path, name, options):
    rows, task = train(name, tmp_path, steps=60, **options)
    assert [row.step for row in rows] == [0, 20, 40, 60]
    assert rows[-1].heldout_loss < 0.8 * rows[0].heldout_loss
    if "item_feature" not in options:  # a tower's first embeddings differ, and so do its first outputs
        assert abs(rows[0].heldout_loss - math.log(task.num_classes)) < 0.5
    with (tmp_path / "run" / "metrics.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [float(row["heldout_loss"]) for row in written] == [row.heldout_loss for row in rows]
    full = options.get("sampler") == "full"
    assert (rows[-1].bias is None) == full == (rows[-1].num_samples is None)
    # The loaded model is the trained one, and its loss is that of the last line.
    model, loaded, step = training.load(Run(tmp_path / "run"))
    assert step == 60
    assert training.evaluate(model, loaded)["loss"] == pytest.approx(rows[-1].heldout_loss, abs=1e-6)


def test_every_output_layer_sees_the_same_dropout(tmp_path):
    """A pool of all classes has the gradients of the full softmax, so that only dropout could make a difference."""
    options = {"dropout": 0.5, "model": "feed-forward", "optimizer": "sgd", "steps": 20}
    losses = []
    for layer in ({"sampler": "full"}, {"sampler": "blocks", "num_samples": 100}):
        folder = tmp_path / layer["sampler"]
        folder.mkdir()
        rows, _ = train("next-item", folder, **layer, **options)
        losses.append([row.train_loss for row in rows[1:]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(("name", "options"), CASES[:2] + CASES[3:5] + CASES[9:])
def test_a_stopped_run_goes_on_to_the_same_numbers(tmp_path, name, options):
    class StopAt(training.Observer):
        def __init__(self, at):
            self.at = at

        def step(self, step, steps, last):
            self.at -= 1

        def stopped(self):
            return self.at == 1

    whole = tmp_path / "whole"
    whole.mkdir()
    expected, _ = train(name, whole, steps=30, **options)
    parts = tmp_path / "parts"
    parts.mkdir()
    settings = settings_of(name, parts, steps=30, resume=True, **options)
    stops = []
    for at in (7, 9, 1000):  # after steps 7, 16 and the end: none of them an evaluation
        torch.manual_seed(999)  # whatever the process did before does not matter
        rows = training.train(training.prepare(name, settings), StopAt(at))
        stops += [int(path.name.split("-")[1]) for path in Run(parts / "run").checkpoints()[-1:]]
    assert stops == [7, 16, 30]
    assert len(rows) == len(expected)
    assert 0 < rows[1].cpu_seconds < rows[-1].cpu_seconds  # of all parts
    for row, other in zip(rows, expected, strict=True):
        times = {"seconds": 0, "cpu_seconds": 0}
        assert repr(row._replace(**times)) == repr(other._replace(**times))  # bit for bit, nan too
    weights = [training.load(Run(folder / "run"))[0].weights() for folder in (parts, whole)]
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key]), key


def test_seeds_differ_and_repeat(tmp_path):
    losses = []
    for number, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        losses.append(train("lm", folder, steps=9, seed=seed)[0][-1].heldout_loss)
    assert losses[0] == losses[1] != losses[2]


def test_a_run_cannot_go_on_with_other_settings(tmp_path):
    train("lm", tmp_path, steps=3)
    with pytest.raises(FileExistsError, match="holds a run already: give --resume"):
        training.prepare("lm", settings_of("lm", tmp_path, steps=3))
    with pytest.raises(ValueError, match=r"was begun with lr=0\.05, so it cannot be resumed with lr=0\.5"):
        training.prepare("lm", settings_of("lm", tmp_path, steps=3, lr=0.5, resume=True))
    with pytest.raises(ValueError, match="is a run of lm, not of classify"):
        training.prepare("classify", settings_of("classify", tmp_path, steps=3, resume=True))
    (tmp_path / "run" / "checkpoint-000000003" / "state-0.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"checkpoint-000000003/state-0\.safetensors: .*header"):
        training.load(Run(tmp_path / "run"))


HEADER = Header(world=1, first=0, last=2)


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    run = Run(tmp_path)

    def save(step, content, state):
        with run.checkpoint(step) as folder:
            checkpoint.save(folder, 0, HEADER, content, state)

    def load():
        reader = checkpoint.Reader(run.checkpoints()[-1])
        return [reader.load(kind, 0, (0, 2)) for kind in (checkpoint.WEIGHTS, checkpoint.STATE)]

    save(1, {"a": torch.ones(2)}, {"x": 1})

    def fail(*arguments):
        raise SafetensorError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError, match=r"model-0.safetensors cannot be written: disk full"):
        save(2, {"a": torch.zeros(2)}, {"x": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000001"]
    weights, state = load()
    assert torch.equal(weights["a"], torch.ones(2))
    assert state == {"x": 1}
    monkeypatch.undo()
    save(2, weights, {"x": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000002"]
    save(2, weights, {"x": 3})  # once more
    assert load()[1] == {"x": 3}


def test_a_checkpoint_keeps_every_kind_of_value(tmp_path):
    base = torch.arange(6.0)
    state = {
        "numbers": [1, 2.5, True, None, "text", float("inf"), 0.1 + 0.2],
        "nested": {"empty": {}, "list": [[torch.tensor(7), {"deep": torch.ones(0, 3)}]]},
        "views": [base, base[2:4], base.view(2, 3).T, torch.tensor([1.5]).bfloat16(), torch.tensor([True])],
    }
    checkpoint.save(tmp_path, 0, HEADER, {}, state)
    found = checkpoint.Reader(tmp_path).load(checkpoint.STATE, 0, (0, 2))
    assert found["numbers"] == state["numbers"]
    assert repr(found["nested"]) == repr(state["nested"])
    for one, other in zip(found["views"], state["views"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    with pytest.raises(TypeError, match="a checkpoint cannot hold other: set"):
        checkpoint.save(tmp_path, 0, HEADER, {}, {"other": {1}})


@pytest.mark.parametrize("wanted", [(0, 7), (0, 2), (1, 5), (3, 4), (6, 7), (2, 2)])
def test_any_rank_reads_the_rows_of_its_classes(tmp_path, wanted):
    rows = torch.arange(14.0).view(7, 2)
    for rank, (first, last) in enumerate([(0, 3), (3, 4), (4, 7)]):
        content = {"weight": checkpoint.Rows(rows[first:last].clone()), "own": torch.tensor(rank)}
        checkpoint.save(tmp_path, rank, Header(3, first, last), content, {"rank": rank})
    reader = checkpoint.Reader(tmp_path)
    if wanted[0] == wanted[1]:
        return
    assert (reader.world, reader.num_classes) == (3, 7)
    found = reader.load(checkpoint.WEIGHTS, 1, wanted)
    assert torch.equal(found["weight"], rows[slice(*wanted)])
    assert found["own"] == 1
    (tmp_path / "state-1.safetensors").write_bytes((tmp_path / "state-0.safetensors").read_bytes())
    with pytest.raises(ValueError, match="its files are not of one checkpoint"):
        checkpoint.Reader(tmp_path)


def test_temporary_files_of_dead_processes_are_deleted(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    run = Run(tmp_path)
    for name in (f".{dead.pid}.checkpoint-000000002", f".{os.getpid()}.data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("")
    (tmp_path / f".{dead.pid}.metrics.csv").write_text("")
    kept = [f".{os.getppid()}.evaluation.json", ".hidden", ".5x.y"]
    for name in kept:
        (tmp_path / name).write_text("")
    with run.alone():
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    (tmp_path / f".{os.getpid()}.metrics.csv").mkdir()  # of a process that had the same id
    run.write_metrics([])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "metrics.csv"])


def test_a_failed_reading_leaves_no_run(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("too short a text")
    settings = LanguageSettings(text=[file], min_count=1, out=tmp_path / "run")
    with pytest.raises(ValueError, match="a text of 4 words is too short for --batch 32 and --length 20"):
        training.prepare("lm", settings)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="must be a multiple of the 2 attention heads"):
        train("next-item", tmp_path, features=15)
    assert train("next-item", tmp_path, steps=1)[0]  # in the same folder
    settings.out = tmp_path / "other"
    file.write_text("word another " * 2000)
    assert training.prepare("lm", settings).num_classes == 3


def test_only_one_process_writes_a_run(tmp_path, monkeypatch):
    """While it reads, while it trains, and when the other would resume it; nothing of the other's is left."""
    run = Run(tmp_path / "run")
    with run.alone():
        with pytest.raises(ValueError, match=r"run: another process is writing a run there$"):
            train("lm", tmp_path, steps=2)
        assert list(run.folder.iterdir()) == []
    rows, task = train("lm", tmp_path, steps=2)
    task.settings.resume = True
    with run.alone(), pytest.raises(ValueError, match="another process is writing a run there"):
        training.train(task)
    assert train("lm", tmp_path, steps=2, resume=True)[0] == rows

    def fail(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", fail)  # as on some network file systems: it goes without
    assert train("lm", tmp_path, steps=2, resume=True)[0] == rows


def test_text_is_walked_along(tmp_path):
    task = training.prepare("lm", settings_of("lm", tmp_path))
    streams = np.asarray(task.streams)
    first, second = task.batch(0), task.batch(1)
    assert torch.equal(first.inputs[0], torch.from_numpy(streams[:, :5].astype(np.int64)))
    assert torch.equal(first.target.squeeze(-1), torch.from_numpy(streams[:, 1:6].astype(np.int64)))
    assert torch.equal(first.context, first.inputs[0])
    assert torch.equal(second.inputs[0][:, 0], first.target[:, -1, 0])  # nothing is left out between windows
    assert torch.equal(task.batch(task.steps_per_epoch).inputs[0], first.inputs[0])
    held = torch.cat([batch.target.flatten() for batch in task.heldout()])
    assert len(held) == task.heldout_examples
    assert sum(batch.target.numel() for batch in task.heldout(20)) <= 20 + len(task.heldout_streams)


@pytest.mark.parametrize("model", ["transformer", "feed-forward"])
def test_every_interaction_is_a_target_once_an_epoch(tmp_path, model):
    settings = settings_of("next-item", tmp_path, model=model, history=4, split="last")
    task = training.prepare("next-item", settings)
    lines = [line.split() for line in (tmp_path / "items.txt").read_text().splitlines()]
    names = task.vocabulary.names
    wanted, held = [], []
    for line in lines:
        last = len(line) - (len(line) >= 3)
        wanted += [(tuple(line[max(0, place - 4) : place]), line[place]) for place in range(1, last)]
        held += [(tuple(line[max(0, len(line) - 5) : -1]), line[-1])] if len(line) >= 3 else []

    def examples(batches):
        found = []
        for (items, _), target, *_ in batches:
            for row, right in zip(items.tolist(), target.squeeze(-1).tolist(), strict=True):
                for place, one in enumerate(right, 1 + len(row) - len(right)):
                    if one != IGNORE:
                        history = [names[item] for item in row[:place] if item >= 0]
                        found.append((history, names[one]))
        return found

    epoch = examples(task.batch(step) for step in range(task.steps_per_epoch))
    assert len(epoch) == len(wanted) == task.train_examples
    assert sorted(target for _, target in epoch) == sorted(target for _, target in wanted)
    known = {(history[-1], target) for history, target in wanted}
    assert {(history[-1], target) for history, target in epoch} == known
    if model == "feed-forward":  # a place in a window sees what is left of it; the network all of its history
        assert sorted((tuple(history), target) for history, target in epoch) == sorted(wanted)
    found = sorted((tuple(history), target) for history, target in examples(task.heldout()))
    assert found == sorted(held)
    assert task.heldout_examples == len(held)
    second = examples(task.batch(task.steps_per_epoch + step) for step in range(task.steps_per_epoch))
    assert sorted(map(repr, second)) == sorted(map(repr, epoch))
    assert second != epoch


def test_windows_of_long_histories():
    part = _Part(Ragged.from_rows([list(range(10)), [50], [60, 61]]), np.zeros((3, 0)))
    batch = part.batch(part.windows(4)[:], 4, 4)
    assert batch.inputs[0].tolist() == [[-1, -1, -1, 0], [1, 2, 3, 4], [5, 6, 7, 8], [-1, -1, -1, 60]]
    assert batch.target.squeeze(-1).tolist() == [
        [IGNORE, IGNORE, IGNORE, 1],
        [2, 3, 4, 5],
        [6, 7, 8, 9],
        [IGNORE, IGNORE, IGNORE, 61],
    ]


def test_the_parts_of_a_split(tmp_path):
    """What is held out and tested comes last, nothing is in two parts, and histories hold all that came before."""
    rows = ["abcde", "bcd", "cd", "e", "aceb"]
    file = tmp_path / "items.csv"
    times = iter(range(100))
    lines = [f"{user},{item},{next(times)}" for user, row in enumerate(rows) for item in row]
    file.write_text("user,item,timestamp\n" + "\n".join(lines) + "\n")

    def names_of(task, batches):
        names = task.vocabulary.names
        for batch in batches:
            for seen, target in zip(batch.seen.tolist(), batch.target[:, -1, 0].tolist(), strict=True):
                yield "".join(names[item] for item in seen if item != IGNORE), names[target]

    def parts(**options):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        settings = NextItemSettings(interactions=file, history=2, features=8, out=out, **options)
        task = training.prepare("next-item", settings)
        found = [sorted(names_of(task, task.heldout(seen=True, test=test))) for test in (False, True)]
        train = "".join(sorted(task.vocabulary.names[target] for target in task.pairs()[0]))
        assert (task.heldout_examples, task.test_examples) == tuple(map(len, found))
        return train, *found

    last, before = [("abcd", "e"), ("ace", "b"), ("bc", "d")], [("abc", "d"), ("ac", "e"), ("b", "c")]
    assert parts() == ("bccd", before, last)
    assert parts(split="last") == ("bcccdde", last, [])
    # Of 15 rows, those from the times 12 and 13 on come after eight and nine tenths.
    assert parts(split="time") == ("bccddde", [("a", "c")], [("ac", "e"), ("ace", "b")])
    assert parts(heldout=file, test=file)[0] == "bbcccdddee"
    _, held, tested = parts(test=file)  # then the last item is held out
    assert held == last
    assert len(tested) == 10
    file.write_text("user,item\n" + "\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    with pytest.raises(ValueError, match="--split time needs a column of the time"):
        parts(split="time")


class Record(training.Observer):
    """Remember the checkpoints that there are after each step."""

    def __init__(self, folder):
        self.run, self.found = Run(folder), {}

    def step(self, step, steps, last):
        self.found[step] = [int(path.name.split("-")[1]) for path in self.run.checkpoints()]


@pytest.mark.parametrize("select", ["loss", "recall@10", "ndcg@10"])
def test_the_best_checkpoint_is_kept(tmp_path, monkeypatch, select):
    measured = training._measured

    def worse_again(*arguments):
        row = measured(*arguments)
        if row.step <= 20:
            return row
        return row._replace(heldout_loss=9.0, recall_10=0.0, ndcg_10=0.0)

    monkeypatch.setattr(training, "_measured", worse_again)
    settings = settings_of("next-item", tmp_path, steps=40, evaluations=20, select=select)
    task, watcher = training.prepare("next-item", settings), Record(tmp_path / "run")
    rows = training.train(task, watcher)
    values = {row.step: row.measure(select) for row in rows[1:]}
    wanted = (min if select == "loss" else max)(values, key=values.get)
    assert wanted < 40
    assert watcher.found[40] == [wanted, 40]
    for step, found in watcher.found.items():
        assert len(found) <= 2
        assert max(found, default=step) >= step - 2
    model, task, step = training.load(Run(tmp_path / "run"))
    assert step == wanted
    found = training.evaluate(model, task, k=(10,))
    assert found[select] == pytest.approx(values[wanted], abs=1e-6)
    assert best(rows, task.selects) == rows[wanted // 2]
    settings.resume = True
    assert repr(training.train(training.prepare("next-item", settings))) == repr(rows)  # nothing is left to do


def test_patience_ends_a_run_for_good(tmp_path):
    options = {"steps": 60, "evaluations": 30, "lr": 3.0, "schedule": "constant", "select": "loss", "patience": 3}
    settings = settings_of("next-item", tmp_path, **options)
    rows = training.train(training.prepare("next-item", settings))
    lowest = min(rows[1:], key=lambda row: row.heldout_loss)
    assert rows[-1].step == lowest.step + 6 < 60
    settings.resume = True
    assert training.train(training.prepare("next-item", settings)) == rows
    with pytest.raises(ValueError, match="--patience needs --select"):
        settings_of("next-item", tmp_path, patience=3)
    with pytest.raises(ValueError, match=r"--select ndcg@10: language models are selected by their loss"):
        settings_of("lm", tmp_path, select="ndcg@10")  # not after the first epoch


def test_a_finished_run_can_be_extended(tmp_path):
    rows, _ = train("lm", tmp_path, steps=6, schedule="constant")
    longer, _ = train("lm", tmp_path, steps=12, schedule="constant", resume=True)
    assert [row.step for row in longer] == [0, 2, 4, 6, 8, 12]
    assert longer[:4] == rows
    other = tmp_path / "other"
    other.mkdir()
    whole, _ = train("lm", other, steps=12, schedule="constant")
    assert longer[-1].train_loss == whole[-1].train_loss  # the constant rate does not depend on the length
    assert Run(tmp_path / "run").config()["settings"]["steps"] == 12
    with pytest.raises(ValueError, match="has done 12 steps already, so it cannot end after 5"):
        train("lm", tmp_path, steps=5, schedule="constant", resume=True)


def test_a_run_can_begin_with_the_weights_of_another(tmp_path):
    before, task = train("next-item", tmp_path, steps=60)
    more = tmp_path / "more"
    more.mkdir()
    settings = settings_of("next-item", more, steps=4, init=tmp_path / "run")
    (more / "items.txt").write_text((more / "items.txt").read_text() + "new1 3 new2\n4 new1 5 new2 6\n" * 3)
    again = training.prepare("next-item", settings)
    assert again.num_classes == task.num_classes + 2
    assert training.train(again)[0].heldout_loss < 0.8 * before[0].heldout_loss
    old, new = training.load(Run(tmp_path / "run"))[0], training.Model(again, settings)
    assert training.initialise(new, again, Run(tmp_path / "run")) == task.num_classes
    for name, index in task.ids.items():
        assert torch.equal(new.head.weight[again.ids[name]], old.head.weight[index])
        assert torch.equal(new.trunk.embedding.weight[again.ids[name]], old.trunk.embedding.weight[index])
    with pytest.raises(ValueError, match=r"--init .*run: trunk.* has another shape"):
        train("next-item", tmp_path, steps=2, features=8, init=tmp_path / "run", out=tmp_path / "wrong")
    with pytest.raises(ValueError, match=r"--init .*run: a run of next-item, not of lm"):
        train("lm", tmp_path, steps=2, init=tmp_path / "run", out=tmp_path / "wrong2")


@pytest.mark.parametrize(("name", "text"), [("lm", "w3 w4 w5 " * 40), ("classify", "3,8 3:1.5 21:2\n4,9 4:1\n")])
def test_test_files_are_evaluated_apart(tmp_path, name, text):
    (tmp_path / "test.file").write_text(text)
    _, task = train(name, tmp_path, steps=3, test=tmp_path / "test.file")
    assert task.test_examples == {"lm": 118, "classify": 2}[name]
    tested = [(batch.target != IGNORE).any(-1).sum() for batch in task.heldout(test=True)]
    assert sum(tested) == task.test_examples
    model, task, _ = training.load(Run(tmp_path / "run"))
    assert training.evaluate(model, task, test=True)["loss"] != training.evaluate(model, task)["loss"]
    with pytest.raises(ValueError, match="--exclude-seen is for recommenders"):
        training.evaluate(model, task, exclude_seen=True)


def test_items_that_a_user_had_are_left_out(tmp_path):
    train("next-item", tmp_path, steps=60)
    model, task, _ = training.load(Run(tmp_path / "run"))
    history = ["3", "4", "5", "6", "nonsense"]
    every_item = [name for name, _ in model.predict([" ".join(history)], 100)[0]]
    assert sorted(every_item) == sorted(task.vocabulary.names)
    left = [name for name in every_item if name not in history]
    assert [name for name, _ in model.recommend(history, 5)] == left[:5]
    assert [name for name, _ in model.recommend(history, 100)] == left
    assert [name for name, _ in model.recommend(history, 3, exclude_seen=False)] == every_item[:3]
    # Measured manually, for every example.
    hits = []
    for batch in task.heldout(test=True, seen=True):
        scores = model.head.log_prob(model.hidden(batch)[0][:, -1]).detach()
        for row, seen, target in zip(scores, batch.seen.tolist(), batch.target[:, -1, 0].tolist(), strict=True):
            row[[item for item in seen if item != IGNORE]] = -math.inf
            hits.append(target in row.topk(3).indices.tolist() and target not in seen)
    found = training.evaluate(model, task, k=(3,), test=True, exclude_seen=True)
    assert found["recall@3"] == pytest.approx(sum(hits) / len(hits))
    similar = model.similar("3", 100)
    assert len(similar) == task.num_classes - 1
    assert 1 >= similar[0].score >= similar[-1].score >= -1
    with pytest.raises(ValueError, match="unknown class 'nonsense'"):
        model.similar("nonsense")


def test_baselines(tmp_path):
    """An item is always followed by the next one, so counts of what followed are right, and popularity is not."""
    task = training.prepare("next-item", settings_of("next-item", tmp_path))
    found = baselines.evaluate_baselines(task, None, (1, 5), test=True)
    assert found["item-to-item"]["recall@1"] > 0.9
    counts = torch.bincount(task.pairs()[0], minlength=task.num_classes)
    best = set(counts.argsort(descending=True, stable=True)[:5].tolist())
    targets = torch.cat([batch.target[:, -1, 0] for batch in task.heldout(test=True)]).tolist()
    assert found["popularity"]["recall@5"] == pytest.approx(sum(target in best for target in targets) / len(targets))
    ranker = baselines.ItemToItem(task, baselines.popularity(task))
    everything = ranker(task.encode("3 4"), task.num_classes)[0].tolist()
    assert sorted(everything) == list(range(task.num_classes))
    assert everything[:2] == [task.ids["5"], task.ids["6"]]
    masked = baselines.evaluate_baselines(task, None, (5,), test=True, exclude_seen=True)
    assert masked["item-to-item"]["recall@5"] >= found["item-to-item"]["recall@5"]
    for name in ("lm", "classify"):
        folder = tmp_path / name
        folder.mkdir()
        other = training.prepare(name, settings_of(name, folder))
        assert 0 < baselines.evaluate_baselines(other, None, (5,))["popularity"]["recall@5"] < 1


def test_documents_and_their_labels(tmp_path):
    task = training.prepare("classify", settings_of("classify", tmp_path))
    assert task.heldout_examples == 8
    assert task.train_examples == 72
    seen = [task.batch(step) for step in range(task.steps_per_epoch)]
    assert sum(len(batch.target) for batch in seen) == 72
    ids, offsets, values = seen[0].inputs
    assert offsets.tolist() == list(range(0, 24, 3))
    for start in offsets.tolist():
        norm = torch.tensor([1.5, 2.0, 0.1]).norm()
        assert torch.allclose(values[start : start + 3], torch.tensor([1.5, 2.0, 0.1]) / norm)
    for start, labels in zip(offsets.tolist(), seen[0].target.squeeze(1).tolist(), strict=True):
        first, second = (int(task.vocabulary.names[label]) for label in labels)
        assert {first, second} == {int(ids[start]), 7 + int(ids[start + 1]) - 20}
    with pytest.raises(ValueError, match="--sampler bigram needs a class before each"):
        training.Model(task, settings_of("classify", tmp_path, sampler="bigram"))


def test_user_features_reach_the_model(tmp_path):
    file = tmp_path / "clicks.csv"
    rows = [
        f"{user},{item},{time},{'north' if user % 2 else 'south'}"
        for user in range(40)
        for time, item in enumerate((user % 5, 7 + user % 2, 9))
    ]
    file.write_text("user,item,timestamp,region\n" + "\n".join(rows) + "\n")
    options = {"interactions": file, "user_feature": ["region"], "features": 16, "split": "last"}
    for model in ("transformer", "feed-forward"):
        settings = NextItemSettings(model=model, **{**options, "out": tmp_path / model})
        task = training.prepare("next-item", settings)
        torch.manual_seed(0)
        found = training.Model(task, settings).eval()
        north, south = (found.hidden(task.encode(f"3 region={value}"))[0][0, -1] for value in ("north", "south"))
        assert not torch.allclose(north, south)
        assert torch.equal(north, found.hidden(task.encode("region=north 3"))[0][0, -1])
    with pytest.raises(ValueError, match="unknown item 'nonsense'"):
        task.encode("nonsense region=north")
    assert torch.equal(task.encode("nonsense 3").inputs[0], task.encode("3").inputs[0])
    assert task.unknown("region=north 3 nonsense") == ["nonsense"]
    with pytest.raises(ValueError, match="no items to predict from"):
        task.encode("region=north")
    assert task.encode("3 region=nowhere").inputs[1].tolist() == [[0]]


def test_the_transformer_sees_only_the_past():
    torch.manual_seed(0)
    model = Transformer(20, 8, history=6, dropout=0.5).eval()
    users = torch.empty(1, 0, dtype=torch.long)
    items = torch.tensor([[-1, -1, 3, 4, 5, 6]])
    hidden = model(items, users)
    later = model(torch.tensor([[-1, -1, 3, 4, 9, 9]]), users)
    assert torch.allclose(hidden[:, :4], later[:, :4], atol=1e-6)
    assert not torch.allclose(hidden[:, 4:], later[:, 4:], atol=1e-3)
    earlier = model(torch.tensor([[-1, -1, 8, 4, 5, 6]]), users)
    assert not torch.allclose(hidden[:, 5], earlier[:, 5], atol=1e-4)
    with pytest.raises(ValueError, match="features must be a multiple of the 2 attention heads, got 7"):
        Transformer(20, 7)


def test_empty_places_have_no_influence():
    torch.manual_seed(0)
    network = FeedForward(20, 8)
    users = torch.empty(1, 0, dtype=torch.long)
    network(torch.tensor([[-1, -1, 3]]), users).sum().backward()
    assert network.embedding.weight.grad.coalesce().values().abs().sum(1).count_nonzero() == 1


def test_the_lstm_goes_on_from_its_state():
    torch.manual_seed(0)
    model = LSTM(30, 8, dropout=0.5).eval()
    tokens = torch.randint(30, (2, 10))
    whole, _ = model(tokens)
    first, state = model(tokens[:, :4])
    second, _ = model(tokens[:, 4:], state)
    assert torch.allclose(whole, torch.cat([first, second], dim=1), atol=1e-6)
    assert not state[0].requires_grad


@pytest.mark.parametrize("name", list(TASKS))
def test_held_out_loss_and_ranks_are_those_of_all_classes(tmp_path, name):
    _, task = train(name, tmp_path, steps=5)
    model, task, _ = training.load(Run(tmp_path / "run"))
    found = training.evaluate(model, task, k=(1, 3))
    losses, recall, reciprocal = [], [], []
    state = None
    with torch.no_grad():
        for batch in task.heldout():
            hidden, state = model.hidden(batch, state)
            log_p = functional.log_prob(hidden, model.head.weight)
            for row, labels in zip(log_p.flatten(0, 1), batch.target.flatten(0, 1).tolist(), strict=True):
                right = [label for label in labels if label != IGNORE]
                if right:
                    losses += [-float(row[label]) for label in right]
                    best = row.argsort(descending=True).tolist()[:3]
                    recall.append(len(set(best) & set(right)) / len(right))
                    reciprocal.append(next((1 / place for place, one in enumerate(best, 1) if one in right), 0.0))
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["recall@3"] == pytest.approx(np.mean(recall))
    assert found["mrr@3"] == pytest.approx(np.mean(reciprocal))
    assert not model.training  # as it was


def test_ranking_measures():
    best = torch.tensor([[4, 2, 9], [1, 2, 3]])
    target = torch.tensor([[2, 9], [7, IGNORE]])
    found = evaluation.ranking(best, target, (1, 2, 3))
    assert found["recall@1"] == 0
    assert found["recall@2"] == 0.5
    assert found["recall@3"] == 1.0
    assert found["precision@2"] == 0.5
    assert found["mrr@3"] == 0.5
    ideal = 1 + 1 / math.log2(3)
    assert found["ndcg@3"] == pytest.approx((1 / math.log2(3) + 1 / 2) / ideal)
    # More cut-off than classes, and more labels than the cut-off.
    found = evaluation.ranking(torch.tensor([[0, 1]]), torch.tensor([[0, 1]]), (1, 10))
    assert found["ndcg@1"] == found["ndcg@10"] == 1.0


def test_schedules():
    assert [training.schedule("linear", done) for done in (0, 0.5, 0.75, 1)] == [1, 1, 0.5, 0]
    assert training.schedule("constant", 0.99) == 1
    epochs = [training.schedule("exponential", (epoch + 0.5) / 39) for epoch in range(39)]
    assert epochs[:6] == [1] * 6
    assert epochs[6:8] == pytest.approx([0.8, 0.64])
    assert epochs[38] == pytest.approx(0.8**33)


def test_even_choice():
    rows = np.arange(100) * 3
    assert every(rows, None) is rows
    assert every(rows, 4).tolist() == [0, 99, 198, 297]


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    train("lm", tmp_path, steps=3, tensorboard=True)
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "--lr must be positive and finite, got 0.0"),
        ({"lr": math.inf}, "--lr must be positive and finite, got inf"),
        ({"clip": -1.0}, "--clip must be positive"),
        ({"sampler": "full", "num_samples": 3}, "--sampler full has no negatives, so it takes no --num-samples"),
        ({"power": 0.5}, "--power is for unigram, not for blocks"),
        ({"power": 1.0}, "--power is for unigram, not for blocks"),
        ({"own": 8, "sampler": "uniform"}, "--own is for blocks, not for uniform"),
        ({"own": 8, "sampler": "full"}, "--own is for blocks, not for full"),
        ({"probe": 8, "sampler": "quadratic"}, "--probe is for blocks, head_tail, not for quadratic"),
        ({"sampler": "zipf"}, "--sampler must be one of 'full', 'blocks', .*, got 'zipf'"),
        ({"epochs": math.nan}, "--epochs must be positive and finite, got nan"),
        ({"num_samples": 3, "tolerance": 0.1}, "give --num-samples or --tolerance, not both"),
        (
            {"scope": "batch", "sampler": "softmax"},
            "--scope is for uniform, log_uniform, unigram, not for softmax",
        ),
    ],
)
def test_impossible_settings(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        settings_of("lm", tmp_path, **options)


def test_every_option_of_a_sampler_has_a_sampler():
    assert all(settings.takers(option) for option in settings.SAMPLER_OPTIONS)
    assert settings.takers("scope") == ["uniform", "log_uniform", "unigram"]


def test_an_option_that_equals_the_default_is_no_difference(tmp_path):
    """Also, earlier runs remember ``power`` with every sampler."""
    plain = settings_of("lm", tmp_path)
    assert settings_of("lm", tmp_path, own=32).differences({**plain.to_json(), "power": 1.0}) == []
    assert settings_of("lm", tmp_path, own=31).differences(plain.to_json()) == ["own"]
    assert settings_of("lm", tmp_path, sampler="unigram").differences(
        {**plain.to_json(), "sampler": "unigram", "power": 0.5}
    ) == ["power"]
    assert settings_of("lm", tmp_path, sampler="full").differences(plain.to_json()) == ["sampler"]


def test_language_needs_one_source():
    for options in ({}, {"text": ["a"], "corpus": "python"}):
        with pytest.raises(ValueError, match="give a text, --text FILE, or --corpus python"):
            LanguageSettings(**options)
