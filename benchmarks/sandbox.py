"""What a container costs: start to first answer, a command, an episode when several run at once, memory.

    python benchmarks/sandbox.py                     # about 2 minutes; needs a Docker engine (make sandboxes)
    python benchmarks/sandbox.py --quick --json sandbox.json

An episode here is a fresh container, five commands (`git --version`), and its removal: no model and no repository, so
it is the part that Docker adds to an episode of an agent. Memory is what the container's cgroup holds, idle.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import save_json, show
from sandboxes.base import Limits
from sandboxes.docker import host_image
from sandboxes.docker.engine import DockerEngine
from sandboxes.docker.pool import DockerPool
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings

COMMAND = ["git", "--version"]
COMMANDS_AN_EPISODE = 5
LIMITS = Limits(wall_clock_s=120)


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"p50_ms": 1e3 * statistics.median(ordered), "p99_ms": 1e3 * p99, "max_ms": 1e3 * ordered[-1]}


async def timed_run(sandbox: DockerSandbox) -> float:
    """Seconds that one command takes."""
    begun = time.perf_counter()
    result = await sandbox.run(COMMAND, limits=LIMITS)
    assert result.exit_code == 0, result
    return time.perf_counter() - begun


async def starts(image: str, settings: DockerSettings, engine: DockerEngine, count: int) -> dict[str, list[float]]:
    """Times of `count` containers, one after another: until started, until the first answer, for the removal."""
    times: dict[str, list[float]] = {"start": [], "start to first answer": [], "close": []}
    for _ in range(count):
        begun = time.perf_counter()
        sandbox = DockerSandbox(image, settings=settings, engine=engine)
        try:
            await sandbox.start()
            times["start"].append(time.perf_counter() - begun)
            await timed_run(sandbox)
            times["start to first answer"].append(time.perf_counter() - begun)
        finally:
            begun = time.perf_counter()
            await sandbox.close()
        times["close"].append(time.perf_counter() - begun)
    return times


async def commands(image: str, settings: DockerSettings, engine: DockerEngine, count: int) -> tuple[list[float], float]:
    """Times of `count` commands in one container, and the MiB that it holds before them."""
    async with DockerSandbox(image, settings=settings, engine=engine) as sandbox:
        stats = await engine.call(lambda: engine.client.api.stats(sandbox.id, stream=False))
        held = float(stats["memory_stats"]["usage"]) / 2**20
        return [await timed_run(sandbox) for _ in range(count)], held


async def episode(pool: DockerPool, image: str) -> None:
    """A container, five commands, its removal."""
    sandbox = await pool.sandbox(image)
    try:
        for _ in range(COMMANDS_AN_EPISODE):
            await timed_run(sandbox)
    finally:
        await sandbox.close()


async def episodes_a_minute(image: str, settings: DockerSettings, at_once: int, count: int, warm: int) -> float:
    """Rate of `count` episodes, `at_once` of them at any time."""
    async with DockerPool(settings, slots=at_once + warm, warm=warm) as pool:
        todo = iter(range(count))

        async def worker() -> None:
            for _ in todo:
                await episode(pool, image)

        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(worker())
        return 60 * count / (time.perf_counter() - begun)


async def measure(image: str, runtime: str, quick: bool) -> dict[str, Any]:
    """All figures."""
    settings = replace(
        DockerSettings(), memory_bytes=2**29, runtime=runtime, project=f"benchmark-{secrets.token_hex(4)}", ttl_s=900
    )
    engine = DockerEngine()
    await engine.ready()
    begun_with = os.getloadavg()[0]
    times = await starts(image, settings, engine, 5 if quick else 20)
    times["command"], held = await commands(image, settings, engine, 20 if quick else 200)
    rates = []
    for at_once in (1, 4, 16):
        count = (3 if quick else 12) if at_once == 1 else at_once * (1 if quick else 4)
        for warm in (0,) if quick else (0, 2):
            rate = await episodes_a_minute(image, settings, at_once, count, warm)
            rates.append({"at_once": at_once, "warm": warm, "episodes": count, "episodes_a_minute": rate})
    await engine.close()
    return {
        "image": image,
        "load_average_before": begun_with,
        "times": {name: quantiles(values) for name, values in times.items()},
        "memory_mib": held,
        "rates": rates,
    }


def report(figures: dict[str, Any]) -> None:
    """Print the tables."""
    rows = [
        [name, *(f"{row[key]:.0f}" for key in ("p50_ms", "p99_ms", "max_ms"))] for name, row in figures["times"].items()
    ]
    notes = [f"memory of an idle container: {figures['memory_mib']:.1f} MiB; image {figures['image']}"]
    show("Containers, one at a time", ["", "p50 ms", "p99 ms", "max ms"], rows, notes)
    rows = [
        [str(rate["at_once"]), str(rate["warm"]), str(rate["episodes"]), f"{rate['episodes_a_minute']:.0f}"]
        for rate in figures["rates"]
    ]
    notes = [f"an episode: start, {COMMANDS_AN_EPISODE} commands, close; {os.cpu_count()} CPUs"]
    show("Episodes", ["at once", "warm spares", "episodes", "a minute"], rows, notes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/sandbox.py --quick",
    )
    parser.add_argument(
        "--image", default="", help=f"image with sh and git (default: {host_image.TAG}, built if missing)"
    )
    parser.add_argument("--runtime", default="", help="a container runtime that the engine knows, runsc say")
    parser.add_argument("--quick", action="store_true", help="few repetitions, about 20 seconds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(arguments)
    if not given.image:
        host_image.build()
    figures = asyncio.run(measure(given.image or host_image.TAG, given.runtime, given.quick))
    report(figures)
    save_json(given.json, figures)


if __name__ == "__main__":
    main()
