"""Many episodes at once, on a real store process: nothing is lost, nothing is left behind, nothing waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_tools import AnyStore, EchoEnv, Reply, ScriptedEngine, StoreProcess

from agent.backoff import Unreachable
from agent.chat.renderer import ChatRenderer
from agent.engines.base import Completion, EngineFault
from agent.episode import StopReason, decode
from agent.runtime.runtime import NothingWorks, Runtime
from agent.runtime.settings import ConfigError, EnvConfig, RuntimeConfig
from agent.store.client import StoreClient
from agent.store.protocol import Claim, EvaluationStatus, StoreFault, Ticket
from envs import make_core
from envs.core import AsyncEnv, EnvironmentFault

WAIT_S = 30.0


class CountingClient(StoreClient):
    """The real client, with a list of what was asked for."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.leases: list[int] = []

    async def lease(self, n: int, worker: str, wait_s: float = 0.0) -> list[Ticket]:
        self.leases.append(n)
        return await super().lease(n, worker, wait_s)


def config(store: AnyStore, **changes: Any) -> RuntimeConfig:
    limits = {"shutdown_s": 8.0, "store_patience_s": WAIT_S, **changes.pop("limits", {})}
    plain = {"store": store.url, "engines": ["http://engine"], "model": "m", "env": {"id": "test/Echo-v0"}}
    return RuntimeConfig.model_validate({**plain, "worker": "w", "concurrency": 4, "limits": limits, **changes})


class Bench:
    """A runtime on scripted engines, with the environments that it made."""

    def __init__(
        self,
        renderer: ChatRenderer,
        settings: RuntimeConfig,
        script: Callable[[str, int], Reply] = lambda prompt, number: "right",
        make_env: Callable[[EnvConfig], AsyncEnv] | None = None,
        engines: int = 1,
        store: type[CountingClient] = CountingClient,
    ) -> None:
        self.envs: list[EchoEnv] = []
        self.engines = [ScriptedEngine(renderer, script) for _ in range(engines)]
        self.engine = self.engines[0]
        self.store = store(settings.store)
        self.runtime = Runtime(
            settings,
            store=self.store,
            engines={f"engine-{i}": engine for i, engine in enumerate(self.engines)},
            renderer=renderer,
            make_env=make_env or self._make,
        )

    def _make(self, chosen: EnvConfig) -> AsyncEnv:
        env = EchoEnv(tasks=20, **chosen.kwargs)
        self.envs.append(env)
        return env

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """The runtime as a task; cancelled, and waited for, at the end."""
        task = asyncio.create_task(self.runtime.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=10)
            assert task.done(), "the shutdown is bounded"
            await self.store.close()


async def claim(client: StoreClient, n: int) -> Claim:
    found = await client.claim(n, version=0, wait_s=WAIT_S)
    assert found is not None
    return found


