"""One episode, from reset to record: how it may end, and that the record is what was sampled."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from runtime_tools import EchoEnv, ScriptedEngine, settings, ticket

from agent.chat.renderer import ChatRenderer
from agent.engines.base import Completion, ContextOverflow, EngineBusy, EngineFault
from agent.episode import EpisodeError, StopReason, validate
from agent.runtime.rollout import PromptTooLong, rollout
from envs.core import EnvironmentFault


def says(*turns: str):
    return lambda prompt, number: turns[min(number, len(turns) - 1)]


async def test_a_terminated_episode_records_every_segment_in_order(renderer: ChatRenderer) -> None:
    """Case C: terminated."""
    engine = ScriptedEngine(renderer, says("more", "more please", "right"), version=4)
    episode = await rollout(ticket(group_id="g"), EchoEnv(), engine, renderer, settings(worker="w"))
    assert episode.stop_reason is StopReason.TERMINATED
    kinds = ["prompt", "action", "observation", "action", "observation", "action"]
    assert [s.kind for s in episode.segments] == kinds
    assert episode.turn_rewards == (0.0, 0.0, 1.0)
    assert [a.text for a in episode.actions] == ["more", "more please", "right"]
    assert (episode.task_id, episode.group_id, episode.worker) == ("echo-0", "g", "w")
    assert episode.metrics["turns"] == 3
    assert episode.metrics["taken"] == 3
    assert episode.timings.finished_at >= episode.timings.issued_at > 0


async def test_each_prompt_is_exactly_the_recorded_tokens_so_far(renderer: ChatRenderer) -> None:
    """Case B1: the tokens the model saw and sampled are the record, never tokenised again."""
    engine = ScriptedEngine(renderer, says("more", "right"))
    episode = await rollout(ticket(), EchoEnv(), engine, renderer, settings())
    for (prompt, _), index in zip(engine.requests, (1, 3), strict=True):
        assert prompt == [t for s in episode.segments[:index] for t in s.token_ids]


async def test_the_stop_token_is_an_action_token_with_its_log_prob(renderer: ChatRenderer) -> None:
    """Case B8; and case B7: the stop token is also the padding token here, and stays in the record."""
    episode = await rollout(ticket(), EchoEnv(), ScriptedEngine(renderer, says("right")), renderer, settings())
    (action,) = episode.actions
    assert action.token_ids[-1] == renderer.turn_end_id
    assert len(action.logprobs) == len("right") + 1
    assert action.text == "right"


async def test_an_observation_carries_no_log_prob(renderer: ChatRenderer) -> None:
    """Case B5."""
    episode = await rollout(ticket(), EchoEnv(), ScriptedEngine(renderer, says("more", "right")), renderer, settings())
    for segment in episode.segments:
        if segment.kind != "action":
            assert segment.logprobs == ()
            assert segment.versions == ()


async def test_segments_interleave_and_are_no_contiguous_prefix(renderer: ChatRenderer) -> None:
    """Case B3: the mask comes from the segments."""
    episode = await rollout(ticket(), EchoEnv(), ScriptedEngine(renderer, says("more", "right")), renderer, settings())
    mask = [s.kind == "action" for s in episode.segments for _ in s.token_ids]
    flips = sum(a != b for a, b in itertools.pairwise(mask))
    assert flips == 3, "prompt | action | observation | action"


async def test_an_engine_with_fewer_log_probs_than_tokens_is_an_error(renderer: ChatRenderer) -> None:
    """Case B4: never padded with 0.0."""
    short = Completion((1, 2, 3), (-0.1, -0.2), (0, 0, 0), "stop")
    with pytest.raises(EpisodeError, match="2 log-probs"):
        await rollout(ticket(), EchoEnv(), ScriptedEngine(renderer, lambda p, n: short), renderer, settings())


async def test_a_nan_log_prob_is_an_error(renderer: ChatRenderer) -> None:
    """Case B4, its sibling."""
    bad = Completion((1, 2), (-0.1, float("nan")), (0, 0), "stop")
    with pytest.raises(EpisodeError, match="NaN"):
        await rollout(ticket(), EchoEnv(), ScriptedEngine(renderer, lambda p, n: bad), renderer, settings())


async def test_an_action_cut_inside_a_character_keeps_its_tokens(renderer: ChatRenderer) -> None:
    """Case B6: replacement is for the environment only."""
    env = EchoEnv()
    engine = ScriptedEngine(renderer, says("é" * 20))
    episode = await rollout(ticket(), env, engine, renderer, settings(max_tokens_per_turn=5))
    (action,) = episode.actions
    assert action.token_ids == renderer.encode_action("é" * 20)[:5]
    assert action.finish_reason == "length"
    assert env.log[-1] == ("turn_tokens", "éé\ufffd")


async def test_a_turn_that_reaches_its_cap_is_graded_as_it_stands(renderer: ChatRenderer) -> None:
    """Case M12: a turn's own cap has its own reason."""
    engine = ScriptedEngine(renderer, says("more", "right and so on"))
    episode = await rollout(ticket(), EchoEnv(), engine, renderer, settings(max_tokens_per_turn=8))
    assert episode.stop_reason is StopReason.TRUNCATED_TURN_TOKENS
    assert episode.turn_rewards == (0.0, 1.0)


