"""The layer inside torch's own machinery: frozen parameters, checkpoints of activations, meta devices, other states."""

import copy
import functools
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyclass import Cosine, FullSoftmax, SampledSoftmax, kernels, optim, samplers

N, D = 200, 6


COUNTS = torch.arange(N) + 1
PAIRS = torch.stack([torch.arange(500) % 7, torch.arange(500) * 11 % N], 1)
#: Every sampler by name, with the options that it needs.
SAMPLERS = {
    "uniform": {},
    "log_uniform": {},
    "unigram": {"counts": COUNTS},
    "bigram": {"pairs": PAIRS},
    "ngram": {"pairs": PAIRS, "memory": 64},
    "in_batch": {"counts": COUNTS, "uniform": 8},
    "softmax": {},
    "quadratic": {},
    "quartic": {},
    "blocks": {"own": 4, "probe": 4, "block_size": 2},
    "head_tail": {"head": 4, "probe": 4},
    "two_pass": {"candidates": 50, "counts": COUNTS},
    "lsh": {"tables": 4, "bits": 3},
    "multi_index": {"codewords": 5},
    "positive_features": {"features": 16},
    "fourier": {"features": 16},
}


def test_every_named_sampler_is_here():
    assert SAMPLERS.keys() == set(samplers.names())


def batch(seed=0, size=32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, D, generator=generator), torch.randint(N, (size,), generator=generator)


def make(sampler="blocks", num_samples=16, **options):
    torch.manual_seed(0)
    options = {**SAMPLERS[sampler], **options} if sampler == "blocks" else options
    return SampledSoftmax(D, N, sampler, num_samples, **options)


def trained(layer, steps=3):
    """Train for some steps; returns the losses."""
    query, target = (part.to(layer.weight.device) for part in batch())
    optimizer, losses = torch.optim.SGD(layer.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        losses.append(layer(query.to(layer.weight.dtype), target, context=target, generator=generator))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses)


def test_the_full_softmax_is_the_cross_entropy(backend):
    query, target = batch()
    for bias in (False, True):
        layer = FullSoftmax(D, N, bias=bias)
        logits = query @ layer.weight.T + (layer.bias if bias else 0)
        torch.testing.assert_close(layer(query, target), nn.functional.cross_entropy(logits, target))
        torch.testing.assert_close(layer.eval()(query, target), nn.functional.cross_entropy(logits, target))
    assert not hasattr(layer, "sampler")
    target[0] = -100
    assert FullSoftmax(D, N, reduction="none")(query, target)[0] == 0


@pytest.mark.parametrize("frozen", ["all", "weight", "bias"])
def test_a_frozen_head_gets_no_gradient(frozen, backend):
    layer = make(bias=True)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not (frozen == "all" or name.startswith("bias") == (frozen == "bias")))
    query, target = batch()
    query.requires_grad_()
    layer(query, target).backward()
    assert query.grad.abs().sum() > 0
    for parameter in layer.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad


def test_second_derivatives_are_right_or_refused():
    query, target = batch()
    with pytest.raises(RuntimeError, match="no second derivatives"):  # of the native kernel
        torch.autograd.grad(make()(query.requires_grad_(), target), query, create_graph=True)
    layer = make("uniform", dtype=torch.double)

    def loss(query):
        return layer(query, target[:3], generator=torch.Generator().manual_seed(0))

    assert torch.autograd.gradgradcheck(loss, query[:3].detach().double().requires_grad_())
    with pytest.raises(RuntimeError, match="no second derivatives"):
        loss(query[:3].detach().double()).backward(create_graph=True)


