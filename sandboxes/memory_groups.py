"""Control groups that hold the memory of each sandbox, where this process may make them.

The kernel then counts what no list of processes shows: files in memory, buffers of pipes and sockets, memory that is
shared and was let go of. Both versions of control groups serve. A group is a folder below this process's own group (in
version 2 below the nearest one above it that hands the memory limit down), named after its owner, so that what a killed
owner left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from dataclasses import dataclass

ROOT = "/sys/fs/cgroup"
NAME = "sao-sandbox"
MISSING = (
    "no control group for memory: {reason}. The supervisor adds up what processes and files hold, and looks every few "
    "milliseconds; buffers of pipes and sockets are not counted"
)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where groups may be made, and what their files are called; without a `folder`, `missing` says why."""

    folder: str = ""
    limit: str = ""
    swap: str = ""
    events: str = ""
    swap_with_memory: bool = False
    """Whether the file `swap` bounds both together, as in version 1."""
    missing: str = ""


VERSION_1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control", True)
VERSION_2 = ("memory.max", "memory.swap.max", "memory.events", False)


@functools.cache
def hierarchy() -> Hierarchy:
    """Find where groups may be made; tried by making one."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except (OSError, ValueError):
        return Hierarchy(missing=MISSING.format(reason="this system has no control groups"))
    places: list[Hierarchy] = []
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            places.append(Hierarchy(f"{ROOT}/memory{path.rstrip('/')}", *VERSION_1))
        elif controllers == "":
            while True:
                places.append(Hierarchy(f"{ROOT}{path.rstrip('/')}", *VERSION_2))
                if path in ("/", ""):
                    break
                path = os.path.dirname(path)
    reason = "none may be made here"
    for place in places:
        try:
            # Without this a folder of version 2 would be made, and hold nothing.
            if place.limit == VERSION_2[0] and "memory" not in _read(f"{place.folder}/cgroup.subtree_control").split():
                continue
            _sweep(place.folder)
            trial = MemoryGroup(place, 2**30)
            trial.close()
            return place
        except OSError as error:
            reason = f"none may be made in {place.folder} ({error.strerror})"
    return Hierarchy(missing=MISSING.format(reason=reason))


class MemoryGroup:
    """One group with its limit; raises `OSError` if it cannot be made."""

    def __init__(self, place: Hierarchy, limit_bytes: int) -> None:
        self.members = self.events = -1
        self._folder = f"{place.folder}/{_owned_prefix(os.getpid())}-{secrets.token_hex(6)}"
        os.mkdir(self._folder)
        try:
            _write(f"{self._folder}/{place.limit}", b"%d" % limit_bytes)
            # Not there where the kernel does not count swap.
            with contextlib.suppress(FileNotFoundError):
                _write(f"{self._folder}/{place.swap}", b"%d" % (limit_bytes if place.swap_with_memory else 0))
            self.members = os.open(f"{self._folder}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            self.events = os.open(f"{self._folder}/{place.events}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def hand_over(self) -> None:
        """Close the descriptors here, once they have been given on."""
        for fd in (self.members, self.events):
            if fd >= 0:
                os.close(fd)
        self.members = self.events = -1

    def close(self) -> bool:
        """Remove the group; False while something still runs in it."""
        self.hand_over()
        try:
            os.rmdir(self._folder)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # many times a second: Python's own files cost more than the kernel
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _began(pid: int) -> str:
    """When a process began, in the kernel's own count; "" if it is gone. Numbers of processes are given again."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@functools.cache
def _owned_prefix(pid: int) -> str:
    return f"{NAME}-{pid}-{_began(pid)}"


def _sweep(folder: str) -> None:
    """Remove the empty groups of owners that are gone. Those of another PID namespace look gone too, if empty."""
    for name in os.listdir(folder):
        owned = re.fullmatch(rf"{NAME}-(\d+)-(\d+)-[0-9a-f]+", name)
        if owned and _began(int(owned[1])) != owned[2]:
            with contextlib.suppress(OSError):
                os.rmdir(f"{folder}/{name}")
