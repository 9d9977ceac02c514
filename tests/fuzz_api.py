"""Random calls of the Python interface: right arguments give finite, right results, wrong ones an error with a name.

A scenario makes an object and calls it. Half of the scenarios spoil one argument of one call. That call may then raise
TypeError or ValueError with the name of one of its arguments; if it returns, its result must be right all the same.
"""

import copy
import math
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from manyclass import SampledSoftmax, functional, kernels, samplers

DTYPES = [torch.float32] * 4 + [torch.float64, torch.bfloat16, torch.float16]
# What right arguments may be refused with, as they depend on values.
LEGITIMATE = ("leaves no class to draw", "must be finite, and smaller", "features for")


class RefusedError(Exception):
    """A spoiled call was refused as it should be: the scenario is over."""


class Caller:
    """Makes the calls of a scenario, and spoils one of them if it is a scenario with a wrong argument."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.spoiled = rng, ""
        self.spoils = rng.random() < 0.5

    def __call__(self, function: Callable[..., Any], **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Call a function; return its result and the arguments that it was really given."""
        if arguments and self.spoils and not self.spoiled and self.rng.random() < 0.4:
            self.spoiled = self.rng.choice(sorted(arguments))
            arguments[self.spoiled] = wrong(self.rng, arguments[self.spoiled])
        try:
            return function(**arguments), arguments
        except (TypeError, ValueError) as error:
            message = str(error)
            if any(words in message for words in LEGITIMATE):
                raise RefusedError from error
            if not self.spoiled:
                raise
            named = any(re.search(rf"\b{name}s?\b", message) for name in (*arguments, self.spoiled))
            assert named, f"{self.spoiled} = {arguments.get(self.spoiled)!r}: the error names no argument: {message}"
            raise RefusedError from error
        except Exception as error:
            raise AssertionError(f"after spoiling {self.spoiled!r}: {arguments.get(self.spoiled)!r}") from error


def wrong(rng: random.Random, value: Any) -> Any:
    """Another value for an argument; some are right."""
    if isinstance(value, Tensor):
        return wrong_tensor(rng, value)
    if isinstance(value, bool):
        return rng.choice([None, 2, "yes", 0.5, not value])
    if isinstance(value, int):
        return rng.choice([None, "3", 2.5, -1, 0, 1, True, 2**70, -(2**70), math.nan, [3], torch.tensor(3.0)])
    if isinstance(value, float):
        return rng.choice([None, "x", math.nan, math.inf, -1.0, 0.0, 1e-300, 1e300, [1.0], True, 1])
    if isinstance(value, str):
        return rng.choice([None, 3, "nonsense", "", ["softmax"], b"mean"])
    return rng.choice([3, "x", nn.Linear(2, 2), [], -0.5])


def wrong_tensor(rng: random.Random, value: Tensor) -> Any:
    makers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: value.tolist(),
        lambda: value.unsqueeze(-1),
        lambda: value.unsqueeze(0),
        lambda: value.flatten()[:1].squeeze(0) if value.numel() else value,
        lambda: value[:-1] if value.dim() and len(value) else value.new_empty(0, 0),
        lambda: torch.cat([value, value[:1]]) if value.dim() else value,
        lambda: value.to(
            rng.choice([torch.complex64, torch.bool, torch.uint8, torch.int16, torch.float64, torch.float32])
        ),
        lambda: value.float().to(torch.float8_e4m3fn),
        lambda: value.to_sparse() if value.dim() else value,
        lambda: value.to("meta"),
        lambda: poked(rng, value),
        lambda: poked(rng, value),
        lambda: poked(rng, value),
        lambda: value.repeat_interleave(2, dim=-1)[..., ::2] if value.dim() else value,
    ]
    return rng.choice(makers)()


def poked(rng: random.Random, value: Tensor) -> Tensor:
    """One value changed to something extreme."""
    numbers = (
        [math.nan, math.inf, -math.inf, -1.0, 0.0] if value.is_floating_point() else [-1, -5, 0, 10**6, 2**62, -(2**62)]
    )
    if not value.numel() or value.dtype in (torch.int32, torch.bool):
        return value
    value = value.clone()
    value.view(-1)[rng.randrange(value.numel())] = rng.choice(numbers)
    return value


def batch_shape(rng: random.Random) -> tuple[int, ...]:
    return rng.choice([(), (1,), (4,), (0,), (2, 3), (3, 0), (1, 2, 2)])


# --- samplers -----------------------------------------------------------------------------------------------------