async def test_no_episode_is_longer_than_the_context(renderer: ChatRenderer) -> None:
    """Case C: truncated by context, in the middle of an action and on an observation that does not fit."""
    for room in range(5, 120):
        engine = ScriptedEngine(renderer, says("more"))
        prompt = len(renderer.start([{"role": "user", "content": "Say it."}], []).token_ids)
        limit = prompt + room
        episode = await rollout(ticket(), EchoEnv(), engine, renderer, settings(max_context_tokens=limit))
        assert episode.stop_reason is StopReason.TRUNCATED_CONTEXT
        assert sum(len(s.token_ids) for s in episode.segments) <= limit
        assert all(request.max_tokens <= limit for _, request in engine.requests)


async def test_a_prompt_without_room_for_an_action_is_rejected_for_good(renderer: ChatRenderer) -> None:
    """An episode with no action token never becomes a record."""
    with pytest.raises(PromptTooLong, match="max_context_tokens is 10"):
        await rollout(
            ticket(), EchoEnv(), ScriptedEngine(renderer, says("x")), renderer, settings(max_context_tokens=10)
        )


async def test_the_turn_cap_of_the_environment_is_a_truncation(renderer: ChatRenderer) -> None:
    """Case C: truncated by turns."""
    episode = await rollout(ticket(), EchoEnv(turns=3), ScriptedEngine(renderer, says("more")), renderer, settings())
    assert episode.stop_reason is StopReason.TRUNCATED_TURNS
    assert episode.stop_reason.trainable
    assert len(episode.turn_rewards) == 3


async def test_the_wall_clock_keeps_the_tokens_sampled_so_far(renderer: ChatRenderer) -> None:
    """Case C: truncated by wall clock."""
    engine = ScriptedEngine(renderer, says("right away"))
    engine.hold, engine.partial = asyncio.Event(), 5
    env = EchoEnv()
    episode = await rollout(ticket(), env, engine, renderer, settings(episode_s=0.05))
    assert episode.stop_reason is StopReason.TRUNCATED_WALL_CLOCK
    assert episode.actions[0].text == "right"
    assert episode.turn_rewards == (1.0,)
    assert env.log[-1] == ("wall_clock", "right")
    assert len(engine.aborted) == 1


async def test_an_aborted_turn_goes_on_in_the_same_segment(renderer: ChatRenderer) -> None:
    """Case A20's record: partial tokens keep their own log-probs and versions when an engine restarts in mid-turn."""
    ids = renderer.encode_action("right")

    def script(prompt: str, number: int) -> Completion:
        if number == 0:
            return Completion(ids[:2], (-0.1, -0.2), (3, 3), "abort")
        if number == 1:
            return Completion((), (), (), "abort")
        return Completion(ids[2:], (-0.3,) * len(ids[2:]), (4,) * len(ids[2:]), "stop")

    engine = ScriptedEngine(renderer, script)
    episode = await rollout(ticket(), EchoEnv(), engine, renderer, settings(max_tokens_per_turn=50))
    (action,) = episode.actions
    assert action.token_ids == ids
    assert action.text == "right"
    assert action.versions == (3, 3, 4, 4, 4, 4)
    assert action.logprobs[:3] == (-0.1, -0.2, -0.3)
    assert engine.requests[2][0] == engine.requests[0][0] + list(ids[:2])
    assert engine.requests[2][1].max_tokens == 48, "the turn's budget is not given twice"


async def test_an_engine_that_only_aborts_ends_the_episode_untrained(renderer: ChatRenderer) -> None:
    """Case C: aborted is never trained."""
    first = renderer.encode_action("ri", closed=False)

    def script(prompt: str, number: int) -> Completion:
        return Completion(first, (-1.0,) * len(first), (0,) * len(first), "abort") if number == 0 else empty

    empty = Completion((), (), (), "abort")
    episode = await rollout(ticket(), EchoEnv(), ScriptedEngine(renderer, script), renderer, settings())
    assert episode.stop_reason is StopReason.ABORTED
    assert not episode.stop_reason.trainable
    assert episode.actions[0].token_ids == first
    validate(episode)


async def test_an_environment_fault_is_no_reward(renderer: ChatRenderer) -> None:
    """Case C: an infrastructure error is an exception, never reward 0."""

    async def fail(action: str) -> None:
        raise EnvironmentFault("the sandbox is gone")

    with pytest.raises(EnvironmentFault, match="sandbox is gone"):
        await rollout(ticket(), EchoEnv(on_step=fail), ScriptedEngine(renderer, says("more")), renderer, settings())


