"""Own and shared negatives: exact expected counts, the tree and its refresh, the layer."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyclass import SampledSoftmax, ops, samplers
from manyclass.samplers import Blocks, Draw, bisection, blocks, codes, line, partition, pool, search, strays

N, D = 300, 4


@pytest.fixture(autouse=True)
def small_tree(monkeypatch):
    """Let few classes make a tree of several levels, which grows in many slices."""
    monkeypatch.setattr(partition, "TOP", 8)
    monkeypatch.setattr(partition, "SLICE", 64)


def weights(n=N, d=D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, d, generator=generator)
    return centres[torch.randint(5, (n,), generator=generator)] + 0.5 * torch.randn(n, d, generator=generator)


def batch(size, n=N, d=D, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, d, generator=generator), torch.randint(n, (size,), generator=generator)


def trained(n=N, d=D, own=6, probe=5, block_size=4, steps=20, bias=None, **options):
    """A sampler that has seen queries, so that its pool is not uniform."""
    sampler, weight = Blocks(n, d, own, probe, block_size, bias=bias is not None, **options), weights(n, d)
    sampler.update(weight, bias=bias)
    for step in range(steps):
        sampler.observe(*batch(8, n, d, seed=50 + step))
        sampler.update(weight, torch.tensor([step]), bias=bias)
    return sampler


def exact(query, prediction="softmax", bias=None):
    logits = (query @ weights(N, query.shape[1]).T).double() + (0 if bias is None else bias.double())
    return logits.abs() if prediction == "absolute" else logits


def enumerate_draws(sampler, query, target, samples, grid, change=lambda draw: draw, bias=None):
    """All uniform numbers of a grid: how often each class came, the count that was reported, the mean of Ẑ."""
    size, n = len(query), sampler.num_classes
    outputs = exact(query, sampler.prediction, bias)
    counts, mean = torch.zeros(size, n, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    claimed = torch.full((size, n), math.nan, dtype=torch.float64)
    for point in range(grid):
        # The pool's number and the examples' go through the grid in different orders.
        uniform = torch.full((1 + size,), (point * 37 % grid + 0.5) / grid, dtype=torch.float64)
        uniform[0] = (point + 0.5) / grid
        draw = change(sampler._draw_parts(query, samples, target, uniform, query.shape[:1]))
        own = draw.log_count < math.inf
        seen = torch.ones(size, len(draw.pool), dtype=torch.bool)
        seen[tuple(draw.hidden)] = False
        ids = torch.cat([draw.ids, draw.pool.expand(size, -1)], 1)
        log_count = torch.cat([draw.log_count, draw.pool_log_count.expand(size, -1)], 1).double()
        taken = torch.cat([own, seen], 1)
        counts.scatter_add_(1, ids, taken.double() / grid)
        mean += ((outputs.gather(1, ids) - log_count).exp() * taken).sum(1) / grid
        row, place = taken.nonzero(as_tuple=True)
        claimed[row, ids[row, place]] = log_count[row, place].exp()
    return counts, claimed, mean


def check_counts(sampler, query, target, samples, grid, **options):
    """The reported expected count of every class is how often it came, and the mean of Ẑ is Z without the positive."""
    counts, claimed, mean = enumerate_draws(sampler, query, target, samples, grid, **options)
    assert (counts.gather(1, target[:, None]) == 0).all()
    came = claimed.isfinite()
    assert came.sum() > 0.9 * counts.numel()  # the others are too rare for the grid
    torch.testing.assert_close(counts[came], claimed[came], rtol=0, atol=3 / grid)
    outputs = exact(query, sampler.prediction, options.get("bias"))
    expected = outputs.exp().sum(-1) - outputs.gather(1, target[:, None]).squeeze(1).exp()
    torch.testing.assert_close(mean, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
@pytest.mark.parametrize("samples", [3, 40, 250])
def test_expected_counts_are_exact(samples, prediction, offsets, backend):
    """By enumeration of the uniform numbers; with 250 some classes are expected more than once."""
    bias = torch.linspace(-1, 1, N) if offsets else None
    sampler, (query, target) = trained(prediction=prediction, bias=bias), batch(3)
    assert len(sampler.partition.widths) > 1
    assert sampler.partition.outliers > 0
    assert sampler.partition.sums[1] > 0
    check_counts(sampler, query, target, samples, 1500 if backend == "native" else 300, bias=bias)


def own_inside(sampler, query, samples):
    """Whether each example draws classes of blocks, not only outliers."""
    draw = sampler.draw(query, samples)
    outliers = sampler.partition.order[: sampler.partition.outliers]
    return ((draw.log_count < math.inf) & ~torch.isin(draw.ids, outliers)).any(-1)


def test_a_flat_softmax_needs_no_own_negatives(backend):
    """Its own negatives are outliers, which no pool has; the counts are exact beside other examples."""
    sampler, (query, target) = trained(), batch(3)
    query *= torch.tensor([[0.01], [3.0], [0.0]])
    assert own_inside(sampler, query, 40).tolist() == [False, True, False]
    check_counts(sampler, query, target, 40, 1500 if backend == "native" else 300)


def test_a_batch_of_flat_examples_is_hardly_searched(backend):
    """Of 100 examples every fourth is tried. If all of these are flat, no other example draws from blocks."""
    sampler, (query, target) = trained(), batch(100)
    query *= 1e-3
    query[6] = batch(1)[0] * 3
    assert not own_inside(sampler, query, 40).any()
    assert own_inside(sampler, query[4:8], 40).tolist() == [False, False, True, False]
    check_counts(sampler, query[:40], target[:40], 40, 1500 if backend == "native" else 100)
    query[8] = query[6]
    assert own_inside(sampler, query, 40).nonzero().flatten().tolist() == [6, 8]


def test_a_visit_of_all_blocks_keeps_its_own_negatives(backend):
    """It has no error, even where stale spreads make the softmax look flat."""
    sampler, query = trained(own=N, probe=N), torch.ones(2, D)
    sampler.partition.spread.fill_(100.0)
    assert own_inside(sampler, query, 10).all()
    sampler.probe = 5
    assert not own_inside(sampler, query, 10).any()


def test_one_large_class_in_a_flat_softmax_is_drawn(backend, monkeypatch):
    """Its block is among those that are tried, although the other members are small. A target does not count."""
    monkeypatch.setattr(partition, "OUTLIERS", 0)
    sampler, weight = Blocks(N, D, own=6, probe=5, block_size=4), 0.01 * weights()
    weight[7, 0] = 3.0
    sampler.update(weight)
    query = torch.tensor([[2.5, 0.0, 0.0, 0.0]])
    for exclude, expected in [(None, True), (torch.tensor([7]), False)]:
        draw = sampler.draw(query, 40, exclude=exclude)
        own = draw.ids[draw.log_count < math.inf].tolist()
        assert (7 in own) == bool(own) == expected


def test_own_draws_hardly_vary_in_the_visited_mass(backend):
    """Over all visited classes that an example draws for itself, the corrected sum varies by the rounding of codes."""
    sampler, (query, _) = trained(own=6, probe=8), batch(3)
    sums, drawn = [], set()
    for u in torch.linspace(0.01, 0.99, 20, dtype=torch.float64):
        draw = sampler._draw_parts(query, 40, None, torch.cat([torch.zeros(1), u.expand(3)]).double(), query.shape[:1])
        assert (draw.log_count < math.inf).all()
        drawn.add(tuple(draw.ids[0].tolist()))
        sums.append((exact(query).gather(1, draw.ids) - draw.log_count).exp().sum(1))
    sums = torch.stack(sums)
    torch.testing.assert_close(sums, sums[:1].expand_as(sums), rtol=0.01, atol=0)
    assert len(drawn) > 1  # although the classes do


def forget_hidden(draw: Draw) -> Draw:
    return draw._replace(hidden=draw.hidden[:, :0])


def report_uniform(draw: Draw) -> Draw:
    return draw._replace(pool_log_count=torch.full_like(draw.pool_log_count, math.log(40 / N)))


def call_own_certain(draw: Draw) -> Draw:
    return draw._replace(log_count=draw.log_count.clamp(min=0))


@pytest.mark.parametrize("change", [forget_hidden, report_uniform, call_own_certain])
def test_the_enumeration_catches(change):
    sampler, (query, target) = trained(), batch(3)
    with pytest.raises(AssertionError):
        check_counts(sampler, query, target, 40, 500, change=change)


def test_random_draws_follow_the_counts():
    """With the sampler's own randomness: a class comes in a draw as often as the next smaller or larger integer."""
    sampler, (query, _) = trained(), batch(1)
    times, generator, target = 4000, torch.Generator().manual_seed(3), torch.tensor([7])
    _, claimed, _ = enumerate_draws(sampler, query, target, 40, 4000)
    draws = [sampler.draw(query, 40, exclude=target, generator=generator) for _ in range(times)]
    own = torch.cat([draw.ids[draw.log_count < math.inf] for draw in draws]).bincount(minlength=N)
    in_pool = torch.cat([draw.pool for draw in draws]).bincount(minlength=N)
    hidden = torch.cat([draw.pool[draw.hidden[1]] for draw in draws]).bincount(minlength=N)
    came = claimed[0].isfinite() & (claimed[0] < 1)
    expected, observed = claimed[0][came], (own + in_pool - hidden)[came] / times

    def largest_deviation(expected):
        return float(((observed - expected).abs() / (expected * (1 - expected) / times).sqrt()).max())

    assert came.sum() > 250
    assert largest_deviation(expected) < 5.5  # about 1e-5 for 300 classes
    wrong = expected.clone()
    wrong[expected.argmax()] *= 0.8
    assert largest_deviation(wrong) > 8


