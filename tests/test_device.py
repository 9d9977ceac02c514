"""Layers, samplers, optimisers and checkpoints on a second device: nothing mixes devices, the host rarely waits."""

import copy
import math

import pytest
import torch
from strict_device import DEVICE, MixedDevicesError, Strict, StrictTensor, strict_device
from torch.utils import _pytree as pytree

import manyclass
from manyclass import CosFace, Cosine, FullSoftmax, SampledSoftmax, kernels, ops, optim, samplers
from manyclass.samplers import line, partition

N, D, BATCH = 600, 6, 12
COUNTS = torch.arange(1, N + 1)
PAIRS = torch.stack([torch.arange(2000) % 50, torch.arange(2000) * 7 % N], dim=1)
#: Every sampler by name, and those that names do not reach at this size.
SAMPLERS = {
    "blocks": ("blocks", {"own": 8, "probe": 6}),
    "uniform": ("uniform", {}),
    "uniform pool": ("uniform", {"scope": "batch"}),
    "log_uniform": ("log_uniform", {}),
    "log_uniform pool": ("log_uniform", {"scope": "batch"}),
    "unigram": ("unigram", {"counts": COUNTS}),
    "unigram pool": ("unigram", {"counts": COUNTS, "scope": "batch"}),
    "bigram": ("bigram", {"pairs": PAIRS}),
    "ngram": ("ngram", {"pairs": PAIRS, "memory": 256}),
    "head_tail": ("head_tail", {"head": 8, "probe": 6}),
    "two_pass": ("two_pass", {"candidates": 100}),
    "two_pass best": ("two_pass", {"candidates": 100, "counts": COUNTS, "best": True}),
    "lsh": ("lsh", {"tables": 4, "bits": 3, "every": 3}),
    "multi_index": ("multi_index", {"codewords": 5, "every": 3}),
    "positive_features": ("positive_features", {"features": 16, "every": 3}),
    "fourier": ("fourier", {"features": 16}),
    "in_batch": ("in_batch", {"counts": COUNTS, "uniform": 8}),
    "softmax": ("softmax", {}),
    "quadratic": ("quadratic", {}),
    "quartic": ("quartic", {}),
    "tree": (samplers.KernelTree, {"kernel": kernels.Quadratic(100.0), "leaf_size": 8}),
}
#: Most synchronisations of a training step with validate=False; steps that rebuild tables or grow trees count, too.
WAITS = 2


@pytest.fixture
def device(monkeypatch):
    """The strict device. Native kernels are off, so that the CPU computes the same; trees and lines are small."""
    monkeypatch.setattr(ops, "_NATIVE", False)
    monkeypatch.setattr(partition, "SLICE", 128)
    monkeypatch.setattr(partition, "TOP", 16)
    monkeypatch.setattr(line, "REFRESH", 16)
    with torch.sparse.check_sparse_tensor_invariants(False), strict_device() as mode:
        yield mode


def make(name: str, place: torch.device | str, **options) -> SampledSoftmax:
    sampler, own_options = SAMPLERS[name]
    torch.manual_seed(0)
    head = SampledSoftmax(D, N, sampler, 40, device=place, **own_options, **options)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        head.weight.copy_(torch.randn(N, D, generator=generator))
        if head.bias is not None:
            head.bias_embedding.weight.copy_(torch.randn(N, 1, generator=generator))
    return head


