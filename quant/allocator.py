"""The process's memory allocator, told to keep what is freed.

By default glibc gives blocks of more than 32 MiB back to the system when they are freed, and the next
one of the kind faults all its pages in again: a quarter of a calibration's processor time.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterator

# From malloc.h: a block that is larger than the threshold is mapped by itself and returned when freed;
# the rest is returned once more than the trim threshold is free at the end.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_DEFAULTS = (2**25, 2**26)  # What glibc's own adjustment ends at.


@contextlib.contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Reuse blocks of up to 128 MiB meanwhile; does nothing where the C library is not glibc.

    For work that takes and frees the same sizes over and over. Where tensors are kept in between, what
    is freed leaves holes that nothing fits: hence an end to it, when all is given back.
    """
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if not hasattr(libc, "mallopt"):
        yield
        return
    assert libc is not None
    _set_thresholds(libc, 2**27, 2**31 - 1)
    try:
        yield
    finally:
        _set_thresholds(libc, *_DEFAULTS)
        libc.malloc_trim(0)


def _set_thresholds(libc: ctypes.CDLL, mmap: int, trim: int) -> None:
    libc.mallopt(_M_MMAP_THRESHOLD, mmap)
    libc.mallopt(_M_TRIM_THRESHOLD, trim)