def sampler_arguments(rng: random.Random, n: int, d: int) -> dict[type[samplers.Sampler], dict[str, Any]]:
    """Right arguments of the constructors of all samplers."""
    scope = rng.choice(["example", "batch"])
    kernel = rng.choice([kernels.Quadratic(), kernels.Quartic(), kernels.Polynomial(2, 0.5)])
    counts = torch.randint(0, 50, (n,)) + (rng.random() < 0.5)
    counts[rng.randrange(n)] += 1
    if rng.random() < 0.5:
        counts = counts.to(rng.choice([torch.float32, torch.float64])) * 10.0 ** rng.randint(-30, 30)
    power = rng.choice([1.0, 1, 0.75, 0.0, -1.0, 3.0])
    pairs = torch.randint(n, (rng.randint(1, 40), 2))
    shares = {"interpolation": rng.choice([0.1, 1.0, 1e-5, 1e-20, 1e-200])}
    sizes, bias, tables = {"num_classes": n, "in_features": d}, {"bias": False}, {"every": rng.randint(1, 3)}
    blocks = {"own": rng.randint(1, 12), "probe": rng.randint(1, 9), "block_size": rng.randint(1, 9)}
    tree = {"leaf_size": rng.randint(1, 20), "branching": rng.randint(2, 5), "ending": rng.choice(["class", "leaf"])}
    hashes = {"tables": rng.randint(1, 5), "bits": rng.randint(1, 4), "uniform": rng.choice([0.1, 1.0, 1e-3])}
    second = {"candidates": rng.randint(1, 40), "counts": rng.choice([None, counts]), "best": rng.random() < 0.3}
    random_features = {"features": rng.randint(1, 20), "seed": rng.randint(0, 9)}
    fourier = {"nu": rng.choice([4.0, 0.1]), "floor": rng.choice([0.05, 1.0])}
    return {
        samplers.Uniform: {"num_classes": n, "scope": scope},
        samplers.LogUniform: {"num_classes": n, "scope": scope},
        samplers.Unigram: {"counts": counts, "power": power, "scope": scope},
        samplers.Bigram: {"pairs": pairs, "num_classes": n, **shares},
        samplers.AdaptiveNgram: {"pairs": pairs, "num_classes": n, "memory": rng.randint(1, 64)},
        samplers.InBatch: {"num_classes": n, "counts": rng.choice([None, counts]), "uniform": rng.randint(0, 5)},
        samplers.Softmax: {"prediction": rng.choice(functional.PREDICTIONS)},
        samplers.Kernel: {"kernel": kernel},
        samplers.named("quartic"): {},
        samplers.named("quadratic"): {**sizes, **bias, "alpha": rng.choice([10.0, 100.0, 0.5])},
        samplers.KernelTree: {"kernel": kernel, **sizes, **bias, **tree},
        samplers.Blocks: {**sizes, **bias, **blocks},
        samplers.HeadTail: {**sizes, **bias, "head": rng.randint(1, 9), "probe": rng.randint(1, 9)},
        samplers.TwoPass: {**sizes, **bias, **second},
        samplers.SimHash: {**sizes, **bias, **hashes, **tables},
        samplers.MultiIndex: {**sizes, **bias, "codewords": rng.randint(1, 9), **tables},
        samplers.PositiveFeatures: {**sizes, **bias, **random_features, **tables},
        samplers.FourierTree: {**sizes, **bias, **random_features, **fourier},
    }


# Which classes they draw depends on more than a distribution.
WITHOUT_LOG_PROB = (samplers.Blocks, samplers.HeadTail, samplers.TwoPass, samplers.InBatch)


def sampler_scenario(rng: random.Random, call: Caller) -> None:
    n, d = rng.choice([1, 2, 5, 30, 200]), rng.randint(1, 6)
    kind, arguments = rng.choice(list(sampler_arguments(rng, n, d).items()))
    sampler, constructed = call(kind, **arguments)
    weight = torch.randn(n, d, dtype=rng.choice([torch.float32, torch.float32, torch.float64]))
    rows = None
    if sampler.adaptive:
        rows = None if rng.random() < 0.7 else torch.randint(n, (rng.randint(0, 4),))
        _, used = call(sampler.update, weight=weight, rows=rows)
        weight, rows = used["weight"], used["rows"]
    n = sampler.num_classes
    shape = batch_shape(rng)
    query = torch.randn(*shape, d).to(rng.choice(DTYPES))
    exclude = torch.randint(n, shape) if n > 1 and rng.random() < 0.7 else None
    options = {"exclude": exclude}
    if sampler.needs_context:
        options["context"] = torch.randint(n + 3, shape)
    seed = rng.getrandbits(32)
    target = torch.randint(n, (rng.randint(1, 9),))
    sampler.begin(target)

    def draw(**arguments: Any) -> samplers.Draw:
        return sampler.draw(generator=torch.Generator().manual_seed(seed), **arguments)

    result, used = call(draw, query=query, num_samples=rng.randint(1, 40), **options)
    check_draw(sampler, result, used)
    loaded = kind(**constructed)
    if sampler.adaptive:
        loaded.load_state_dict(copy.deepcopy(sampler.state_dict()))
        if sampler.derived:
            loaded.update(weight, rows)
        loaded.attach(weight, None)
    loaded.begin(target)
    other = loaded.draw(generator=torch.Generator().manual_seed(seed), **used)
    assert all(torch.equal(a, b) for a, b in zip(result, other, strict=True)), "the state does not travel"
    if not isinstance(sampler, WITHOUT_LOG_PROB):
        check_probabilities(sampler, result, used, call)


