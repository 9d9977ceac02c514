"""Locality sensitive hashing: classes that share a bucket with the query."""

import torch
from torch import Tensor

from .. import checks
from .snapshot import Snapshot


class SimHash(Snapshot):
    """q_i = (1 − ε)·(1/L)·Σ_t [i in the query's bucket of table t]/|bucket| + ε/n, with L tables of random hyperplanes.

    The hash of a vector is the sign of its products with ``bits`` random vectors, so two vectors share a bucket with
    probability (1 − angle/π)^bits over the choice of the hyperplanes. A draw chooses a table and then a class of the
    query's bucket. The reported q is exact given the tables, so no collision probability is estimated. A table whose
    bucket is empty draws uniformly. Classes outside of all buckets have only the share ε/n and so a large weight: the
    estimate is unbiased, but its variance is large. O(L·bits·d) per example, O(L) per class.

    Charikar (STOC 2002) has the hash; Vijayanarasimhan et al. (ICLR 2015 workshop), Spring and Shrivastava (2017) and
    Chen et al., SLIDE (MLSys 2020) sample a softmax by hash tables. SLIDE takes whole buckets and corrects nothing.

    Args:
        num_classes: n.
        in_features: size of the query, d.
        tables: L.
        bits: of each hash.
        uniform: ε, in (0, 1].
        every: updates between rebuilds of the tables, which cost O(n·L·bits·d).
        seed: of the hyperplanes.
        bias: whether class weights have offsets, stored as a further column.
    """

    q = "classes in the query's hash buckets, mixed with uniform"
    cost = "O(tables·bits·d) per example"
    use = "a baseline: its estimates vary much"
    uniforms_per_draw = 2

    planes: Tensor
    codes: Tensor
    ordered: Tensor
    place: Tensor
    size: Tensor

    def __init__(
        self,
        num_classes: int,
        in_features: int,
        tables: int = 16,
        bits: int = 8,
        uniform: float = 0.2,
        every: int = 100,
        seed: int = 0,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(num_classes, in_features, every, bias)
        self.tables = checks.positive_int("tables", tables, maximum=1 << 10)
        self.bits = checks.positive_int("bits", bits, maximum=20)
        self.uniform = checks.number("uniform", uniform)
        if not 0 < uniform <= 1:
            raise ValueError(f"uniform must be in (0, 1], got {uniform}")
        generator = torch.Generator().manual_seed(checks.integer("seed", seed, 0))
        planes = torch.randn(self.columns, tables * bits, generator=generator)
        self.register_buffer("planes", planes, persistent=False)
        # Per table: the bucket of each class, the classes sorted by bucket, their positions there, and the bucket
        # sizes.
        sizes = {"codes": (num_classes, tables), "ordered": (tables, num_classes), "place": (tables, num_classes)}
        for name, shape in {**sizes, "size": (tables, 1 << bits)}.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.long), persistent=False)

    def _rebuild(self) -> None:
        self.codes = self._hash(self.weight)
        buckets = self.codes.T.contiguous()
        self.ordered = buckets.argsort(dim=-1, stable=True)
        positions = torch.arange(self.num_classes, device=buckets.device).expand_as(buckets)
        self.place = torch.empty_like(self.ordered).scatter(-1, self.ordered, positions)
        self.size = torch.zeros_like(self.size).scatter_add(-1, buckets, torch.ones_like(buckets))

    def _hash(self, vectors: Tensor) -> Tensor:
        """Return the buckets of vectors ``(batch, columns)`` in all tables, shape ``(batch, tables)``."""
        signs = (vectors @ self.planes > 0).view(-1, self.tables, self.bits)
        return (signs * (1 << torch.arange(self.bits, device=vectors.device))).sum(dim=-1)

    def _buckets(self, query: Tensor, exclude: Tensor | None) -> tuple[Tensor, ...]:
        """Return the query's buckets, their sizes, which hold ``exclude``, and masses of parts and of single classes.

        Each is ``(batch, tables)``, the masses ``(batch, tables + 1)`` with the uniform part last.
        """
        bucket = self._hash(self._extended(query, self.weight))
        table = torch.arange(self.tables, device=bucket.device)
        size = self.size[table, bucket]
        holds = torch.zeros_like(bucket) if exclude is None else (self.codes[exclude] == bucket).long()
        share = torch.where(size > 0, (1 - self.uniform) / self.tables, 0.0).double()
        each = torch.cat([share / size.clamp(min=1), (1 - share.sum(-1, keepdim=True)) / self.num_classes], dim=-1)
        left = torch.cat([size - holds, torch.full_like(size[:, :1], self.num_classes - (exclude is not None))], dim=-1)
        return bucket, size, holds, each * left, each

    def _draw(self, query, uniform, exclude, context):
        bucket, size, holds, mass, _ = self._buckets(query, exclude)
        ends = mass.cumsum(dim=-1)
        part = torch.searchsorted(ends, uniform[..., 0] * ends[:, -1:], right=True).clamp(max=self.tables)
        table = part.clamp(max=self.tables - 1)
        code = bucket.gather(-1, table)
        begin = (self.size.cumsum(-1) - self.size)[table, code]
        left = (size - holds).gather(-1, table)
        place = begin + (uniform[..., 1] * left).long().minimum(left - 1).clamp(min=0)
        others = self.num_classes - (exclude is not None)
        anywhere = (uniform[..., 1] * others).long().clamp(max=others - 1)
        if exclude is not None:
            positive = exclude.unsqueeze(-1)
            skipped = holds.gather(-1, table).bool() & (place >= self.place[table, positive])
            place, anywhere = place + skipped, anywhere + (anywhere >= positive)
        inside = self.ordered[table, place.clamp(max=self.num_classes - 1)]
        ids = torch.where(part == self.tables, anywhere, inside)
        return ids, self._log_prob(query, ids, exclude, context)

    def _log_prob(self, query, ids, exclude, context):
        found = []
        for part, chunk, positive in self._chunks(self.tables * max(1, ids.shape[1]), query, ids, exclude):
            bucket, _, _, mass, each = self._buckets(part, positive)
            inside = self.codes[chunk] == bucket.unsqueeze(1)
            prob = (inside * each[:, None, :-1]).sum(dim=-1) + each[:, -1:]
            found.append(prob.log() - mass.sum(dim=-1, keepdim=True).log())
        return torch.cat(found)

    def extra_repr(self) -> str:
        """Show the sizes."""
        return (
            f"num_classes={self.num_classes}, in_features={self.in_features}, tables={self.tables}, bits={self.bits}, "
            f"uniform={self.uniform}"
        )
