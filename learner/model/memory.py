"""How a process on CPUs holds its memory."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h
LARGEST_KEPT = 2**30
LARGEST_KEPT_OF_CUT_WEIGHTS = 2**25
"""Whole layers come and go between parts that stay: kept as they are freed, they would leave holes of their size."""


def keep_freed_memory(largest: int = LARGEST_KEPT) -> bool:
    """Have the C library keep what is freed, in pieces below `largest` bytes, for the next tensor; whether it does
    (glibc only).

    As it comes, glibc gives large pieces back to the kernel, which hands them out again page by page and zeroed: with
    micro-batches that is about a tenth of a step's CPU time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library, which has no such setting
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(_MMAP_THRESHOLD, largest)) and bool(mallopt(_TRIM_THRESHOLD, 2 * largest - 1))