def check_draw(sampler: samplers.Sampler, draw: samplers.Draw, used: dict[str, Any]) -> None:
    n, shape, exclude = sampler.num_classes, used["query"].shape[:-1], used["exclude"]
    assert draw.ids.shape == draw.log_count.shape
    assert draw.ids.shape[:-1] == shape
    assert draw.pool.shape == draw.pool_log_count.shape
    for ids in (draw.ids, draw.pool):
        assert bool(((ids >= 0) & (ids < n)).all())
    for log_count in (draw.log_count, draw.pool_log_count):
        assert bool((log_count > -math.inf).all())  # nor NaN
    # A class of a batch that was never counted has an empty slot.
    assert bool(torch.isfinite(draw.pool_log_count).all()) or isinstance(sampler, samplers.InBatch)
    if exclude is None:
        return
    real = draw.log_count < math.inf
    assert not bool(((draw.ids == exclude.unsqueeze(-1)) & real).any()), "the positive was drawn"
    shown = torch.ones(math.prod(shape), len(draw.pool), dtype=torch.bool)
    shown[tuple(draw.hidden)] = False
    assert not bool(((draw.pool == exclude.reshape(-1, 1)) & shown).any()), "the positive is in the pool"


def check_probabilities(sampler: samplers.Sampler, draw: samplers.Draw, used: dict[str, Any], call: Caller) -> None:
    n, query, m = sampler.num_classes, used["query"], used["num_samples"]
    pooled = sampler.scope == "batch"
    options = {name: used[name] for name in ("exclude", "context") if name in used}
    if pooled:
        options["exclude"] = None
    everything = torch.arange(n).expand(*query.shape[:-1], n)
    log_prob, given = call(sampler.log_prob, query=query, ids=everything, **options)
    assert log_prob.shape == given["ids"].shape
    assert not bool(log_prob.isnan().any())
    assert bool((log_prob <= 1e-9).all())
    leaves = isinstance(sampler, samplers.KernelTree) and sampler.ending == "leaf"
    if call.spoiled in given or leaves:
        return
    total = log_prob.exp().sum(-1)
    assert_close(total, torch.ones_like(total), rtol=1e-6, atol=0)
    rtol = 1e-2 if isinstance(sampler, samplers.KernelTree) else 1e-5
    if pooled and query[..., 0].numel():
        expected = log_prob.reshape(-1, n)[0][draw.pool] + math.log(m)
        assert_close(draw.pool_log_count.double(), expected, rtol=rtol, atol=rtol)
    elif not pooled:
        expected = log_prob.gather(-1, draw.ids) + math.log(m)
        assert_close(draw.log_count.double(), expected, rtol=rtol, atol=rtol)


# --- the layer ----------------------------------------------------------------------------------------------------


