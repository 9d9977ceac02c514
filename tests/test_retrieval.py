"""Search through the tree of blocks: against exact search, in the benchmark, and in `manyclass evaluate --probe`."""

import csv
import json
import sys
from itertools import groupby

import pytest
import torch
from rich.console import Console
from test_commands import fails, write_text
from typer.testing import CliRunner

from manyclass import SampledSoftmax, cli
from manyclass.bench import retrieval
from manyclass.cli import console as shown
from manyclass.train import evaluation, training
from manyclass.train.run import Run
from manyclass.train.settings import LanguageSettings

# Enough for a tree of two levels.
CLASSES, FEATURES = 7000, 16


@pytest.fixture
def console(monkeypatch):
    """Record what a command prints; leave threads and the checks of sparse tensors as they are."""
    recorded = Console(record=True, width=200)
    monkeypatch.setattr(shown, "start", lambda threads: recorded)
    return recorded


def manyclass(*arguments):
    """Run a command that must succeed, in this process."""
    CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)


def trained(prediction="softmax", bias=False):
    """A layer whose weights have moved since its tree was built, and queries."""
    torch.manual_seed(0)
    examples = retrieval.Examples(CLASSES, FEATURES, 0)
    head = SampledSoftmax(FEATURES, CLASSES, num_samples=256, prediction=prediction, bias=bias)
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    for _ in range(12):
        optimizer.zero_grad()
        head(*examples.draw(64)).backward()
        optimizer.step()
    return head, examples.draw(12)[0].reshape(3, 4, FEATURES)


