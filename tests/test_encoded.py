"""Classes that an encoder makes: the table's losses, unbiased with a stale cache, bounded memory, resumable."""

import copy
import gc
import math
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import manyclass
from manyclass import FullSoftmax, SampledSoftmax, encoded, functional

N, D, M = 40, 5, 12
COUNTS = torch.arange(N) + 1
SAMPLERS = {
    "blocks": {"own": 4, "probe": 2},
    "uniform": {},
    "unigram": {"counts": COUNTS},
    "quadratic": {},
    "softmax": {},
}


class Tower(nn.Module):
    """Features of each class through two layers; remembers what it was asked for."""

    def __init__(self, n=N, d=D, dropout=0.0, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("features", torch.randn(n, 7))
        self.layers = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, d))
        self.asked = []

    def forward(self, ids):
        self.asked.append(ids.clone())
        return self.layers(self.features[ids])


def batch(size=9, seed=0, n=N):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, D, generator=generator, requires_grad=True), torch.randint(n, (size,), generator=generator)


def fixed(seed=3):
    return torch.Generator().manual_seed(seed)


def train(head, steps=1, lr=0.1, seed=0):
    optimizer = torch.optim.SGD(head.parameters(), lr)
    losses = []
    for step in range(steps):
        loss = head(*batch(seed=seed + step), generator=fixed(seed + step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def exact(head, query, target, **options):
    """The loss over all classes as the encoder makes them now."""
    weight = head.classes(torch.arange(head.num_classes)).detach()
    return functional.full_softmax_loss(query, weight, target, head.bias, **options)


@pytest.mark.parametrize("chunk_size", [7, 1024])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_an_embedding_as_encoder_is_the_table(name, bias, chunk_size, backend):
    torch.manual_seed(0)
    table = SampledSoftmax(D, N, name, M, bias=bias, **SAMPLERS[name])
    encoder = nn.Embedding(N, D)
    encoder.load_state_dict(table.embedding.state_dict())
    head = SampledSoftmax(D, N, name, M, bias=bias, classes=encoder, chunk_size=chunk_size, **SAMPLERS[name])
    if bias:
        head.bias_embedding.load_state_dict(table.bias_embedding.state_dict())
    for step in range(1 if head.sampler.adaptive else 3):  # a cache is updated in each step, unlike weights at rest
        query, target = batch(seed=step)
        found = []
        for layer, weight in ((table, table.weight), (head, encoder.weight)):
            loss = layer(query, target, generator=fixed(step))
            parameters = [query, weight, *([layer.bias_embedding.weight] if bias else [])]
            found.append([loss, *(grad.to_dense() for grad in torch.autograd.grad(loss, parameters))])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("name", "wrong"), [("blocks", False), ("unigram", False), ("blocks", True)])
def test_the_estimate_is_unbiased_with_a_stale_cache(name, wrong):
    head = SampledSoftmax(D, N, name, 6, classes=Tower(), reduction="none", **SAMPLERS[name])
    query, target = batch()
    query = query.detach()
    head(query, target)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.5)  # the cache knows nothing of it
    head._known = lambda ids: head.cache.rows[ids]  # … and the sweep does not tell
    if wrong:  # as if logits came from the cache, too
        head.classes.forward = lambda ids: head.cache.rows[ids]
    weight = head.classes(torch.arange(N)).detach() if not wrong else Tower.forward(head.classes, torch.arange(N))
    logits = query @ weight.detach().T
    positive = logits.gather(1, target.unsqueeze(1)).squeeze(1)
    truth = logits.scatter(1, target.unsqueeze(1), -math.inf).logsumexp(dim=1).exp()
    sums = []
    with torch.no_grad():
        for seed in range(400):
            head.cache._waiting = None
            own = positive if not wrong else (query * head.cache.rows[target]).sum(dim=1)
            sums.append(head(query, target, generator=fixed(seed)).expm1() * own.exp())
    ratio = torch.stack(sums) / truth
    deviation = (ratio.mean(dim=0) - 1) / (ratio.std(dim=0) / math.sqrt(len(ratio)))
    assert bool((deviation.abs() < 4.5).all()) is not wrong, deviation