async def test_a_bug_in_an_environment_voids_its_episode_only(renderer: ChatRenderer) -> None:
    """Case C: infrastructure error, raised as anything."""

    async def fail(action: str) -> None:
        raise KeyError("oops")

    with pytest.raises(EnvironmentFault, match=r"step raised KeyError: 'oops'"):
        await rollout(ticket(), EchoEnv(on_step=fail), ScriptedEngine(renderer, says("more")), renderer, settings())


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda step: (*step[:4], {"segment": "observation"}), "messages"),
        (lambda step: (*step[:4], {**step[4], "messages": [("user", "x")]}), "messages"),
        (lambda step: (step[0], None, *step[2:]), "plain value"),
        (lambda step: (*step[:4], {**step[4], "metrics": {"share": object()}}), "plain value"),
    ],
)
async def test_a_step_of_a_wrong_shape_voids_its_episode_only(renderer: ChatRenderer, broken, said: str) -> None:
    """Case C: infrastructure error. Anything but a fault would end the runtime, and every episode beside this one."""

    class Broken(EchoEnv):
        async def astep(self, action: str):
            return broken(await super().astep(action))

    with pytest.raises(EnvironmentFault, match=said):
        await rollout(ticket(), Broken(), ScriptedEngine(renderer, says("more")), renderer, settings())


async def test_a_hung_step_is_an_infrastructure_fault(renderer: ChatRenderer) -> None:
    """Case C: the environment answers the policy's own slow code itself; a step past its limit is a fault."""

    async def hang(action: str) -> None:
        await asyncio.Event().wait()

    with pytest.raises(EnvironmentFault, match=r"longer than 0\.05 s"):
        await rollout(
            ticket(), EchoEnv(on_step=hang), ScriptedEngine(renderer, says("more")), renderer, settings(step_s=0.05)
        )


async def test_a_request_past_its_limit_is_an_engine_fault(renderer: ChatRenderer, monkeypatch) -> None:
    """Case C: infrastructure error (engine)."""
    monkeypatch.setattr("agent.runtime.engine_requests.ABORT_GRACE_S", 0.5)
    engine = ScriptedEngine(renderer, says("right"))
    engine.hold = asyncio.Event()
    with pytest.raises(EngineFault, match=r"generate_s=0\.05"):
        await rollout(ticket(), EchoEnv(), engine, renderer, settings(generate_s=0.05))
    assert len(engine.aborted) == 1
    assert not engine.running


async def test_a_cancelled_rollout_leaves_no_request_at_the_engine(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, says("right"))
    engine.hold = asyncio.Event()
    task = asyncio.create_task(rollout(ticket(), EchoEnv(), engine, renderer, settings()))
    await engine.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(engine.aborted) == 1
    assert not engine.running
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_task_index_beyond_the_environment_names_the_disagreement(renderer: ChatRenderer) -> None:
    with pytest.raises(EnvironmentFault, match="has 3"):
        await rollout(ticket(task_index=3), EchoEnv(), ScriptedEngine(renderer, says("x")), renderer, settings())


async def test_seeds_differ_from_request_to_request_and_repeat_with_the_ticket(renderer: ChatRenderer) -> None:
    from agent.runtime.settings import SamplingConfig

    async def seeds(seed: int) -> list[int | None]:
        engine = ScriptedEngine(renderer, says("more", "more", "right"))
        chosen = settings(sampling=SamplingConfig(seeded=True))
        await rollout(ticket(seed=seed), EchoEnv(), engine, renderer, chosen)
        return [sampling.seed for _, sampling in engine.requests]

    first = await seeds(7)
    assert len(set(first)) == 3
    assert await seeds(7) == first
    assert await seeds(8) != first


async def test_a_long_transcript_is_rendered_aside_with_the_same_tokens(renderer: ChatRenderer, monkeypatch) -> None:
    async def run() -> tuple:
        engine = ScriptedEngine(renderer, says("more", "right"))
        return (await rollout(ticket(), EchoEnv(), engine, renderer, settings())).segments

    short = await run()
    monkeypatch.setattr("agent.runtime.rollout.LONG_TRANSCRIPT", 0)
    assert await run() == short


async def test_an_engine_with_a_smaller_context_truncates_and_is_no_fault(renderer: ChatRenderer) -> None:
    """Case C: truncated by context, the engine's own."""

    def script(prompt: str, number: int) -> str | Exception:
        return "more right" if number == 0 else ContextOverflow("maximum context length is 60")

    episode = await rollout(ticket(), EchoEnv(), ScriptedEngine(renderer, script), renderer, settings())
    assert episode.stop_reason is StopReason.TRUNCATED_CONTEXT
    assert len(episode.actions) == 1


async def test_a_busy_engine_is_waited_for_and_is_no_fault(renderer: ChatRenderer) -> None:
    """Case M11: 429 was refused for good."""
    engine = ScriptedEngine(renderer, lambda prompt, n: EngineBusy("429", 0.0) if n < 20 else "right")
    episode = await rollout(ticket(), EchoEnv(), engine, renderer, settings())
    assert episode.reward == 1.0
    assert "engine_faults" not in episode.metrics


async def test_an_engine_that_stays_busy_is_given_up_with_the_key_to_turn(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, lambda prompt, n: EngineBusy("429: slow down", 3600.0))
    with pytest.raises(EngineFault, match=r"slow down.*engine_patience_s=600"):
        await rollout(ticket(), EchoEnv(), engine, renderer, settings())
