"""All samplers against the contract; wrong samplers must be caught by it."""

import itertools
import math

import pytest
import torch
from contract import CHECKS, SIGNIFICANCE, Case, goodness_of_fit
from hypothesis import given, settings
from hypothesis import strategies as st

from manyclass import SampledSoftmax, kernels, ops, samplers
from manyclass.alias import AliasTable


def weights(n: int, d: int = 3) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(n))


def dense_case(make, mass, n: int = 13, d: int = 3) -> Case:
    weight = weights(n, d)

    def truth(query, context):
        values = mass((query @ weight.T).double())
        return values / values.sum(-1, keepdim=True)

    return Case(make, truth, d, weight)


def static_case(make, mass: torch.Tensor) -> Case:
    return Case(make, lambda query, context: (mass.double() / mass.sum()).expand(len(query), -1))


def zipf(n: int) -> torch.Tensor:
    return torch.tensor([math.log((i + 2) / (i + 1)) for i in range(n)], dtype=torch.float64)


COUNTS = torch.tensor([5, 0, 1, 300, 2, 2, 0, 40, 1])
PAIRS = torch.tensor([[0, 1]] * 6 + [[0, 2]] * 3 + [[1, 0], [2, 2], [4, 0], [4, 1], [4, 2], [4, 3], [4, 4], [4, 4]])


def bigram_truth(query, context):
    n, share = 6, 0.2
    unigram = torch.bincount(PAIRS[:, 1], minlength=n).double() + 1
    rows = []
    for c in context.tolist():
        seen = torch.bincount(PAIRS[PAIRS[:, 0] == c][:, 1], minlength=n).double()
        lam = share if seen.sum() else 1.0
        rows.append(lam * unigram / unigram.sum() + (1 - lam) * seen / seen.sum().clamp(min=1))
    return torch.stack(rows)


