"""The sharded layer on 2 and 4 processes."""

import pytest
import sharded
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from manyclass import SampledSoftmax

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return {ranks: sharded.spawn(ranks, folder) for ranks in (4, 2)}, folder


@pytest.mark.parametrize("ranks", [4, 2])
@pytest.mark.parametrize("check", sharded.CHECKS, ids=lambda check: check.__name__)
def test_on_all_ranks(check, ranks, outcomes):
    errors = outcomes[0][ranks]
    assert check.__name__ not in errors, errors[check.__name__]
    names = [other.__name__ for other in sharded.CHECKS]
    failed = [names.index(name) for name in errors]
    assert names.index(check.__name__) < min(failed, default=len(names)), f"not run: {names[min(failed)]} failed before"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # so it is meant
@pytest.mark.parametrize("saved", [4, 2])
def test_a_checkpoint_of_all_ranks_on_one(saved, outcomes):
    """Without a process group, into the unsharded layer: the same predictions."""
    head = SampledSoftmax(sharded.D, sharded.N, bias=True)
    state = {name: value for name, value in head.state_dict().items() if not name.startswith(("sampler.", "_extra"))}
    dcp.load({"head": state}, checkpoint_id=outcomes[1] / f"of-{saved}", no_dist=True)
    head.load_state_dict(state, strict=False)
    expected = sharded.fill(SampledSoftmax(sharded.D, sharded.N, bias=True))
    query = torch.randn(5, sharded.D)
    torch.testing.assert_close(head.topk(query, 9), expected.topk(query, 9))
