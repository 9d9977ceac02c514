"""Native operations that are called directly refuse wrong arguments by name, and survive NaN."""

import math
import random

import pytest
import torch
from fuzz_native import MAKERS
from fuzz_rules import DTYPES
from torch.utils._python_dispatch import TorchDispatchMode

from manyclass import kernels
from manyclass.samplers import KernelTree, bisection, tree

native = torch.ops.manyclass
HUGE = 2**62


def arguments(name, seed=0, **changed):
    """Right arguments of an operation, some of them changed."""
    torch.manual_seed(seed)
    given, _ = MAKERS[name](random.Random(seed))
    return [changed.get(key, value) for key, value in given.items()]


def test_every_operation_is_called_at_random():
    registered = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("manyclass::")
    }
    assert set(MAKERS) == set(DTYPES) == {name.split(".")[0] for name in registered}


REFUSED = [
    (
        "alias_draw",
        {"uniform": torch.full((3, 2), math.nan).double()},
        "one entry per row of uniform|uniform must be in",
    ),
    ("bisect", {"borders": torch.empty(0, dtype=torch.long)}, "borders must part a power of two blocks, got -1"),
    ("sum_up_", {"sums": torch.zeros(3).double()}, "sums must hold twice a power of two, got 3"),
    ("pool_draw", {"outliers": 2**63 - 1}, r"outliers must be in \[0, "),
    ("pool_draw", {"classes": 2**63 - 1}, r"classes must be in \[1, 2147483647\], got 9223372036854775807"),
    ("pool_draw", {"share": math.nan}, r"share must be in \[1e-06, 1\], got nan"),
    ("summarise_", {"num_blocks": 0}, r"blocks must be in \[1, .*\], got 0"),
    ("summarise_", {"outliers": 2**63 - 1}, r"outliers must be in \[0, "),
    ("own_draw", {"blocks": 0}, r"blocks must be in \[1, .*\], got 0"),
    ("own_draw", {"number": HUGE}, r"number must be in \[1, 2147483647\]"),
    ("best_classes", {"top": 0}, r"top must be in \[1, .*\], got 0"),
    ("row_gradients", {"num_classes": HUGE}, r"num_classes must be in \[1, 2147483647\]"),
    ("tree_draw", {"leaf_size": HUGE}, r"leaf_size must be in \[1, .*\], got 4611686018427387904"),
    ("tree_draw", {"branching": HUGE}, r"branching must be in \[2, 2147483647\], got 4611686018427387904"),
    ("tree_draw", {"degree": HUGE}, r"degree must be in \[1, 64\], got 4611686018427387904"),
    ("tree_draw", {"floor": math.nan}, r"floor must be in \[0, 1\], got nan"),
    ("tree_draw", {"sizes": []}, "sizes must have a level"),
    ("tree_refresh_", {"leaf_size": HUGE}, r"leaf_size must be in \[1, .*\], got 4611686018427387904"),
    ("tree_refresh_", {"branching": HUGE}, r"branching must be in \[2, 2147483647\], got 4611686018427387904"),
    ("tree_refresh_", {"alpha": -1.0}, r"alpha must be in \[0, 1e\+30\], got -1"),
]


@pytest.mark.parametrize(("name", "changed", "message"), REFUSED, ids=[f"{r[0]}:{next(iter(r[1]))}" for r in REFUSED])
def test_refused(name, changed, message):
    with pytest.raises(ValueError, match=f"^{name}: ({message})"):
        getattr(native, name)(*arguments(name, **changed))


@pytest.mark.parametrize("name", MAKERS)
def test_an_error_names_the_argument(name):
    for argument, (dtype, dim) in DTYPES[name].items():
        for wrong in (torch.zeros([1] * (dim + 1), dtype=dtype), torch.zeros([1] * dim, dtype=torch.int16)):
            with pytest.raises(ValueError, match=f"^{name}: {argument} must have"):
                getattr(native, name)(*arguments(name, **{argument: wrong}))
        with pytest.raises(ValueError, match=f"^{name}: {argument} must be contiguous"):
            getattr(native, name)(*arguments(name, **{argument: torch.zeros([4] * dim, dtype=dtype)[..., ::2]}))