CASES = {
    "uniform": static_case(lambda: samplers.Uniform(11), torch.ones(11)),
    "uniform-one-class": static_case(lambda: samplers.Uniform(1), torch.ones(1)),
    "uniform-two-classes": static_case(lambda: samplers.Uniform(2), torch.ones(2)),
    "log-uniform": static_case(lambda: samplers.LogUniform(17), zipf(17)),
    "log-uniform-two-classes": static_case(lambda: samplers.LogUniform(2), zipf(2)),
    "unigram": static_case(lambda: samplers.Unigram(COUNTS), COUNTS),
    "unigram-power": static_case(lambda: samplers.Unigram(COUNTS, 0.75), COUNTS.double() ** 0.75 * (COUNTS > 0)),
    "unigram-float": static_case(lambda: samplers.Unigram(COUNTS / 7), COUNTS),
    "unigram-equal": static_case(lambda: samplers.Unigram(torch.full((7,), 3)), torch.ones(7)),
    "bigram": Case(lambda: samplers.Bigram(PAIRS, 6, 0.2), bigram_truth),
    "softmax": dense_case(samplers.Softmax, torch.exp),
    "softmax-absolute": dense_case(lambda: samplers.Softmax("absolute"), lambda o: o.abs().exp()),
    "quadratic": dense_case(lambda: samplers.Kernel(kernels.Quadratic()), lambda o: 100 * o**2 + 1),
    "quartic": dense_case(lambda: samplers.Kernel(kernels.Quartic()), lambda o: o**4 + 1),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_contract(case, check):
    check(case)


@pytest.mark.parametrize("name", ["unigram", "bigram"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_on_the_reference_backend(name, check, monkeypatch):
    monkeypatch.setattr(ops, "_NATIVE", False)
    check(CASES[name])


# --- every check must be able to fail -------------------------------------------------------------------------------


class ReportsWrongly(samplers.Unigram):
    """Draws from the counts, reports the uniform distribution."""

    def _log_prob(self, query, ids, exclude, context):
        return samplers.Uniform(self.num_classes)._log_prob(query, ids, exclude, context)


class MasksAfterwards(samplers.Unigram):
    """Moves a drawn positive to the next class: not the renormalised distribution."""

    def _draw(self, query, uniform, exclude, context):
        ids, _ = super()._draw(query, uniform, None, context)
        if exclude is not None:
            ids = torch.where(ids == exclude[:, None], (ids + 1) % self.num_classes, ids)
        return ids, self._log_prob(query, ids, exclude, context)


class DrawsPositives(samplers.Unigram):
    def _draw(self, query, uniform, exclude, context):
        return super()._draw(query, uniform, None, context)


class DoesNotRenormalise(samplers.Unigram):
    def _log_prob(self, query, ids, exclude, context):
        return super()._log_prob(query, ids, None, context)


class ForgetsTheCount(samplers.Unigram):
    def draw(self, *args, **kwargs):
        draw = super().draw(*args, **kwargs)
        return draw._replace(log_count=draw.log_count - math.log(draw.ids.shape[-1]))


class OwnRandomness(samplers.Unigram):
    def _draw(self, query, uniform, exclude, context):
        return super()._draw(query, torch.rand_like(uniform), exclude, context)


class FixedDraw(samplers.Unigram):
    def draw(self, *args, generator=None, **kwargs):
        return super().draw(*args, generator=torch.Generator().manual_seed(0), **kwargs)


class IgnoresRows(samplers.Softmax):
    def update(self, weight, rows=None, *, bias=None):
        if rows is None:
            super().update(weight)


class HiddenState(samplers.Unigram):
    """Keeps what its draws depend on outside of its buffers: every one that is made has another shift."""

    made = itertools.count()

    def __init__(self, counts):
        super().__init__(counts)
        self.shift = 0.31 * next(self.made)

    def _draw(self, query, uniform, exclude, context):
        return super()._draw(query, (uniform + self.shift) % 1, exclude, context)


class FlatOnly(samplers.Unigram):
    def draw(self, query, num_samples, **kwargs):
        draw = super().draw(query, num_samples, **kwargs)
        return draw._replace(ids=draw.ids.reshape(-1, num_samples), log_count=draw.log_count.reshape(-1, num_samples))


def wrong(kind) -> Case:
    if issubclass(kind, samplers.Dense):
        return dense_case(kind, torch.exp)
    return static_case(lambda: kind(COUNTS), COUNTS)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (ReportsWrongly, "check_probabilities_by_enumeration"),
        (ReportsWrongly, "check_draws_follow_reported_distribution"),
        (MasksAfterwards, "check_draws_follow_reported_distribution"),
        (DoesNotRenormalise, "check_probabilities_by_enumeration"),
        (DrawsPositives, "check_positive_never_appears"),
        (ForgetsTheCount, "check_log_count_is_that_of_the_distribution"),
        (OwnRandomness, "check_same_uniforms_same_draw"),
        (FixedDraw, "check_same_uniforms_same_draw"),
        (IgnoresRows, "check_update_equals_rebuild"),
        (HiddenState, "check_state_travels"),
        (FlatOnly, "check_leading_shapes"),
    ],
)
def test_contract_catches(kind, check):
    (function,) = [c for c in CHECKS if c.__name__ == check]
    with pytest.raises(AssertionError):
        function(wrong(kind))


# --- one pool for the batch -----------------------------------------------------------------------------------------

POOLS = {
    "uniform": lambda: samplers.Uniform(9, scope="batch"),
    "log_uniform": lambda: samplers.LogUniform(9, scope="batch"),
    "unigram": lambda: samplers.Unigram(COUNTS, 0.5, scope="batch"),
}


@pytest.mark.parametrize("make", POOLS.values(), ids=POOLS.keys())
def test_a_pool_is_drawn_by_the_distribution_and_its_partition_estimate_is_unbiased(make):
    sampler, m = make(), 200_000
    query, target = torch.zeros(3, 2), torch.tensor([3, 7, 0])
    generator = torch.Generator().manual_seed(0)
    draw = sampler.draw(query, m, exclude=target, generator=generator)
    assert draw.pool.shape == draw.pool_log_count.shape == (m,)
    assert draw.ids.shape == draw.log_count.shape == (3, 0)
    q = sampler.log_prob(query, torch.arange(9).expand(3, -1)).exp()[0]
    torch.testing.assert_close(q.sum(), torch.ones((), dtype=torch.float64))
    assert goodness_of_fit(torch.bincount(draw.pool, minlength=9), q * m) > SIGNIFICANCE
    empty = torch.zeros(3, m, dtype=torch.bool)
    empty[tuple(draw.hidden)] = True
    assert torch.equal(empty, draw.pool == target[:, None])
    assert empty.any(1).all()
    torch.testing.assert_close(draw.pool_log_count, (q.log()[draw.pool] + math.log(m)).float())
    # Σ exp(o − log_count) is the partition function of the classes that can be drawn, without the positive.
    output = torch.linspace(-1, 1, 9).double()
    estimate = ((output[draw.pool] - draw.pool_log_count).exp() * ~empty).sum(-1)
    others = (q > 0) & (torch.arange(9) != target[:, None])
    torch.testing.assert_close(estimate, (output.exp() * others).sum(-1), rtol=0.02, atol=0)
    assert sampler.draw(query, 5, exclude=torch.tensor([-1, -1, -1])).hidden.shape == (2, 0)


@pytest.mark.parametrize("name", ["uniform", "log_uniform"])
def test_a_pool_in_the_layer(name):
    torch.manual_seed(0)
    head = SampledSoftmax(4, 50, name, 20_000, scope="batch")
    query, target = torch.randn(8, 4), torch.randint(50, (8,))
    loss = head(query, target)
    loss.backward()
    torch.testing.assert_close(loss, head.eval()(query, target), rtol=0.01, atol=0)
    assert head.weight.grad.is_sparse


# --- large n --------------------------------------------------------------------------------------------------------


def large_samplers():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 50, (10_000_000,), generator=generator)
    tokens = (torch.rand(400_000, generator=generator) ** 4 * 1_000_000).long()
    return {
        "uniform": samplers.Uniform(10_000_000),
        "log_uniform": samplers.LogUniform(10_000_000),
        "unigram": samplers.Unigram(counts),
        "bigram": samplers.Bigram(torch.stack([tokens[:-1], tokens[1:]], 1), 1_000_000),
    }


