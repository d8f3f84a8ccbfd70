"""Several engines behind one runtime: who serves, who is taken out and taken back, and what becomes of episodes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from runtime_tools import EchoEnv, Reply, ScriptedEngine, settings, ticket

from agent.backoff import Unreachable
from agent.chat.renderer import ChatRenderer
from agent.engines.base import Completion, ContextOverflow, Disconnected, EngineFault, EngineRefused
from agent.engines.pool import EnginePool
from agent.episode import Episode, StopReason
from agent.runtime.engine_requests import REQUEST_FAULTS
from agent.runtime.rollout import rollout

WAIT_S = 20.0


def says(*turns: Reply) -> Callable[[str, int], Reply]:
    return lambda prompt, number: turns[min(number, len(turns) - 1)]


@contextlib.asynccontextmanager
async def pool_of(*engines: ScriptedEngine, **options: Any) -> AsyncIterator[EnginePool]:
    """A pool that asks often and has asked everyone once."""
    pool = EnginePool(
        {f"e{i}": engine for i, engine in enumerate(engines)},
        **{"patience_s": WAIT_S, "check_every_s": 0.02, "check_s": 5.0, **options},
    )
    task = asyncio.create_task(pool.run())
    try:
        await until(lambda: all(e.asked or e.down or e.hung for e in engines))
        yield pool
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def asked_again(engine: ScriptedEngine, times: int = 2) -> None:
    before = engine.asked + engine.refused
    await until(lambda: engine.asked + engine.refused >= before + times)


async def run_episode(pool: EnginePool, renderer: ChatRenderer, **changes: Any) -> tuple[Episode, str]:
    """An episode, and the name of the engine that it ended on."""
    async with pool.seat() as seat:
        episode = await rollout(ticket(), EchoEnv(), seat, renderer, settings(**changes), recover=seat.move)
        return episode, seat.name


async def test_the_least_loaded_engine_is_taken_and_an_episode_keeps_its_own(renderer: ChatRenderer) -> None:
    engines = [ScriptedEngine(renderer, says("more", "more", "right")) for _ in range(2)]
    async with pool_of(*engines) as pool:
        async with pool.seat() as first, pool.seat() as second:
            assert {first.name, second.name} == {"e0", "e1"}
            async with pool.seat() as third:
                assert third.name in ("e0", "e1")
            async with pool.seat() as fourth:
                assert fourth.name == third.name, "a place that was left is free again"
        await run_episode(pool, renderer)
        assert sorted(len(engine.requests) for engine in engines) == [0, 3], "all turns on one engine: one cache"


async def test_an_episode_of_a_dead_engine_goes_on_with_the_tokens_it_has(renderer: ChatRenderer) -> None:
    """Case A20's record over two engines: the partial action keeps its log-probs and versions, the rest is sampled
    on the other engine from prompt and partial."""
    ids = renderer.encode_action("right")
    partial = Completion(ids[:2], (-0.1, -0.2), (3, 3), "abort")
    rest = Completion(ids[2:], (-0.3,) * len(ids[2:]), (4,) * len(ids[2:]), "stop")
    script = says(partial, EngineFault("connection reset"), rest)
    engines: list[ScriptedEngine] = []
    total = 0

    def shared(prompt: str, number: int) -> Reply:
        nonlocal total
        total += 1
        if total == 2:
            next(e for e in engines if e.requests).down = True
        return script(prompt, total - 1)

    engines += [ScriptedEngine(renderer, shared, version=3) for _ in range(2)]
    async with pool_of(*engines) as pool:
        episode, ended_on = await run_episode(pool, renderer)
    (action,) = episode.actions
    assert action.token_ids == ids
    assert action.versions == (3, 3, 4, 4, 4, 4)
    assert action.logprobs[:3] == (-0.1, -0.2, -0.3)
    other = engines[int(ended_on[1])]
    assert not other.down
    assert len(other.requests) == 1
    prompt, sampling = other.requests[0]
    assert tuple(prompt[-2:]) == ids[:2]
    assert sampling.max_tokens == 512 - 2, "the turn's budget is not given twice"
    assert episode.metrics["engine_faults"] == 1


async def test_with_one_engine_an_episode_waits_for_it_and_the_wait_is_not_its_time(renderer: ChatRenderer) -> None:
    """Case C: what the engine was away is not the policy's wall clock."""
    engine = ScriptedEngine(renderer, says("more", "right"))
    env = EchoEnv()

    async def die(action: str) -> None:
        engine.down = engine.refused == 0

    env.on_step = die
    async with pool_of(engine) as pool, pool.seat() as seat:
        running = asyncio.create_task(
            rollout(ticket(), env, seat, renderer, settings(episode_s=1.0), recover=seat.move)
        )
        await until(lambda: engine.refused >= 2)
        await asyncio.sleep(1.2)
        engine.down = False
        episode = await asyncio.wait_for(running, WAIT_S)
    assert episode.stop_reason is StopReason.TERMINATED
    assert episode.reward == 1.0


