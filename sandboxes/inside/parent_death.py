"""A signal when the parent ends, by SIGKILL too: asked of the kernel, on Linux. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def signal_at_parents_end(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process sent `number` when the thread that started it ends; elsewhere than on Linux nothing happens.

    A parent that has ended before is not noticed: look at `os.getppid()` after this. Raises OSError.
    """
    if _libc is not None and _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"parent death signal: {os.strerror(error)}")