@pytest.fixture(scope="module")
def large():
    return large_samplers()


@pytest.mark.parametrize("name", ["uniform", "log_uniform", "unigram", "bigram"])
def test_millions_of_classes(name, large):
    sampler = large[name]
    n, bins, draws = sampler.num_classes, 500, 200_000
    ids = torch.arange(n).unsqueeze(0)
    query, exclude, context = torch.zeros(1, 2), torch.tensor([7]), torch.tensor([3])
    q = sampler.log_prob(query, ids, exclude=exclude, context=context).exp()
    assert float(q.sum()) == pytest.approx(1, abs=1e-9)
    draw = sampler.draw(query, draws, exclude=exclude, context=context, generator=torch.Generator().manual_seed(1))
    for bin_of in (lambda i: i * bins // n, lambda i: i % bins):  # where in the range, and which neighbour
        expected = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_of(ids[0]), q[0]) * draws
        observed = torch.bincount(bin_of(draw.ids[0]), minlength=bins)
        assert goodness_of_fit(observed, expected) > SIGNIFICANCE


def test_dense_sampling_beyond_the_limit_of_multinomial():
    n = 2**24 + 3
    sampler = samplers.Softmax()
    weight = torch.zeros(n, 1)
    weight[-1] = 20.0
    sampler.update(weight)
    draw = sampler.draw(torch.ones(1, 1), 200, generator=torch.Generator().manual_seed(0))
    q_last = 1 / (1 + (n - 1) * math.exp(-20))
    assert (draw.ids == n - 1).double().mean() == pytest.approx(q_last, abs=0.05)
    assert float(draw.log_count[draw.ids == n - 1][0]) == pytest.approx(math.log(200 * q_last), abs=1e-4)


