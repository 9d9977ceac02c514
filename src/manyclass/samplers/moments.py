"""The first two moments of blocks of vectors, in plain PyTorch: what the native core does in one pass."""

import torch
import torch.nn.functional as F
from torch import Tensor


def moments(
    members: Tensor,  # shape: (blocks, size, columns), zero where there is no member
    inside: Tensor,  # shape: (blocks, size)
    start: Tensor,  # shape: (blocks, rank, columns)
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean ``(blocks, columns)``, scaled principal directions, shape of ``start``, and the variance left to a column.

    The directions come from ``iterations`` of subspace iteration that begins at ``start``.
    """
    size, rank = inside.sum(dim=-1), start.shape[1]
    mean = members.sum(dim=1) / size.unsqueeze(-1)
    members = (members - mean.unsqueeze(1)) * (inside / size.sqrt().unsqueeze(-1)).unsqueeze(-1)
    variance, directions = members.square().sum(dim=(1, 2)), start
    if rank:
        # Blocks that have no directions yet start from their own members.
        fresh = F.pad(members, (0, 0, 0, max(0, rank - members.shape[1])))[:, :rank]
        basis = torch.where(start.square().sum(dim=(1, 2), keepdim=True) > 0, start, fresh).mT
        for _ in range(iterations):
            basis = _orthonormal(members.mT @ (members @ basis))
        inner = members @ basis
        covariance = inner.mT @ inner
        jitter = 1e-6 * covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + 1e-20
        scale = torch.linalg.cholesky(covariance + jitter[:, None, None] * torch.eye(rank).to(covariance))
        directions = (basis @ scale).mT
        variance = variance - covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return mean, directions, variance.clamp(min=0) / members.shape[-1]


def _orthonormal(basis: Tensor) -> Tensor:
    """Gram-Schmidt on the columns of ``(…, d, r)``; a column that vanishes stays zero."""
    columns: list[Tensor] = []
    for column in basis.unbind(dim=-1):
        for _ in range(2):  # the second time removes what rounding left
            for other in columns:
                column = column - (column * other).sum(dim=-1, keepdim=True) * other
        columns.append(F.normalize(column, dim=-1, eps=1e-20))
    return torch.stack(columns, dim=-1)