@pytest.mark.parametrize(("prediction", "bias"), [("softmax", False), ("softmax", True), ("absolute", False)])
def test_all_blocks_find_what_exact_search_finds(backend, prediction, bias):
    head, query = trained(prediction, bias)
    blocks = head.sampler.partition.blocks
    assert len(head.sampler.partition.widths) == 2
    log_prob, ids = head.topk(query, 100)
    for probe in (blocks, blocks + 1):
        found = head.topk(query, 100, probe=probe)
        # Classes with equal outputs may change places.
        torch.testing.assert_close(head.log_prob(query).gather(-1, found[1]), log_prob, atol=2e-5, rtol=0)
        # The partition function is a sum over codes, which are rounded.
        torch.testing.assert_close(found[0], log_prob, atol=2e-3, rtol=0)
    fewer = head.topk(query, 100, probe=blocks // 8)[1]
    assert fewer.shape == ids.shape
    assert not torch.equal(fewer, ids)


def test_few_blocks_give_true_outputs_of_distinct_classes(backend):
    head, query = trained()
    log_prob, ids = head.topk(query, 50, probe=16)
    assert bool((log_prob.diff(dim=-1) <= 0).all())
    assert all(len(row.unique()) == 50 for row in ids.flatten(0, 1))
    # The estimated partition function shifts all log probabilities of a query alike.
    shift = log_prob - head.log_prob(query).gather(-1, ids)
    torch.testing.assert_close(shift, shift[..., :1].expand_as(shift), atol=2e-5, rtol=0)


def test_a_search_sees_loaded_weights(backend):
    head, query = trained()
    head.topk(query, 5, probe=4)
    other = SampledSoftmax(FEATURES, CLASSES)
    other.topk(query, 5, probe=4)
    other.load_state_dict(head.state_dict())
    torch.testing.assert_close(other.topk(query, 50, probe=16), head.topk(query, 50, probe=16))


def test_errors():
    head, query = trained()
    with pytest.raises(ValueError, match="probe must be at least 1, got 0"):
        head.topk(query, 5, probe=0)
    with pytest.raises(ValueError, match="k must be at most 152, the classes that probe = 4 visits, got 153"):
        head.topk(query, 153, probe=4)
    assert head.topk(query, 152, probe=4)[1].shape == (3, 4, 152)
    with pytest.raises(ValueError, match="probe needs a sampler with a search index, such as 'blocks'; Uniform"):
        SampledSoftmax(FEATURES, 50, "uniform").topk(query, 5, probe=4)


def test_bench(tmp_path, monkeypatch, console):
    pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    monkeypatch.setattr(retrieval, "STEPS", 60)
    manyclass("bench", "retrieval", "--classes", 2000, "--queries", 50, "--features", 16, "--out", tmp_path)
    with (tmp_path / "retrieval.csv").open() as file:
        rows = [retrieval.Row(*row) for row in list(csv.reader(file))[1:]]
    assert {int(row.num_classes) for row in rows} == {2000}
    assert all(float(row.microseconds_per_query) > 0 for row in rows)
    recalls = {}
    for (method, k), group in groupby(rows, key=lambda row: (row.method, int(row.k))):
        recalls[method, k] = {int(row.value): float(row.recall) for row in group}
    methods = {"exact", "blocks", "blocks rebuilt", "faiss flat", "faiss IVF", "faiss HNSW"}
    assert set(recalls) == {(method, k) for method in methods for k in (10, 100)}
    for k in (10, 100):
        assert recalls["exact", k] == {0: 1.0}
        assert recalls["faiss flat", k][0] > 0.99
        for method in ("blocks", "blocks rebuilt"):
            # 256 blocks on one level: a larger probe adds classes and drops none.
            recall = recalls[method, k]
            assert tuple(recall) == retrieval.PROBES
            assert list(recall.values()) == sorted(recall.values())
            assert recall[8] < recall[64] < recall[256] == recall[512] == 1.0
    assert min(recalls["faiss HNSW", 100]) >= 100
    assert {float(row.build_seconds) for row in rows if row.method == "blocks"} == {0.0}
    assert (tmp_path / "retrieval.png").read_bytes()[:4] == b"\x89PNG"
    printed = console.export_text()
    assert "2,000 classes: trained for" in printed
    assert f"{torch.get_num_threads()} threads" in printed


def test_bench_without_faiss(tmp_path, monkeypatch, capsys, console):
    monkeypatch.setitem(sys.modules, "faiss", None)
    error = fails(monkeypatch, capsys, "bench", "retrieval", "--out", tmp_path)
    assert "pip install 'manyclass[faiss]'" in error
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of small runs, by sampler."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder)
    for sampler in ("blocks", "uniform"):
        settings = LanguageSettings(
            text=[text], sampler=sampler, features=16, steps=30, evaluations=1, out=folder / sampler
        )
        training.train(training.prepare("lm", settings))
    return folder


def test_evaluate_ranks_through_blocks(runs, console):
    def measure(*options):
        manyclass("evaluate", runs / "blocks", "--k", 10, *options)
        return json.loads((runs / "blocks" / "evaluation.json").read_text())

    exact = measure()
    assert "approximate" not in console.export_text()
    assert measure("--probe", 1000) == {**exact, "probe": 1000}
    rough = measure("--probe", 1)
    assert "ranking through 1 blocks per query: approximate; the loss is exact" in console.export_text()
    assert rough["loss"] == exact["loss"]
    # A few of the other classes: by chance the targets may be found more often among them.
    assert rough["recall@10"] != exact["recall@10"]


def test_evaluate_refuses_probe(runs, monkeypatch, capsys, console):
    error = fails(monkeypatch, capsys, "evaluate", runs / "uniform", "--probe", 4)
    assert "probe needs a model trained with sampler='blocks', not 'uniform'" in error
    error = fails(monkeypatch, capsys, "evaluate", runs / "blocks", "--probe", 1, "--k", 40)
    assert "the classes that probe = 1 visits, got 40" in error
    model, task, _ = training.load(Run(runs / "blocks"))
    task.part = (0, 2)
    with pytest.raises(ValueError, match="several processes have a tree each"):
        evaluation.evaluate(model, task, k=(1,), probe=4)
