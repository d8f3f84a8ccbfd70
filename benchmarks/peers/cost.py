"""CPU time and peak memory of a piece of work. Standard library only: every peer's own Python imports it. Linux."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _memory_mib(line: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) / 1024


def cost_of(work: Callable[[], Any]) -> dict[str, float]:
    """`cpu_s` of this process while `work` runs, `peak_mib` then, and `standing_mib` before."""
    standing = _memory_mib("VmRSS")
    with contextlib.suppress(OSError):  # where the kernel forbids it, the peak is that of the process so far
        Path("/proc/self/clear_refs").write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu, "standing_mib": standing, "peak_mib": _memory_mib("VmHWM")}


def answer(figures: dict[str, Any]) -> None:
    """A worker's last line."""
    print("\n" + json.dumps(figures), flush=True)
