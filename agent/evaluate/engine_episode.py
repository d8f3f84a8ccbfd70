"""`engine_sample`: one task at a rollout engine, through the runtime's own rollout, as one `Sample`."""

from __future__ import annotations

import time

from agent.engines.base import EngineFault
from agent.engines.pool import Seat
from agent.episode import Episode, EpisodeError, StopReason
from agent.evaluate.config import Evaluation, EvaluationError
from agent.evaluate.endpoint.wire import clean
from agent.evaluate.sample import Said, Sample, Tokens
from agent.runtime.rollout import PromptTooLong, Renderer, rollout
from agent.runtime.settings import RolloutSettings, SamplingConfig
from agent.store.protocol import Ticket
from envs.core import AsyncEnv, EnvironmentFault

MAX_TOKENS_PER_TURN = 4096
"""Of a turn, unless the evaluation says otherwise."""


def rollout_settings(evaluation: Evaluation, max_context: int) -> RolloutSettings:
    """What an episode may use at an engine whose context is `max_context`; raises `EvaluationError`."""
    sampling, policy = evaluation.sampling, evaluation.policy
    context = getattr(policy, "max_context_tokens", None) or max_context
    if context > max_context:
        raise EvaluationError(f"--max-context-tokens: {context} is more than the {max_context} of the engine")
    return RolloutSettings(
        env_id=evaluation.env.id,
        sampling=SamplingConfig(
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            seeded=sampling.seed is not None,
        ),
        max_context_tokens=context,
        max_tokens_per_turn=min(sampling.max_tokens or MAX_TOKENS_PER_TURN, context),
        limits=evaluation.stage_limits,
        worker="agent.evaluate",
    )


async def engine_sample(
    task_id: str,
    number: int,
    env: AsyncEnv,
    seat: Seat,
    renderer: Renderer,
    settings: RolloutSettings,
    evaluation: Evaluation,
    task_index: int,
) -> Sample:
    """Run one episode at the engine behind `seat`; faults become samples without a reward.

    A prompt that leaves no room for an action is truncated at once, with reward 0: nothing could be said.
    """
    seed, began = evaluation.seed_of(task_id, number), time.monotonic()
    ticket = Ticket(id=f"evaluate-{seed:08x}-{number}", kind="evaluate", task_index=task_index, epoch=0, seed=seed)
    try:
        episode = await rollout(ticket, env, seat, renderer, settings, recover=seat.move)
    except PromptTooLong:
        return Sample(task_id, number, StopReason.TRUNCATED_CONTEXT.value, reward=0.0, finished_at=time.time())
    except (EnvironmentFault, EngineFault, EpisodeError) as fault:
        return Sample(
            task_id,
            number,
            StopReason.INFRASTRUCTURE_ERROR.value,
            fault=clean(f"{type(fault).__name__}: {fault}"),
            seconds=time.monotonic() - began,
            finished_at=time.time(),
        )
    return sample_of(episode, number)


def sample_of(episode: Episode, number: int) -> Sample:
    """An episode as a sample. Each turn's prompt counts anew, as at an endpoint."""
    said, prompts, read, turn = [], 0, 0, 0
    for segment in episode.segments:
        if segment.kind != "action":
            said.append(Said(role=segment.kind, text=clean(segment.text)))
        else:
            prompts += read
            said.append(
                Said(
                    role="assistant",
                    text=clean(segment.text),
                    finish=segment.finish_reason,
                    reward=episode.turn_rewards[turn],
                    tokens=len(segment.token_ids),
                )
            )
            turn += 1
        read += len(segment.token_ids)
    versions = episode.sampled_by
    aborted = episode.stop_reason is StopReason.ABORTED
    return Sample(
        task_id=episode.task_id,
        number=number,
        stop_reason=episode.stop_reason.value,
        reward=None if aborted else episode.reward,
        fault="the engine aborted it again and again" if aborted else "",
        turns=len(episode.actions),
        tokens=Tokens(prompt=prompts, completion=episode.action_tokens),
        requests=len(episode.actions),
        retries=int(episode.metrics.get("engine_faults", 0)),
        seconds=episode.timings.finished_at - episode.timings.issued_at,
        generate_s=episode.timings.generate_s,
        environment_s=episode.timings.environment_s,
        versions=(versions[0], versions[-1]) if versions else None,
        metrics=episode.metrics,
        transcript=tuple(said),
        finished_at=episode.timings.finished_at,
    )