@pytest.mark.parametrize("samples", [N, 1000])
def test_a_pool_of_all_classes_gives_the_full_softmax(samples, backend):
    torch.manual_seed(0)
    head = SampledSoftmax(D, N, "blocks", samples, own=6, probe=5, block_size=4, bias=True)
    (query, target), full = batch(6), copy.deepcopy(head).eval()
    query.requires_grad_()
    for _ in range(3):
        losses = head(query, target), full(query, target)
        torch.testing.assert_close(*losses)
        grads = [
            torch.autograd.grad(loss, [query, *h.parameters()]) for loss, h in zip(losses, (head, full), strict=True)
        ]
        for sampled, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(sampled.to_dense(), wanted, rtol=1e-4, atol=1e-6)


def test_own_draws_of_all_classes_give_the_full_softmax(backend):
    """Every block is visited and every class is certain: nothing is left to the pool."""
    torch.manual_seed(0)
    head = SampledSoftmax(D, N, "blocks", 16, own=N, probe=N, block_size=4)
    query, target = batch(6)
    torch.testing.assert_close(head(query, target), head.eval()(query, target))


@given(
    n=st.integers(1, 400),
    d=st.integers(1, 9),
    own=st.integers(1, 40),
    probe=st.integers(1, 12),
    block_size=st.integers(1, 20),
    samples=st.integers(1, 500),
    size=st.integers(0, 5),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_any_sizes(n, d, own, probe, block_size, samples, size):
    sampler = Blocks(n, d, own, probe, block_size)
    sampler.update(weights(n, d))
    query, target = batch(size, n, d)
    for step in range(3):
        draw = sampler.draw(query, samples, exclude=target if n > 1 else None)
        assert draw.ids.shape == draw.log_count.shape == (size, own)
        assert draw.pool.shape == draw.pool_log_count.shape
        assert len(draw.pool) in (samples, n)
        real = draw.log_count < math.inf
        if n > 1:
            assert (draw.ids != target[:, None])[real].all()
        for row in range(size):  # a class comes for certain once, and never from both parts
            mine = draw.ids[row][real[row]]
            assert len(mine.unique()) == len(mine)
            seen = torch.ones(len(draw.pool), dtype=torch.bool)
            seen[draw.hidden[1][draw.hidden[0] == row]] = False
            assert not set(mine.tolist()) & set(draw.pool[seen].tolist())
            assert n == 1 or int(target[row]) not in draw.pool[seen].tolist()
        sampler.observe(query, target)
        sampler.update(weights(n, d, seed=step), torch.arange(min(n, 3)))


# --- native and reference -------------------------------------------------------------------------------------------


def both(function, monkeypatch):
    native = function()
    monkeypatch.setattr(ops, "_NATIVE", False)
    return native, function()


def test_pools_are_the_same_on_both_backends(monkeypatch):
    sampler = trained()
    for number, u in itertools.product((1, 7, 100), (0.0, 0.3, 1 - 2**-53)):
        uniform = torch.tensor([u], dtype=torch.float64)
        with monkeypatch.context() as patch:
            (position, log_count), other = both(lambda: pool.pool_draw(sampler.partition, uniform, number), patch)  # noqa: B023
        assert torch.equal(position, other[0])
        torch.testing.assert_close(log_count, other[1], rtol=1e-12, atol=1e-12)
        assert torch.equal(position, position.sort().values)


@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
@pytest.mark.parametrize("offsets", [False, True])
def test_searches_are_the_same_on_both_backends(prediction, offsets, monkeypatch):
    bias = torch.linspace(-1, 1, N) if offsets else None
    sampler, (query, target) = trained(prediction=prediction, bias=bias), batch(40)
    uniform = torch.rand(41, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with monkeypatch.context() as patch:
        native, reference = both(lambda: sampler._draw_parts(query, 40, target, uniform, query.shape[:1]), patch)
    assert torch.equal(native.pool, reference.pool)
    assert torch.equal(native.ids, reference.ids)
    torch.testing.assert_close(native.log_count, reference.log_count, rtol=1e-4, atol=1e-4)
    pairs = [sorted(map(tuple, draw.hidden.T.tolist())) for draw in (native, reference)]
    assert pairs[0] == pairs[1]
    assert pairs[0]
    found, other = both(lambda: sampler.search(query, 7, 4), monkeypatch)
    assert torch.equal(found.ids, other.ids)
    for a, b in zip(found, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_log_mass_is_that_of_gaussians_or_of_their_largest():
    """A moderate spread adds σ²/2; a huge one cannot make N classes heavier than the largest of them."""
    mean, variance = torch.tensor([0.3, 0.3]), torch.tensor([1.0, 100.0])
    found = search.log_mass(mean, variance, 8.0, "softmax")
    torch.testing.assert_close(found[0], torch.tensor(math.log(8) + 0.3 + 0.5))
    torch.testing.assert_close(found[1], torch.tensor(0.3 + 10 * math.sqrt(2 * math.log(8))))
    assert found[1] < math.log(8) + 0.3 + 50


# --- the tree -------------------------------------------------------------------------------------------------------


def members_of(tree, level, node):
    width = tree.blocks // tree.widths[level]
    begin, end = tree._border(node * width), tree._border((node + 1) * width)
    return tree.order[begin:end].long()


def check_tree(tree, n):
    assert torch.equal(tree.order.sort().values, torch.arange(n, dtype=torch.int32))
    assert (tree.block_of[tree.order[: tree.outliers].long()] == -1).all()
    sizes = tree.block_of[tree.block_of >= 0].bincount(minlength=tree.blocks)
    assert int(sizes.max() - sizes.min()) <= 1
    assert int(sizes.max()) == tree.block_size
    ids, inside = tree.members(torch.arange(tree.blocks))
    assert torch.equal(tree.block_of[ids[inside]].long(), torch.arange(tree.blocks).repeat_interleave(sizes))


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 64, 1000, 1021])
def test_the_tree_is_balanced(n, backend):
    sampler = Blocks(n, 3)
    sampler.update(weights(n, 3))
    check_tree(sampler.partition, n)


@pytest.mark.parametrize("bias", [False, True])
def test_nodes_know_the_moments_of_their_members(bias, backend):
    weight, offsets = weights(1021, 5), torch.randn(1021, generator=torch.Generator().manual_seed(0)) if bias else None
    sampler = Blocks(1021, 5, block_size=4, bias=bias)
    sampler.update(weight, bias=offsets)
    weight[17] += 1
    sampler.update(weight, torch.tensor([17]), bias=offsets)
    tree, rows = sampler.partition, weight if offsets is None else torch.cat([weight, offsets[:, None]], 1)
    assert len(tree.widths) == 3
    for level, number in enumerate(tree.widths):
        for node in range(0, number, 7):
            members = rows[members_of(tree, level, node)]
            place = tree.firsts[level] + node
            mean, variance = members.mean(0), members.var(0, unbiased=False).mean()
            # Means are rounded to 127 steps, and those of nodes above are means of rounded ones.
            torch.testing.assert_close(tree.mean.read(place), mean, rtol=0, atol=float(mean.abs().max()) / 120 + 0.004)
            torch.testing.assert_close(tree.spread[place], variance, rtol=0.01, atol=1e-5)


def test_outliers_are_the_classes_that_lie_farthest_out(backend):
    weight = weights()
    weight[[3, 77, 200]] = 9 * torch.nn.functional.normalize(
        torch.randn(3, D, generator=torch.Generator().manual_seed(5))
    )
    sampler = Blocks(N, D)
    sampler.update(weight)
    outliers = sampler.partition.order[: sampler.partition.outliers].tolist()
    assert {3, 77, 200} <= set(outliers)
    assert 0 < len(outliers) <= N // 16


def test_a_class_that_left_its_block_becomes_an_outlier(backend):
    """The mean and variance of its block hardly show it, so a search would miss it until the next tree."""
    n, d = 4000, 8
    sampler, weight = Blocks(n, d, own=4, probe=4), weights(n, d)
    sampler.update(weight)
    query = torch.nn.functional.normalize(torch.ones(1, d)).expand(8, -1)
    stray, nobody = int(sampler.partition.order[-1]), torch.full((8,), -1)
    weight[stray] = 6 * query[0]
    for _ in range(2):
        sampler.update(weight, torch.tensor([stray]))
        sampler.observe(query, nobody)
    block = int(sampler.partition.block_of[stray])
    assert block >= 0
    assert not (sampler.search(query, 1, 4).ids == stray).any()
    sampler.update(weight, torch.tensor([stray]))
    sampler.observe(query, torch.tensor([7, stray, -1, 7, stray, 7, 8, 9]))
    assert int(sampler.partition.block_of[stray]) == -1
    assert (sampler.search(query, 1, 4).ids == stray).all()
    assert bool(sampler.line.touched[block])
    check_tree(sampler.partition, n)
    # The next tree starts with the farthest classes, and receives the present outliers that it would miss.
    weight[stray] = 0
    sampler._grow(sampler.growing.slices)
    weight[stray] = 6 * query[0]
    sampler._grow_some()
    assert (sampler.search(query, 1, 4).ids == stray).all()
    check_tree(sampler.partition, n)


@pytest.mark.parametrize("margin", [-math.inf, math.inf])
def test_only_classes_that_a_search_misses_are_strays(margin, monkeypatch, backend):
    """The counts stay exact while outliers change."""
    monkeypatch.setattr(strays, "MARGIN", margin)
    sampler, (query, target) = trained(steps=8), batch(3)
    first = sampler.partition.outliers - sampler.partition.strays
    before = sampler.partition.order.clone()
    for seed in range(4):
        sampler.updates += 1
        sampler.observe(*batch(8, seed=seed))
    changed = sampler.partition.order != before
    assert bool(changed[first : sampler.partition.outliers].any()) == (margin < 0)
    assert not changed[:first].any()
    check_tree(sampler.partition, N)
    check_counts(sampler, query, target, 40, 1500 if backend == "native" else 300)


def test_blocks_are_neighbours(backend):
    """Much closer together than a random partition, and closer than halving across the principal direction alone."""
    weight, borders = weights(1024, 8), torch.arange(0, 1025, 8)

    def spread(order):
        return float(weight[order].view(128, 8, 8).var(1, unbiased=False).mean())

    found = spread(bisection.bisect(weight, borders))
    assert found < 0.5 * spread(torch.randperm(1024, generator=torch.Generator().manual_seed(0)))


def test_equal_rows_and_rows_that_are_not_finite_can_be_divided(backend):
    for rows in (torch.ones(64, 3), torch.full((64, 3), math.nan)):
        order = bisection.bisect(rows, torch.arange(0, 65, 8))
        assert torch.equal(order.sort().values, torch.arange(64))


def test_a_new_tree_grows_beside_the_old_one(backend, monkeypatch):
    """In small slices, in use only when complete, and then as good as one made at once."""
    monkeypatch.setattr(blocks, "FASTEST", 4)
    sampler, weight = Blocks(N, D, block_size=4), weights()
    sampler.update(weight)
    old, moved = sampler.partition.order.clone(), weights(seed=9)
    changes = []
    for step in range(200):
        sampler.update(moved, torch.tensor([step]))
        check_tree(sampler.partition, N)
        if not torch.equal(sampler.partition.order, old):
            changes.append(step)
            old = sampler.partition.order.clone()
    slices = sampler.partition.slices
    assert slices > 10
    assert changes[0] == blocks.REBUILD + math.ceil(slices / blocks.FASTEST) - 2
    assert all(later >= 1.25 * earlier for earlier, later in itertools.pairwise(changes))
    fresh = Blocks(N, D, block_size=4)
    fresh.update(moved)
    assert torch.equal(sampler.partition.order, fresh.partition.order)
    assert torch.equal(sampler.partition.mean.code, fresh.partition.mean.code)
    inside = old[sampler.partition.outliers :].long()
    assert torch.equal(sampler.codes.code[inside], fresh.codes.code[inside])


def test_no_slice_reads_more_rows_than_a_slice(monkeypatch):
    read = []
    rows_of = partition.rows_of
    monkeypatch.setattr(partition, "rows_of", lambda w, b, ids: (read.append(ids.numel()), rows_of(w, b, ids))[1])
    sampler = Blocks(2000, D)
    sampler.update(weights(2000))
    assert len(read) > 2000 / 64 * 5
    assert max(read[1:]) <= 64 + 1  # the first is the sample for the centre


def test_touched_blocks_wait_in_line(monkeypatch):
    monkeypatch.setattr(line, "REFRESH", 8)
    sampler, weight = Blocks(N, D, block_size=4), weights()
    sampler.update(weight)
    tree = sampler.partition
    before, rows = tree.mean.code.clone(), tree.order[tree.outliers :: 4].long()[20:40]
    weight[rows] += 1
    touched = tree.block_of[rows].long().unique()
    assert len(touched) > 14
    sampler.update(weight, rows)
    assert int(sampler.line.touched.sum()) == len(touched) - 7  # one of eight is swept
    for _ in range(4):  # every other update refreshes blocks
        sampler.update(weight, rows[:0])
    assert int(sampler.line.touched.sum()) == max(0, len(touched) - 21)
    leaves = tree.firsts[-1]
    changed = (tree.mean.code[leaves:] != before[leaves:]).any(1).nonzero().flatten()
    assert set(changed.tolist()) <= set(touched.tolist())
    for _ in range(6):
        sampler.update(weight, rows[:0])
    fresh = copy.deepcopy(tree)
    fresh.summarise(weight, None, torch.arange(tree.blocks), copy.deepcopy(sampler.codes))
    assert torch.equal(tree.mean.code, fresh.mean.code)


@pytest.mark.parametrize(("blocks", "window"), [(64, 8192), (256, 64)])
def test_every_touched_block_is_soon_due_and_none_twice(blocks, window, monkeypatch):
    monkeypatch.setattr(line, "REFRESH", 16)
    monkeypatch.setattr(line, "WINDOW", window)
    queue, generator, since = line.Line(blocks), torch.Generator().manual_seed(0), torch.zeros(blocks)
    swept_at, longest = torch.zeros(blocks), 0
    for step in range(200):
        queue.join(torch.randint(blocks, (step % 5,), generator=generator))
        due = queue.due()
        assert len(due) == 16
        assert bool((due.diff() > 0).all())
        since = torch.where(queue.touched, since + 1, 0)
        longest = max(longest, int(since.max()))
        swept_at[due] = step
    # Two touched blocks per step on average: they wait for the window to come round, or for the sweep.
    assert longest <= blocks // min(blocks, window) + 16
    assert float(swept_at.min()) >= 200 - blocks / 2  # a sweep of at least 2 blocks per step


def test_codes_of_touched_rows_are_never_stale(monkeypatch, backend):
    """Blocks wait for their refresh, but the classes themselves do not."""
    monkeypatch.setattr(line, "REFRESH", 8)
    sampler, weight = Blocks(N, D, block_size=4), weights()
    sampler.update(weight)
    rows = torch.tensor([5, 3, 150, 3, 99, 210])  # in any order, some of them twice
    weight[rows] += 1
    sampler.update(weight, rows)
    largest = weight.abs().amax(1)
    torch.testing.assert_close(sampler.codes.read(rows), weight[rows], rtol=0, atol=float(largest[rows].max()) / 250)


def test_codes_round_and_say_what_they_cannot_hold():
    held = codes.Codes(4, 3)
    held.write(torch.arange(4), torch.tensor([[0, 0, 0], [1e-40, 0, 0], [math.nan, 1, 1], [-127, 0.5, 1.6]]))
    assert held.code[:, :3].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [-127, 0, 2]]
    assert held.scale[:2].tolist() == [0, 0]
    assert math.isnan(held.scale[2])
    assert float(held.scale[3]) == 1