def test_a_step_encodes_its_classes_once_and_in_chunks():
    head = SampledSoftmax(D, N, "uniform", M, classes=Tower(), chunk_size=8)
    head.refresh()
    query, target = batch()
    head.classes.asked.clear()
    head(query, target, generator=fixed())
    asked = torch.cat(head.classes.asked)
    draw = head.sampler.draw(query.detach(), M, exclude=target, generator=fixed())
    assert torch.equal(asked, torch.cat([target, draw.ids.flatten()]).unique())
    assert max(len(ids) for ids in head.classes.asked) == 8


def test_chunks_are_encoded_again_with_the_same_random_numbers():
    tower = Tower(dropout=0.5)
    head = SampledSoftmax(D, N, "uniform", M, classes=tower, chunk_size=8)
    sums = []
    tower.layers[2].register_forward_hook(lambda module, inputs, hidden: sums.append(float(hidden.detach().sum())))
    head.refresh()
    sums.clear()
    loss = head(*batch())
    first = list(sums)
    loss.backward()
    assert len(first) > 1
    assert sorted(sums[len(first) :]) == sorted(first)
    assert tower.training
    assert all(part.training for part in tower.modules())


@pytest.mark.parametrize("recomputed", [True, False])
def test_activations_of_one_chunk_are_alive(recomputed, monkeypatch):
    """What an encoder computes for a chunk is gone before the next chunk, in both passes."""
    tower, storages, alive = Tower(), [], []

    def count(module, inputs, hidden):
        storages.append(StorageWeakRef(hidden.untyped_storage()))
        alive.append(sum(not storage.expired() for storage in storages))

    tower.layers[1].register_forward_hook(count)
    head = SampledSoftmax(D, N, "uniform", 1000, scope="batch", classes=tower, chunk_size=8)
    head(*batch())  # encodes all
    if not recomputed:
        monkeypatch.setattr(encoded, "checkpoint", lambda part, chunk, use_reentrant: part(chunk))
    storages.clear()
    alive.clear()
    head(*batch()).backward()
    chunks = math.ceil(N / 8)
    assert len(alive) >= chunks * (2 if recomputed else 1)
    assert max(alive) == (1 if recomputed else chunks)


def test_the_encoder_is_asked_as_for_a_prediction_outside_of_steps():
    tower = Tower(dropout=0.5)
    tower.layers[1].eval()
    head = SampledSoftmax(D, N, "uniform", M, classes=tower)
    state = torch.get_rng_state()
    head.refresh()
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in tower.modules()] == [True, True, True, False, True, True]
    tower.eval()
    torch.testing.assert_close(head.weight, tower(torch.arange(N)).detach())


def test_the_sweep_comes_round_and_skips_what_was_encoded():
    n = 400
    head = SampledSoftmax(D, n, "uniform", 2, classes=Tower(n), chunk_size=1000)
    head(*batch(n=n), generator=fixed(0))
    for step in range(1, 300):
        head(*batch(seed=step, n=n), generator=fixed(step))
    assert head.cache.encoded_at.min() > 300 - 200  # 20 or so per step, with gradients and in the sweep
    head.cache.encoded_at.fill_(5)
    head.cache.cursor, head.cache.round_began = 0, 6
    head.cache.encoded_at[:30] = 7
    assert head.cache._due(10).tolist() == list(range(30, 40))
    assert head.cache._due(10).tolist() == list(range(40, 50))
    head.cache.cursor = n - 5
    assert head.cache._due(10).tolist() == list(range(n - 5, n))
    assert (head.cache.cursor, head.cache.round_began) == (0, head.cache.steps)


def test_rows_of_a_step_reach_the_cache_and_the_sampler():
    head = SampledSoftmax(D, N, "softmax", M, classes=Tower())
    train(head, 2)
    with torch.no_grad():
        for parameter in head.classes.parameters():
            parameter.mul_(1.5)
    query, target = batch()
    head(query, target)
    ids = head.cache._waiting[0]
    made = head.classes(ids).detach()
    head(query, target)
    torch.testing.assert_close(head.weight[ids], made)
    torch.testing.assert_close(head.sampler.weight, head.weight)


