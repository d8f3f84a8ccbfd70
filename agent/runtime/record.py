"""What an episode is filled with when it is over, whoever made its turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from agent.episode import Branch, Episode, Segment, StopReason, Timings, validate
from agent.runtime.engine_requests import ActionSampler
from agent.runtime.environment_calls import EnvironmentCalls
from agent.runtime.settings import RolloutSettings
from agent.store.protocol import Ticket
from envs.asking.model import CountedModel


def record(
    ticket: Ticket,
    settings: RolloutSettings,
    *,
    task_id: str,
    segments: Sequence[Segment],
    turn_rewards: Sequence[float],
    branches: Sequence[Branch] = (),
    stop_reason: StopReason,
    stop_token_ids: Sequence[int],
    issued_at: float,
    sampler: ActionSampler,
    calls: EnvironmentCalls,
    asked: CountedModel,
    metrics: Mapping[str, Any],
) -> Episode:
    """The episode of `ticket`, validated. `metrics` are the environment's; those of the clocks, of faults and of the
    model that the environment has asked are added. `issued_at`: when the work on it began.

    Raises `EpisodeError` for a record that nobody may train on.
    """
    spent = {"generate_s": sampler.generate_s, "environment_s": calls.seconds}
    faults = {"engine_faults": sampler.faults} if sampler.faults else {}
    turns = sum(len(rewards) for rewards in (turn_rewards, *(branch.turn_rewards for branch in branches)))
    return validate(
        Episode(
            id=ticket.id,
            env_id=settings.env_id,
            task_id=task_id,
            segments=tuple(segments),
            turn_rewards=tuple(turn_rewards),
            branches=tuple(branches),
            stop_reason=stop_reason,
            sampling=settings.sampling.params(
                max_tokens=settings.max_tokens_per_turn,
                stop_token_ids=tuple(stop_token_ids),
                seed=ticket.seed if settings.sampling.seeded else None,
            ),
            timings=Timings(issued_at=issued_at, finished_at=time.time(), **spent),
            worker=settings.worker,
            group_id=ticket.group_id,
            environment=settings.environment,
            attempt=ticket.attempt,
            metrics={**faults, **asked.figures(), **metrics, "turns": turns, **spent},
        )
    )
