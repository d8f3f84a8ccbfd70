"""CPU time and peak memory of a piece of work. Standard library only: every peer's own Python imports it. Linux."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def _memory_mib(line: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) / 1024


def _cpu_s() -> float:
    """CPU time of this process, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@contextlib.contextmanager
def measured() -> Iterator[dict[str, float]]:
    """`cpu_s` and `wall_s` of the block, `peak_mib` then, and `standing_mib` before; filled in at its end."""
    figures = {"standing_mib": _memory_mib("VmRSS")}
    with contextlib.suppress(OSError):  # where the kernel forbids it, the peak is that of the process so far
        Path("/proc/self/clear_refs").write_text("5")
    cpu, wall = _cpu_s(), time.perf_counter()
    yield figures
    figures |= {"cpu_s": _cpu_s() - cpu, "wall_s": time.perf_counter() - wall, "peak_mib": _memory_mib("VmHWM")}


def cost_of(work: Callable[[], Any]) -> dict[str, float]:
    """What `measured` says of `work`."""
    with measured() as figures:
        work()
    return figures


def answer(figures: dict[str, Any]) -> None:
    """A worker's last line."""
    print("\n" + json.dumps(figures), flush=True)
