"""What a sandbox's own code may not ask of the kernel: a keyring of its own, and a filter of system calls.

The filter comes from outside as a finished program (`sandboxes/syscall_filter.py` makes it); here it is only loaded.
"""

from __future__ import annotations

import ctypes
import errno
import os

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_GET_SECCOMP = 21
KEYCTL_JOIN_SESSION_KEYRING = 1
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
INSTRUCTION_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def own_keyring() -> None:
    """Leave the caller's session keyring for a new, empty one.

    A kernel without keyrings, or a container that forbids the call, has nothing to leave: nobody below can ask either.
    """
    number = SYS_KEYCTL.get(os.uname().machine)
    if number is None:
        return
    if _libc.syscall(ctypes.c_long(number), ctypes.c_long(KEYCTL_JOIN_SESSION_KEYRING), None, 0, 0, 0) < 0:
        failure = ctypes.get_errno()
        if failure not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise OSError(failure, f"a keyring of its own: {os.strerror(failure)}")


def kernel_filters_calls() -> bool:
    """Whether this kernel can filter system calls."""
    return _libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


class CallFilter:
    """A filter of system calls, made ready by the zygote for all that will load it. An empty program is no filter."""

    def __init__(self, program: bytes = b"") -> None:
        self._wanted = bool(program) and kernel_filters_calls()
        text = _Program(len(program) // INSTRUCTION_BYTES, program)
        self._arguments = (PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(text), 0, 0)

    def load(self) -> None:
        """Put this process, and all that it will start, behind it; no new privileges must have been given up."""
        if self._wanted and _libc.prctl(*self._arguments) != 0:
            failure = ctypes.get_errno()
            raise OSError(failure, f"the filter of system calls: {os.strerror(failure)}")