async def test_engines_that_stay_away_are_said_with_their_reasons(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, says("right"))
    engine.down = True
    async with pool_of(engine, patience_s=0.2) as pool:
        with pytest.raises(Unreachable, match=r"e0: the scripted engine is down.*limits\.engine_patience_s"):
            await run_episode(pool, renderer)


async def test_an_engine_is_taken_out_without_a_request_and_taken_back(renderer: ChatRenderer) -> None:
    engines = [ScriptedEngine(renderer, says("right")) for _ in range(2)]
    async with pool_of(*engines) as pool:
        engines[0].down = True
        await until(lambda: "e0 0 (away)" in pool.loads())
        for _ in range(3):
            assert (await run_episode(pool, renderer))[1] == "e1"
        engines[0].down = False
        await until(lambda: "away" not in pool.loads())
        async with pool.seat() as one, pool.seat() as two:
            assert {one.name, two.name} == {"e0", "e1"}


async def test_an_engine_that_comes_back_with_older_weights_serves_only_once_it_has_the_newest(
    renderer: ChatRenderer,
) -> None:
    """Case D6 for a restart: tokens of old weights are not passed off as new ones."""
    engines = [ScriptedEngine(renderer, says("right"), version=5) for _ in range(2)]
    async with pool_of(*engines) as pool:
        engines[0].down = True
        await until(lambda: "e0 0 (away)" in pool.loads())
        engines[0].down, engines[0].version = False, 3
        await asked_again(engines[0], 3)
        assert "e0 0 (away)" in pool.loads()
        assert (await run_episode(pool, renderer))[1] == "e1"
        engines[0].version = 5
        await until(lambda: "away" not in pool.loads())


async def test_an_engine_restarted_between_two_checks_is_caught_by_its_tokens(renderer: ChatRenderer) -> None:
    """Bad input: a version that goes backwards. The tokens are dropped, the engine waits for its weights."""
    engines = [ScriptedEngine(renderer, says("more", "right"), version=5) for _ in range(2)]
    async with pool_of(*engines, check_every_s=60.0) as pool, pool.seat() as seat:
        first = engines[int(seat.name[1])]
        other = engines[1 - int(seat.name[1])]
        first.version = 2
        episode = await rollout(ticket(), EchoEnv(), seat, renderer, settings(), recover=seat.move)
        assert {v for action in episode.actions for v in action.versions} == {5}
        assert len(first.requests) == 1
        assert other.requests
        await until(lambda: "(away)" in pool.loads())


async def test_a_publication_under_way_takes_no_engine_out(renderer: ChatRenderer) -> None:
    engines = [ScriptedEngine(renderer, says("right"), version=5) for _ in range(2)]
    async with pool_of(*engines) as pool:
        engines[1].version = 6
        await asked_again(engines[1])
        await asked_again(engines[0])
        assert "away" not in pool.loads()


async def test_an_engine_that_stays_behind_is_taken_out(renderer: ChatRenderer, monkeypatch: Any) -> None:
    """A publication that failed on one engine: its old weights are not served for ever."""
    monkeypatch.setattr("agent.engines.pool.BEHIND_S", 0.05)
    engines = [ScriptedEngine(renderer, says("right"), version=5) for _ in range(2)]
    async with pool_of(*engines) as pool:
        engines[1].version = 6
        await until(lambda: "e0 0 (away)" in pool.loads())
        engines[0].version = 6
        await until(lambda: "away" not in pool.loads())