def test_bisect_of_no_classes(backend):
    for blocks in (1, 4):
        assert bisection.bisect(torch.empty(0, 3), torch.zeros(blocks + 1, dtype=torch.long)).shape == (0,)


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_reference_bisects_level_by_level():
    """Not block by block: without the native core that took ten times as long."""
    found = []
    for blocks in (32, 1024):
        with Operations() as operations:
            bisection.bisect_reference(torch.randn(2 * blocks, 3).double(), torch.arange(0, 2 * blocks + 1, 2))
        found.append(operations.count)
    assert found[1] == pytest.approx(2 * found[0], rel=0.05)  # 10 levels and 5


def test_a_tree_with_a_huge_branching_is_one_with_a_child_for_every_leaf(backend, monkeypatch):
    monkeypatch.setattr(tree, "MAX_TOP", 2)
    samplers = [KernelTree(kernels.Quadratic(), 20, 3, 1, branching) for branching in (2**50, 20)]
    for sampler in samplers:
        sampler.update(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
    ids = torch.arange(20).expand(2, -1)
    log_prob = [sampler.log_prob(torch.ones(2, 3), ids) for sampler in samplers]
    assert torch.equal(*log_prob)


def test_scores_that_are_not_finite_are_not_searched():
    """Below a top level of many nodes, the best of NaN once were nodes that did not exist."""
    classes, top, width = 4096, 64, 2
    blocks = 8 * top
    nodes = top + blocks
    mean, scale, spread = torch.ones(nodes, 32, dtype=torch.int8), torch.zeros(nodes), torch.zeros(nodes)
    scale[top:] = math.nan
    codes = (torch.zeros(classes, 32, dtype=torch.int8), torch.zeros(classes))
    weights = (torch.zeros(classes, 1), torch.zeros(0))
    tables = (mean, scale, spread, *codes, *weights, torch.arange(classes, dtype=torch.int32))
    values, ids, total, _ = native.best_classes(torch.ones(3, 1), *tables, 0, blocks, top, width, 5, False)
    assert total.isnan().all()
    assert values.isnan().all()
    assert (ids == 0).all()
    scale[:], spread[:] = 0.0, -1.0
    assert native.best_classes(torch.ones(3, 1), *tables, 0, blocks, top, width, 5, False)[2].isnan().all()


@pytest.mark.parametrize("name", [name for name in MAKERS if "uniform" in DTYPES[name]])
@pytest.mark.parametrize("value", [math.nan, 1.0, -0.1, 1e300])
def test_uniform_numbers_are_in_the_unit_interval(name, value):
    """NaN once sent a sort out of its array."""
    seed = 2 if name == "own_draw" else 1  # with examples
    place = list(MAKERS[name](random.Random(seed))[0]).index("uniform")
    uniform = arguments(name, seed)[place]
    assert uniform.numel()
    uniform.view(-1)[-1] = value
    with pytest.raises(ValueError, match=rf"^{name}: uniform must be in \[0, 1\)"):
        getattr(native, name)(*arguments(name, seed, uniform=uniform))


def test_masses_that_are_not_finite_have_no_probability():
    top = arguments("tree_draw", 1)[2]
    log_prob = native.tree_draw(*arguments("tree_draw", 1, top=torch.full_like(top, math.nan)))[1]
    assert log_prob.numel()
    assert log_prob.isnan().all()


def test_a_loss_of_nothing_but_nan_is_nan():
    """It once was that of an example without negatives, −1e30, which looks like a very good model."""
    classes, hidden = torch.zeros(1, 3, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)
    tables = (torch.ones(1, 2), torch.full((4, 2), math.nan), torch.zeros(0), classes, torch.zeros(1, 2))
    loss = native.sampled_loss_(torch.full((5, 1), math.nan), *tables, torch.zeros(5), hidden, False)[0]
    assert loss.isnan().all()


def test_a_loss_needs_a_class():
    classes, hidden = torch.full((1, 3), -1), torch.zeros(2, 0, dtype=torch.long)
    tables = (torch.ones(1, 2), torch.zeros(0, 2), torch.zeros(0), classes, torch.zeros(1, 2), torch.zeros(5), hidden)
    with pytest.raises(ValueError, match="sampled_loss_: weight must have a class"):
        native.sampled_loss_(torch.zeros(5, 1), *tables, False)
