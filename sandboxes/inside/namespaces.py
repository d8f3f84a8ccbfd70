"""Namespaces, mounts and capabilities, by the C library: a sandbox of its own for each child of the zygote."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
from typing import Any

UID_INSIDE = 1000

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000
PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 4, 8
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 2

CLONE_FLAGS = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWUTS
SYS_CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220}

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock during a call
_held.syscall.restype = ctypes.c_long
_held.syscall.argtypes = [ctypes.c_long] * 6


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int, what: str) -> None:
    """Call prctl(2); raises OSError naming `what`."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), what)


def set_capabilities(mask: int) -> None:
    """Hold exactly the capabilities of `mask` (bit numbers below 32), permitted, effective and inheritable."""
    head = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    data = struct.pack("=IIIIII", mask, mask, mask, 0, 0, 0)
    _check(_libc.capset(head, data), "capset")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Call mount(2); raises OSError naming the target."""
    _check(
        _libc.mount(
            source.encode(), target.encode(), None if kind is None else kind.encode(), flags, data.encode() or None
        ),
        f"mount {target}",
    )


def subreaper() -> None:
    """Adopt orphans from below, so that a double fork does not escape."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, "subreaper")


def become(uid: int) -> None:
    """Give up root for user and group `uid`."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def clone(proc: str | None, uid: int | None) -> int:
    """Fork into new user, mount, PID, IPC, network and UTS namespaces; returns the child's process id, 0 in the child.

    A fork followed by unshare would need a process in between, which costs more than all namespaces together. `uid`:
    the user to become, for a parent that is root; `proc` is then where /proc of the parent's PID namespace lies.
    """
    number = SYS_CLONE.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"no support for {os.uname().machine} processors")
    outside = (os.getuid(), os.getgid())
    read_end, write_end = os.pipe()
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = _held.syscall(number, CLONE_FLAGS | signal.SIGCHLD, 0, 0, 0, 0)
    if pid != 0:
        failure = ctypes.get_errno()
        python.PyOS_AfterFork_Parent()
        os.close(read_end)
        try:
            if pid < 0:
                raise OSError(failure, f"clone: {os.strerror(failure)}")
            if uid is not None:  # only root may choose the user, and only from outside
                _map(f"{proc}/{pid}", uid, uid)
            os.write(write_end, b"1")
        finally:
            os.close(write_end)
        return pid
    python.PyOS_AfterFork_Child()
    os.close(write_end)
    try:
        if uid is None:
            _map("/proc/self", *outside)
        if os.read(read_end, 1) == b"":
            raise OSError(errno.EPERM, "the user could not be mapped")
    finally:
        os.close(read_end)
    if uid is not None:
        os.setresgid(UID_INSIDE, UID_INSIDE, UID_INSIDE)
        os.setresuid(UID_INSIDE, UID_INSIDE, UID_INSIDE)
    return 0


def _map(process: str, user: int, group: int) -> None:
    """Map one user and one group into the user namespace of `process`."""
    for name, text in (
        ("setgroups", b"deny"),
        ("uid_map", b"%d %d 1" % (UID_INSIDE, user)),
        ("gid_map", b"%d %d 1" % (UID_INSIDE, group)),
    ):
        fd = os.open(f"{process}/{name}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text)
        finally:
            os.close(fd)


def furnish(limits: dict[str, Any], hide: str | None) -> None:
    """As process 1 of the new namespaces: fresh /proc, /tmp, /dev/shm and terminals, then no capability at all.

    `hide` is a folder that is covered by an empty one.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    size = f"size={limits['file_bytes']},nr_inodes=65536,mode=1777"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, size)
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    if hide is not None:
        mount("tmpfs", hide, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,mode=0")
    # No namespaces below this one: they would give code inside the kernel's less travelled roads.
    fd = os.open("/proc/sys/user/max_user_namespaces", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, b"0")
    os.close(fd)
    drop_privileges()


def drop_privileges() -> None:
    """Give up every capability; without new privileges and namespaces there is no way to get one back."""
    set_capabilities(0)
    prctl(PR_SET_NO_NEW_PRIVS, 1, "no new privileges")


def read_everything(uid: int) -> None:
    """Give up root for `uid`, but keep the right to read files.

    Needed where the interpreter lives in a folder only root may enter (/root). Programs started later keep it.
    """
    prctl(PR_SET_KEEPCAPS, 1, "keep capabilities")
    become(uid)
    set_capabilities(1 << CAP_DAC_READ_SEARCH)
    raise_ambient(CAP_DAC_READ_SEARCH)


def raise_ambient(capability: int) -> None:
    """Keep a capability over execve."""
    _check(_libc.prctl(PR_CAP_AMBIENT, 2, ctypes.c_ulong(capability), 0, 0), "ambient capability")
