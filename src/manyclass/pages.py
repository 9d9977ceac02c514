"""Keep large tables in huge pages: reading rows at random then costs fewer misses of the address cache."""

import ctypes
import mmap
import sys

from torch import Tensor

# Tables that are smaller than this many bytes gain nothing.
SMALLEST = 1 << 23
# Pages of this size are used from now on, and memory that is already in use moves into them (Linux 6.1 and later).
HUGEPAGE, COLLAPSE = 14, 25

_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def use_huge_pages(*tensors: Tensor | None) -> None:
    """Ask the kernel to hold these tensors in huge pages, if they are large and on the CPU.

    Values stay as they are. Where a kernel cannot do it, nothing changes.
    """
    for tensor in tensors:
        if _madvise is None or tensor is None or tensor.device.type != "cpu" or tensor.nbytes < SMALLEST:
            continue
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
        for advice in (HUGEPAGE, COLLAPSE):
            _madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