def test_results_are_exact_after_a_refresh():
    head = SampledSoftmax(D, N, "blocks", M, classes=Tower(), bias=True)
    train(head, 3)
    head.refresh()
    query, target = batch()
    weight = head.classes(torch.arange(N)).detach()
    head.eval()
    torch.testing.assert_close(head(query, target), exact(head, query, target))
    torch.testing.assert_close(head.log_prob(query), (query @ weight.T + head.bias).log_softmax(dim=-1))
    for probe in (None, 1000):
        values, ids = head.topk(query, 3, probe=probe)
        expected = (query @ weight.T + head.bias).log_softmax(dim=-1).topk(3)
        torch.testing.assert_close(values, expected.values.detach())
        assert torch.equal(ids, expected.indices)


def test_a_stale_cache_warns_once_and_names_the_cure():
    head = SampledSoftmax(D, N, "uniform", M, classes=Tower())
    query, target = batch()
    head.eval()
    torch.testing.assert_close(head(query, target), exact(head, query, target))  # the first time it encodes
    head.train()
    train(head)
    head.eval()
    with pytest.warns(UserWarning, match=r"call refresh\(\)"):
        head(query, target)
    head.predict(query)  # warnings are errors
    head.refresh()
    head.topk(query, 1)
    with torch.no_grad():
        head.classes.layers[0].weight.add_(1)
    with pytest.warns(UserWarning, match=r"call refresh\(\)"):
        head.log_prob(query)
    searched = SampledSoftmax(D, N, "blocks", M, classes=Tower())
    train(searched)
    with pytest.warns(UserWarning, match=r"call refresh\(\)"):
        searched.topk(query, 1, probe=1000)
    head.diagnostics()  # compares what the cache holds with what the cache holds


def test_a_frozen_encoder_stays_fresh():
    head = SampledSoftmax(D, N, "uniform", M, classes=Tower().requires_grad_(False))
    query, target = batch()
    for _ in range(3):
        head(query, target).backward()
    head.eval()
    torch.testing.assert_close(head(query, target), exact(head, query, target))


@pytest.mark.parametrize("chunk_size", [7, 1024])
def test_the_full_softmax_encodes_all_classes(chunk_size):
    head = FullSoftmax(D, N, classes=Tower(), chunk_size=chunk_size, bias=True)
    query, target = batch()
    loss = head(query, target)
    expected = functional.full_softmax_loss(query, head.classes(torch.arange(N)), target, head.bias)
    torch.testing.assert_close(loss, expected)
    parameters = [query, *head.parameters()]
    for one, other in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(one, other)
    train(head, 2)
    head.eval()
    torch.testing.assert_close(head(query, target), exact(head, query, target))  # without a word: it encodes again


@pytest.mark.parametrize("name", ["blocks", "quadratic", "softmax"])
def test_a_checkpoint_resumes_exactly(name):
    options = {"chunk_size": 8, **SAMPLERS[name]}
    head, unsaved = (SampledSoftmax(D, N, name, M, classes=Tower(), **options) for _ in range(2))
    train(head, 5)
    train(unsaved, 5)
    other = SampledSoftmax(D, N, name, M, classes=Tower(seed=1), **options)
    other.load_state_dict(copy.deepcopy(head.state_dict()))
    losses = train(unsaved, 5, seed=10)
    for layer in (head, other):  # saving changes nothing
        assert train(layer, 5, seed=10) == losses
        assert torch.equal(layer.weight, unsaved.weight)
        assert torch.equal(layer.cache.encoded_at, unsaved.cache.encoded_at)


def test_a_checkpoint_of_a_fresh_layer_is_fresh():
    head = SampledSoftmax(D, N, "uniform", M, classes=Tower())
    train(head)
    head.refresh()
    other = SampledSoftmax(D, N, "uniform", M, classes=Tower(seed=1))
    other.load_state_dict(head.state_dict())
    query, target = batch()
    torch.testing.assert_close(other.eval()(query, target), head.eval()(query, target))
    # The encoder alone: the first use encodes all classes.
    fresh = SampledSoftmax(D, N, "uniform", M, classes=Tower(seed=2))
    fresh(*batch())
    fresh.load_state_dict({key: value for key, value in head.state_dict().items() if key.startswith("classes.")})
    torch.testing.assert_close(fresh.eval()(query, target), head(query, target))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["blocks", "uniform"])
