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
import gc, time
from agent import collector

collector.calm()
pauses = []
def noted(phase, info):
    global began
    if phase == "start":
        began = time.thread_time()
    else:
        pauses.append((info["generation"], time.thread_time() - began))

alive = [[[] for _ in range(60)] for _ in range(10_000)]  # what the collector sees of 10,000 episodes
gc.callbacks.append(noted)
for number in range(60_000):  # three turns of each of them, or so
    alive[number % 10_000] = [[] for _ in range(60)]
    kept = [{"role": "tool", "content": ["x"]} for _ in range(4)]
print(len(pauses), max(generation for generation, _ in pauses), max(pause for _, pause in pauses))
"""


def test_ten_thousand_episodes_are_not_walked_through_while_they_run() -> None:
    """Case M8: pauses of .88 s; here none is above 100 ms of CPU time (a busy machine adds what it likes)."""
    found = subprocess.run([sys.executable, "-c", CHURN], capture_output=True, text=True, timeout=100, check=True)
    count, oldest, longest = map(float, found.stdout.split())
    assert count > 0
    assert oldest < 2
    assert longest < 0.1


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