# --- alias tables ---------------------------------------------------------------------------------------------------


def table_probabilities(table: AliasTable, row: int) -> torch.Tensor:
    """The distribution that the table really draws, from its cells."""
    first, last = int(table.offsets[row]), int(table.offsets[row + 1])
    cells = torch.arange(first, last)
    mass = torch.zeros(len(table.weight), dtype=torch.float64)
    mass.index_add_(0, cells, table.threshold[cells]).index_add_(0, table.alias[cells], 1 - table.threshold[cells])
    return mass / (last - first)


@given(st.lists(st.lists(st.integers(0, 1000), max_size=12).filter(lambda row: not row or sum(row) > 0), min_size=1))
@settings(deadline=None, derandomize=True)
def test_alias_tables_hold_exactly_the_weights(rows):
    offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    weight = torch.tensor([x for row in rows for x in row], dtype=torch.long)
    table = AliasTable(weight, offsets)
    for index, row in enumerate(rows):
        if row:
            expected = torch.zeros(len(weight), dtype=torch.float64)
            expected[offsets[index] : offsets[index + 1]] = torch.tensor(row).double() / sum(row)
            torch.testing.assert_close(table_probabilities(table, index), expected, rtol=1e-12, atol=1e-14)
            if sum(x > 0 for x in row) > 1:
                skip = offsets[index] + max(range(len(row)), key=row.__getitem__)
                uniform = torch.tensor([0.0, 0.3, 1 - 2**-53], dtype=torch.float64)
                cells = table.draw_without(torch.full((3,), index), skip.expand(3), uniform)
                assert ((cells >= offsets[index]) & (cells < offsets[index + 1]) & (cells != skip)).all()
                assert (weight[cells] > 0).all()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50).filter(lambda w: sum(w) > 1e-3))
@settings(deadline=None, derandomize=True)
def test_alias_table_of_real_numbers(values):
    weight = torch.tensor(values, dtype=torch.float64)
    table = AliasTable(weight)
    probabilities = table_probabilities(table, 0)
    torch.testing.assert_close(probabilities, weight / weight.sum(), rtol=1e-9, atol=1e-12)
    assert (probabilities[weight == 0] == 0).all()


def test_alias_draw_native_equals_reference():
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 5, 5, 105, 106])
    table = AliasTable(torch.randint(1, 50, (106,), generator=generator), offsets)
    row = torch.tensor([0, 2, 3, 2, 0])
    uniform = torch.rand(5, 1000, dtype=torch.float64, generator=generator)
    uniform[:, 0], uniform[:, 1] = 0.0, 1 - 2**-53
    arguments = (table.threshold, table.alias, offsets[row], offsets.diff()[row], uniform)
    assert torch.equal(torch.ops.manyclass.alias_draw(*arguments), ops.alias_draw_reference(*arguments))
    torch.library.opcheck(torch.ops.manyclass.alias_draw.default, arguments)


def test_alias_draw_refuses_cells_outside_of_the_table():
    table = AliasTable(torch.tensor([1, 2]))
    for start, length in [(1, 2), (-1, 2), (0, 0), (0, 3)]:
        with pytest.raises(ValueError, match="start and length must name cells of the table"):
            ops.alias_draw(
                table.threshold, table.alias, torch.tensor([start]), torch.tensor([length]), torch.rand(1, 1).double()
            )


# --- kernels --------------------------------------------------------------------------------------------------------