async def test_a_hanging_engine_loses_its_requests_to_another(renderer: ChatRenderer) -> None:
    """Its connections stay open: only its silence tells. Without checks the episode would wait for generate_s."""
    engines = [ScriptedEngine(renderer, says("right")) for _ in range(2)]
    for engine in engines:
        engine.hold = asyncio.Event()
    async with pool_of(*engines, check_s=0.05) as pool:
        running = asyncio.create_task(run_episode(pool, renderer))
        await until(lambda: any(engine.running for engine in engines))
        stuck = next(engine for engine in engines if engine.running)
        other = next(engine for engine in engines if engine is not stuck)
        assert other.hold is not None
        other.hold.set()
        stuck.hung = True
        episode, _ = await asyncio.wait_for(running, WAIT_S)
        assert not stuck.running
    assert episode.reward == 1.0
    assert len(other.requests) == 1


@pytest.mark.parametrize(
    "reply",
    [
        EngineFault("engine: 500: oops"),
        EngineFault("engine: an empty completion"),
        EngineFault("engine: a log-prob is missing or not a number"),
    ],
)
async def test_an_answer_that_is_no_answer_is_asked_for_again_and_not_for_ever(
    renderer: ChatRenderer, reply: EngineFault, monkeypatch: Any
) -> None:
    """Bad input: a 500, an empty completion, NaN or null log-probs. The client makes each an `EngineFault`; one is
    asked for again, an engine that never answers otherwise fails the ticket with that reason."""
    monkeypatch.setattr("agent.runtime.engine_requests.backoff_s", lambda tries: 0.0)
    engine = ScriptedEngine(renderer, says(reply, reply, "right"))
    async with pool_of(engine) as pool:
        episode, _ = await run_episode(pool, renderer)
        assert episode.metrics["engine_faults"] == 2
        engine.script = lambda prompt, number: reply
        engine.requests.clear()
        with pytest.raises(EngineFault, match="engine: "):
            await run_episode(pool, renderer)
        assert len(engine.requests) == REQUEST_FAULTS + 1


async def test_what_an_engine_refuses_is_not_asked_again(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, says(EngineRefused("no such token")))
    async with pool_of(engine) as pool:
        with pytest.raises(EngineRefused):
            await run_episode(pool, renderer)
        assert len(engine.requests) == 1
        assert "away" not in pool.loads(), "the engine is sound: the request was not"


async def test_a_context_overflow_after_a_fault_ends_the_turn_with_what_it_has(renderer: ChatRenderer) -> None:
    """Bad input: a context overflow, here of an engine with less room than the one that died."""
    ids = renderer.encode_action("right", closed=False)
    partial = Completion(ids, (-0.1,) * len(ids), (0,) * len(ids), "abort")
    engine = ScriptedEngine(renderer, says(partial, EngineFault("reset"), ContextOverflow("maximum context length")))
    async with pool_of(engine) as pool:
        episode, _ = await run_episode(pool, renderer)
    assert episode.stop_reason is StopReason.TRUNCATED_CONTEXT
    assert episode.actions[0].token_ids == ids
    assert episode.reward == 1.0, "graded as it stands"


async def test_a_request_past_its_limit_keeps_the_tokens_that_the_abort_handed_over(
    renderer: ChatRenderer, monkeypatch: Any
) -> None:
    monkeypatch.setattr("agent.runtime.engine_requests.ABORT_GRACE_S", 0.5)
    engine = ScriptedEngine(renderer, says("right"))
    engine.hold, engine.partial = asyncio.Event(), 2
    ids = renderer.encode_action("right")

    async with pool_of(engine) as pool:

        def script(prompt: str, number: int) -> Reply:
            if number == 0:
                return "right"
            return Completion(ids[2:], (-0.3,) * len(ids[2:]), (0,) * len(ids[2:]), "stop")

        engine.script = script
        episode, _ = await run_episode(pool, renderer, generate_s=0.1)
    assert episode.actions[0].token_ids == ids
    assert engine.requests[1][0][-2:] == list(ids[:2])


