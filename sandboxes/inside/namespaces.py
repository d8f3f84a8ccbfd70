"""Namespaces, mounts and capabilities, by the C library: a sandbox of its own for each child of the zygote."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from typing import Any, NoReturn

UID_INSIDE = 1000

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 2

_libc = ctypes.CDLL(None, use_errno=True)


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


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Be sent signal `number` when the parent ends."""
    prctl(PR_SET_PDEATHSIG, number, "parent death signal")


def become(uid: int) -> None:
    """Give up root for user and group `uid`."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def enter(uid: int | None) -> tuple[int, int]:
    """Leave for new user, mount, PID, IPC, network and UTS namespaces; returns the (user, group) mapped inside.

    With `uid` root is given up for that user first. Children are in the new PID namespace, this process is not.
    """
    if uid is not None:
        become(uid)
        prctl(PR_SET_DUMPABLE, 1, "dumpable")  # else /proc/self/uid_map belongs to root
    user, group = os.getuid(), os.getgid()
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWUTS
    _check(_libc.unshare(flags), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{UID_INSIDE} {user} 1"),
        ("gid_map", f"{UID_INSIDE} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return user, group


def furnish(limits: dict[str, Any]) -> None:
    """As process 1 of the new namespaces: fresh /proc, /tmp, /dev/shm and terminals, then no capability at all."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    size = f"size={limits['file_bytes']},nr_inodes=65536,mode=1777"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, size)
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    # No namespaces below this one: they would give code inside the kernel's less travelled roads.
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
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


def report_and_exit(fd: int, error: OSError) -> NoReturn:
    """Tell the caller on `fd` why a sandbox could not be made, and end."""
    from . import wire

    with contextlib.suppress(OSError):
        wire.write_all(fd, wire.pack({"ready": False, "error": str(error)}))
    os._exit(1)
