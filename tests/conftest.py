"""Settings of the test run."""

import torch

# torch warns when it makes sparse tensors unless this is decided; in tests it shall check them.
torch.sparse.check_sparse_tensor_invariants.enable()
