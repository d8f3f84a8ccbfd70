"""Checks of `Sandbox` on what a backend says its code asks for in vain. They need a Python inside."""

from __future__ import annotations

import secrets

from sandboxes.base import Sandbox
from sandboxes.conformance.check import LIMITS, Check, Make, check, expect, started

KERNEL_CHECKS: list[Check[Sandbox]] = []

CALL = """
import ctypes, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def refused(number_x86, number_other, *arguments):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number_x86 if x86 else number_other), *map(ctypes.c_long, arguments))
    return ctypes.get_errno() in (1, 13, 38)
def say(what):
    os.write(1, what.encode())
"""


async def _python(sandbox: Sandbox, code: str) -> str:
    """Run code in the Python inside; returns what it wrote."""
    python = getattr(sandbox, "interpreter", lambda: "python3")()
    result = await sandbox.run([python, "-c", CALL + code])
    expect(result.exit_code == 0, result)
    return result.stdout


@check(KERNEL_CHECKS, needs="refuses.keyrings")
async def keyrings_are_out_of_reach(make: Make[Sandbox]) -> None:
    """What one sandbox would leave in a keyring, or the caller has in one, no other can ask for."""
    word = secrets.token_hex(8)
    code = f"""
texts = [ctypes.create_string_buffer(text) for text in (b"user", {word!r}.encode())]
kind, word = map(ctypes.addressof, texts)
added = [refused(248, 217, kind, word, word, 8, ring) for ring in (-3, -4, -5)]
say(str(all(added) and refused(250, 219, 0, -3, 0) and refused(249, 218, kind, word, 0, 0)))
"""
    async with started(make) as sandbox:
        expect(await _python(sandbox, code) == "True", "a keyring can be used")


@check(KERNEL_CHECKS, needs="refuses.kernel_interfaces")
async def the_kernels_workshops_are_closed(make: Make[Sandbox]) -> None:
    """Programs for the kernel, its rings, faults by hand, tracing and files by number are refused, by an error."""
    code = """
calls = {"io_uring": (425, 425, 8, 0), "bpf": (321, 280, 0, 0, 0), "userfaultfd": (323, 282, 0)}
calls |= {"perf": (298, 241, 0, 0, 0, 0, 0), "ptrace": (101, 117, 0, 0, 0, 0), "handles": (304, 265, 0, 0, 0)}
calls |= {"namespaces": (272, 97, 0x10000000), "mount": (165, 40, 0, 0, 0, 0, 0)}
say(" ".join(name for name, call in calls.items() if not refused(*call)))
"""
    async with started(make) as sandbox:
        expect((seen := await _python(sandbox, code)) == "", f"not refused: {seen}")


@check(KERNEL_CHECKS, needs="refuses.uncounted_memory")
async def memory_lies_in_processes_and_files(make: Make[Sandbox]) -> None:
    """No memory can be had that neither a process nor a file of the sandbox shows."""
    code = """
name = ctypes.create_string_buffer(b"x")
calls = {"memfd": (319, 279, ctypes.addressof(name), 0), "shmget": (29, 194, 0, 4096, 0o1600)}
calls |= {"msgget": (68, 186, 0, 0o1600), "semget": (64, 190, 0, 1, 0o1600)}
say(" ".join(name for name, call in calls.items() if not refused(*call)))
"""
    async with started(make) as sandbox:
        expect((seen := await _python(sandbox, code)) == "", f"not refused: {seen}")


@check(KERNEL_CHECKS, needs="limits.memory_bytes")
async def processes_share_the_memory(make: Make[Sandbox]) -> None:
    """Memory of many processes counts together: what is too much is killed, and the sandbox goes on."""
    share = LIMITS.memory_bytes // 2
    code = f"""
import time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray({share})
        time.sleep(3)
        os._exit(0)
say(str(sum(os.wait()[1] == 0 for _ in range(6))))
"""
    async with started(make) as sandbox:
        python = getattr(sandbox, "interpreter", lambda: "python3")()
        result = await sandbox.run([python, "-c", CALL + code])
        expect(result.stdout.strip() != "6", "six halves of the memory were held at the same time")
        expect((await sandbox.run(["echo", "next"])).stdout == "next\n", "the next run failed")


@check(KERNEL_CHECKS, needs="refuses.packages")
async def packages_of_the_caller_are_not_there(make: Make[Sandbox]) -> None:
    """What is installed for the caller can be imported only where it is shown by name."""
    code = """
import importlib.util
say(" ".join(name for name in ("sandboxes", "reasoning_gym", "datasets", "pip") if importlib.util.find_spec(name)))
"""
    async with started(make) as sandbox:
        expect((seen := await _python(sandbox, code)) == "", f"can be imported: {seen}")
