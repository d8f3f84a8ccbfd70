"""What interpreters cost: how many live at once, start and call times as the caller sees them, CPU a start takes.

    python benchmarks/interpreters.py --alive 200 --starts 128

CPU is counted for everything this process started, the zygote and the interpreters themselves included, from start
to close: each start runs one small cell and is closed again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

import psutil

from sandboxes.backends import choose_backend
from sandboxes.base import PythonSession
from sandboxes.pool import PythonPool

CELL = "from math import gcd\nsum(gcd(i, 12) for i in range(100))"


def cpu_of(children: bool) -> float:
    """CPU seconds of this process, or of all that ended below it and was waited for."""
    times = os.times()
    return times.children_user + times.children_system if children else times.user + times.system


def quantiles(seconds: list[float]) -> str:
    """p50, p90 and the largest, in milliseconds."""
    ordered = sorted(seconds)
    picks = (statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1])
    return "  ".join(f"{1000 * pick:8.2f}" for pick in picks)


async def started(pool: PythonPool, times: list[float]) -> PythonSession:
    """Start one session and note how long the caller waited."""
    begun = time.perf_counter()
    session = await pool.session()
    times.append(time.perf_counter() - begun)
    return session


async def machine_busy_s() -> float:
    """CPU seconds that the whole machine has spent (kernel threads that tear namespaces down included)."""
    times = psutil.cpu_times()
    return times.user + times.system + times.nice + times.irq + times.softirq


async def measure(backend: str, alive: int, starts: int, calls: int, spares: int, pause_s: float) -> None:
    """Print one table."""
    print(
        f"backend {backend}, {spares} spares, {os.cpu_count()} CPUs\n{'':34}{'p50 ms':>8}  {'p90 ms':>8}  {'max ms':>8}"
    )
    # A. many alive at once, started as fast as they come
    burst: list[float] = []
    async with PythonPool(backend, spares=spares) as pool:
        begun = time.perf_counter()
        sessions = await asyncio.gather(*(started(pool, burst) for _ in range(alive)))
        took = time.perf_counter() - begun
        results = await asyncio.gather(*(session.run(CELL) for session in sessions))
        good = sum(result.status == "ok" for result in results)
        memory = sum(getattr(p.memory_full_info(), "uss", 0) for p in psutil.Process().children(recursive=True))
        print(f"{f'burst of {alive} starts':34}{quantiles(burst)}")
        durations = []
        for _ in range(calls):
            begun = time.perf_counter()
            await sessions[0].run("1")
            durations.append(time.perf_counter() - begun)
        print(f"{f'call, {alive} alive':34}{quantiles(durations)}")
        print(
            f"alive and answering: {good} of {alive}; all up in {took:.2f} s; "
            f"{memory / alive / 2**20:.1f} MiB private each"
        )
    # B. a training step: starts spread over time, each session used once and closed
    steady: list[float] = []
    own, below, machine, begun = cpu_of(False), cpu_of(True), await machine_busy_s(), time.perf_counter()
    async with PythonPool(backend, spares=spares) as pool:
        up = time.perf_counter() - begun
        for _ in range(starts):
            session = await started(pool, steady)
            await session.run(CELL)
            await session.close()
            await asyncio.sleep(pause_s)
    cpu = (cpu_of(False) - own, cpu_of(True) - below)
    busy = await machine_busy_s() - machine
    print(f"{f'steady {starts} starts':34}{quantiles(steady)}")
    own_ms, below_ms, busy_ms = (1000 * seconds / starts for seconds in (*cpu, busy))
    print(
        f"CPU a start (with one cell and close): {own_ms + below_ms:.2f} ms, {own_ms:.2f} ms of it in the caller; "
        f"pool up in {1000 * up:.0f} ms (in the figure); whole machine meanwhile {busy_ms:.2f} ms"
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", help="auto, bubblewrap or process")
    parser.add_argument("--alive", type=int, default=200, help="interpreters alive at once")
    parser.add_argument("--starts", type=int, default=128, help="starts of the training step")
    parser.add_argument("--calls", type=int, default=300, help="calls of which the overhead is taken")
    parser.add_argument("--spares", type=int, default=4, help="warm spares of the pool")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="pause between the steady starts")
    given = parser.parse_args()
    asyncio.run(
        measure(
            choose_backend(given.backend), given.alive, given.starts, given.calls, given.spares, given.pause_ms / 1000
        )
    )


if __name__ == "__main__":
    main()