def head_scenario(rng: random.Random, call: Caller) -> None:
    n, d = rng.choice([2, 5, 30, 300]), rng.randint(1, 6)
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    name = rng.choice(samplers.names())
    arguments = sampler_arguments(rng, n, d)[samplers.named(name)]
    extra = {option: arguments[option] for option in samplers.options(name) if option in arguments}
    sparse = rng.random() < 0.5
    if rng.random() < 0.2:
        extra["embedding"] = nn.Embedding(n, d, sparse=sparse)
        dtype = torch.float32
    arguments = {
        "in_features": d,
        "num_classes": n,
        "sampler": name,
        "num_samples": rng.randint(1, 2 * n),
        "prediction": rng.choice(functional.PREDICTIONS),
        "bias": rng.random() < 0.5,
        "sparse": sparse,
        "reduction": rng.choice(functional.REDUCTIONS),
        "ignore_index": rng.choice([-100, 0]),
        "dtype": dtype,
        **extra,
    }
    if rng.random() < 0.15:
        arguments |= {"num_samples": None, "tolerance": rng.choice([0.01, 0.5])}
    head, arguments = call(SampledSoftmax, **arguments)
    n, d, dtype = head.num_classes, head.in_features, head.weight.dtype
    shape = batch_shape(rng)
    query = torch.randn(*shape, d).to(dtype).requires_grad_()
    target = torch.randint(n, shape)
    context = {"context": torch.randint(n, shape)} if head.sampler.needs_context else {}
    for _ in range(rng.randint(1, 3)):
        train_once(head, query, target, context, call)
    exact_once(rng, head, query.detach(), target, call)
    kept = int((target != head.ignore_index).sum())
    if kept and not call.spoiled:
        measured, _ = call(head.diagnostics, examples=rng.randint(1, 8))
        assert all(math.isfinite(value) for value in measured[:7]), measured
    if "embedding" not in arguments:
        other = SampledSoftmax(**arguments)
        other.load_state_dict(head.state_dict())
        losses = [each.eval()(query.detach(), target) for each in (head, other)]
        assert torch.equal(*losses), "the state does not travel"


def train_once(head: SampledSoftmax, query: Tensor, target: Tensor, context: dict[str, Tensor], call: Caller) -> None:
    """The sampled loss against the formula, with the negatives that were really drawn."""
    draws: list[tuple[samplers.Draw, Tensor]] = []
    original = head.shard.draw

    def noting(sampler: samplers.Sampler, examples: Any, *rest: Any) -> samplers.Draw:
        draws.append((original(sampler, examples, *rest), examples.target))
        return draws[-1][0]

    head.shard.draw = noting  # type: ignore
    try:
        loss, used = call(head, input=query, target=target, **context)
    finally:
        del head.shard.draw
    query, target = used["input"], used["target"]
    here = target.long() != head.ignore_index
    kept = (here.any(-1) if here.dim() == query.dim() else here).reshape(-1)
    draw, labels = draws[-1]
    outputs = all_outputs(head, query).reshape(-1, head.num_classes)[kept]
    expected = torch.zeros(labels.shape, dtype=torch.float64)
    for row in range(len(outputs)):
        count = draw.pool_log_count.double().clone()
        count[draw.hidden[1][draw.hidden[0] == row]] = math.inf
        own = outputs[row, draw.ids[row]] - draw.log_count[row].double()
        negatives = torch.cat([own, outputs[row, draw.pool] - count])
        for place in (labels[row] >= 0).nonzero():  # one, or several of an example
            positive = outputs[row, labels[row][tuple(place)]]
            expected[row][tuple(place)] = torch.cat([positive[None], negatives]).logsumexp(0) - positive
    check_loss(head, loss, expected, labels >= 0, kept, target.shape)
    head.zero_grad()
    loss.sum().backward()
    for parameter in head.parameters():
        if parameter.grad is not None:
            assert bool(torch.isfinite(parameter.grad.to_dense()).all()), "a gradient is not finite"


def exact_once(rng: random.Random, head: SampledSoftmax, query: Tensor, target: Tensor, call: Caller) -> None:
    """The exact loss, probabilities and ranks against torch's."""
    head.eval()
    outputs = all_outputs(head, query)
    loss, used = call(head, input=query, target=target)
    if call.spoiled in used:
        return
    kept = (target != head.ignore_index).reshape(-1)
    flat = outputs.reshape(-1, head.num_classes)[kept]
    expected = F.cross_entropy(flat, target.reshape(-1)[kept], reduction="none")
    check_loss(head, loss, expected, torch.ones_like(expected, dtype=torch.bool), kept, target.shape)
    log_prob, used = call(head.log_prob, input=query)
    if call.spoiled not in used:
        assert_close(log_prob.double(), outputs.log_softmax(-1), rtol=1e-4, atol=1e-4)
    k = rng.randint(1, head.num_classes)
    (values, ids), used = call(head.topk, input=query, k=k)
    if call.spoiled not in used:
        assert_close(values.double(), outputs.log_softmax(-1).topk(k, dim=-1).values, rtol=1e-4, atol=1e-4)
        assert_close(values.double(), outputs.log_softmax(-1).gather(-1, ids), rtol=1e-4, atol=1e-4)
    if isinstance(head.sampler, samplers.Blocks):
        (values, ids), used = call(head.topk, input=query, k=1, probe=rng.randint(1, 9))
        assert bool(torch.isfinite(values).all())
        assert bool(((ids >= 0) & (ids < head.num_classes)).all())
    best, used = call(head.predict, input=query)
    if call.spoiled not in used:
        assert_close(outputs.gather(-1, best.unsqueeze(-1)).squeeze(-1), outputs.amax(-1), rtol=1e-4, atol=1e-4)
    head.train()


