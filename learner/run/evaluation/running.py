"""The evaluation of one held-out set by one version, by the runtimes that a store has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent import episode as records
from agent.episode import Episode
from agent.store.client import StoreClient
from envs import make_core
from learner.config import HeldOutSet, Recipe
from learner.faults import LearnerFault

_POLL_S = 0.25


class EvaluationFault(LearnerFault):
    """An evaluation that came to its end without a result; to go on with it would change nothing."""


async def run_evaluation(
    store: StoreClient,
    check: Callable[[], None],
    chosen: HeldOutSet,
    *,
    version: int,
    tasks: int,
    timeout_s: float,
    name: str = "",
    pinned: bool = True,
    stop: asyncio.Event | None = None,
    keep: bool = False,
    began: Callable[[str], None] = lambda evaluation: None,
    progress: Callable[[int], None] = lambda finished: None,
) -> list[Episode]:
    """Have the first `tasks` tasks of the set run `chosen.samples` times at `version`.

    Once `stop` is set the evaluation is given up and the answer is []; with `keep` it stays in the store, for the next
    session to go on with. `pinned`: every action token must come from `version`, so nobody may publish to these
    engines meanwhile; else the figures are of whichever versions they serve. `check` raises when a process that is
    needed has gone. `began` is told the evaluation's id. Raises `EvaluationFault`.
    """
    evaluation = await store.start_evaluation(
        version, list(range(tasks)), chosen.samples, name, environment=chosen.name, pinned=pinned
    )
    began(evaluation)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                check()
                status = await store.evaluation(evaluation)
                progress(status.finished)
                if status.finished >= status.requested:
                    break
                if stop is not None and stop.is_set():
                    if not keep:
                        await store.cancel_evaluation(evaluation)
                    return []
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        await store.cancel_evaluation(evaluation)
        raise EvaluationFault(
            f"the evaluation of version {version} did not finish within {timeout_s:g} s; raise evaluation.timeout_s"
        ) from error
    episodes = [records.decode(data) for data in status.episodes]
    if status.failed:
        raise EvaluationFault(
            f"{status.failed} of {status.requested} evaluation episodes failed; see the runtime's log"
        )
    foreign = sum(n for e in episodes for s in e.actions for v, n in s.versions.runs() if v != version)
    if pinned and foreign:
        raise EvaluationFault(f"{foreign} tokens of the evaluation of version {version} come from another version")
    return episodes


async def count_held_out(recipe: Recipe) -> dict[str, int]:
    """How many tasks an evaluation of each set uses, by its name: its `tasks`, or all there are."""
    return {one.name: await _count(one) for one in recipe.held_out_sets}


async def _count(chosen: HeldOutSet) -> int:
    env = make_core(chosen.env.id, **chosen.env.kwargs)
    try:
        return min(chosen.tasks, await asyncio.to_thread(lambda: len(env.task_ids)))
    finally:
        await env.aclose()
