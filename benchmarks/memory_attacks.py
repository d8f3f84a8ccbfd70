"""Attacks on a sandbox's memory limit: the most that was held at once, and what stayed after the call.

    python -m benchmarks.memory_attacks

Held is what the zygote and all below it have more than before the call (proportional set sizes, looked at every 10 ms),
and what the whole machine has more of shared memory and files in memory, as a share of the limit. Each attack runs once
where a control group holds the limit, and once where only the supervisor does.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from unittest import mock

import psutil

from sandboxes import zygote
from sandboxes.base import Limits, PythonResult
from sandboxes.memory_groups import Hierarchy, hierarchy
from sandboxes.pool import PythonPool

LIMITS = Limits(wall_clock_s=15, memory_bytes=200 * 2**20, processes=16, file_bytes=64 * 2**20)
ATTACKS: dict[str, str] = {
    "memory files": (
        "import os\nfds = []\nwhile True:\n    f = os.memfd_create('x'); os.write(f, bytes(2**24)); fds.append(f)"
    ),
    "system V": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\nfor _ in range(30):\n"
        "    p = libc.shmat(libc.shmget(0, 2**25, 0o1600), None, 0)\n    ctypes.memset(p, 1, 2**25)\n"
        "    libc.shmdt(ctypes.c_void_p(p))"
    ),
    "a frame of a gigabyte": (
        "import os, stat, struct\nfor fd in range(3, 64):\n    try:\n        if stat.S_ISSOCK(os.fstat(fd).st_mode):\n"
        "            os.write(fd, struct.pack('!II', 2, 2**30) + b'{}')\n"
        "            for _ in range(2**14): os.write(fd, bytes(2**16))\n    except OSError: pass"
    ),
    "many processes": (
        "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n        x = bytearray(100 * 2**20)\n"
        "        time.sleep(5)\ntime.sleep(5)"
    ),
    "files in memory": """
import time
for i in range(400):
    for folder in ('.', '/dev/shm'):
        try:
            open(f'{folder}/{i}', 'wb').write(bytes(2**20))
        except OSError:
            pass
x = bytearray(150 * 2**20)
time.sleep(1)
""",
}


@dataclass(frozen=True, slots=True)
class Held:
    """What one attack came to: shares of the limit at most and after the call, and how the call ended."""

    most: float
    left: float
    result: PythonResult


def _held_bytes(shared: bool) -> int:
    total = psutil.virtual_memory().shared if shared else 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


async def attack(code: str, limits: Limits = LIMITS, *, grouped: bool = True, shared: bool = False) -> Held:
    """Run one attack in a sandbox of its own.

    `grouped`: in a control group, if one may be made here. `shared`: count the machine's shared memory too.
    """
    place = hierarchy() if grouped else Hierarchy(missing="no control group, on purpose")
    with mock.patch.object(zygote, "hierarchy", return_value=place):
        async with PythonPool("bubblewrap", limits, spares=0) as pool:
            session = await pool.session()
            before, most = _held_bytes(shared), 0
            running = asyncio.create_task(session.run(code, timeout_s=8))
            while not running.done():
                await asyncio.sleep(0.01)
                most = max(most, _held_bytes(shared) - before)
            result = await running
            await session.close()
            left = max(0, _held_bytes(shared) - before)
    return Held(most / limits.memory_bytes, left / limits.memory_bytes, result)


async def _measure(limits: Limits) -> None:
    print(f"{'limit ' + str(limits.memory_bytes // 2**20) + ' MiB':24}{'held by':12}{'at most':>8}{'after':>8}  ended")
    for name, code in ATTACKS.items():
        for grouped in (True, False):
            if grouped and hierarchy().missing:
                continue
            held = await attack(code, limits, grouped=grouped, shared=True)
            by = "kernel" if grouped else "supervisor"
            print(f"{name:24}{by:12}{held.most:8.2f}{held.left:8.2f}  {held.result.status}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-mb", type=int, default=200, help="the limit")
    given = parser.parse_args()
    asyncio.run(_measure(Limits(15, None, given.memory_mb * 2**20, 16, 64 * 2**20)))


if __name__ == "__main__":
    main()
