"""Spend less time in the kernel: large tables in huge pages, and memory that a process keeps to use it again."""

import ctypes
import mmap
import sys

from torch import Tensor

# Tables that are smaller than this many bytes gain nothing.
SMALLEST = 1 << 23
# Pages of this size are used from now on, and memory that is already in use moves into them (Linux 6.1 and later).
HUGEPAGE, COLLAPSE = 14, 25

# Parameters of glibc's mallopt: how many blocks have a mapping of their own, and how much free memory is given back.
MMAP_MAX, TRIM_THRESHOLD = -4, -1
NEVER = -1

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_madvise, _mallopt = getattr(_libc, "madvise", None), getattr(_libc, "mallopt", None)


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


def keep_memory() -> None:
    """Let this process keep memory that is freed, until it ends.

    glibc returns large tensors to the kernel, which clears their pages when the next one is made. A training step of
    the full softmax would spend 40% of its time on that. Processes of the command line call this; the library does not.
    """
    if _mallopt is not None:
        _mallopt(MMAP_MAX, 0)
        _mallopt(TRIM_THRESHOLD, NEVER)