async def until(condition: Callable[[], Any]) -> None:
    """Return once `condition` holds; what it looks at changes in this process."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def finished(client: StoreClient, evaluation: str) -> EvaluationStatus:
    async with asyncio.timeout(WAIT_S):
        while (status := await client.evaluation(evaluation)).finished < status.requested:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return status


async def test_finished_episodes_reach_the_learner_while_slots_go_on(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    """Case D10: no task twice in a batch before the epoch wraps."""
    bench = Bench(renderer, config(store))
    async with bench.running():
        first = await claim(client, 10)
        await client.commit(first.id, 1)
        await client.set_version(1)
        second = await client.claim(10, version=1, wait_s=WAIT_S)
    assert second is not None
    episodes = [decode(data) for data in first.episodes + second.episodes]
    assert len({episode.task_id for episode in episodes}) == 20
    assert all(episode.reward == 1.0 and episode.worker == "w" for episode in episodes)
    assert len(bench.envs) == 4, "environments are used again, one for each slot"
    assert bench.runtime.counters["episodes"] >= 20
    assert 0 < bench.runtime.progress.busy_share() <= 1


async def test_many_idle_slots_make_one_lease_request(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    bench = Bench(renderer, config(store, concurrency=64))
    async with bench.running():
        await claim(client, 10)
        assert bench.store.leases[0] == 64
        assert len(bench.store.leases) <= 8


async def test_a_full_queue_slows_rollouts_and_drops_nothing(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    """Case D5; and case D1: a batch of 4 taken from 10 leaves 6."""
    bench = Bench(renderer, config(store))
    async with bench.running():
        taken = await claim(client, 4)
        await client.release(taken.id)
        await claim(client, 10)
        # The store may answer for the tenth after it has handed it on.
        assert bench.runtime.counters["episodes"] <= 10, "the budget is out: no eleventh episode was begun"
    status = await client.status()
    assert status.claimed == 10
    assert status.counters["accepted"] == 10


async def test_a_fault_gives_its_capacity_back_and_the_ticket_is_dealt_again(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    """Case D2, and case C: infrastructure errors are counted and retried, never trained."""
    failed: list[EchoEnv] = []

    def make(chosen: EnvConfig) -> AsyncEnv:
        async def step(action: str) -> None:
            if len(failed) < 5:
                failed.append(env)
                raise EnvironmentFault("the sandbox is gone")

        env = EchoEnv(tasks=20, on_step=step)
        return env

    bench = Bench(renderer, config(store), make_env=make)
    async with bench.running():
        batch = await claim(client, 10)
    assert all(decode(data).stop_reason is StopReason.TERMINATED for data in batch.episodes)
    assert bench.runtime.counters["environment"] == 5
    assert all(env.closed == 1 for env in failed), "an environment that failed is not used again"
    assert len({id(env) for env in failed}) == 5
    status = await client.status()
    assert status.counters["retried"] == 5
    assert max(decode(data).attempt for data in batch.episodes) >= 1


async def test_fewer_log_probs_than_tokens_is_a_counted_rejection_and_a_retry(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    """Case B4 at the runtime."""
    short = Completion((1, 2, 3), (-0.1, -0.2), (0, 0, 0), "stop")
    bench = Bench(renderer, config(store), script=lambda prompt, number: short if number < 3 else "right")
    async with bench.running():
        batch = await claim(client, 10)
    assert len(batch.episodes) == 10
    assert bench.runtime.counters["rejected"] == 3
    assert (await client.status()).counters["retried"] == 3


async def test_an_aborted_episode_is_resumable_and_not_trained(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    """Case C: aborted. Its ticket is dealt again, as the same attempt."""
    gone = Completion((), (), (), "abort")
    bench = Bench(renderer, config(store, concurrency=1), script=lambda prompt, number: gone if number < 5 else "right")
    async with bench.running():
        batch = await claim(client, 10)
    assert bench.runtime.counters["aborted"] == 1
    assert {decode(data).attempt for data in batch.episodes} == {0}


async def test_every_truncation_is_graded_and_reaches_the_learner(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    """Case C: truncated, with the reward of what stood there."""
    long = "right " * 30
    bench = Bench(renderer, config(store, max_tokens_per_turn=16), script=lambda prompt, number: long)
    async with bench.running():
        batch = await claim(client, 10)
    for data in batch.episodes:
        assert decode(data).stop_reason is StopReason.TRUNCATED_TURN_TOKENS
        assert decode(data).reward == 1.0


async def test_an_engine_that_is_down_at_the_start_costs_no_attempt(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    """Case C: nothing is leased while there is nobody to serve it, and no ticket loses an attempt to that."""
    bench = Bench(renderer, config(store))
    bench.engine.down = True
    async with bench.running():
        await until(lambda: bench.engine.refused >= 3)
        leases = sum(bench.store.leases)
        bench.engine.down = False
        batch = await claim(client, 10)
    assert leases == 0, "no ticket was leased while the engine was away"
    assert {decode(data).attempt for data in batch.episodes} == {0}
    assert bench.runtime.counters["engine"] == 0


async def test_episodes_wait_for_their_only_engine_and_go_on(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    """Case D2: the death of the engine in the middle costs no episode and no attempt."""
    bench = Bench(renderer, config(store))
    bench.engine.script = lambda prompt, number: "more" if "heard" not in prompt else "right"
    bench.engine.hold = asyncio.Event()
    async with bench.running():
        await until(lambda: len(bench.engine.running) == 4)
        bench.engine.down = True
        bench.engine.hold.set()
        await until(lambda: bench.engine.refused >= 6)
        assert bench.runtime.counters["episodes"] == 0
        bench.engine.down = False
        batch = await claim(client, 10)
    episodes = [decode(data) for data in batch.episodes]
    assert {episode.attempt for episode in episodes} == {0}
    assert sum(episode.metrics.get("engine_faults", 0) for episode in episodes) >= 4
    assert bench.runtime.counters["engine"] == 0
    assert (await client.status()).counters.get("retried", 0) == 0


async def test_an_engine_that_stays_away_stops_the_runtime_with_a_message(
    renderer: ChatRenderer, store: AnyStore
) -> None:
    bench = Bench(renderer, config(store, limits={"engine_patience_s": 0.2}))
    bench.engine.down = True
    async with bench.running() as task:
        with pytest.raises(Unreachable, match="no engine of engine-0"):
            await asyncio.wait_for(asyncio.shield(task), WAIT_S)


async def test_episodes_are_spread_over_engines_and_stay_on_one(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    bench = Bench(renderer, config(store, concurrency=6), engines=2)
    hold = asyncio.Event()
    for engine in bench.engines:
        engine.hold = hold
        engine.script = lambda prompt, number: "more" if "heard" not in prompt else "right"
    async with bench.running():
        await until(lambda: sum(len(engine.running) for engine in bench.engines) == 6)
        assert [len(engine.running) for engine in bench.engines] == [3, 3]
        hold.set()
        await claim(client, 10)
    for engine in bench.engines:
        opened = [tuple(prompt) for prompt, _ in engine.requests if len(prompt) < 40]
        continued = [prompt for prompt, _ in engine.requests if len(prompt) >= 40]
        assert len(continued) <= len(opened)


async def test_evaluation_waits_for_its_version_and_never_enters_the_queue(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    """Case D7."""
    held_out = {"id": "test/Echo-v0", "kwargs": {"prompt": "Held out."}}
    bench = Bench(renderer, config(store, evaluation_env=held_out))
    evaluation = await client.start_evaluation(1, [0, 1, 2], 2)
    async with bench.running():
        await until(lambda: bench.engine.asked >= 4)
        assert bench.engine.requests == [], "every slot holds an evaluation, and waits for its version"
        bench.engine.version = 1
        status = await finished(client, evaluation)
        ready = await claim(client, 10)
    assert status.failed == 0
    for data in status.episodes:
        episode = decode(data)
        assert {v for action in episode.actions for v in action.versions} == {1}
        assert episode.segments[0].text.count("Held out.") == 1
    assert not {decode(data).id for data in ready.episodes} & {decode(data).id for data in status.episodes}
    assert len({decode(data).id for data in status.episodes}) == 6


async def test_evaluation_of_a_version_that_is_past_is_refused_not_mixed(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    """Case D7: pinned means pinned."""
    bench = Bench(renderer, config(store))
    bench.engine.version = 5
    evaluation = await client.start_evaluation(4, [0], 1)
    async with bench.running():
        status = await finished(client, evaluation)
    assert status.failed == 1
    assert status.episodes == []


async def test_an_episode_outlives_the_death_of_the_store(renderer: ChatRenderer, store_process: StoreProcess) -> None:
    """Case D3, runtime side: what was finished while the store was away is delivered when it is back."""
    client = StoreClient(store_process.url)
    bench = Bench(renderer, config(store_process))
    bench.engine.hold = asyncio.Event()
    async with bench.running():
        await until(lambda: len(bench.engine.running) == 4)
        await store_process.kill()
        bench.engine.hold.set()
        await until(lambda: bench.runtime.counters["store_retries"] >= 4)
        await store_process.start()
        batch = await claim(client, 10)
    assert len(batch.episodes) == 10
    assert len({decode(data).id for data in batch.episodes}) == 10
    assert {decode(data).attempt for data in batch.episodes} == {0}, "no episode was run twice"
    await client.close()


async def test_a_store_that_stays_away_stops_the_runtime_with_a_message(
    renderer: ChatRenderer, store_process: StoreProcess
) -> None:
    """Case D8, runtime side."""
    bench = Bench(renderer, config(store_process, limits={"store_patience_s": 0.3}))
    bench.engine.hold = asyncio.Event()
    async with bench.running() as task:
        await until(lambda: len(bench.engine.running) == 4)
        await store_process.kill()
        bench.engine.hold.set()
        with pytest.raises(Unreachable, match=r"raise limits\.store_patience_s"):
            await asyncio.wait_for(asyncio.shield(task), WAIT_S)


async def test_cancellation_leaves_nothing_behind(renderer: ChatRenderer, store: AnyStore, client: StoreClient) -> None:
    """Case C: aborted (shutdown). Requests are aborted, tickets given back, environments closed, tasks awaited."""
    before = asyncio.all_tasks()
    bench = Bench(renderer, config(store))
    bench.engine.hold = asyncio.Event()
    async with bench.running():
        await until(lambda: len(bench.engine.running) == 4)
        assert (await client.status()).leased == 4
    assert bench.engine.running == {}
    assert len(bench.engine.aborted) == 4
    assert [env.closed for env in bench.envs] == [1, 1, 1, 1]
    status = await client.status()
    assert status.leased == 0
    assert status.metrics["waiting"] == 4, "the tickets can be dealt again"
    left = asyncio.all_tasks() - before
    assert [task for task in left if "RequestHandler" not in repr(task)] == [], "(those are the store's, in this loop)"


async def test_episodes_longer_than_the_patience_leave_the_store_its_patience(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D8, runtime side: the patience counts from the first request that fails, not from the last that was made."""
    bench = Bench(renderer, config(store, limits={"store_patience_s": 2.0}))
    bench.engine.hold = asyncio.Event()
    lease = bench.store.lease

    async def away_once(n: int, worker: str, wait_s: float = 0.0) -> list[Ticket]:
        monkeypatch.setattr(bench.store, "lease", lease)
        raise StoreFault("the store is being started again")

    async with bench.running() as task:
        await until(lambda: len(bench.engine.running) == 4)
        monkeypatch.setattr(bench.store, "lease", away_once)
        await asyncio.sleep(2.5)  # no slot is idle: the store is not asked for anything
        bench.engine.hold.set()
        await claim(client, 10)
        assert not task.done()


