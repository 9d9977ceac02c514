"""Bad input is refused with the argument, the value and what is allowed."""

import pytest
import torch
from torch import nn

from manyclass import SampledSoftmax, checks, functional, optim, samplers
from manyclass.kernels import Polynomial, Quadratic

NAN, INF = float("nan"), float("inf")
X, Y = torch.zeros(2, 4), torch.tensor([0, 1])


class Negative:
    def value(self, logits):
        return logits - 1e6


def head(**options):
    arguments = {"in_features": 4, "num_classes": 9, "sampler": "uniform", "num_samples": 3, **options}
    return SampledSoftmax(**arguments)


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def dense(kernel=None):
    sampler = samplers.Kernel(kernel or Quadratic())
    sampler.update(torch.ones(9, 4))
    return sampler


REFUSED = [
    # the layer's arguments
    (lambda: head(num_classes=1), ValueError, "num_classes must be at least 2, got 1"),
    (lambda: head(num_classes=9.0), TypeError, "num_classes must be an int, got 9.0 of type float"),
    (lambda: head(in_features=0), ValueError, "in_features must be at least 1, got 0"),
    (lambda: head(num_samples=0), ValueError, "num_samples must be at least 1, got 0"),
    (lambda: head(num_samples=True), TypeError, "num_samples must be an int, got True"),
    (lambda: head(prediction="abs"), ValueError, "prediction must be one of 'softmax', 'absolute', got 'abs'"),
    (lambda: head(reduction="avg"), ValueError, "reduction must be one of 'none', 'mean', 'sum', got 'avg'"),
    (lambda: head(sampler="zipf"), ValueError, "sampler must be one of 'blocks', .*, got 'zipf'"),
    (lambda: head(sampler=3), TypeError, "sampler must be a name, or a class or object of samplers.Sampler"),
    (lambda: head(sampler=samplers.Uniform(8)), ValueError, "sampler Uniform must have num_classes = 9, .* got 8"),
    (lambda: head(sampler="unigram"), ValueError, "sampler='unigram' needs counts="),
    (lambda: head(sampler="bigram"), ValueError, "sampler='bigram' needs pairs="),
    (lambda: head(sampler="unigram", counts=torch.ones(8)), ValueError, r"counts must have shape \(9,\), got \(8,\)"),
    (lambda: head(alpha=2.0), TypeError, "sampler='uniform' has no option 'alpha': its options are scope"),
    (lambda: head(sampler="quadratic", beta=1), TypeError, "no option 'beta': its options are alpha"),
    (lambda: head(sampler=samplers.Uniform(9), alpha=2.0), TypeError, "unknown arguments alpha"),
    (lambda: head(label_smoothing=0.1), TypeError, "does not take label_smoothing: smoothed targets need"),
    (lambda: head(weight=torch.ones(9)), TypeError, "does not take weight: for class weights use reduction='none'"),
    (lambda: head(ignore_index=None), TypeError, "ignore_index must be an int, got None"),
    (lambda: head(bias=2), TypeError, "bias must be a bool, got 2"),
    (lambda: head().reset_bias(torch.ones(9)), ValueError, "reset_bias needs a layer with bias=True"),
    (lambda: head(bias=True).reset_bias(torch.ones(8)), ValueError, r"counts must have shape \(9,\), got \(8,\)"),
    (lambda: head(bias=True).reset_bias(-torch.ones(9)), ValueError, "counts must be finite and not negative"),
    (lambda: head(sparse="yes"), TypeError, "sparse must be a bool, got 'yes'"),
    (lambda: head(embedding=nn.Linear(4, 9)), TypeError, "embedding must be an nn.Embedding or None, got Linear"),
    (lambda: head(device="gpu"), ValueError, "device must be a device of torch, got 'gpu'"),
    (lambda: head(device=1.5), TypeError, "device must be a device of torch, got 1.5"),
    (lambda: head(shard=2), TypeError, "shard must be a manyclass.shard.Shard or None, got 2"),
    (lambda: samplers.create(samplers.Uniform(9), 9, 4), TypeError, "sampler must be a name or a subclass"),
    (lambda: samplers.create(int, 9, 4), TypeError, "sampler must be a name or a subclass"),
    (lambda: samplers.create("uniform", 9, 4, part=3), TypeError, "part must be a samplers.Part or None, got 3"),
    (lambda: optim.AdamW([X], rowwise=1), TypeError, "rowwise must be a bool, got 1"),
    (lambda: optim.Adagrad([{"params": [X], "rowwise": "x"}]), TypeError, "rowwise must be a bool, got 'x'"),
    (lambda: head(dtype=torch.long), TypeError, "dtype must be a floating point dtype"),
    (lambda: head(num_samples=None, tolerance="x"), TypeError, "tolerance must be a number, got 'x'"),
    (lambda: head(num_samples=None, tolerance=NAN), ValueError, "tolerance must be finite, got nan"),
    # what the layer is called with
    (lambda: head()(X, torch.tensor([0, 9])), ValueError, r"target must be in \[0, 9\) or ignore_index = -100, got 9"),
    (lambda: head()(X, torch.tensor([0, -1])), ValueError, "target must be in .*, got -1"),
    (lambda: head()(X, torch.tensor([0.0, 1.0])), TypeError, "target must have an integer dtype, got torch.float32"),
    (lambda: head()(X, torch.tensor([True, True])), TypeError, "target must have an integer dtype, got torch.bool"),
    (lambda: head()(X, [0, 1]), TypeError, "target must be a tensor, got list"),
    (lambda: head()(X, Y[:1]), ValueError, r"target must have shape \(2,\) or \(2, k\), got \(1,\)"),
    (lambda: head()(X[:, :3], Y), ValueError, r"input must have shape \(\*batch, 4\), got \(2, 3\)"),
    (lambda: head()(X + NAN, Y), ValueError, "input holds NaN or infinite values"),
    (lambda: head().eval()(X + INF, Y), ValueError, "input holds NaN or infinite values"),
    (lambda: head()(X.double(), Y), TypeError, "input must have the dtype of weight, torch.float32, got torch.float64"),
    (lambda: head()(X.long(), Y), TypeError, "input must have a floating point dtype, got torch.int64"),
    (lambda: head(device="meta")(X, Y), ValueError, "input is on cpu but weight is on meta"),
    (lambda: head()(X, Y.to("meta")), ValueError, "target is on meta but the query is on cpu"),
    (lambda: head().topk(X, 10), ValueError, "k must be at most num_classes = 9, got 10"),
    (lambda: head().topk(X, 0), ValueError, "k must be at least 1, got 0"),
    (lambda: head().predict(X[0, 0]), ValueError, r"input must have shape \(\*batch, 4\), got \(\)"),
    # samplers
    (lambda: samplers.Uniform(0), ValueError, "num_classes must be at least 1, got 0"),
    (lambda: samplers.LogUniform(-2), ValueError, "num_classes must be at least 1, got -2"),
    (lambda: samplers.Unigram(torch.tensor([1, -1])), ValueError, "counts must be finite and not negative"),
    (lambda: samplers.Unigram(torch.tensor([1.0, NAN])), ValueError, "counts must be finite and not negative"),
    (lambda: samplers.Unigram(torch.tensor([1.0, INF])), ValueError, "counts must be finite and not negative"),
    (lambda: samplers.Unigram(torch.zeros(3)), ValueError, "counts must not all be zero"),
    (lambda: samplers.Unigram(torch.ones(2, 2)), ValueError, r"counts must have shape \(num_classes,\), got \(2, 2\)"),
    (lambda: samplers.Unigram(torch.ones(0)), ValueError, r"counts must have shape \(num_classes,\), got \(0,\)"),
    (lambda: samplers.Unigram([1, 2]), TypeError, "counts must be a tensor of numbers, got list"),
    (lambda: samplers.Unigram(torch.ones(2), NAN), ValueError, "power must be finite, got nan"),
    (lambda: samplers.Bigram(torch.ones(3, 2)), TypeError, "pairs must have an integer dtype"),
    (lambda: samplers.Bigram(torch.ones(3, 3).long()), ValueError, r"pairs must have shape \(N, 2\)"),
    (lambda: samplers.Bigram(torch.empty(0, 2).long()), ValueError, "N ≥ 1"),
    (lambda: samplers.Bigram(-torch.ones(1, 2).long()), ValueError, "pairs must be non-negative, got -1"),
    (lambda: samplers.Bigram(torch.tensor([[0, 5]]), 5), ValueError, r"classes in \[0, 5\), got 5"),
    (lambda: samplers.Bigram(torch.tensor([[0, 5]]), 6, 0.0), ValueError, r"interpolation must be in \(0, 1\], got 0"),
    (lambda: samplers.Bigram(torch.tensor([[0, 5]])).draw(X, 1), ValueError, "context is needed"),
    (lambda: samplers.Kernel(3), TypeError, r"kernel must have a method value\(logits\), got 3"),
    (lambda: samplers.Softmax("x"), ValueError, "prediction must be one of"),
    (lambda: samplers.Softmax().draw(X, 2), ValueError, r"call update\(weight\) first"),
    (lambda: dense().update(torch.ones(9)), ValueError, "weight must have shape"),
    (lambda: dense().update(torch.ones(9, 4), bias=torch.ones(8)), ValueError, r"bias must have shape \(9,\)"),
    (lambda: dense().update(torch.ones(9, 4), torch.tensor([9])), ValueError, r"rows must be in \[0, 9\), got 9"),
    (lambda: dense().draw(torch.zeros(2, 3), 1), ValueError, r"query must have shape \(\*batch, 4\)"),
    (lambda: dense(Negative()).draw(X, 1), ValueError, "kernel must not be negative"),
    (lambda: samplers.Uniform(2**60), ValueError, "num_classes must be at most 9007199254740992"),
    (lambda: samplers.Uniform("9"), TypeError, "num_classes must be an int, got '9' of type str"),
    (lambda: samplers.Uniform(9, None), ValueError, "scope must be one of 'example', 'batch', got None"),
    (lambda: samplers.Blocks(2**31, 4), ValueError, "num_classes must be at most 2147483647"),
    (lambda: samplers.Blocks(9, 4, own=1.5), TypeError, "own must be an int, got 1.5"),
    (lambda: samplers.Blocks(9, 4, bias=2), TypeError, "bias must be a bool, got 2"),
    (lambda: samplers.KernelTree(Quadratic(), 9, 4, bias=2), TypeError, "bias must be a bool, got 2"),
    (lambda: samplers.Unigram(torch.ones(2), "x"), TypeError, "power must be a number, got 'x'"),
    (lambda: samplers.Unigram(torch.ones(2).to_sparse()), TypeError, "counts must be a dense tensor"),
    (lambda: samplers.Unigram(torch.ones(2, device="meta")), ValueError, "counts is on the device meta"),
    (
        lambda: samplers.Unigram(doubles(1e200, 1.0), 2),
        ValueError,
        r"counts \*\* 2.0 must stay within",
    ),
    (
        lambda: samplers.Unigram(doubles(1e-200, 1.0), 2),
        ValueError,
        r"counts \*\* 2.0 must stay within",
    ),
    (
        lambda: samplers.Unigram(doubles(1e308, 1e308)),
        ValueError,
        r"counts \*\* 1.0 must stay within",
    ),
    (
        lambda: samplers.Bigram(torch.tensor([[0, 5]]), 6, 1e-300),
        ValueError,
        "the smallest is 1e-290",
    ),
    (lambda: samplers.Bigram(torch.tensor([[0, 5]]), 6, "x"), TypeError, "interpolation must be a number, got 'x'"),
    (lambda: samplers.Bigram(torch.tensor([[2**62, 5]])), ValueError, "pairs must hold contexts below 2147483647"),
    (lambda: samplers.Bigram(torch.tensor([[0, 2**62]])), ValueError, "num_classes must be at most 2147483647"),
    (lambda: samplers.create("blocks", 9, "4"), TypeError, "in_features must be an int, got '4'"),
    (lambda: samplers.create("uniform", 9, 4, bias=None), TypeError, "bias must be a bool, got None"),
    (lambda: dense().update(torch.ones(9, 4), bias=[0.0] * 9), TypeError, "bias must be a tensor, got list"),
    (lambda: Quadratic("x"), TypeError, "alpha must be a number, got 'x'"),
    (lambda: Quadratic(INF), ValueError, "alpha must be finite, got inf"),
    (lambda: Polynomial(10**9), ValueError, "degree must be at most 64"),
    (lambda: Polynomial(2.0), TypeError, "degree must be an int, got 2.0"),
    (lambda: Quadratic().feature_map([1.0]), TypeError, "vectors must be a tensor, got list"),
    # draws
    (lambda: samplers.Uniform(9).draw(X, 0), ValueError, "num_samples must be at least 1, got 0"),
    (lambda: samplers.Uniform(9).draw(X, 2.5), TypeError, "num_samples must be an int, got 2.5"),
    (lambda: samplers.Uniform(9).draw(X + NAN, 1), ValueError, "query holds NaN or infinite values"),
    (lambda: samplers.Uniform(9).draw(X.long(), 1), TypeError, "query must have a floating point dtype"),
    (lambda: samplers.Uniform(9).draw(X, 1, exclude=torch.tensor([0, 9])), ValueError, "exclude must be in .* got 9"),
    (lambda: samplers.Uniform(9).draw(X, 1, exclude=Y[:1]), ValueError, r"exclude must have shape \(2,\)"),
    (lambda: samplers.Uniform(1).draw(X, 1, exclude=Y * 0), ValueError, "exclude leaves no class to draw"),
    (
        lambda: samplers.Unigram(torch.tensor([0, 5])).draw(X, 1, exclude=Y),
        ValueError,
        "exclude = 1 leaves no class to draw",
    ),
    (lambda: dense().draw(X.to("meta"), 1), ValueError, "query is on meta but the sampler's weight is on cpu"),
    (lambda: head()(X.to("meta"), Y), ValueError, "input is on meta but weight is on cpu"),
    (lambda: samplers.Uniform(9).log_prob(X, Y), ValueError, r"ids must have shape \(2, 'k'\), got \(2,\)"),
    (lambda: samplers.Uniform(9).log_prob(X, Y[:, None] + 9), ValueError, "ids must be in"),
    # functions
    (lambda: functional.sampled_softmax_loss(X[:, 0], X[:1], X), ValueError, "negative_logits must have shape"),
    (
        lambda: functional.sampled_softmax_loss(X[:, 0], X[:, 1:], X),
        ValueError,
        r"log_count must broadcast to \(2, 3\)",
    ),
    (lambda: functional.sampled_softmax_loss(X[:, 0], X, X[None]), ValueError, "log_count must broadcast to"),
    (lambda: functional.sampled_softmax_loss(X[:, 0], X, X, "avg"), ValueError, "reduction must be one of"),
    (lambda: functional.sampled_softmax_loss(X[:, 0], X, X, prediction="x"), ValueError, "prediction must be one of"),
    (lambda: functional.sampled_softmax_loss(X[:, 0], X, 0.5), TypeError, "log_count must be a tensor, got float"),
    (lambda: functional.sampled_softmax_loss(X[:, 0], X.to("meta"), X), ValueError, "negative_logits is on meta"),
    (lambda: functional.full_softmax_loss(X, X, Y + 1), ValueError, r"target must be in \[0, 2\), got 2"),
    (
        lambda: functional.full_softmax_loss(X, X[0], Y),
        ValueError,
        r"weight must have shape \(num_classes, ",
    ),
    (lambda: functional.log_partition(X[:, :3], X), ValueError, r"query must have shape \(\*batch, 4\), got \(2, 3\)"),
    (lambda: functional.log_prob(X, X, X), ValueError, r"bias must have shape \(2,\), got \(2, 4\)"),
    (lambda: functional.log_prob(X.long(), X), TypeError, "query must have a floating point dtype, got torch.int64"),
    (lambda: functional.topk(X, X, 1.0), TypeError, "k must be an int, got 1.0"),
    (lambda: functional.topk(X, X, 1, prediction="x"), ValueError, "prediction must be one of"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[f"{i}:{r[2][:40]}" for i, r in enumerate(REFUSED)])
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_numbers_whose_sum_overflows_are_finite():
    assert checks.all_finite(torch.full((4,), 6e4, dtype=torch.float16))
    assert checks.all_finite(torch.full((4,), 3e38))
    assert checks.all_finite(torch.zeros(0))
    assert not checks.all_finite(torch.tensor([INF, -INF]))
    assert not checks.all_finite(torch.tensor([3e38, 3e38, NAN]))


def test_nan_in_the_weights_is_refused_by_dense_samplers():
    layer = head(sampler="softmax")
    with torch.no_grad():
        layer.weight[3, 1] = NAN
    with pytest.raises(ValueError, match="class weights must be finite"):
        layer(torch.ones(2, 4), Y)


def test_extreme_logits_keep_the_rest_of_the_distribution():
    sampler = samplers.Softmax()
    sampler.update(torch.tensor([[2000.0], [1.0], [0.0]]))
    draw = sampler.draw(torch.ones(1, 1), 1000, exclude=torch.tensor([0]), generator=torch.Generator().manual_seed(0))
    assert set(draw.ids.flatten().tolist()) == {1, 2}
    assert torch.isfinite(draw.log_count).all()
