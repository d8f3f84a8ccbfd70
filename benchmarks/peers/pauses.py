"""How long the runtime's event loop is held up with 10,000 episodes at once, over HTTP.

    python benchmarks/peers/pauses.py                                       # 3 minutes on a quiet machine
    python benchmarks/peers/pauses.py --concurrency 200 --think 2           # does it run

All episodes begin together and have `--turns` short turns, for each of which the engine takes up to `--think` seconds,
by chance; otherwise runtime, engine and environment are those of `rollouts.py`. Two figures: the longest callback of
the loop in CPU time, which is what no other callback can come between, and by how much a probe that wants to be woken
every 5 ms was late. The second one also grows with what else runs on the machine, and where more is to be done than one
core can do the loop is always late: the share of a core that is said should be well below 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from agent import collector  # noqa: E402
from agent.descriptors import raise_limit  # noqa: E402
from agent.engines.client import HttpEngine  # noqa: E402
from benchmarks.peers.fake_engine import fake_engine  # noqa: E402
from benchmarks.peers.project_rollouts import WARM_UP, CountingStore, run  # noqa: E402
from benchmarks.peers.rollout_script import prepare  # noqa: E402
from benchmarks.report import save_json, show  # noqa: E402

WAKE_S = 0.005


async def probe(late: list[float]) -> None:
    """Append the seconds by which each wake was late, until cancelled."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(WAKE_S)
        late.append(time.monotonic() - began - WAKE_S)


@contextlib.contextmanager
def timed_callbacks(spent: list[float]) -> Iterator[None]:
    """Append the CPU seconds of each callback of asyncio's loop that takes a millisecond or more."""
    usual = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.process_time()
        usual(handle)
        took = time.process_time() - began
        if took >= 0.001:
            spent.append(took)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        asyncio.Handle._run = usual  # type: ignore[method-assign]


async def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Run the episodes; longest pauses in ms, and how busy the loop was."""
    raise_limit(asked["concurrency"] + 200, "the benchmark")
    engine = HttpEngine(asked["url"], keepalive_s=60.0)
    await run(asked, CountingStore(WARM_UP), engine, WARM_UP)
    collector.calm()
    store = CountingStore(asked["concurrency"])
    late: list[float] = []
    callbacks = [0.0]
    probing = asyncio.create_task(probe(late))
    wall, cpu = time.monotonic(), time.process_time()
    with timed_callbacks(callbacks):
        await run(asked, store, engine, asked["concurrency"])
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    await engine.close()
    late.sort()
    return {
        "turns": store.turns,
        "wall_s": wall,
        "core": cpu / wall,
        "callback_ms": 1e3 * max(callbacks),
        "callbacks_above_10_ms": sum(one > 0.01 for one in callbacks),
        "late_ms": 1e3 * late[-1],
        "late_p99_ms": 1e3 * late[int(0.99 * len(late))],
        "wakes": len(late),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=10_000, help="episodes at once (default: 10,000)")
    parser.add_argument("--think", type=float, default=60.0, help="seconds that the engine takes at most (default: 60)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
        with fake_engine(Path(scratch), "short", given.turns, given.think) as url:
            asked = {"folder": scratch, "length": "short", "turns": given.turns, "url": url}
            asked["concurrency"] = given.concurrency
            found = asyncio.run(measure(asked))
    columns = ["episodes at once", "turns", "longest callback, CPU ms", "late by at most, ms", "99 %, ms", "of a core"]
    row = [f"{given.concurrency:,}", f"{found['turns']:,}", f"{found['callback_ms']:.1f}", f"{found['late_ms']:.0f}"]
    row += [f"{found['late_p99_ms']:.0f}", f"{found['core']:.2f}"]
    show("Pauses of the event loop over HTTP", columns, [row], [])
    save_json(given.json, {"pauses": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