def test_a_sweep_finds_what_changed_unseen():
    sampler, weight = Blocks(N, D, block_size=4), weights()
    sampler.update(weight)
    weight.add_(1)
    for _ in range(3):
        sampler.update(weight, torch.tensor([0]))
    torch.testing.assert_close(
        sampler.partition.mean.read(torch.arange(sampler.partition.firsts[-1], len(sampler.partition.spread))).mean(),
        weight[sampler.partition.order[sampler.partition.outliers :].long()].mean(),
        rtol=0.01,
        atol=0,
    )
    assert sampler.staleness() == 0


def test_staleness_is_the_age_of_summaries(monkeypatch):
    monkeypatch.setattr(line, "REFRESH", 8)
    sampler, weight = Blocks(N, D, block_size=4), weights()
    sampler.update(weight)
    for _ in range(4):
        sampler.update(weight, torch.tensor([0]))
    assert sampler.partition.blocks == 64
    # Two of the four updates refreshed 8 blocks each.
    assert sampler.staleness() == pytest.approx((8 * (1 + 3) + 48 * 4) / 64, rel=0.1)


def test_shares_follow_the_queries():
    """The pool goes where recent queries have mass that they do not visit."""
    sampler, weight = Blocks(N, D, own=1, probe=1, block_size=4), weights()
    sampler.update(weight)
    direction = 2 * torch.nn.functional.normalize(weight[5], dim=0)
    for step in range(8):
        query = direction + 0.1 * torch.randn(8, D, generator=torch.Generator().manual_seed(step))
        sampler.observe(query, torch.full((8,), 5))
        sampler.update(weight, torch.tensor([0]))
    draws = [sampler.draw(direction[None], 40, generator=torch.Generator().manual_seed(s)) for s in range(20)]
    drawn = torch.cat([draw.pool for draw in draws])
    assert (weight @ direction)[drawn].mean() > (weight @ direction).mean() + 0.5