def batch(
    step: int, place: torch.device | str, ignored: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    query = torch.randn(3, BATCH // 3, D, generator=generator)
    target = torch.randint(N, (3, BATCH // 3), generator=generator)
    if ignored:
        target[0, step % 4] = -100
    context = torch.randint(60, (3, BATCH // 3), generator=generator)
    return query.to(place).requires_grad_(), target.to(place), context.to(place)


def train(head, optimizer, steps: range, mode: Strict | None = None) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        query, target, context = batch(step, head.weight.device)
        generator = torch.Generator(head.weight.device).manual_seed(step)
        before = 0 if mode is None else mode.count
        optimizer.zero_grad()
        loss = head(query, target, context=context, generator=generator)
        loss.sum().backward()
        optimizer.step()
        if mode is not None:
            losses.append(mode.count - before)
        else:
            losses.append(torch.cat([loss.detach().flatten(), query.grad.flatten()]).cpu())
    return losses


def same(found, expected) -> None:
    found = found.to_dense() if found.is_sparse else found
    expected = expected.to_dense() if expected.is_sparse else expected
    torch.testing.assert_close(found.detach().cpu(), expected.detach().cpu())


# The device itself.


@pytest.mark.parametrize(
    "mix",
    [
        lambda there, here: there + here,
        lambda there, here: torch.cat([there, here]),
        lambda there, here: there @ here,
        lambda there, here: there[here.long()],
        lambda there, here: here[there.long()],
        lambda there, here: there.index_put_((there.long(),), here),
        lambda there, here: torch.where(there > 0, there, here),
        lambda there, here: there.sum() * here,
        lambda there, here: torch.rand(3, device=DEVICE, generator=torch.Generator()),
        lambda there, here: torch.rand(3, generator=torch.Generator(DEVICE)),
        lambda there, here: torch.ops.manyclass.sum_up_(there, there),
        lambda there, here: torch.sparse_coo_tensor(here.long()[None], there, (3,)),
    ],
)
def test_the_strict_device_refuses_to_mix(device, mix):
    with pytest.raises(MixedDevicesError):
        mix(torch.ones(3, device=DEVICE), torch.ones(3))


@pytest.mark.parametrize(
    ("number", "read"),
    [
        (1, lambda x: x.sum().item()),
        (1, lambda x: int(x.sum())),
        (1, lambda x: bool(x.any())),
        (1, lambda x: x.tolist()),
        (1, lambda x: x.cpu()),
        (1, lambda x: torch.zeros(4).copy_(x)),
        (1, lambda x: x.nonzero()),
        (1, lambda x: x.unique()),
        (1, lambda x: x[x > 1]),
        (1, lambda x: x.index_put_((x > 1,), torch.tensor(0.0))),
        (1, lambda x: x.masked_select(x > 1)),
        (1, lambda x: torch.equal(x, x)),
        (1, lambda x: x.repeat_interleave(x.long())),
        (1, lambda x: x[x.long()[0]]),
        (1, lambda x: torch.sparse_coo_tensor(x.long()[None], x, (4,)).coalesce()),
        (0, lambda x: x.repeat_interleave(x.long(), output_size=6)),
        (0, lambda x: torch.nonzero_static(x, size=3)),
        (0, lambda x: x.masked_fill(x > 1, 0.0)),
        (0, lambda x: x[x.long()] + torch.tensor(1.0)),
        (0, lambda x: torch.arange(3).to(x)),
        (0, lambda x: torch.tensor([1.0, 2.0], device=DEVICE).sort()),
    ],
)
def test_the_strict_device_counts_synchronisations(device, number, read):
    x = torch.tensor([0.0, 1.0, 2.0, 3.0], device=DEVICE)
    read(x)
    assert device.count == number


def test_a_planted_mix_is_caught(device, monkeypatch):
    head = make("uniform", DEVICE)
    monkeypatch.setattr(
        samplers.Uniform, "_log_prob", lambda self, query, ids, *rest: torch.zeros(ids.shape, dtype=torch.float64)
    )
    with pytest.raises(MixedDevicesError):
        train(head, optim.SGD(head.parameters(), lr=0.1), range(1))


def test_a_planted_synchronisation_is_counted(device, monkeypatch):
    head = make("uniform", DEVICE, validate=False)
    monkeypatch.setattr(samplers.Uniform, "observe", lambda self, query, target: query.sum().item())
    assert train(head, optim.SGD(head.parameters(), lr=0.1), range(2), device) == [3, 3]


# Training.


def test_every_named_sampler_is_here():
    assert {sampler for sampler, _ in SAMPLERS.values() if isinstance(sampler, str)} == set(samplers.names())


@pytest.mark.parametrize("name", SAMPLERS)
def test_training_is_that_of_the_cpu(device, name):
    """Losses, gradients and weights of some steps, over several trees of blocks."""
    heads = [make(name, place, bias=name != "bigram") for place in ("cpu", DEVICE)]
    found = [train(head, optim.SGD(head.parameters(), lr=0.1), range(13)) for head in heads]
    for expected, loss in zip(*found, strict=True):
        torch.testing.assert_close(loss, expected)
    assert isinstance(heads[1].weight, StrictTensor)
    assert heads[1].weight.grad.is_sparse
    assert heads[1].weight.grad.is_coalesced()
    for (key, expected), value in zip(heads[0].state_dict().items(), heads[1].state_dict().values(), strict=True):
        torch.testing.assert_close(value.cpu(), expected, msg=lambda text, key=key: f"{key}: {text}")


def test_the_line_is_that_of_the_cpu(device, monkeypatch):
    """None, few and all blocks touched, and outliers only."""
    monkeypatch.setattr(line, "REFRESH", 16)
    lines = [line.Line(64), line.Line(64).to(DEVICE)]
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        number = [0, 3, 30, 200][step % 4]
        joining = torch.randint(-1, 64, (number,), generator=generator) if step % 7 else torch.full((2,), -1)
        due = []
        for one in lines:
            one.join(joining.to(one.touched.device))
            due.append(one.due())
        same(*due[::-1])
        for name in ("touched", "at", "swept"):
            same(getattr(lines[1], name), getattr(lines[0], name))


@pytest.mark.parametrize("options", [{"sparse": False}, {"reduction": "none"}, {"prediction": "absolute"}])
def test_options_of_the_layer(device, options):
    heads = [make("blocks", place, **options) for place in ("cpu", DEVICE)]
    found = [train(head, optim.SGD(head.parameters(), lr=0.1), range(3)) for head in heads]
    for expected, loss in zip(*found, strict=True):
        torch.testing.assert_close(loss, expected)
    same(heads[1].weight, heads[0].weight)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_step_rarely_waits_for_the_device(device, name):
    head = make(name, DEVICE, validate=False)
    waits = train(head, optim.AdamW(head.parameters()), range(16), device)
    if name == "blocks":
        assert head.sampler.partition.blocks > line.REFRESH  # blocks wait in line
        assert head.sampler.rebuild_at > 10  # a second tree has been made
    assert max(waits) <= WAITS, device.waits


OPTIONS = {
    "several": {},
    "bias": {"bias": True},
    "dense": {"sparse": False},
    "none": {"reduction": "none"},
    "absolute": {"prediction": "absolute"},
    "cosine": {"cosine": Cosine(8.0)},
    "margin": {"cosine": Cosine(8.0, margin=CosFace(0.2))},
    "encoder": {"classes": torch.nn.Embedding(N, D)},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_make_the_host_wait_no_longer(device, kind):
    """Clipping is part of the step, too."""
    head = make("blocks", DEVICE, validate=False, **copy.deepcopy(OPTIONS[kind])).to(DEVICE)
    optimizer = optim.AdamW(head.parameters())
    for step in range(5):
        query, target, _ = batch(step, DEVICE)
        if kind == "several":
            target = torch.stack([target, (target.clamp(min=0) + 1) % N, torch.full_like(target, -100)], dim=-1)
        before = device.count
        optimizer.zero_grad()
        head(query, target, generator=torch.Generator(DEVICE).manual_seed(step)).sum().backward()
        manyclass.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        assert device.count - before <= WAITS, device.waits


def test_checks_make_the_host_wait(device):
    """What validate=False saves."""
    head = make("blocks", DEVICE)
    assert min(train(head, optim.SGD(head.parameters(), lr=0.1), range(2), device)) > 6


def test_tolerance_and_diagnostics(device):
    sizes = []
    for place in ("cpu", DEVICE):
        torch.manual_seed(0)
        head = SampledSoftmax(D, N, own=8, probe=6, tolerance=0.01, device=place)
        torch.manual_seed(1)
        with torch.no_grad():
            head.weight.copy_(torch.randn(N, D))
        train(head, optim.SGD(head.parameters(), lr=0.1), range(6))
        sizes.append((head.num_samples, head.budget.bias_product, *head.diagnostics(4)[:6]))
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-3)
    assert sizes[1][0] != 256  # it has adapted


# Exact results and search.


@pytest.mark.parametrize("kind", ["sampled", "full"])
def test_evaluation(device, kind):
    results = []
    for place in ("cpu", DEVICE):
        head = make("blocks", place, bias=True) if kind == "sampled" else FullSoftmax(D, N, bias=True, device=place)
        if kind == "full":
            head.load_state_dict(
                {k: v for k, v in make("uniform", "cpu", bias=True).state_dict().items() if "emb" in k}
            )
        query, target, _ = batch(0, place)
        loss = head.train(kind == "full")(query, target)
        loss.backward()
        results.append(
            [loss, query.grad, head.weight.grad, head.log_prob(query), *head.topk(query, 5), head.predict(query)]
        )
    for found, expected in zip(results[1], results[0], strict=True):
        assert isinstance(found, StrictTensor)
        same(found, expected)


def test_search(device):
    results = []
    for place in ("cpu", DEVICE):
        head = make("blocks", place)
        train(head, optim.SGD(head.parameters(), lr=0.1), range(2))
        head.refresh()
        results.append(head.topk(batch(0, place)[0], 5, probe=4))
    for found, expected in zip(results[1], results[0], strict=True):
        same(found, expected)


# Optimisers, clipping and checkpoints.


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (optim.Adagrad, {"lr": 0.1}),
        (optim.Adam, {"lr": 0.01}),
        (optim.AdamW, {"lr": 0.01, "rowwise": True}),
    ],
)
def test_optimisers(device, kind, options, sparse):
    if not sparse:
        options = {name: value for name, value in options.items() if name != "rowwise"}
    weights = []
    for place in ("cpu", DEVICE):
        head = make("uniform", place, sparse=sparse, bias=True)
        optimizer = kind(head.parameters(), **options)
        train(head, optimizer, range(3))
        resumed = kind(head.parameters(), **options)
        resumed.load_state_dict(optimizer.state_dict())
        train(head, resumed, range(3, 6))
        if hasattr(resumed, "flush"):
            resumed.flush()
        weights.append(head.weight)
    same(weights[1], weights[0])


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping(device, norm_type):
    found = []
    for place in ("cpu", DEVICE):
        head = make("uniform", place, bias=True)
        query, target, _ = batch(0, place)
        head(query, target, generator=torch.Generator(place).manual_seed(0)).backward()
        found.append((manyclass.clip_grad_norm_(head.parameters(), 0.01, norm_type), head.weight.grad))
    for result, expected in zip(found[1], found[0], strict=True):
        assert isinstance(result, StrictTensor)
        same(result, expected)


@pytest.mark.parametrize("name", ["blocks", "unigram", "tree"])
@pytest.mark.parametrize("place", ["cpu", DEVICE], ids=str)
def test_a_checkpoint_resumes(device, name, place):
    """On the same device exactly, on the CPU closely."""
    head = make(name, DEVICE)
    optimizer = optim.AdamW(head.parameters())
    train(head, optimizer, range(12))
    state = {key: value.cpu().clone() for key, value in head.state_dict().items()}
    assert int(state["step"]) == 12
    other = make(name, place)
    other.load_state_dict(state)
    resumed = optim.AdamW(other.parameters())
    moments = pytree.tree_map_only(torch.Tensor, lambda value: value.cpu().clone(), optimizer.state_dict())
    resumed.load_state_dict(moments)
    losses = [train(*pair, range(12, 16)) for pair in ((head, optimizer), (other, resumed))]
    assert other.step == 16
    for expected, loss in zip(*losses, strict=True):
        torch.testing.assert_close(loss, expected, **({} if place == "cpu" else {"rtol": 0.0, "atol": 0.0}))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_layer_moves(device, name):
    head = make(name, "cpu")
    train(head, optim.SGD(head.parameters(), lr=0.1), range(2))
    head.to(DEVICE)
    assert {tensor.device for tensor in [*head.parameters(), *head.buffers()]} == {DEVICE}
    losses = train(head, optim.SGD(head.parameters(), lr=0.1), range(2, 4))
    assert all(bool(loss.isfinite().all()) for loss in losses)
    head.cpu()
    assert all(bool(loss.isfinite().all()) for loss in train(head, optim.SGD(head.parameters(), lr=0.1), range(4, 6)))


# What validate=False leaves out.


def test_without_validation_values_are_not_read():
    query, target, _ = batch(0, "cpu")
    query = query.detach().masked_fill(torch.arange(D) == 0, math.nan)
    with pytest.raises(ValueError, match="input holds NaN"):
        make("uniform", "cpu")(query, target)
    assert make("uniform", "cpu", validate=False)(query, target).isnan()
    sampler = make("uniform", "cpu", validate=False).sampler
    assert not sampler.validate
    sampler.draw(query, 3)
    sampler.validate = True
    with pytest.raises(ValueError, match="query holds NaN"):
        sampler.draw(query, 3)


@pytest.mark.parametrize("kind", [SampledSoftmax, FullSoftmax])
def test_without_validation_shapes_and_dtypes_are_checked(kind):
    head, (query, target, _) = kind(D, N, validate=False), batch(0, "cpu")
    for error, arguments in [
        (ValueError, (query[..., 1:], target)),
        (ValueError, (query, target[1:])),
        (TypeError, (query.double(), target)),
        (TypeError, (query, target.float())),
    ]:
        with pytest.raises(error, match="must have"):
            head(*arguments)
    with pytest.raises(TypeError, match="validate must be a bool"):
        kind(D, N, validate=1)
