"""The layer: gradients, optimizers, modes, precision, and what PyTorch does around it."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import manyclass
from manyclass import SampledSoftmax, functional, samplers

N, D, M = 30, 5, 6
COUNTS = torch.arange(N)
PAIRS = torch.stack([torch.arange(N), torch.arange(N).flip(0)], 1)
NAMED = {
    "uniform": {},
    "log_uniform": {},
    "unigram": {"counts": COUNTS, "power": 0.5},
    "bigram": {"pairs": PAIRS},
    "softmax": {},
    "quadratic": {"alpha": 10.0},
    "quartic": {},
}


def batch(shape=(7,), seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(*shape, D, generator=generator, dtype=dtype, requires_grad=True)
    return query, torch.randint(N, shape, generator=generator), torch.randint(N, shape, generator=generator)


def head_of(name="uniform", seed=0, **options):
    torch.manual_seed(seed)
    return SampledSoftmax(D, N, name, M, **NAMED.get(name, {}), **options)


def fixed(seed=3):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_training_loss_and_gradients_are_the_formula(name, bias, prediction):
    head, (query, target, context) = head_of(name, bias=bias, prediction=prediction), batch()
    loss = head(query, target, context=context, generator=fixed())
    loss.backward()

    draw = head.sampler.draw(
        query.detach(), M, exclude=target, context=context if name == "bigram" else None, generator=fixed()
    )
    ids, log_count = draw.ids, draw.log_count
    logits = F.linear(query, head.weight, head.bias)
    expected = functional.sampled_softmax_loss(
        logits.gather(1, target[:, None]).squeeze(1), logits.gather(1, ids), log_count, prediction=prediction
    )
    torch.testing.assert_close(loss, expected)
    parameters = [query, *head.parameters()]
    for parameter, grad in zip(parameters, torch.autograd.grad(expected, parameters), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.to_dense(), grad)

    drawn = torch.cat([target, ids.flatten()]).unique()
    for parameter in head.parameters():
        assert parameter.grad is not None
        assert parameter.grad.is_sparse
        assert parameter.grad.is_coalesced()
        assert torch.equal(parameter.grad.indices()[0], drawn)


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    sizes=st.tuples(st.integers(1, 9), st.integers(2, 40), st.integers(1, 7)),
    name=st.sampled_from(["uniform", "log_uniform", "unigram", "softmax", "quadratic"]),
    ignored=st.booleans(),
    training=st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_random_shapes(shape, sizes, name, ignored, training):
    d, n, m = sizes
    options = {"counts": torch.ones(n)} if name == "unigram" else {}
    head = SampledSoftmax(d, n, name, m, reduction="none", **options).train(training)
    query, target = torch.randn(*shape, d, requires_grad=True), torch.randint(n, shape)
    if ignored:
        target = target.masked_fill(torch.rand(shape) < 0.5, -100)
    losses = head(query, target)
    assert losses.shape == target.shape
    assert torch.equal(losses > 0, target != -100)
    losses.sum().backward()
    assert query.grad is not None
    assert (query.grad[target == -100] == 0).all()
    assert all(bool(torch.isfinite(g).all()) for g in (losses, query.grad, head.weight.grad.to_dense()))


@pytest.mark.parametrize("name", ["softmax", "quadratic"])
def test_adaptive_samplers_follow_weight_and_bias(name):
    head, (query, target, _) = head_of(name, bias=True, reduction="none"), batch()
    head(query, target)
    with torch.no_grad():
        head.weight.mul_(3.0)
        head.bias_embedding.weight.add_(torch.randn(N, 1))
    head(query, target)
    q = head.sampler.log_prob(query.detach(), torch.arange(N).expand(7, -1)).exp()
    logits = F.linear(query.detach(), head.weight, head.bias).double()
    mass = logits.exp() if name == "softmax" else 10 * logits**2 + 1
    torch.testing.assert_close(q, mass / mass.sum(-1, keepdim=True), rtol=1e-5, atol=1e-9)


def test_softmax_draws_give_the_full_loss_for_any_sample():
    head, (query, target, _) = head_of("softmax"), batch()
    torch.testing.assert_close(head(query, target), head.eval()(query, target))


def test_gradients_accumulate():
    head, (query, target, _) = head_of(), batch()
    dense = head_of(sparse=False)
    for h in (head, dense):
        for seed in (1, 2):
            h(query, target, generator=fixed(seed)).backward()
    torch.testing.assert_close(head.weight.grad.to_dense(), dense.weight.grad)
    assert not dense.weight.grad.is_sparse


@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
@pytest.mark.parametrize("training", [True, False])
def test_gradcheck_in_double(training, prediction):
    head = head_of("unigram", sparse=False, bias=True, dtype=torch.float64, reduction="none", prediction=prediction)
    query, target, _ = batch((3,), dtype=torch.float64)

    def loss(query, weight, bias):
        overrides = {"embedding.weight": weight, "bias_embedding.weight": bias}
        return torch.func.functional_call(head, overrides, (query, target), {"generator": fixed()})

    assert torch.autograd.gradcheck(loss, (query, *head.train(training).parameters()))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (1, 2, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_leading_shapes_and_reductions(shape, training):
    query, target, _ = batch(shape)
    losses = head_of(reduction="none").train(training)(query, target, generator=fixed())
    assert losses.shape == shape
    for reduction in ("mean", "sum"):
        loss = head_of(reduction=reduction).train(training)(query, target, generator=fixed())
        torch.testing.assert_close(loss, getattr(losses, reduction)())


@pytest.mark.parametrize("training", [True, False])
def test_ignored_targets(training):
    query, target, context = batch((2, 4))
    head = head_of("bigram", reduction="none").train(training)
    target[0, 1] = target[1, 2] = -100
    losses = head(query, target, context=context, generator=fixed())
    losses.sum().backward()
    assert losses[0, 1] == losses[1, 2] == 0
    assert (losses != 0).sum() == 6
    assert (query.grad[0, 1] == 0).all()
    assert (query.grad[1, 1] != 0).any()
    head.reduction = "mean"
    torch.testing.assert_close(head(query, target, context=context, generator=fixed()), losses.sum() / 6)
    reference = F.cross_entropy(query.flatten(0, 1) @ head.weight.T, target.flatten())
    torch.testing.assert_close(head.eval()(query, target), reference)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["empty", "all-ignored"])
def test_nothing_to_learn_from_is_a_loss_of_zero(kind, training):
    head = head_of(bias=True, ignore_index=7).train(training)
    query, target, _ = batch((0,) if kind == "empty" else (3,))
    loss = head(query, torch.full_like(target, 7))
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and p.grad.to_dense().count_nonzero() == 0 for p in (query, *head.parameters()))


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam"])
def test_sparse_optimizers_leave_other_rows_alone_and_match_dense(optimizer):
    sparse, dense = head_of(bias=True), head_of(bias=True, sparse=False)
    kind = getattr(torch.optim, optimizer)
    dense_kind = torch.optim.Adagrad if optimizer == "Adagrad" else torch.optim.SGD
    query, target, _ = batch((2,))
    before = sparse.weight.detach().clone()
    steps = {sparse: kind(sparse.parameters(), lr=0.5), dense: dense_kind(dense.parameters(), lr=0.5)}
    for head, step in steps.items():
        head(query, target, generator=fixed()).backward()
        step.step()
    touched = torch.zeros(N, dtype=torch.bool).index_fill(0, sparse.weight.grad.indices()[0], True)
    changed = (sparse.weight != before).any(1)
    assert torch.equal(changed, touched)
    assert 2 < changed.sum() < N
    if optimizer != "SparseAdam":  # by design not Adam: moments of other rows stand still
        torch.testing.assert_close(sparse.weight, dense.weight)
        torch.testing.assert_close(sparse.bias, dense.bias)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clip_grad_norm(max_norm, norm_type):
    layers = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(D, D), head_of(bias=True, sparse=sparse)])
        query, target, _ = batch()
        model[1](model[0](query), target, generator=fixed()).backward()
        layers.append(model)
    norm = manyclass.clip_grad_norm_(layers[0].parameters(), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(layers[1].parameters(), max_norm, norm_type)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_dense(), b.grad)
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        manyclass.clip_grad_norm_(layers[0].parameters(), 0)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_takes_what_torch_takes(foreach):
    """Empty sparse gradients, the largest value as the norm, and an error for norms that are not finite."""
    embedding, linear = nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2)
    parameters = [*embedding.parameters(), *linear.parameters()]
    linear(embedding(torch.tensor([], dtype=torch.long))).sum().backward()
    embedding.weight.grad = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 2), (3, 2))
    for norm_type in (2.0, math.inf):
        assert manyclass.clip_grad_norm_(parameters, 1.0, norm_type, foreach=foreach) == 0
    linear.weight.grad.fill_(math.nan)
    assert manyclass.clip_grad_norm_(parameters, 1.0, foreach=foreach).isnan()
    with pytest.raises(RuntimeError, match="norm of the gradients is nan, and error_if_nonfinite=True"):
        manyclass.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True, foreach=foreach)


def test_clip_coalesces_first():
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1, 1, 1])).sum().backward()
    assert manyclass.clip_grad_norm_(embedding.weight, 100.0) == pytest.approx(3 * 2**0.5)
    assert manyclass.clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0) == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
def test_evaluation_is_exact(prediction, bias):
    head, (query, target, _) = head_of(prediction=prediction, bias=bias).eval(), batch((2, 3))
    logits = F.linear(query, head.weight, head.bias)
    logits = logits.abs() if prediction == "absolute" else logits
    torch.testing.assert_close(head(query, target), F.cross_entropy(logits.flatten(0, 1), target.flatten()))
    log_prob = head.log_prob(query)
    torch.testing.assert_close(log_prob, logits.log_softmax(-1))
    values, ids = head.topk(query, 4)
    assert torch.equal(ids, log_prob.topk(4).indices)
    torch.testing.assert_close(values, log_prob.topk(4).values)
    assert torch.equal(head.predict(query), log_prob.argmax(-1))


@pytest.mark.parametrize("name", NAMED)
def test_state_dict_pickle_and_deepcopy(name):
    head, (query, target, context) = head_of(name, bias=True), batch()
    head(query, target, context=context)
    other = head_of(name, bias=True, seed=1)
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for twin in (other, pickle.loads(pickle.dumps(head)), copy.deepcopy(head)):
        losses = [h(query, target, context=context, generator=fixed()) for h in (head, twin)]
        assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
def test_reset_bias_predicts_the_frequencies(prediction):
    counts = torch.arange(N)
    head = head_of("uniform", bias=True, prediction=prediction)
    head.reset_bias(counts)
    found = head.log_prob(torch.zeros(1, D)).exp().squeeze(0)
    torch.testing.assert_close(found, (counts + 1) / (counts + 1).sum())


def test_tied_weights():
    embedding = nn.Embedding(N, D, sparse=True)
    head = head_of("softmax", embedding=embedding)
    assert head.weight is embedding.weight
    assert len({id(p) for p in [*embedding.parameters(), *head.parameters()]}) == 1
    _, target, context = batch()
    head(embedding(context), target, generator=fixed()).backward()
    both = embedding.weight.grad.to_dense()
    embedding.weight.grad = None
    head(embedding(context).detach(), target, generator=fixed()).backward()
    assert not torch.allclose(both, embedding.weight.grad.to_dense())
    with pytest.raises(ValueError, match=r"embedding must have shape \(30, 5\), got \(30, 4\)"):
        head_of(embedding=nn.Embedding(N, 4, sparse=True))
    with pytest.raises(ValueError, match=r"sparse=True but embedding.sparse=False"):
        head_of(embedding=nn.Embedding(N, D))


@pytest.mark.parametrize("training", [True, False])
def test_autocast_computes_in_float32(training):
    head, (query, target, _) = head_of().train(training), batch()
    half = query.detach().bfloat16()
    expected = head(half.float(), target, generator=fixed())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(half, target, generator=fixed())
        assert head.log_prob(half).dtype == head.topk(half, 2)[0].dtype == torch.float32
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("training", [True, False])
def test_low_precision_parameters(training):
    head = head_of(dtype=torch.bfloat16, bias=True).train(training)
    query, target, _ = batch(dtype=torch.bfloat16)
    loss = head(query, target, generator=fixed())
    loss.backward()
    exact = head_of(bias=True).train(training)
    exact.load_state_dict(head.state_dict())
    torch.testing.assert_close(loss, exact(query.float(), target, generator=fixed()))
    assert loss.dtype == torch.float32
    assert head.weight.grad.dtype == query.grad.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore")  # torch's own, from inside the compiler
def test_torch_compile_around_the_layer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(D, D), head_of("quadratic")

        def forward(self, query, target):
            return self.head(self.trunk(query).relu(), target, generator=fixed()) * 2

    model, (query, target, _) = Model(), batch()
    expected = model(query, target)
    expected.backward()
    grads = [p.grad.to_dense() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model)
    loss = compiled(query, target)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([p.grad.to_dense() for p in model.parameters()], grads)
    torch.testing.assert_close(compiled.eval()(query, target), model.eval()(query, target))


def test_repr_and_native_core():
    shown = repr(head_of("quadratic"))
    assert shown.startswith("SampledSoftmax(\n  in_features=5, num_classes=30, prediction=")
    assert "(budget): Budget(num_samples=6, tolerance=None)" in shown
    assert "alpha=10.0" in repr(head_of("quadratic"))
    assert manyclass.native_available()


def test_own_sampler_and_custom_kernel():
    class Exponential:
        def value(self, logits):
            return logits.exp()

    head, (query, target, _) = head_of(samplers.Kernel(Exponential())), batch()
    torch.testing.assert_close(head(query, target), head.eval()(query, target))
