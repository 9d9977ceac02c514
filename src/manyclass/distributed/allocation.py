"""Allocation of ``num_samples`` to the ranks."""

from torch import Tensor

SPLITS = ("even", "mass")


def even(units: int, ranks: int, rank: int) -> int:
    """Return a rank's part of ``units``; the first ranks take what is left over."""
    return units // ranks + (rank < units % ranks)


def allocate(
    share: Tensor,  # shape: (ranks, k), of each rank in the whole
    units: int,
) -> Tensor:
    """Divide ``units`` between the ranks by their shares, at least one each: shape ``(ranks, k)``, int64.

    One per rank keeps the estimate unbiased. The others follow the largest remainder method.
    """
    ranks = len(share)
    total = share.double().sum(dim=0)
    wanted = (units - ranks) * (share / total).where(total > 0, 1 / ranks)
    whole = wanted.floor()
    left = units - ranks - whole.sum(dim=0).long()
    order = (wanted - whole).argsort(dim=0, descending=True, stable=True)
    place = order.argsort(dim=0)
    return 1 + whole.long() + (place < left).long()