@given(d=st.integers(1, 6), degree=st.sampled_from([2, 4, 6]), seed=st.integers(0, 1000))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_feature_map_gives_the_kernel(d, degree, seed):
    kernel = kernels.Polynomial(degree, alpha=3.0)
    a, b = torch.randn(2, 4, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    features = kernel.feature_map(a)
    assert features.shape == (4, kernel.feature_dim(d))
    torch.testing.assert_close((features * kernel.feature_map(b)).sum(-1), kernel.value((a * b).sum(-1)))


def test_named_kernels():
    logits = torch.tensor([-2.0, 0.0, 0.5])
    assert kernels.Quadratic().value(logits).tolist() == [401.0, 1.0, 26.0]
    assert kernels.Quartic().value(logits).tolist() == [17.0, 1.0, 1.0625]
    assert kernels.Quadratic().feature_dim(64) == 64 * 65 // 2 + 1
    with pytest.raises(ValueError, match=r"in_features=200.*samplers\.Kernel"):
        kernels.Quartic().feature_map(torch.ones(1, 200))
    for degree in (3, 0, 1):
        with pytest.raises(ValueError, match="degree must be"):
            kernels.Polynomial(degree)
    with pytest.raises(ValueError, match="alpha must be positive"):
        kernels.Quadratic(-1.0)


@pytest.mark.parametrize("interpolation", [0.1, 1e-10, 1e-20, 1e-200])
def test_bigram_with_a_tiny_share_of_the_unigram_is_exact(interpolation):
    """Classes never seen after the context keep their share, also if the only class that was seen is excluded."""
    sampler = samplers.Bigram(torch.tensor([[0, 1]] * 5), 4, interpolation)  # unigram: 1, 6, 1, 1 of 9
    query, context, ids = torch.zeros(2, 1), torch.tensor([0, 3]), torch.arange(4).expand(2, -1)
    log_prob = sampler.log_prob(query, ids, context=context)
    expected = torch.tensor([1, 6, 1, 1]).double().div(9).log()
    torch.testing.assert_close(log_prob[1], expected)
    torch.testing.assert_close(log_prob[0, [0, 2, 3]], expected[[0, 2, 3]] + math.log(interpolation))
    without = sampler.log_prob(query, ids, exclude=torch.tensor([1, 1]), context=context)
    torch.testing.assert_close(without[:, [0, 2, 3]].exp(), torch.full((2, 3), 1 / 3).double())
    draw = sampler.draw(query, 1000, exclude=torch.tensor([1, 1]), context=context)
    assert torch.bincount(draw.ids[0], minlength=4)[[0, 2, 3]].min() > 200
    torch.testing.assert_close(draw.log_count, torch.full((2, 1000), math.log(1000 / 3)))


def test_unigram_refuses_an_excluded_class_whose_rest_is_rounding():
    for counts in (torch.tensor([10**15, 1]), torch.tensor([1e300, 1.0], dtype=torch.float64)):
        sampler, positive = samplers.Unigram(counts), torch.tensor([0])
        for ask in (
            lambda s, p: s.draw(torch.zeros(1, 1), 3, exclude=p),
            lambda s, p: s.log_prob(torch.zeros(1, 1), torch.tensor([[0, 1]]), exclude=p),
        ):
            with pytest.raises(ValueError, match="exclude = 0 leaves no class to draw"):
                ask(sampler, positive)
        assert torch.equal(sampler.draw(torch.zeros(1, 1), 3, exclude=positive + 1).ids, torch.zeros(1, 3).long())


def test_unigram_of_large_counts_is_exact():
    counts = torch.tensor([2**52, 2**51, 1])
    log_prob = samplers.Unigram(counts).log_prob(torch.zeros(1, 1), torch.arange(3).unsqueeze(0))
    torch.testing.assert_close(log_prob[0], (counts.double() / counts.double().sum()).log())


def test_queries_without_features():
    assert samplers.Uniform(5).draw(torch.zeros(2, 3, 0), 4).ids.shape == (2, 3, 4)


def test_arguments_that_are_not_contiguous():
    """A slice of a batch, such as diagnostics take: the native tree once refused it."""
    sampler = samplers.KernelTree(kernels.Quadratic(), 40, 3)
    sampler.update(weights(40))
    query, exclude = torch.randn(6, 3)[::2], torch.arange(6)[::2]
    draws = [
        sampler.draw(query, 5, exclude=positive, generator=torch.Generator().manual_seed(0))
        for positive in (exclude, exclude.contiguous())
    ]
    assert torch.equal(draws[0].ids, draws[1].ids)
