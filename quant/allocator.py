"""The process's memory allocator, told to keep what is freed.

By default glibc gives blocks of some megabytes back to the system when they are freed, and the next one
of the kind faults all its pages in again: a quarter of a calibration's processor time.
"""

import ctypes
import sys

# From malloc.h: a block that is larger than the threshold is mapped by itself and returned when freed;
# the rest is returned once more than the trim threshold is free at the end.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Let this process reuse large blocks; does nothing where the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Larger blocks are still returned: kept, they leave holes that nothing fits (8 GiB instead of 6
        # for a model of 1.5 billion weights).
        mallopt(_M_MMAP_THRESHOLD, 2**27)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
