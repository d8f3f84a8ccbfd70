"""The garbage collector does not hold up the loop, and does not have to: episodes leave no cycles behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections import Counter

from runtime_tools import EchoEnv, ScriptedEngine, settings, ticket

from agent.chat.renderer import ChatRenderer
from agent.episode import Episode
from agent.runtime.rollout import rollout

CHURN = """
import gc, sys
from agent import collector

if sys.argv[1] == "calm":
    collector.calm()
found = []
gc.callbacks.append(lambda phase, info: found.append(info["generation"]))
alive = []
for number in range(40_000):  # 10,000 episodes begin, and each is followed by three others, in no order
    place = number * 7919 % 10_000
    containers = [{"role": "tool", "content": [number]} for _ in range(10)]
    if number < 10_000:
        alive.append(containers)
    else:
        alive[place] = containers
print(len(found), sum(generation == 2 for generation in found))
cycles = 0
while sys.argv[1] == "calm" and len(found) < 4 and cycles < 8_000_000:
    cycle = []
    cycle.append(cycle)
    cycles += 1
print(cycles)
"""


def collections(how: str) -> list[int]:
    found = subprocess.run([sys.executable, "-c", CHURN, how], capture_output=True, text=True, timeout=100, check=True)
    return [int(word) for word in found.stdout.split()]


def test_ten_thousand_episodes_are_not_walked_through_while_they_run() -> None:
    """Case M8: pauses of .88 s. Now there is none, and cycles are found once they are many."""
    count, full, cycles = collections("calm")
    assert (count, full) == (0, 0)
    assert 1_000_000 < cycles < 8_000_000
    count, full, _ = collections("as it comes")
    assert full > 0, "or the figures above would say nothing"


async def test_an_episode_leaves_no_cycle_behind(renderer: ChatRenderer) -> None:
    """Nothing but a full collection frees cycles that have lived as long as an episode, and there is hardly any."""
    engine = ScriptedEngine(renderer, lambda text, turn: "right" if text.count("heard") > 2 else "more")

    async def some(first: int) -> list[Episode]:
        return await asyncio.gather(
            *(rollout(ticket(id=f"{first + n}"), EchoEnv(), engine, renderer, settings()) for n in range(20))
        )

    await some(0)
    await asyncio.sleep(0)
    gc.collect()
    gc.disable()
    try:
        assert len(await some(20)) == 20
        await asyncio.sleep(0)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(type(one).__name__ for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left.total() < 20, left
