"""The kernel tree: the contract on both backends, many shapes, updates, partial samples, any kernel."""

import math

import pytest
import torch
from contract import CHECKS, SIGNIFICANCE, Case, goodness_of_fit
from hypothesis import given, settings
from hypothesis import strategies as st

from manyclass import SampledSoftmax, kernels, samplers
from manyclass.samplers import KernelTree, tree


class Cosine:
    """A user's own kernel: random features of a Gaussian kernel. Sums of them may turn negative."""

    def __init__(self, size: int = 20, seed: int = 0) -> None:
        self.size, self.seed = size, seed

    def feature_dim(self, in_features: int) -> int:
        return self.size

    def feature_map(self, vectors: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        frequency = torch.randn(vectors.shape[-1], self.size, generator=generator)
        phase = 2 * math.pi * torch.rand(self.size, generator=generator)
        return math.sqrt(2 / self.size) * torch.cos(vectors @ frequency.to(vectors) + phase.to(vectors))


def weights(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed + n)) / math.sqrt(d)


def case(n=13, d=3, kernel=None, rtol=1e-4, **options) -> Case:
    kernel, weight = kernel or kernels.Quadratic(), weights(n, d)

    def truth(query, context):
        mass = kernel.value(query.double() @ weight.double().T)
        return mass / mass.sum(-1, keepdim=True)

    return Case(lambda: KernelTree(kernel, n, d, **options), truth, d, weight, rtol)


@pytest.fixture
def small_top(monkeypatch):
    """Trees that are deep although they are small."""
    monkeypatch.setattr(tree, "MAX_TOP", 2)


CASES = {
    "default": case(),
    "one-class": case(1),
    "two-classes": case(2, 5),
    "leaf-of-one": case(11, 2, leaf_size=1, rtol=2e-3),
    "prime": case(31, 4, leaf_size=3),
    "power-of-two": case(32, 4, leaf_size=4),
    "three-children": case(29, 3, leaf_size=2, branching=3),
    "one-leaf": case(7, 3, leaf_size=100),
    "one-feature": case(17, 1, leaf_size=2),
    "quartic": case(23, 3, kernels.Quartic(), leaf_size=3),
    "degree-6": case(19, 2, kernels.Polynomial(6, 0.5), leaf_size=2),
}


@pytest.mark.usefixtures("small_top")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CASES)
def test_contract(name, check, backend):
    check(CASES[name])