# --- the layer ------------------------------------------------------------------------------------------------------


def test_the_first_shares_follow_the_offsets(backend):
    """So the first steps estimate Z well even if a few offsets hold most of it, as log frequencies do."""
    n, d = 20000, 8
    counts = 1e6 / torch.arange(1, n + 1)
    sampler = Blocks(n, d, own=1, probe=1, bias=True)
    sampler.update(0.01 * torch.randn(n, d), bias=counts.log())
    expected = sampler.partition.sums[sampler.partition.blocks :]
    members, inside = sampler.partition.members(torch.arange(sampler.partition.blocks))
    mass = (counts[members] * inside).sum(-1)
    low = mass < 0.5 * mass.topk(2).values[-1]  # others are capped, since the example visits them
    ratio = expected[low] / mass[low]
    assert ratio.max() < 1.5 * ratio.min()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("prediction", ["softmax", "absolute"])
def test_the_mean_loss_gradient_is_close_to_the_full_one(sparse, bias, prediction, backend):
    torch.manual_seed(0)
    head = SampledSoftmax(
        D, N, "blocks", 60, own=16, probe=16, block_size=4, sparse=sparse, bias=bias, prediction=prediction
    )
    (query, target), full = batch(6), copy.deepcopy(head).eval()
    wanted = torch.autograd.grad(full(query, target), list(full.parameters()))
    total = [0.0] * len(wanted)
    for _ in range(200):
        found = torch.autograd.grad(head(query, target), list(head.parameters()))
        assert all(grad.is_sparse == sparse for grad in found)
        total = [t + grad.to_dense() / 200 for t, grad in zip(total, found, strict=True)]
    for mean, exact_gradient in zip(total, wanted, strict=True):
        assert float((mean - exact_gradient).norm() / exact_gradient.norm()) < 0.05


