"""The learner's engines: published to when they are there, started again when they end, told apart when they refuse."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from control_server import WAIT_S, ControlServer, servers, until
from learner_tools import micro_recipe, write_micro_model
from rich.console import Console

from agent.doors.door import WrongKey
from agent.engines.client import HttpEngine
from agent.engines.local.launch import local_engine
from learner.config import RecipeError, parse_recipe
from learner.faults import LearnerFault
from learner.pretrain_value import collect_episodes
from learner.run.display import Display
from learner.services.engine_fleet import Fleet
from learner.services.engine_launchers import engine_devices, launcher
from learner.services.processes import Services


def fleet_of(found: list[ControlServer], folder: Path, *, patience_s: float = WAIT_S) -> Any:
    recipe = micro_recipe(
        folder,
        engine={"max_context": 512, "urls": [server.url for server in found]},
        runtime={"max_context_tokens": 400, "max_tokens_per_turn": 16, "limits": {"engine_patience_s": patience_s}},
    )
    return Fleet.start(recipe, model=folder / "start", version=0, folder=folder)


async def test_external_engines_are_given_the_weights_before_anything_runs(tmp_path: Path) -> None:
    """Whatever they were started with, and whatever a run before left in them."""
    async with servers(2) as found:
        found[1].label = "0"
        async with fleet_of(found, tmp_path) as fleet:
            await until(lambda: len(fleet.engines) == 2)
            assert [server.published for server in found] == [[("0", "start")]] * 2


async def test_an_engine_with_another_key_is_refused_at_the_start_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is wrong stays wrong: the patience for an engine that is away, ten minutes, would be for nothing."""
    locked = ControlServer()
    locked.key = "the-key-of-this-engine"
    await locked.start()
    try:
        monkeypatch.delenv("SAO_KEY", raising=False)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(WrongKey, match=rf"engine {locked.url}.*401.*SAO_KEY"):
                async with fleet_of([locked], tmp_path, patience_s=10 * WAIT_S):
                    pass
        assert not locked.published
        monkeypatch.setenv("SAO_KEY", locked.key)
        async with fleet_of([locked], tmp_path):
            assert locked.published == [("0", "start")]
    finally:
        await locked.stop()


async def test_an_engine_that_is_down_at_the_start_is_waited_for_and_then_named(tmp_path: Path) -> None:
    """Bad input: engine down at start."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = ControlServer()
        dead.port = closed.getsockname()[1]
    with pytest.raises(LearnerFault, match=rf"{dead.url}.*is it running.*engine_patience_s"):
        async with fleet_of([dead], tmp_path, patience_s=0.3):
            pass
    starting = asyncio.create_task(dead.start())
    async with fleet_of([dead], tmp_path) as fleet:
        assert len(fleet.engines) == 1
    await starting
    await dead.stop()


async def test_a_publication_to_an_engine_that_is_down_is_made_when_it_is_back(tmp_path: Path) -> None:
    """Bad input: engine down in the middle. One of two is enough; the other gets the newest, not each in between."""
    async with servers(2) as found, fleet_of(found, tmp_path) as fleet:
        await until(lambda: len(fleet.engines) == 2)
        await found[0].stop()
        for version in (1, 2):
            await fleet.publish(version, tmp_path / f"v{version}", timeout_s=10)
            assert [e.url for e in fleet.engines] == [found[1].url]
        assert len(await fleet.healths()) == 1
        found[0].label = "base"
        await found[0].start()
        await until(lambda: len(fleet.engines) == 2)
        assert found[0].published == [("0", "start"), ("2", "v2")]
        fleet.check()


async def test_with_the_only_engine_down_a_publication_waits_for_it(tmp_path: Path) -> None:
    async with servers(1) as found, fleet_of(found, tmp_path) as fleet:
        await found[0].stop()
        publishing = asyncio.create_task(fleet.publish(1, tmp_path / "v1", timeout_s=10))
        await until(lambda: fleet._troubles())
        assert not publishing.done()
        await found[0].start()
        await asyncio.wait_for(publishing, WAIT_S)
        assert found[0].published[-1] == ("1", "v1")


async def test_an_engine_that_stays_away_ends_the_run_with_its_name(tmp_path: Path) -> None:
    async with servers(1) as found, fleet_of(found, tmp_path) as fleet:
        await found[0].stop()
        fleet._patience_s = 0.5
        with pytest.raises(LearnerFault, match=found[0].url):
            await fleet.publish(1, tmp_path / "v1", timeout_s=10)


async def test_the_same_version_can_be_published_again(tmp_path: Path) -> None:
    """After a probe that found an engine on other weights."""
    async with servers(1) as found, fleet_of(found, tmp_path) as fleet:
        for _ in range(2):
            await fleet.publish(1, tmp_path / "v1", timeout_s=10)
        assert found[0].published == [("0", "start"), ("1", "v1"), ("1", "v1")]


async def test_an_engine_that_was_restarted_by_others_is_published_to_again(tmp_path: Path) -> None:
    """Its label says so, even if it was never seen to be away."""
    async with servers(1) as found, fleet_of(found, tmp_path) as fleet:
        await fleet.publish(3, tmp_path / "v3", timeout_s=10)
        found[0].label = "0"
        await until(lambda: found[0].label == "3")
        assert found[0].published[-1] == ("3", "v3")
        fleet.check()


@pytest.mark.parametrize(
    "answers", [[(400, "no tensor named lm_head")], [(500, "no tensor named lm_head")] * 3], ids=["400", "500s"]
)
async def test_an_engine_with_another_model_is_said_at_once(tmp_path: Path, answers: list[tuple[int, str]]) -> None:
    """Bad input: a model that differs from the learner's. vLLM says 500 to it."""
    async with servers(1) as found:
        found[0].answers = list(answers)
        with pytest.raises(LearnerFault, match=r"no tensor named lm_head.*serve the model of this recipe"):
            async with fleet_of(found, tmp_path):
                pass


