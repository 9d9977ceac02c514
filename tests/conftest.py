"""Settings of the test run."""

import pytest
import torch

from manyclass import ops

# torch warns when it makes sparse tensors unless this is decided; in tests it shall check them.
torch.sparse.check_sparse_tensor_invariants.enable()


@pytest.fixture(params=["native", "reference"])
def backend(request, monkeypatch):
    """Run the test with the native kernels, and again with the PyTorch reference."""
    if request.param == "reference":
        monkeypatch.setattr(ops, "_NATIVE", False)
    elif not ops.native_available():
        pytest.skip("the native core was not built")
    return request.param


@pytest.fixture
def launched(monkeypatch):
    """The command and the folder of every process that a sweep starts."""
    from manyclass.experiments import reproduce

    launch, started = reproduce._launch, []

    def recorded(job):
        started.append((job.commands[0][0], job.folder.name))
        return launch(job)

    monkeypatch.setattr(reproduce, "_launch", recorded)
    return started