@pytest.mark.parametrize("d", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 130])
def test_sums_and_probabilities_for_all_widths(d, backend):
    n = 700
    weight, query = weights(n, d), torch.randn(3, d, generator=torch.Generator().manual_seed(d))
    sampler, oracle = KernelTree(kernels.Quadratic(), n, d), samplers.Kernel(kernels.Quadratic())
    sampler.update(weight)
    oracle.update(weight)
    features = sampler.sums.shape[1]
    exact = torch.nn.functional.pad(
        kernels.Quadratic().feature_map(weight.double()), (0, features - kernels.Quadratic().feature_dim(d))
    )
    total = sampler._level(0).double().sum(0)
    torch.testing.assert_close(total, exact.sum(0), rtol=1e-4, atol=1e-4 * float(exact.sum(0).abs().max()))
    ids = torch.arange(n).expand(3, -1)
    exclude = torch.tensor([0, n // 2, n - 1])
    torch.testing.assert_close(
        sampler.log_prob(query, ids, exclude=exclude).exp(),
        oracle.log_prob(query, ids, exclude=exclude).exp(),
        rtol=1e-4,
        atol=1e-7,
    )


@given(
    n=st.integers(1, 400),
    d=st.integers(1, 20),
    leaf_size=st.integers(1, 30),
    branching=st.integers(2, 5),
    top=st.integers(1, 40),
    seed=st.integers(0, 999),
    ending=st.sampled_from(["class", "leaf"]),
)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_native_equals_reference(n, d, leaf_size, branching, top, seed, ending):
    generator = torch.Generator().manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "MAX_TOP", top)
        sampler = KernelTree(kernels.Quadratic(), n, d, leaf_size, branching, ending)
    sampler.update(weights(n, d, seed))
    query = torch.randn(3, d, generator=generator)
    exclude = torch.randint(n, (3,), generator=generator) if n > 1 else None
    uniform = torch.rand(3, 50, dtype=torch.float64, generator=generator)
    native = sampler._draw_native(query, uniform, exclude)
    reference = sampler._draw_reference(query, uniform, exclude)
    # A number that falls within rounding of a border may land on its other side.
    same = native[0] == reference[0]
    assert int((~same).sum()) <= 1
    torch.testing.assert_close(native[1][same], reference[1][same], rtol=1e-3, atol=1e-3)


def test_ties_by_rounding_are_rare_and_counted():
    n, d, draws = 40_000, 24, 4000
    sampler = KernelTree(kernels.Quadratic(), n, d, leaf_size=4)
    sampler.update(weights(n, d))
    generator = torch.Generator().manual_seed(0)
    query, exclude = torch.randn(10, d, generator=generator), torch.randint(n, (10,), generator=generator)
    uniform = torch.rand(10, draws, dtype=torch.float64, generator=generator)
    differ = sampler._draw_native(query, uniform, exclude)[0] != sampler._draw_reference(query, uniform, exclude)[0]
    assert len(sampler.sizes) > 2
    assert int(differ.sum()) <= 40  # of 40,000: borders of 10,000 leaves, each blurred by rounding in float32


def test_large_tree_draws_what_it_reports():
    n, d, draws, bins = 200_003, 16, 200_000, 400
    sampler = samplers.create("quadratic", n, d)
    assert isinstance(sampler, KernelTree)
    weight = weights(n, d)
    sampler.update(weight)
    query, exclude = torch.randn(1, d, generator=torch.Generator().manual_seed(1)), torch.tensor([77])
    draw = sampler.draw(query, draws, exclude=exclude, generator=torch.Generator().manual_seed(2))
    q = kernels.Quadratic().value(query.double() @ weight.double().T)[0]
    q[77] = 0
    q /= q.sum()
    torch.testing.assert_close(draw.log_count[0].double(), (q[draw.ids[0]] * draws).log(), rtol=0, atol=1e-3)
    for bin_of in (lambda i: i * bins // n, lambda i: i % bins):
        expected = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_of(torch.arange(n)), q) * draws
        assert goodness_of_fit(torch.bincount(bin_of(draw.ids[0]), minlength=bins), expected) > SIGNIFICANCE


@pytest.mark.usefixtures("small_top")
@pytest.mark.parametrize("kernel", [kernels.Quadratic(), kernels.Quartic()])
def test_a_hundred_thousand_updates_do_not_drift(kernel, backend):
    n, d = 300, 4
    sampler = KernelTree(kernel, n, d, leaf_size=5)
    weight, generator = weights(n, d), torch.Generator().manual_seed(0)
    sampler.update(weight)
    for _ in range(500):
        rows = torch.randint(n, (200,), generator=generator)  # with repeats, unsorted
        weight[rows] += torch.randn(200, d, generator=generator) * 0.1
        sampler.update(weight, rows)
    fresh = KernelTree(kernel, n, d, leaf_size=5)
    fresh.update(weight)
    assert torch.equal(sampler.sums, fresh.sums)
    exact = fresh._features(weight.double()).sum(0)
    drift = (sampler._level(0).sum(0) - exact).abs().max() / exact.abs().max()
    assert float(drift) < 1e-4


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.usefixtures("small_top")
def test_stale_sums_change_the_distribution_but_not_the_truth(stale, backend):
    """Sums that do not belong to the weights: what is drawn is still what is reported, and the estimate unbiased."""
    n, d, draws = 21, 2, 40_000
    sampler = KernelTree(kernels.Quadratic(), n, d, leaf_size=3)
    sampler.update(weights(n, d))
    if stale:
        sampler.sums.mul_(0.5 + torch.rand(sampler.sums.shape, generator=torch.Generator().manual_seed(0)))
        sampler.sums[3:6] *= -1  # worse than any staleness
    query, exclude = torch.tensor([[0.7, -1.1]]), torch.tensor([4])
    q = sampler.log_prob(query, torch.arange(n)[None], exclude=exclude).exp()
    assert float(q.sum()) == pytest.approx(1, abs=1e-9)
    assert (q > 0).sum() == n - 1
    draw = sampler.draw(query, draws, exclude=exclude, generator=torch.Generator().manual_seed(3))
    assert goodness_of_fit(torch.bincount(draw.ids[0], minlength=n), q[0] * draws) > SIGNIFICANCE


@pytest.mark.usefixtures("small_top")
def test_partial_samples_estimate_the_partition_without_bias(backend):
    """Section 3.2.2: E Σ exp(o − log_count) = Σ exp(o), by enumeration over a grid of uniform numbers."""
    n, d, grid = 23, 3, 20_000
    weight = weights(n, d)
    query, exclude = torch.tensor([[0.5, -1.0, 0.8]]), torch.tensor([9])
    outputs = (query @ weight.T).double()[0]
    expected = outputs.exp().sum() - outputs[9].exp()
    for ending in ("leaf", "class"):
        sampler = KernelTree(kernels.Quadratic(), n, d, leaf_size=4, ending=ending)
        sampler.update(weight)
        uniform = ((torch.arange(grid, dtype=torch.float64) + 0.5) / grid).view(1, grid, 1)
        ids, log_prob = sampler._draw(query, uniform, exclude, None)
        assert ids.shape == (1, grid * (4 if ending == "leaf" else 1))
        estimate = (outputs[ids[0]] - log_prob[0] - math.log(grid)).exp().sum()
        assert float(estimate) == pytest.approx(float(expected), rel=2e-3)
        kept = log_prob < math.inf
        assert not (ids[kept] == 9).any()
        assert kept.all() == (ending == "class")


def test_partial_samples_are_less_biased_per_leaf():
    """The bias of log Ẑ at equal numbers of leaves: a whole leaf never says less than one class of it."""
    n, d, m, repeats = 400, 8, 4, 4000
    weight, query = weights(n, d) * 3, torch.randn(1, d, generator=torch.Generator().manual_seed(0))
    outputs = (query @ weight.T)[0]
    bias = {}
    for ending in ("class", "leaf"):
        sampler = KernelTree(kernels.Quadratic(), n, d, leaf_size=16, ending=ending)
        sampler.update(weight)
        number = m * sampler.classes_per_draw
        draw = sampler.draw(query.expand(repeats, -1), number, generator=torch.Generator().manual_seed(1))
        ids, log_count = draw.ids, draw.log_count
        bias[ending] = float((outputs[ids] - log_count).logsumexp(-1).mean() - outputs.logsumexp(-1))
    assert bias["class"] < bias["leaf"] < 0.02


@pytest.mark.parametrize(("num_samples", "slots"), [(1, 16), (16, 16), (17, 32), (64, 64)])
def test_num_samples_counts_negatives_where_leaves_are_drawn(num_samples, slots):
    """Whole leaves hold as many negatives as were asked for, and no more than a leaf too many."""
    n, d, repeats = 400, 4, 20_000
    weight, query = weights(n, d), torch.randn(1, d, generator=torch.Generator().manual_seed(0))
    sampler = KernelTree(kernels.Quadratic(), n, d, leaf_size=16, ending="leaf")
    sampler.update(weight)
    assert sampler.numbers(num_samples) == (slots, 0)
    draw = sampler.draw(query.expand(repeats, -1), num_samples, generator=torch.Generator().manual_seed(1))
    assert draw.ids.shape == (repeats, slots)
    outputs = (query @ weight.T)[0].double()
    estimate = (outputs[draw.ids] - draw.log_count).exp().sum(-1).mean()
    assert float(estimate) == pytest.approx(float(outputs.exp().sum()), rel=0.03)


@pytest.mark.usefixtures("small_top")
def test_own_feature_map_with_negative_sums():
    n, d = 40, 3
    sampler = KernelTree(Cosine(), n, d, leaf_size=3)
    sampler.update(weights(n, d) * 2)
    query = torch.randn(4, d, generator=torch.Generator().manual_seed(2)) * 2
    assert (sampler._features(query) @ sampler._level(-1).T < 0).any()
    q = sampler.log_prob(query, torch.arange(n).expand(4, -1)).exp()
    torch.testing.assert_close(q.sum(-1), torch.ones(4, dtype=torch.float64))
    assert (q > 0).all()
    draw = sampler.draw(query, 20_000, generator=torch.Generator().manual_seed(0))
    for example in range(4):
        observed = torch.bincount(draw.ids[example], minlength=n)
        assert goodness_of_fit(observed, q[example] * 20_000) > SIGNIFICANCE


def test_opcheck():
    sampler = KernelTree(kernels.Quadratic(), 50, 4, leaf_size=3)
    sampler.update(weights(50, 4))
    query = torch.randn(2, 4)
    features = sampler._features(query)
    shape = (sampler.sizes, sampler.leaf_size, sampler.branching)
    uniform, exclude = torch.rand(2, 5, dtype=torch.float64), torch.tensor([3, 4])
    arguments = (features, query, features @ sampler._level(0).T, sampler.sums, sampler.weight, *shape, uniform)
    torch.library.opcheck(
        torch.ops.manyclass.tree_draw.default, (*arguments, exclude, torch.ones(2), 2, 100.0, 1e-6, False)
    )
    leaves = torch.tensor([0, 5])
    torch.library.opcheck(
        torch.ops.manyclass.tree_refresh_.default, (sampler.sums, sampler.weight, *shape, leaves, 100.0)
    )
    for bad in ([5, 0], [0, 0], [17], [-1]):
        with pytest.raises(ValueError, match="leaves must be"):
            torch.ops.manyclass.tree_refresh_(sampler.sums, sampler.weight, *shape, torch.tensor(bad), 100.0)
    with pytest.raises(ValueError, match="sizes must fit the classes: 17 nodes, got 16"):
        torch.ops.manyclass.tree_refresh_(sampler.sums, sampler.weight, [16], 3, 2, leaves, 100.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: KernelTree(kernels.Quartic(), 9, 64), ValueError, r"features for 64 columns.*Use samplers\.Kernel"),
        (lambda: KernelTree(3, 9, 4), TypeError, "kernel must have methods feature_map and feature_dim, got 3"),  # type: ignore
        (lambda: KernelTree(kernels.Quadratic(), 0, 4), ValueError, "num_classes must be at least 1, got 0"),
        (lambda: KernelTree(kernels.Quadratic(), 9, 4, 0), ValueError, "leaf_size must be at least 1, got 0"),
        (lambda: KernelTree(kernels.Quadratic(), 9, 4, branching=1), ValueError, "branching must be at least 2, got 1"),
        (
            lambda: KernelTree(kernels.Quadratic(), 9, 4, ending="x"),
            ValueError,
            "ending must be one of 'class', 'leaf'",
        ),
        (
            lambda: KernelTree(kernels.Quadratic(), 9, 4).update(torch.ones(9, 3)),
            ValueError,
            r"weight must have shape \(9, 4\), got \(9, 3\)",
        ),
        (
            lambda: KernelTree(kernels.Quadratic(), 9, 4).update(torch.ones(9, 4), bias=torch.ones(9)),
            ValueError,
            "bias must be None",
        ),
        (
            lambda: KernelTree(kernels.Quadratic(), 9, 4, bias=True).update(torch.ones(9, 4)),
            ValueError,
            "bias must be given",
        ),
        (
            lambda: KernelTree(kernels.Quadratic(), 9, 4).update(torch.ones(9, 4), torch.tensor([9])),
            ValueError,
            r"rows must be in \[0, 9\), got 9",
        ),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e20])
def test_weights_that_are_not_finite_are_refused(value, backend):
    sampler, weight = KernelTree(kernels.Quadratic(), 50, 3), weights(50, 3)
    weight[17, 1] = value
    sampler.update(weight)
    with pytest.raises(ValueError, match="class weights must be finite"):
        sampler.draw(torch.ones(2, 3), 4)


def test_by_name_the_tree_serves_many_classes():
    small, wide, large = (SampledSoftmax(d, n, "quadratic", 2) for d, n in ((4, 4095), (100, 5000), (4, 4096)))
    assert isinstance(small.sampler, samplers.Kernel)
    assert isinstance(wide.sampler, samplers.Kernel)
    assert isinstance(large.sampler, KernelTree)
    assert "× the class weights" in repr(large)
    biased = SampledSoftmax(4, 5000, "quadratic", 2, bias=True)
    biased(torch.ones(2, 4), torch.tensor([1, 2])).backward()


def test_memory_is_that_of_the_weights():
    for d in (16, 32, 64, 128):
        sampler = KernelTree(kernels.Quadratic(), 100_000, d)
        assert sampler.sums.numel() <= 1.5 * 100_000 * d