def test_tied_weights():
    """Gradients of the input and the output side add up."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(N, D, sparse=True)
    head = SampledSoftmax(D, N, "blocks", 1000, embedding=embedding)
    target = batch(6)[1]
    losses = [head.train(training)(embedding(target.flip(0)), target) for training in (True, False)]
    torch.testing.assert_close(*losses)
    sampled, full = (torch.autograd.grad(loss, embedding.weight)[0].to_dense() for loss in losses)
    torch.testing.assert_close(sampled, full, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["Adagrad", "SGD"])
def test_training_ends_at_the_loss_of_the_full_softmax(optimizer):
    """Name 1000 directions in 50 clusters, with queries that differ: the batch alone does not tell what matters."""
    torch.manual_seed(0)
    n, d = 1000, 8
    centres = torch.randn(50, d)
    truth = 4 * torch.nn.functional.normalize(centres[torch.arange(n) % 50] + 0.4 * torch.randn(n, d), dim=1)
    losses = {}
    for name in ("blocks", "uniform", "full"):
        torch.manual_seed(1)
        options = {"own": 8, "probe": 8, "block_size": 4} if name == "blocks" else {"scope": "batch"}
        head = SampledSoftmax(d, n, "blocks" if name == "blocks" else "uniform", 40, **options).train(name != "full")
        step = getattr(torch.optim, optimizer)(head.parameters(), lr=0.5 if optimizer == "Adagrad" else 5.0)
        for _ in range(400):
            target = torch.randint(n, (64,))
            step.zero_grad()
            head(truth[target] + 0.3 * torch.randn(64, d), target).backward()
            step.step()
        target = torch.arange(n).repeat(3)
        torch.manual_seed(2)
        losses[name] = float(head.eval()(truth[target] + 0.3 * torch.randn(3 * n, d), target).detach())
    assert losses["full"] < 4.5 < math.log(n)
    assert losses["blocks"] < losses["full"] + 0.1
    assert losses["uniform"] > losses["full"] + 0.15


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Blocks(0, 4), "num_classes must be at least 1, got 0"),
        (lambda: Blocks(9, 4, 0), "own must be at least 1, got 0"),
        (lambda: Blocks(9, 4, probe=0), "probe must be at least 1, got 0"),
        (lambda: Blocks(9, 4, block_size=0), "block_size must be at least 1, got 0"),
        (lambda: Blocks(9, 4, prediction="x"), "prediction must be one of"),
        (lambda: Blocks(9, 4).update(torch.ones(9, 3)), r"weight must have shape \(9, 4\), got \(9, 3\)"),
        (lambda: Blocks(9, 4).update(torch.ones(9, 4), bias=torch.ones(9)), "bias must be None"),
        (
            lambda: Blocks(9, 4).draw(torch.ones(2, 4), 8),
            r"Blocks has seen no class weights yet: call update\(weight\)",
        ),
        (lambda: trained().draw(torch.ones(2, 4), 0), "num_samples must be at least 1, got 0"),
        (lambda: trained().draw(torch.ones(2, 3), 8), r"query must have shape \(\*batch, 4\)"),
        (lambda: trained().log_prob(torch.ones(2, 4), torch.zeros(2, 1)), "Blocks has no single distribution"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_weights_that_are_not_finite_are_refused(backend):
    for value in (math.nan, math.inf):
        sampler, weight = Blocks(N, D), weights()
        weight[3, 1] = value
        sampler.update(weight)
        near = weights()[3].repeat(4, 1)
        with pytest.raises(ValueError, match="class weights must be finite"):
            sampler.draw(torch.cat([near, -near]), 8)


def test_state_and_shapes():
    sampler, (query, target) = trained(), batch(6)
    loaded = Blocks(N, D, 6, 5, 4)
    loaded.load_state_dict(sampler.state_dict())
    for other in (loaded, pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        other.attach(weights(), None)
        draws = [
            s.draw(query, 16, exclude=target, generator=torch.Generator().manual_seed(4)) for s in (sampler, other)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))
    assert pickle.loads(pickle.dumps(sampler))._tables is None
    shaped = sampler.draw(
        query.view(2, 3, 4), 16, exclude=target.view(2, 3), generator=torch.Generator().manual_seed(4)
    )
    assert shaped.ids.shape == (2, 3, 6)
    assert torch.equal(shaped.ids.reshape(6, -1), draws[0].ids)
    assert torch.equal(shaped.hidden, draws[0].hidden)
    assert sampler.draw(query[:0], 16, exclude=target[:0]).ids.shape == (0, 6)
    assert sampler.draw(query[0], 16, exclude=target[0]).ids.shape == (6,)


def test_by_name():
    head = SampledSoftmax(4, 500, "blocks", 64, own=16, prediction="absolute")
    assert isinstance(head.sampler, samplers.Blocks)
    assert (head.sampler.own, head.sampler.prediction) == (16, "absolute")
    assert "× the class weights" in repr(head)
    with pytest.raises(
        TypeError, match="sampler='blocks' has no option 'scope': its options are own, probe, block_size"
    ):
        SampledSoftmax(4, 500, scope="batch")


def test_opcheck():
    sampler, (query, target) = trained(), batch(3)
    tree, index = sampler.partition, sampler._index()
    uniform = torch.rand(3, dtype=torch.float64)
    position, _ = pool.pool_draw(tree, uniform[:1], 40)
    native = torch.ops.manyclass
    tables = (*index.native(), tree.block_of, tree.sums)
    own = (query, target, uniform, *tables, position, *index.sizes(), 5, 6, 0.5, False)
    best = (query, *index.native(), *index.sizes(), 5, 6, False)
    torch.library.opcheck(native.own_draw.default, own)
    torch.library.opcheck(native.best_classes.default, best)
    torch.library.opcheck(native.pool_draw.default, (tree.sums, uniform[:1], N, tree.outliers, 40, 0.5))
    torch.library.opcheck(native.sum_up_.default, (tree.sums.clone(), torch.tensor([0, 5])))
    torch.library.opcheck(native.bisect.default, (weights(50), torch.tensor([0, 20, 50])))
    nodes = (tree.mean.code.clone(), tree.mean.scale.clone(), tree.spread.clone())
    classes = (sampler.codes.code.clone(), sampler.codes.scale.clone(), weights(), torch.empty(0))
    summarise = (*nodes, *classes, tree.order)
    torch.library.opcheck(native.summarise_.default, (*summarise, torch.tensor([0, 3]), *index.sizes()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, i: torch.ops.manyclass.bisect(weights(50), torch.tensor([0, 60])), "borders must rise from 0 to 50"),
        (lambda t, i: torch.ops.manyclass.bisect(weights(50), torch.tensor([0, 10, 20, 50])), "a power of two blocks"),
        (lambda t, i: torch.ops.manyclass.bisect(weights(0), torch.tensor([0])), "a power of two blocks"),
        (lambda t, i: torch.ops.manyclass.sum_up_(t.sums, torch.tensor([t.blocks])), "leaves must be in"),
        (
            lambda t, i: torch.ops.manyclass.pool_draw(t.sums, torch.zeros(1).double(), N, 3, N, 0.5),
            "samples must be in",
        ),
        (
            lambda t, i: torch.ops.manyclass.best_classes(torch.ones(1, 4), *i.native(), *i.sizes(), 1, 99, False),
            r"k must be in \[1, .*\], the classes that are visited, got 99",
        ),
        (
            lambda t, i: torch.ops.manyclass.best_classes(torch.ones(1, 4), *i.native(), 3, 64, 5, 1, 1, False),
            "blocks must be top times a power of 8",
        ),
        (
            lambda t, i: torch.ops.manyclass.summarise_(*i.native(), torch.tensor([t.blocks]), *i.sizes()),
            "blocks must be in",
        ),
        (
            lambda t, i: torch.ops.manyclass.summarise_(
                *i.native()[:-1], t.order + N, torch.tensor([t.blocks - 1]), *i.sizes()
            ),
            "order must hold classes",
        ),
    ],
)
def test_native_operations_refuse(call, message):
    sampler = trained()
    with pytest.raises(ValueError, match=message):
        call(sampler.partition, sampler._index())


def test_rows_are_a_vector():
    sampler = trained()
    with pytest.raises(ValueError, match=r"rows must have shape \(k,\), got \(\)"):
        sampler.update(weights(), torch.tensor(3))
