"""Processes as the kernel shows them to a supervisor, the limits they are given, and their end."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
CLOCK = os.sysconf("SC_CLK_TCK")
ENDED = {signal.SIGCHLD}

_plain: Any = importlib.import_module("_signal")
set_handler: Callable[[int, Any], Any] = _plain.signal
"""`signal.signal` without names made of numbers, which in a process just forked costs more than the call."""
DEFAULT = int(signal.SIG_DFL)


def apply_rlimits(limits: dict[str, Any], processes: int) -> None:
    """Set this process's own limits; everything it starts inherits them."""
    memory, files = limits["memory_bytes"], limits["file_bytes"]
    for which, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 512),
        (resource.RLIMIT_CORE, 0),
    ):
        try:
            resource.setrlimit(which, (value, value))
        except ValueError:  # more than this process was given itself
            value = min(value, resource.getrlimit(which)[1])
            resource.setrlimit(which, (value, value))


def facts_of(pid: int) -> tuple[str, int, float] | None:
    """Return (state, resident bytes, CPU seconds with waited-for children) of a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[21]) * PAGE, sum(map(int, fields[11:15])) / CLOCK


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has resident; 0 if it is gone."""
    try:
        fd = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(fd, 256).split()[1]) * PAGE
    except (OSError, IndexError):
        return 0
    finally:
        os.close(fd)


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process, zombies too; none if it is gone."""
    pids: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                pids += map(int, file.read().split())
    except OSError:
        pass
    return pids


def kill_all_others(seconds: float) -> bool:
    """As process 1 of a PID namespace: kill all others, by the kernel's own list; True if they are gone in time.

    Orphans become this process's children, so that with the last child nothing is left.
    """
    deadline = time.monotonic() + seconds
    _plain.pthread_sigmask(signal.SIG_BLOCK, ENDED)  # kept, so that none ends between a look and the wait for it
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            signal.sigtimedwait(ENDED, 0.01)
    except ChildProcessError:
        return True
    finally:
        _plain.pthread_sigmask(signal.SIG_UNBLOCK, ENDED)
    return False