async def test_one_500_is_not_the_end(tmp_path: Path) -> None:
    """Bad input: an engine that returns a 500 to a publication, once."""
    async with servers(1) as found, fleet_of(found, tmp_path) as fleet:
        found[0].answers = [(500, "oops")]
        await fleet.publish(1, tmp_path / "v1", timeout_s=10)
        fleet.check()
        assert found[0].label == "1"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_killed_engine_is_started_again_with_the_newest_weights_until_its_restarts_are_spent(
    tmp_path: Path, micro_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real engines; while one is down the other takes the publications. One that hangs counts as dead."""
    recipe = micro_recipe(tmp_path, engine={"max_context": 512, "count": 2, "restarts": 1})
    other = write_micro_model(tmp_path / "v1", seed=5)
    async with Fleet.start(recipe, model=micro_model, version=0, folder=tmp_path) as fleet:
        assert len(fleet.engines) == 2
        urls, (victim, witness) = fleet.urls, fleet._members
        assert victim.process is not None
        victim.process.send_signal(signal.SIGKILL)
        await victim.process.wait()
        await fleet.publish(1, other, timeout_s=60)
        assert witness.engine in fleet.engines
        await until(lambda: len(fleet.engines) == 2)
        assert fleet.urls == urls, "nobody has to learn a new address"
        assert (await victim.engine.health()).version == 1
        fleet.check()
        monkeypatch.setattr("learner.services.engine_fleet._CHECK_S", 2.0)
        monkeypatch.setattr("learner.services.engine_member.HUNG_S", 5.0)
        victim.process.send_signal(signal.SIGSTOP)
        with pytest.raises(LearnerFault, match=r"ended with code -9, after 1 restarts.*engine\.restarts"):
            await until(lambda: fleet.check())
        left = [m.process.pid for m in fleet._members if m.process is not None]
    assert not [pid for pid in left if psutil.pid_exists(pid)]


@pytest.mark.timeout(300)
async def test_value_rollouts_use_the_engines_of_the_recipe_with_the_policys_weights(
    tmp_path: Path, micro_model: Path
) -> None:
    """An engine elsewhere holds other weights, and a runtime elsewhere cannot know of the store of this stage."""
    problems = [{"problem": f"What is {i}+1?", "answer": str(i + 1)} for i in range(4)]
    foreign = write_micro_model(tmp_path / "foreign", seed=9)
    async with local_engine(foreign, version=7, log=tmp_path / "engine.log", max_context=512) as url:
        recipe = micro_recipe(
            tmp_path,
            env={"id": "sao/PythonTIR-v0", "kwargs": {"problems": problems, "max_turns": 2, "spares": 1}},
            engine={"max_context": 512, "urls": [url]},
            runtime={"max_context_tokens": 400, "max_tokens_per_turn": 8, "launch": False, "concurrency": 2},
            store={"url": "http://127.0.0.1:9"},
        )
        display = Display(recipe.name, console=Console(quiet=True))
        with display:
            episodes = await collect_episodes(recipe, micro_model, tmp_path / "value", 3, display)
        assert len(episodes) == 3
        assert {v for e in episodes for a in e.actions for v in a.versions} == {0}
        assert not (tmp_path / "value" / "engine.log").exists(), "no engine was started"
        engine = HttpEngine(url)
        assert (await engine.health()).version == 0
        await engine.close()


async def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with servers(1) as found:
        recipe = micro_recipe(
            tmp_path,
            engine={"max_context": 512, "urls": [found[0].url]},
            runtime={"max_context_tokens": 400, "max_tokens_per_turn": 16, "python": str(tmp_path / "python3.12")},
        )
        with pytest.raises(LearnerFault, match=r"runtime\.python: cannot start .*python3\.12: No such file"):
            async with Services.start(recipe, model=tmp_path, folder=tmp_path / "run", store_config={"tasks": 1}):
                pass


async def test_a_session_after_a_dead_one_gives_its_weights_a_number_of_their_own(tmp_path: Path) -> None:
    """Else one version names two sets of weights: those of the checkpoint, and what the dead one had made since."""
    async with servers(1) as found:
        recipe = micro_recipe(
            tmp_path,
            engine={"max_context": 512, "urls": [found[0].url]},
            runtime={"max_context_tokens": 400, "max_tokens_per_turn": 16, "launch": False},
        )
        start: Any = {"model": tmp_path / "start", "folder": tmp_path / "run", "store_config": {"tasks": 1}}
        async with Services.start(recipe, **start) as services:
            assert found[0].published == [("0", "start")]
            await services.publish(5, tmp_path / "v5", timeout_s=60)
        async with Services.start(
            recipe, **start, checkpoint_version=5
        ):  # the checkpoint's weights are those of version 5
            assert found[0].published[-1] == ("5", "start")
        for saved, served in ((6, "7"), (4, "8"), (0, "9")):  # died before it had published; before it had saved
            async with Services.start(recipe, **start, checkpoint_version=saved):
                assert found[0].published[-1] == (served, "start")
        async with Services.start(recipe, **start, checkpoint_version=5) as services:
            assert services.fleet is not None
            await services.fleet.publish(20, tmp_path / "v20", timeout_s=60)  # the store does not hear of it
        async with Services.start(recipe, **start, checkpoint_version=5):
            assert found[0].published[-1] == ("21", "start")


@pytest.mark.parametrize(("routing", "returned"), [("own", False), ("watched", True), ("replayed", True)])
async def test_vllm_returns_the_experts_that_the_learner_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, routing: str, returned: bool
) -> None:
    asked: list[dict[str, Any]] = []

    async def launch(model: Path, **options: Any) -> None:
        asked.append(options)

    monkeypatch.setattr("agent.engines.launching.launch_vllm", launch)
    recipe = micro_recipe(tmp_path, engine={"launch": "vllm"}, learner={"routing": routing})
    await launcher(recipe, 0, tmp_path / "log", "")(tmp_path, 0, 0)
    assert asked[0]["returns_experts"] is returned


def test_launched_vllms_get_gpus_of_their_own_after_the_learners() -> None:
    data = json.loads(micro_recipe(Path("runs")).model_dump_json())
    data["engine"] |= {"launch": "vllm", "count": 2}
    data["hardware"] = {"learner_gpus": 1, "engine_gpus": 4, "gpus_per_engine": 2}
    recipe = parse_recipe(data)
    assert [engine_devices(recipe, i, None) for i in range(2)] == ["1,2", "3,4"]
    assert engine_devices(recipe, 1, "7,6,5,4,3") == "4,3"
    with pytest.raises(LearnerFault, match="CUDA_VISIBLE_DEVICES names 4"):
        engine_devices(recipe, 1, "7,6,5,4")
    data["engine"]["count"] = 1
    with pytest.raises(RecipeError, match=r"engine\.count 1 .* hardware\.engine_gpus 4"):
        parse_recipe(data)