@pytest.mark.parametrize("sampler", ["blocks", "uniform", "softmax", "quadratic"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_pass_draws_the_same(sampler, reentrant, backend):
    query, target = batch()
    found = []
    for recompute in (False, True):
        layer = make(sampler, tolerance=0.1, num_samples=None)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        torch.manual_seed(1)
        for _ in range(14):
            optimizer.zero_grad()
            leaf = query.clone().requires_grad_()
            run = functools.partial(checkpoint, layer, use_reentrant=reentrant) if recompute else layer
            losses = [run(leaf[part], target[part]) for part in (slice(0, 16), slice(16, 32))]
            for loss in losses:  # the other batch has been drawn for in between
                loss.backward()
            optimizer.step()
        found.append((layer.weight.detach().clone(), leaf.grad, int(layer.step), layer.num_samples))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_layer_on_the_meta_device_can_be_filled(name):
    """Statistics and counts of the sampler are those of a layer that was made on the CPU."""
    losses = []
    for place in ("cpu", "meta"):
        with torch.device(place):
            layer = SampledSoftmax(D, N, name, 16, bias=True, **SAMPLERS[name])
        assert layer.weight.is_meta == (place == "meta")
        if place == "meta":
            layer = layer.to_empty(device="cpu")
        torch.manual_seed(0)
        layer.reset_parameters()
        assert layer.weight.abs().max() <= 1 / D**0.5
        assert layer.weight.std() > 0.1 / D**0.5
        losses += [trained(layer)]
    assert torch.equal(*losses)


def test_new_parameters_make_all_statistics_stale():
    layer = SampledSoftmax(D, N, samplers.KernelTree, 16, kernel=kernels.Quadratic(), leaf_size=4)
    trained(layer)
    layer.reset_parameters()
    with torch.no_grad():
        layer(*batch())
    assert torch.equal(layer.sampler.weight, layer.weight)


@pytest.mark.parametrize("name", SAMPLERS)
def test_inference_mode_first_and_training_afterwards(name):
    layer = SampledSoftmax(D, N, name, 16, **SAMPLERS[name])
    query, target = batch()
    with torch.inference_mode():
        layer(query, target, context=target)
        layer.diagnostics()
        layer.refresh()
        if name == "blocks":
            layer.topk(query, 3, probe=4)
    trained(layer)
    assert layer.weight.grad.is_sparse


def test_a_layer_made_in_inference_mode():
    query, target = batch()
    with torch.inference_mode():
        layer = make()
        layer(query, target)
        assert layer.topk(query, 3, probe=200)[1].tolist() == layer.topk(query, 3)[1].tolist()


@pytest.mark.parametrize("sampler", ["blocks", "uniform", "softmax", "quadratic"])
def test_the_weights_of_a_linear_layer_can_be_loaded(sampler):
    linear, layer = nn.Linear(D, N), make(sampler, bias=True)
    query, target = batch()
    layer(query, target)
    layer.load_state_dict(linear.state_dict())
    torch.testing.assert_close(layer.log_prob(query), linear(query).log_softmax(-1))
    assert layer.follower.touched is None
    layer(query, target).backward()
    state = {"trunk.weight": torch.ones(1), **{f"head.{k}": v for k, v in linear.state_dict().items()}}
    whole = nn.ModuleDict({"head": make(sampler, bias=True)})
    whole.load_state_dict(state, strict=False)
    assert torch.equal(whole["head"].bias, linear.bias)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_all_classes_loads_other_layers(bias):
    sampled = make(bias=bias)
    trained(sampled)
    for other in (nn.Linear(D, N, bias=bias), sampled):
        whole = nn.ModuleDict({"head": FullSoftmax(D, N, bias=bias)})
        whole.load_state_dict({f"head.{name}": value for name, value in other.state_dict().items()})
        assert torch.equal(whole["head"].weight, other.weight)
        assert not bias or torch.equal(whole["head"].bias, other.bias)
    sampled.load_state_dict(whole["head"].state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        whole.load_state_dict({**whole.state_dict(), "head.other": torch.ones(1)})


@pytest.mark.parametrize("other", ["blocks", "uniform", "softmax", "quadratic"])
def test_the_state_of_a_layer_with_another_sampler_can_be_loaded(other):
    query, target = batch()
    for sampler in ("blocks", "unigram"):
        options = {"counts": torch.arange(N) + 1} if sampler == "unigram" else {}
        old, new = make(other), make(sampler, **options)
        old(query, target).backward()
        new(query, target)
        new.load_state_dict(old.state_dict())
        assert torch.equal(new.weight, old.weight)
        if sampler != other:
            assert new.follower.touched is None
        new(query, target).backward()


def test_a_checkpoint_without_the_sampler_makes_all_statistics_stale():
    query, target = batch()
    layer = make()
    layer(query, target).backward()
    state = {key: value for key, value in layer.state_dict().items() if not key.startswith("sampler.")}
    layer(query, target)
    layer.load_state_dict(state, strict=False)
    assert layer.follower.touched is None


def test_pickles_do_not_carry_the_last_batch():
    layer = make()
    small = len(pickle.dumps(layer))
    layer(*batch(size=4096))
    assert len(pickle.dumps(layer)) < small + 20_000


@pytest.mark.parametrize("name", SAMPLERS)
def test_copies_train_where_the_original_would(name):
    """Between the backward pass and the optimiser's step. The trees of copies may take them for a further step."""
    query, target = batch()
    layer = SampledSoftmax(D, N, name, 16, **SAMPLERS[name])
    layer(query, target, context=target).backward()
    for duplicate in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        pair, losses = (duplicate(layer), layer), []
        for each in pair:
            losses.append(each(query, target, context=target, generator=torch.Generator().manual_seed(0)))
        torch.testing.assert_close(*losses, rtol=0.02 if name == "blocks" else 0.0, atol=0.0)


def test_a_single_vector_has_a_best_class():
    layer = make()
    query = torch.randn(D)
    assert layer.predict(query).shape == ()
    assert layer.topk(query, 3)[1].shape == layer.topk(query, 3, probe=200)[1].shape == (3,)


class Favourite(samplers.Unigram):
    """A sampler of a user: one class is drawn as often as all others together."""

    def __init__(self, num_classes, favourite=0):
        counts = torch.ones(num_classes)
        counts[favourite] = num_classes - 1
        super().__init__(counts)


def test_a_class_of_samplers_can_be_given():
    layer = SampledSoftmax(D, N, Favourite, 50, favourite=7)
    draw = layer.sampler.draw(torch.zeros(100, D), 50)
    assert 0.4 < (draw.ids == 7).float().mean() < 0.6
    with pytest.raises(TypeError, match="sampler=Favourite has no option 'favorite': its options are favourite"):
        SampledSoftmax(D, N, Favourite, favorite=7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ignore_index": None}, "ignore_index must be an int, got None"),
        ({"bias": 2}, "bias must be a bool, got 2"),
        ({"sparse": "yes"}, "sparse must be a bool, got 'yes'"),
        ({"embedding": nn.Linear(D, N)}, "embedding must be an nn.Embedding or None, got Linear"),
        ({"dtype": torch.int64}, "dtype must be a floating point dtype of 16, 32 or 64 bits, got torch.int64"),
        ({"tolerance": "small", "num_samples": None}, "tolerance must be a number, got 'small'"),
        ({"num_samples": 2.5}, "num_samples must be an int, got 2.5"),
        ({"sampler": 3}, "sampler must be a name, or a class or object of samplers.Sampler, got 3"),
    ],
)
def test_wrong_types_are_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        SampledSoftmax(D, N, **arguments)


@pytest.mark.parametrize(
    "name", [name for name in inspect.signature(SampledSoftmax).parameters if name[-8:] != "_options"]
)
@pytest.mark.parametrize("value", [object(), [], torch.zeros(2), 3 + 4j], ids=["object", "list", "tensor", "complex"])
def test_every_argument_refuses_what_it_is_not(name, value):
    arguments = {"in_features": D, "num_classes": N, name: value}
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        SampledSoftmax(**arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half, torch.double])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("late", [False, True], ids=["made", "converted"])
def test_parameters_of_any_dtype(dtype, sampler, late, backend):
    """Losses are those of the same weights in float32, and statistics stay as precise as they were."""
    query, target = batch()
    options = SAMPLERS[sampler]
    number = 500 if sampler == "fourier" else 5000  # which reads whole leaves for each draw
    exact = make(sampler, number, bias=True, **options)
    layer = make(sampler, number, bias=True, **({} if late else {"dtype": dtype}), **options)
    if late:
        layer(query, target, context=target)  # statistics exist already
        layer = layer.to(dtype)
    with torch.no_grad():
        layer.weight.copy_(exact.weight)
        exact.weight.copy_(layer.weight)
        layer.bias.copy_(exact.bias)
        exact.bias.copy_(layer.bias)
        query = query.to(dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        generators = [torch.Generator().manual_seed(step) for _ in range(2)]
        loss = layer(query, target, context=target, generator=generators[0])
        assert loss.dtype == (torch.double if dtype == torch.double else torch.float32)
        if step == 0:
            wanted = exact(query.float(), target, context=target, generator=generators[1])
            torch.testing.assert_close(loss.float(), wanted, rtol=0.05, atol=0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert layer.weight.dtype == dtype
    for name, buffer in layer.sampler.named_buffers():
        if buffer.is_floating_point():
            assert buffer.dtype in (torch.float32, torch.double), name


def test_dense_samplers_score_in_float32():
    sampler = samplers.create("softmax", N, D)
    weight = torch.randn(N, D).bfloat16()
    query = torch.randn(3, D).bfloat16()
    sampler.update(weight)
    found = sampler.log_prob(query, torch.arange(N).expand(3, -1))
    torch.testing.assert_close(found.float(), (query.float() @ weight.float().T).log_softmax(-1), rtol=1e-5, atol=1e-5)


class Served(nn.Module):
    """What people export: a layer's answer to a batch of queries."""

    def __init__(self, layer, k):
        super().__init__()
        self.layer, self.k = layer, k

    def forward(self, query):
        return self.layer.topk(query, self.k) if self.k else (self.layer.log_prob(query),)


LAYERS = {
    "softmax": lambda: make(bias=True),
    "absolute": lambda: make(bias=True, prediction="absolute"),
    "cosine": lambda: make(cosine=Cosine(5.0)),
    "encoder": lambda: make(classes=nn.Embedding(N, D)),
    "full": lambda: FullSoftmax(D, N, bias=True),
}


@pytest.mark.parametrize("k", [0, 3], ids=["log_prob", "topk"])
@pytest.mark.parametrize("kind", LAYERS)
def test_export_compile_and_vmap(k, kind):
    layer = LAYERS[kind]().eval()
    layer.refresh()
    model, query = Served(layer, k), torch.randn(5, D)
    dynamic = ({0: torch.export.Dim("batch", min=2, max=4096)},)
    torch._dynamo.reset()
    exported = torch.export.export(model, (query,), dynamic_shapes=dynamic).module()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for function in (exported, compiled, torch.vmap(model)):
        for found, wanted in zip(function(query), model(query), strict=True):
            torch.testing.assert_close(found, wanted)
    assert exported(torch.randn(17, D))[0].shape[0] == 17


def test_graphs_of_cosines_are_never_stale():
    """A compiled graph cannot tell whether the cache of normalised embeddings is stale, so it does not read it."""
    layer, query = make(cosine=Cosine(5.0)).eval(), torch.randn(5, D)
    functions = [torch.compile(layer.log_prob, fullgraph=True, backend="eager"), torch.vmap(layer.log_prob)]
    for function in functions:
        with torch.no_grad():
            layer.embedding.weight.add_(torch.randn(N, D))
        normalised = nn.functional.normalize
        wanted = (5 * normalised(query, dim=-1) @ normalised(layer.embedding.weight, dim=-1).T).log_softmax(-1)
        torch.testing.assert_close(function(query), wanted)


def test_a_graph_of_an_encoder_that_encoded_nothing_is_refused():
    layer = make(classes=nn.Embedding(N, D)).eval()
    with pytest.raises(Exception, match=r"call refresh\(\) on the layer before you compile or export"):
        torch.export.export(Served(layer, 0), (torch.randn(5, D),))


def test_a_layer_that_nobody_needs_is_freed_at_once():
    """Parts of the layer that knew the layer would keep its weights until the next collection of cycles."""
    gc.disable()
    try:
        layer = make()
        layer(*batch()).backward()
        gone = weakref.ref(layer)
        del layer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore")  # torch's own, from inside the compiler
def test_a_compiled_training_step_breaks_once():
    """The trunk, the layer, and what follows: two graphs. Backward passes and rows of optimisers make no graphs."""
    torch.manual_seed(0)
    trunk, layer = nn.Linear(D, D), make()
    optimizer = optim.AdamW([*trunk.parameters(), *layer.parameters()])

    def loss(query, target):
        return layer(trunk(query).relu(), target) * 2

    def step(query, target):
        optimizer.zero_grad()
        loss(query, target).backward()
        optimizer.step()

    torch._dynamo.reset()
    step(*batch())
    found = torch._dynamo.explain(loss)(*batch())
    assert (found.graph_count, found.graph_break_count) == (2, 1)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, backend="eager")
    for seed in range(3):
        compiled(*batch(seed))
    reasons = [reason for reason in torch._dynamo.utils.counters["graph_break"] if "manyclass" in reason]
    assert {name for name in ("Head._forward", "checked", "_step_rows") if any(name in one for one in reasons)} == {
        "Head._forward",
        "checked",
    }
    assert len(reasons) == 2