def test_checkpointing_the_layer_draws_and_encodes_the_same(name, use_reentrant):
    found = []
    for around in (False, True):
        head = SampledSoftmax(D, N, name, M, classes=Tower(dropout=0.3), chunk_size=8, **SAMPLERS[name])
        torch.manual_seed(5)
        for step in range(3):
            query, target = batch(seed=step)
            loss = checkpoint(head, query, target, use_reentrant=use_reentrant) if around else head(query, target)
            loss.backward()
        found.append([loss.detach(), query.grad, *(parameter.grad for parameter in head.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["blocks", "uniform"])
@pytest.mark.parametrize("of_encoder", [torch.float32, torch.bfloat16])
def test_the_cache_may_have_half_precision(name, of_encoder):
    head = SampledSoftmax(D, N, name, M, classes=Tower().to(of_encoder), dtype=torch.bfloat16, **SAMPLERS[name])
    query, target = batch()
    loss = head(query.to(of_encoder), target)
    loss.backward()
    assert loss.dtype == torch.float32
    assert head.weight.dtype == torch.bfloat16
    head.refresh()
    head.eval()
    weight = head.classes(torch.arange(N)).to(torch.bfloat16).float()
    full = functional.full_softmax_loss(query.to(of_encoder).float(), weight, target)
    torch.testing.assert_close(head(query.to(of_encoder), target), full)


def test_training_reaches_the_full_softmax():
    ends = []
    for kind in ("blocks", None):
        if kind is None:
            head = FullSoftmax(D, N, classes=Tower())
        else:
            head = SampledSoftmax(D, N, kind, 16, classes=Tower(), own=4)
        trunk = torch.manual_seed(1) and nn.Embedding(20, D)
        optimizer = manyclass.optim.Adam([*trunk.parameters(), *head.parameters()], lr=0.01)
        generator = fixed(7)
        for _ in range(300):
            item = torch.randint(20, (32,), generator=generator)
            target = (2 * item + torch.randint(3, (32,), generator=generator)) % N
            loss = head(trunk(item), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        head.refresh()
        item = torch.arange(20)
        ends.append(float(head.eval()(trunk(item), 2 * item % N).detach()))
    assert ends[1] < 2.0  # of ln 40 = 3.7
    assert abs(ends[0] - ends[1]) < 0.1


def test_copies_and_pickles():
    head = SampledSoftmax(D, N, "blocks", M, classes=Tower())
    train(head, 2)
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        other.refresh()
        assert other.classes is not head.classes
        assert torch.equal(other.weight, other.classes(torch.arange(N)).detach())
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(head)
        del head
        assert gone() is None
    finally:
        gc.enable()


def test_an_empty_batch_and_a_single_class_of_each_example():
    head = SampledSoftmax(D, N, "uniform", 1, classes=Tower())
    loss = head(torch.zeros(0, D), torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert float(loss.detach()) == 0
    with warnings.catch_warnings():
        head.refresh()
        assert head.eval()(torch.zeros(0, D), torch.zeros(0, dtype=torch.long)) == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"classes": lambda ids: ids}, TypeError, "classes must be a Module or None, got"),
        ({"classes": nn.Embedding(N, D), "chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        (
            {"classes": nn.Embedding(N, D), "embedding": nn.Embedding(N, D, sparse=True)},
            ValueError,
            "give embedding or classes, not both",
        ),
    ],
)
def test_wrong_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        SampledSoftmax(D, N, **options)


def test_a_wrong_encoder_is_named():
    head = SampledSoftmax(D, N, "uniform", M, classes=nn.Embedding(N, D + 1))
    with pytest.raises(
        ValueError, match=rf"classes must map ids of shape \({N},\) to embeddings .*got \({N}, {D + 1}\)"
    ):
        head(*batch())


def test_tables_are_as_they_were():
    head = SampledSoftmax(D, N)
    assert head.cache is None
    assert set(dict(head.named_parameters())) == {"embedding.weight"}
    assert isinstance(F.linear(torch.zeros(1, D), head.weight), torch.Tensor)


def test_offsets_may_have_another_dtype_than_the_encoder():
    head = manyclass.SampledSoftmax(4, 50, classes=torch.nn.Embedding(50, 4), bias=True, dtype=torch.bfloat16)
    head(torch.randn(3, 4), torch.randint(50, (3,))).backward()
    assert head.bias_embedding.weight.grad.dtype == torch.bfloat16
