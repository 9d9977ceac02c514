"""The layer and its adaptive sampler: which statistics are refreshed when, and checkpoints in between."""

import copy

import pytest
import torch

from manyclass import SampledSoftmax, kernels, optim, refresh
from manyclass.samplers import KernelTree, blocks, line, partition


def layer(n=60, d=6, **options):
    torch.manual_seed(0)
    bias = options.get("bias", False)
    sampler = KernelTree(kernels.Quadratic(), n, d, leaf_size=3, bias=bias)
    return SampledSoftmax(d, n, sampler, 4, prediction="absolute", **options)


def steps(model, optimizer, count, seed=0, d=6, n=60):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        query, target = torch.randn(5, d, generator=generator), torch.randint(n, (5,), generator=generator)
        optimizer.zero_grad()
        model(query, target, generator=generator).backward()
        optimizer.step()
    return query, target


def expected_sums(model):
    old = model.sampler
    fresh = KernelTree(old.kernel, old.num_classes, old.in_features, old.leaf_size, bias=model.bias is not None)
    fresh.update(model.weight, bias=model.bias)
    return fresh.sums


@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_refreshes_what_it_touched(bias, backend, monkeypatch):
    model = layer(bias=bias)
    calls = []
    update = model.sampler.update
    monkeypatch.setattr(model.sampler, "update", lambda w, rows=None, **k: (calls.append(rows), update(w, rows, **k)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    query, target = steps(model, optimizer, 4)
    assert not torch.equal(model.sampler.sums, expected_sums(model))  # the last step is not yet followed
    with torch.no_grad():
        model(query, target)
    assert torch.equal(model.sampler.sums, expected_sums(model))
    assert [rows is None for rows in calls] == [True, False, False, False, False]
    assert all(5 <= len(rows.unique()) <= 25 for rows in calls[1:])


@pytest.mark.parametrize("kind", ["dense", "fused", "tied"])
def test_untracked_weights_are_refreshed_periodically(kind):
    """Fused optimisers change weights without counting it in their versions."""
    tied = kind == "tied"
    model = layer(embedding=torch.nn.Embedding(60, 6, sparse=True)) if tied else layer(sparse=False)
    options = {"fused": True} if kind == "fused" else {}
    optimizer = (torch.optim.SGD if tied else torch.optim.Adam)(model.parameters(), lr=0.1, **options)
    steps(model, optimizer, refresh.REFRESH_UNTRACKED)
    assert not torch.equal(model.sampler.sums, expected_sums(model))
    with torch.no_grad():
        model(torch.ones(1, 6), torch.tensor([0]))
    assert torch.equal(model.sampler.sums, expected_sums(model))


def test_unseen_changes_are_found_in_the_end(monkeypatch):
    monkeypatch.setattr(refresh, "REFRESH_ALL", 3)
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model, optimizer, 1)
    with torch.no_grad():
        model.weight.mul_(2)
    steps(model, optimizer, 1)
    assert not torch.equal(model.sampler.weight, model.weight)
    steps(model, optimizer, 2)
    with torch.no_grad():
        model(torch.ones(1, 6), torch.tensor([0]))
    assert torch.equal(model.sampler.weight, model.weight)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("kind", ["tree", "blocks", "tolerance"])
def test_a_loaded_checkpoint_goes_on_as_if_never_stopped(kind, sparse, tmp_path, monkeypatch):
    monkeypatch.setattr(line, "REFRESH", 16)  # so that blocks wait in line when the checkpoint is written, …
    monkeypatch.setattr(partition, "SLICE", 64)  # … and a tree is half grown

    def model_of():
        if kind == "tree":
            return layer(sparse=sparse)
        if kind == "tolerance":
            return SampledSoftmax(6, 600, "blocks", sparse=sparse, block_size=2, tolerance=0.01)
        return SampledSoftmax(6, 600, "blocks", 16, sparse=sparse, block_size=2, own=4, probe=4)

    def optimizer_of(model):
        return torch.optim.Adagrad(model.parameters(), lr=0.3)

    torch.manual_seed(0)
    whole = model_of()
    optimizer = optimizer_of(whole)
    steps(whole, optimizer, 17, seed=1)
    if kind != "tree":
        assert whole.sampler.line.touched.any()
        assert whole.sampler.growing.grown > 0
    torch.save([whole.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")
    steps(whole, optimizer, 40, seed=2)

    resumed = model_of()
    state, optimizer_state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert not {"sampler.sums", "sampler.weight"} & state.keys()
    resumed.load_state_dict(state)
    optimizer = optimizer_of(resumed)
    optimizer.load_state_dict(optimizer_state)
    steps(resumed, optimizer, 40, seed=2)
    assert torch.equal(whole.weight, resumed.weight)
    assert whole.num_samples == resumed.num_samples


def test_new_weights_without_the_rest_of_a_checkpoint_refresh_all():
    model = layer()
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    model.load_state_dict({"embedding.weight": torch.randn(60, 6)}, strict=False)
    with torch.no_grad():
        model(torch.ones(1, 6), torch.tensor([0]))
    assert torch.equal(model.sampler.weight, model.weight)


@pytest.mark.parametrize("kind", ["tree", "blocks"])
def test_rows_wait_until_the_weights_change(kind, monkeypatch):
    """Several batches before one step of the optimiser: all their rows are refreshed after it, none before."""
    monkeypatch.setattr(line, "SWEEP", 1 << 20)  # what a sweep would find does not count
    model = layer() if kind == "tree" else SampledSoftmax(6, 60, "blocks", 8, own=4, probe=2, block_size=2)
    seen = []
    update = model.sampler.update
    monkeypatch.setattr(model.sampler, "update", lambda w, rows=None, **k: (seen.append(rows), update(w, rows, **k)))
    optimizer, updates = torch.optim.SGD(model.parameters(), lr=0.1), 1
    for _ in range(3):
        for _ in range(4):
            model(torch.randn(5, 6), torch.randint(60, (5,))).backward()
        assert len(seen) == updates
        changed = model.weight.grad.coalesce().indices()[0]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(5, 6), torch.randint(60, (5,)))
        updates += 1
        assert len(seen) == updates
        assert set(changed.tolist()) == set(seen[-1].tolist())
    if kind == "tree":
        assert torch.equal(model.sampler.sums, expected_sums(model))


@pytest.mark.parametrize("change", ["replaced", "momentum", "averaged", "flushed"])
def test_changes_that_nobody_noted_are_found_by_the_sweep(change, monkeypatch):
    """Weights that were set, moved by momentum, averaged over steps, or caught up, in rows without gradients."""
    monkeypatch.setattr(line, "REFRESH", 128)  # of 256 blocks
    monkeypatch.setattr(blocks, "REBUILD", 1000)  # no new tree
    torch.manual_seed(0)
    model = SampledSoftmax(6, 600, "blocks", 16, own=4, probe=4, block_size=2)
    average = torch.optim.swa_utils.AveragedModel(model)
    options = {"lr": 0.5, "momentum": 0.9} if change in ("momentum", "flushed") else {"lr": 0.5}
    optimizer = (optim.SGD if change == "flushed" else torch.optim.SGD)(model.parameters(), **options)
    for seed in range(3):
        steps(model, optimizer, 1, seed, n=600)
        average.update_parameters(model)
    if change == "replaced":
        model.weight.data.copy_(torch.randn(600, 6))
    elif change == "averaged":
        model.weight.data.copy_(average.module.weight)
    elif change == "flushed":
        optimizer.flush()
    assert misfit(model) > 0.02
    steps(model, torch.optim.SGD(model.parameters(), lr=1e-6), 24, n=600)
    assert misfit(model) < 0.01
    assert 0 < model.diagnostics().stale_steps < 24


def misfit(model):
    """How far the means of the blocks are from those of the present weights."""
    model = copy.deepcopy(model)
    tree = model.sampler.partition
    every = torch.arange(len(tree.spread))
    old = tree.mean.read(every).clone()
    tree.summarise(model.weight.detach(), None, torch.arange(tree.blocks), model.sampler.codes)
    return float((old - tree.mean.read(every)).abs().max())