def all_outputs(head: SampledSoftmax, query: Tensor) -> Tensor:
    logits = query.detach().double() @ head.weight.detach().double().T
    if head.bias is not None:
        logits = logits + head.bias.detach().double()
    return functional.output(logits, head.prediction)


def check_loss(
    head: SampledSoftmax, loss: Tensor, expected: Tensor, here: Tensor, kept: Tensor, shape: torch.Size
) -> None:
    """Compare with the losses of all examples that are ``kept``; ``here`` are those that are no padding."""
    if head.reduction == "none":
        whole = torch.zeros(*kept.shape, *expected.shape[1:], dtype=torch.float64)
        whole[kept] = expected
        expected = whole.reshape(shape)
    elif head.reduction == "mean" and bool(here.any()):
        expected = expected[here].mean()
    else:
        expected = expected.sum()
    assert_close(loss.detach().double(), expected, rtol=1e-4, atol=1e-4)


# --- functions ----------------------------------------------------------------------------------------------------


def functional_scenario(rng: random.Random, call: Caller) -> None:
    n, d, shape = rng.randint(1, 40), rng.randint(1, 6), batch_shape(rng)
    prediction, reduction = rng.choice(functional.PREDICTIONS), rng.choice(functional.REDUCTIONS)
    query, weight, target = torch.randn(*shape, d), torch.randn(n, d), torch.randint(n, shape)
    bias = torch.randn(n) if rng.random() < 0.5 else None
    tables: dict[str, Any] = {"query": query, "weight": weight, "bias": bias, "prediction": prediction}
    outputs = functional.output(query.double() @ weight.double().T + (0 if bias is None else bias.double()), prediction)
    log_z = outputs.logsumexp(-1)
    positive = outputs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    k = rng.randint(1, n)
    truths: list[tuple[Callable[..., Any], dict[str, Any], Callable[[], Tensor]]] = [
        (functional.full_softmax_loss, {**tables, "target": target, "reduction": "none"}, lambda: log_z - positive),
        (functional.log_partition, tables, lambda: log_z),
        (functional.log_prob, tables, lambda: outputs.log_softmax(-1)),
        (functional.topk, {**tables, "k": k}, lambda: outputs.topk(k, dim=-1).values),
    ]
    function, arguments, truth = rng.choice(truths)
    result, used = call(function, **arguments)
    result = result[0] if isinstance(result, tuple) else result
    if not call.spoiled:
        assert_close(result.double(), truth(), rtol=1e-4, atol=1e-4)
    negative, log_count = torch.randn(*shape, 5), torch.randn(*rng.choice([shape, ()]), 5)
    arguments = {"positive_logits": torch.randn(shape), "negative_logits": negative, "log_count": log_count}
    loss, used = call(functional.sampled_softmax_loss, **arguments, reduction=reduction, prediction=prediction)
    if not call.spoiled:
        o_y, o_k = (functional.output(used[name], prediction) for name in ("positive_logits", "negative_logits"))
        each = torch.log(o_y.exp() + (o_k - log_count).exp().sum(-1)) - o_y
        assert_close(loss, functional.reduce(each, reduction), rtol=1e-4, atol=1e-4)


def kernel_scenario(rng: random.Random, call: Caller) -> None:
    d = rng.randint(1, 5)
    kernel, _ = call(kernels.Polynomial, degree=rng.choice([2, 4, 6]), alpha=rng.choice([1.0, 100.0, 0.01]))
    a, b = torch.randn(2, 3, d, dtype=torch.float64)
    features, _ = call(kernel.feature_map, vectors=a)
    if not call.spoiled or call.spoiled in ("degree", "alpha"):
        other = kernel.feature_map(b)
        assert_close((features * other).sum(-1), kernel.value((a * b).sum(-1)), rtol=1e-6, atol=1e-6)


SCENARIOS = [sampler_scenario, sampler_scenario, head_scenario, head_scenario, functional_scenario, kernel_scenario]


def one_call(rng: random.Random) -> None:
    """Run one scenario; raise if a result is wrong or an error has no name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            rng.choice(SCENARIOS)(rng, Caller(rng))
        except RefusedError:
            return