async def test_a_finished_episode_is_delivered_in_the_shutdown(
    renderer: ChatRenderer, store_process: StoreProcess
) -> None:
    """Nothing finished is lost: a store that comes back during the shutdown still gets it."""
    client = StoreClient(store_process.url)
    bench = Bench(renderer, config(store_process, concurrency=1, limits={"shutdown_s": 40.0}))
    bench.engine.hold = asyncio.Event()
    async with bench.running() as task:
        await until(lambda: bench.engine.running)
        await store_process.kill()
        bench.engine.hold.set()
        await until(lambda: bench.runtime.counters["store_retries"])
        task.cancel()
        await store_process.start()
        await asyncio.wait({task}, timeout=WAIT_S)
    assert (await client.status()).ready == 1
    await client.close()


async def test_when_every_ticket_fails_the_runtime_says_so_and_stops(renderer: ChatRenderer, store: AnyStore) -> None:
    refused = EngineFault("400: top_k is not supported")
    bench = Bench(renderer, config(store, faults_in_a_row=5), script=lambda prompt, number: refused)
    async with bench.running() as task:
        with pytest.raises(NothingWorks, match="top_k is not supported"):
            await asyncio.wait_for(asyncio.shield(task), WAIT_S)


async def test_an_environment_that_cannot_be_made_is_a_configuration_error(
    renderer: ChatRenderer, store: AnyStore
) -> None:
    broken = {"id": "sao/PythonTIR-v0", "kwargs": {"max_turn": 3}}
    bench = Bench(renderer, config(store, env=broken), make_env=lambda chosen: make_core(chosen.id, **chosen.kwargs))
    async with bench.running() as task:
        with pytest.raises(ConfigError, match=r"cannot make sao/PythonTIR-v0: .*max_turn"):
            await asyncio.wait_for(asyncio.shield(task), WAIT_S)


async def test_an_episode_the_store_never_took_is_delivered_by_the_next_runtime(
    renderer: ChatRenderer, store_process: StoreProcess, tmp_path: Path
) -> None:
    """Case D3, runtime side: nothing finished is lost, even when the runtime has to leave first."""
    chosen = config(store_process, concurrency=1, spool=str(tmp_path / "spool"), limits={"store_patience_s": 0.2})
    bench = Bench(renderer, chosen)
    bench.engine.hold = asyncio.Event()
    async with bench.running() as task:
        await until(lambda: bench.engine.running)
        await store_process.kill()
        bench.engine.hold.set()
        with pytest.raises(Unreachable):
            await asyncio.wait_for(asyncio.shield(task), WAIT_S)
    (kept,) = (tmp_path / "spool").iterdir()
    await store_process.start()
    second = Bench(renderer, chosen)
    async with second.running(), StoreClient(store_process.url) as client:
        batch = await claim(client, 10)
        # The claim's answer may be here before the last delivery's is.
        await until(lambda: second.runtime.counters["episodes"] >= 9)
    assert not kept.exists()
    assert decode(batch.episodes[0]).id == kept.stem
    assert second.runtime.counters["episodes"] == 9, "it was not run again"
