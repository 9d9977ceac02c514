"""Vectors in 8 bits per number. A search reads a quarter of the memory, and this precision suffices for it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops

# Codes are padded with zeros to a multiple of this, for vector instructions.
PADDING = 32
LARGEST = 127
# Vectors whose largest number is below this count as zero: the quotient by it would overflow.
TINY = 1e-30


class Codes(nn.Module):
    """Vectors as int8 codes with one scale per vector: value = code · scale.

    A vector that is not finite has the scale NaN.

    Args:
        number: of vectors.
        columns: numbers in each.
    """

    code: Tensor
    scale: Tensor

    def __init__(self, number: int, columns: int) -> None:
        super().__init__()
        self.columns = columns
        stride = math.ceil(columns / PADDING) * PADDING
        self.register_buffer("code", torch.zeros(number, stride, dtype=torch.int8))
        self.register_buffer("scale", torch.zeros(number))
        #: Largest number of a query that is rounded to integers: sums of products stay within 32 bits.
        self.query_largest = min(2**15 - 1, (2**31 - 1) // (LARGEST * stride))

    def write(self, ids: Tensor, vectors: Tensor) -> None:
        """Set the vectors ``ids (k,)`` to ``vectors (k, columns)``, rounded."""
        code, scale = _rounded(vectors.float(), LARGEST)
        self.code[ids] = F.pad(code, (0, self.code.shape[1] - self.columns)).to(torch.int8)
        self.scale[ids] = scale.squeeze(-1)

    def read(self, ids: Tensor) -> Tensor:
        """Return the vectors ``ids``, with one more dimension of ``columns``."""
        return self.code[ids][..., : self.columns] * self.scale[ids].unsqueeze(-1)

    def dots(self, query: Tensor, ids: Tensor) -> Tensor:
        """Return products of queries ``(batch, columns)`` with vectors ``ids (batch, k)``, from rounded numbers."""
        rounded, scale = _rounded(query, self.query_largest)
        total = torch.einsum("bkc,bc->bk", self.code[ids][..., : self.columns].to(query.dtype), rounded)
        return total * (self.scale[ids] * scale)


def encode(codes: Codes, weight: Tensor, bias: Tensor | None, ids: Tensor) -> None:
    """Bring the codes of the classes ``ids`` up to date with the class weights."""
    if ops.native_for(weight):
        if not bool((ids[1:] > ids[:-1]).all()):  # those of several batches
            ids = ids.unique()
        torch.ops.manyclass.encode_(codes.code, codes.scale, *native_tables(weight, bias), ids.contiguous())
    else:
        codes.write(ids, rows_of(weight, bias, ids))


def rows_of(weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """Return the rows of the class weights in float32, with their offsets as a further column if there are any."""
    rows = F.embedding(ids, weight).float()  # a fifth of the time of weight[ids]
    return rows if bias is None else torch.cat([rows, bias[ids].float().unsqueeze(-1)], dim=-1)


def native_tables(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the class weights as the native operations take them."""
    return weight.contiguous(), weight.new_empty(0) if bias is None else bias.contiguous()


def _rounded(vectors: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Round to integers of at most ``largest``, kept in floating point; return them and the scales, one column."""
    most = vectors.abs().amax(dim=-1, keepdim=True)
    finite, zero = torch.isfinite(most), most < TINY
    code = (vectors * (largest / most)).round()
    scale = (most / largest).masked_fill(zero, 0.0).masked_fill(~finite, math.nan)
    return code.masked_fill(zero | ~finite, 0.0), scale