async def test_a_turn_that_gains_tokens_at_every_limit_is_not_given_up(
    renderer: ChatRenderer, monkeypatch: Any
) -> None:
    """A slow turn is no request that kills engines: only faults without a token in between are counted."""
    monkeypatch.setattr("agent.runtime.engine_requests.ABORT_GRACE_S", 0.3)
    monkeypatch.setattr("agent.runtime.engine_requests.backoff_s", lambda tries: 0.0)
    ids = renderer.encode_action("right, slowly")
    engine = ScriptedEngine(renderer, says("x"))
    engine.hold, engine.partial = asyncio.Event(), 1
    opening = 0

    def script(prompt: str, number: int) -> Reply:
        nonlocal opening
        taken = len(engine.requests[-1][0])
        opening = opening or taken
        if number >= REQUEST_FAULTS + 2:
            assert engine.hold is not None
            engine.hold.set()
        return renderer.decode(ids[taken - opening :])

    engine.script = script
    async with pool_of(engine) as pool:
        episode, _ = await run_episode(pool, renderer, generate_s=0.05)
    assert episode.actions[0].token_ids == ids
    assert episode.metrics["engine_faults"] >= REQUEST_FAULTS + 2


async def test_a_pool_that_is_cancelled_leaves_no_task(renderer: ChatRenderer) -> None:
    engines = [ScriptedEngine(renderer, says("right")) for _ in range(2)]
    engines[0].hung = True
    async with pool_of(*engines) as pool:
        await run_episode(pool, renderer)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_request_that_always_fails_costs_no_neighbour_its_engine(renderer: ChatRenderer) -> None:
    """Case M3: one ticket's 500 took the engine, with its cache, from 199 healthy ones."""

    def script(prompt: str, number: int) -> Reply:
        return EngineFault("engine: 500: this prompt only") if "poison" in prompt else "right"

    engines = [ScriptedEngine(renderer, script) for _ in range(2)]
    async with pool_of(*engines) as pool:

        async def poisoned() -> None:
            async with pool.seat() as seat:
                await rollout(ticket(), EchoEnv(prompt="poison"), seat, renderer, settings(), recover=seat.move)

        bad = asyncio.create_task(poisoned())
        away = 0
        healthy = []
        while not bad.done():
            away += "away" in pool.loads()
            healthy.append(await run_episode(pool, renderer))
            await asyncio.sleep(0.01)
        with pytest.raises(EngineFault, match="this prompt only"):
            await bad
    assert away == 0
    assert healthy
    assert not any("engine_faults" in episode.metrics for episode, _ in healthy)


async def test_a_broken_connection_takes_an_engine_out_until_it_has_answered(renderer: ChatRenderer) -> None:
    engines = [ScriptedEngine(renderer, says(Disconnected("connection reset"), "right")) for _ in range(2)]
    async with pool_of(*engines, check_every_s=60.0) as pool, pool.seat() as seat:
        used = next(engine for i, engine in enumerate(engines) if seat.name == f"e{i}")
        used.down = True
        await seat.move(Disconnected("connection reset"))
        assert "away" in pool.loads()
        assert seat.name != f"e{engines.index(used)}"


async def test_a_crowd_that_waits_for_a_version_asks_as_one(renderer: ChatRenderer) -> None:
    """Case M10: 200 pinned tickets made 740 requests a second of each endpoint."""
    engine = ScriptedEngine(renderer, says("right"))
    async with pool_of(engine, check_every_s=60.0) as pool, contextlib.AsyncExitStack() as stack:
        seats = [await stack.enter_async_context(pool.seat()) for _ in range(200)]
        before = engine.asked
        engine.version = 3
        assert set(await asyncio.gather(*(seat.version() for seat in seats))) == {3}
        assert engine.asked - before <= 3


async def test_an_engine_is_blamed_for_a_loop_that_is_too_busy_to_hear_it(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, says("right"))

    async def busy(go_on: asyncio.Event) -> None:
        while not go_on.is_set():
            time.sleep(0.8)  # noqa: ASYNC251 - what thousands of turns do to a loop
            await asyncio.sleep(0)

    async with pool_of(engine, check_s=0.3) as pool:
        enough = asyncio.Event()
        task = asyncio.create_task(busy(enough))
        engine.hung = True
        await asyncio.sleep(1.6)
        assert pool._members[0].sound
        enough.set()
        await task
        await until(lambda: not pool._members[0].sound)  # now that it would be heard
