"""The filter of system calls that code in a sandbox lives behind: what it needs goes through, the rest is refused.

Made once in the caller's process by libseccomp, which knows each processor's call numbers, and handed to the zygote as
a finished program: inside there is only the standard library, and a zygote could not make sandboxes behind it. What is
refused fails as for want of rights (EPERM), or as not there (ENOSYS) where programs have another way; nobody is killed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import platform
import tempfile
from dataclasses import dataclass
from typing import Any

REFUSED: dict[str, tuple[str, ...]] = {
    "keyrings": ("add_key", "keyctl", "request_key"),
    # Memory that lies in no process: nobody's resident memory shows it, and System V's outlives who made it.
    "memory that nobody counts": (
        *("memfd_create", "memfd_secret"),
        *("shmget", "shmat", "shmctl", "shmdt", "msgget", "msgsnd", "msgrcv", "msgctl"),
        *("semget", "semop", "semtimedop", "semctl", "mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive"),
        *("mq_notify", "mq_getsetattr"),
    ),
    "other processes": ("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd"),
    # Large and young parts of the kernel, where most of its holes were found.
    "the kernel's workshops": (
        *("io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open", "userfaultfd"),
        *("fanotify_init", "fanotify_mark", "lookup_dcookie", "vmsplice", "remap_file_pages", "modify_ldt"),
    ),
    "files by number": ("open_by_handle_at", "name_to_handle_at"),
    "mounts and namespaces": (
        *("mount", "umount2", "umount", "pivot_root", "chroot", "unshare", "setns", "quotactl", "quotactl_fd"),
        *("move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr"),
    ),
    "the machine": (
        *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "create_module"),
        *("reboot", "swapon", "swapoff", "acct", "syslog", "iopl", "ioperm", "nfsservctl", "vhangup", "_sysctl"),
        *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "stime", "sethostname", "setdomainname"),
    ),
}
"""System calls that are refused, by what they reach. Those a processor does not have are passed over."""

NAMESPACE_FLAGS = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
SOCKET_FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6, netlink. Others reach past a network namespace (vsock) or into seldom used corners."""
TYPING_INTO_TERMINALS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX put words into the mouth of whoever sits at the terminal."""

LIBRARY = "libseccomp"
MISSING = (
    "no filter of system calls: {reason}. Keyrings, memory files, io_uring and their like are not refused. "
    "Install libseccomp (Debian, Ubuntu: apt-get install libseccomp2) and the Python package pyseccomp"
)


@dataclass(frozen=True, slots=True)
class SyscallFilter:
    """The program for the kernel; empty where none can be made, and `missing` says why."""

    program: bytes = b""
    missing: str = ""


@functools.cache
def syscall_filter() -> SyscallFilter:
    """Return this machine's filter."""
    try:
        import pyseccomp
    except ImportError:
        return SyscallFilter(missing=MISSING.format(reason="the Python package pyseccomp is not installed"))
    except RuntimeError:
        return SyscallFilter(missing=MISSING.format(reason=f"{LIBRARY} is not installed"))
    try:
        return SyscallFilter(_compile(pyseccomp))
    except OSError as error:
        return SyscallFilter(missing=MISSING.format(reason=f"{LIBRARY} cannot make one ({error})"))


def _compile(seccomp: Any) -> bytes:
    """Return the filter as the kernel reads it."""
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    no_right, not_there = seccomp.ERRNO(errno.EPERM), seccomp.ERRNO(errno.ENOSYS)
    # Calls in another processor's numbers, such as 32-bit ones, would go round every rule below.
    rules.set_attr(seccomp.Attr.ACT_BADARCH, not_there)

    def refuse(action: int, name: str, *arguments: Any) -> None:
        try:
            number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        except (OSError, ValueError):
            return  # this version of the library does not know it
        if number >= 0:  # below: this processor does not have it
            rules.add_rule(action, number, *arguments)

    for names in REFUSED.values():
        for name in names:
            refuse(no_right, name)
    # Its flags lie in memory, where no filter can read them; the C library then takes clone.
    refuse(not_there, "clone3")
    flags_at = 1 if platform.machine() == "s390x" else 0
    for flag in NAMESPACE_FLAGS:
        refuse(no_right, "clone", seccomp.Arg(flags_at, seccomp.MASKED_EQ, flag, flag))
    last = max(SOCKET_FAMILIES)
    for family in sorted(set(range(last)) - set(SOCKET_FAMILIES)):
        for call in ("socket", "socketpair"):
            refuse(no_right, call, seccomp.Arg(0, seccomp.EQ, family))
    for call in ("socket", "socketpair"):
        refuse(no_right, call, seccomp.Arg(0, seccomp.GT, last))
    for request in TYPING_INTO_TERMINALS:
        refuse(no_right, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, request))
    # Each sandbox loads the program anew, and the kernel then tries it on every call's number: a tree is tried faster.
    with contextlib.suppress(OSError, ValueError):  # an older library leaves it a list
        rules.set_attr(seccomp.Attr.CTL_OPTIMIZE, 2)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
