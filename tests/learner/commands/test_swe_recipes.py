"""The recipes for repositories: keys that the environment takes, traces that fit, and a run in real containers."""

from __future__ import annotations

import asyncio
import io
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console
from run_tools import ROOT, TrainCommand, last_step, metrics, training

from agent.chat.renderer import ChatRenderer
from agent.store.reading import EpisodeFilter, EpisodeReader
from envs import make_core
from envs.core import Message
from learner.config import Recipe, load_recipe
from learner.data.traces import encode_trace
from learner.model.tiny import train_tokenizer
from learner.run.display import Display
from learner.sft import collect_traces
from sandboxes.docker.engine import DockerEngine
from sandboxes.docker.labels import LABEL_OWNER, machine

TINY = ROOT / "recipes" / "swe_tiny.yaml"
LARGE = ROOT / "recipes" / "swe_30b.yaml"


def actions(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("path", [TINY, LARGE], ids=lambda path: path.stem)
def test_the_gate_is_the_narrow_one_and_an_episode_has_300_turns(path: Path) -> None:
    """The paper's numbers for repositories; the environments take every key that the recipe gives them."""
    recipe = load_recipe(path)
    algorithm = recipe.learner.resolve()
    assert (algorithm.eps_low, algorithm.eps_high) == (0.8, 3.0)
    for env in (recipe.env, recipe.evaluation.env):
        assert env is not None
        assert env.id == "sao/SWEBench-v0"
        assert env.kwargs["max_turns"] == 300
        make_core(env.id, **env.kwargs)
        # Grading is a step too.
        limit_s = env.kwargs.get("call_timeout_s", 120.0) + 2 * env.kwargs.get("test_timeout_s", 1800.0)
        assert recipe.runtime.limits.step_s > limit_s / 2


def test_at_full_scale_the_tools_are_openhands_and_the_context_128k() -> None:
    recipe = load_recipe(LARGE)
    assert recipe.env.kwargs["scaffold"] == "openhands"
    assert recipe.runtime.python == Path(".venv-openhands/bin/python")
    assert recipe.runtime.max_context_tokens == 131_072
    assert recipe.learner.batch_size == 128


async def test_a_cold_start_needs_no_container_and_its_traces_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every trace fits the context, every action a turn's limit; else the policy would learn what it may not do."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    recipe: Recipe = load_recipe(TINY)
    assert recipe.sft is not None
    assert recipe.model.tiny is not None
    with Display("swe_tiny", console=Console(file=io.StringIO())) as display:
        clean, imperfect = await collect_traces(recipe, recipe.sft, display)
    assert len(clean) == recipe.sft.clean_traces
    assert len(imperfect) == recipe.sft.imperfect_traces
    everything = [*clean, *imperfect]
    corpus = [f"{m['role']}\n{m['content']}" for messages in everything for m in messages]
    train_tokenizer(corpus[:4000], recipe.model.tiny.vocab_size).save_pretrained(tmp_path)
    renderer = ChatRenderer.from_pretrained(tmp_path)
    different = {str(messages): messages for messages in everything}.values()
    assert max(len(encode_trace(messages, renderer)[0]) for messages in different) < recipe.runtime.max_context_tokens
    longest = max(len(renderer.encode_action(action)) for messages in different for action in actions(messages))
    assert longest < recipe.runtime.max_tokens_per_turn


SMALL = [
    "sft.imperfect_steps=60",
    "value_pretraining.episodes=4",
    "value_pretraining.held_out_episodes=2",
    "value_pretraining.steps=1",
    "learner.batch_size=4",
    "learner.tracker=null",
    "evaluation.tasks=1",
    "evaluation.samples=1",
]


def containers_of(owners: set[int]) -> list[str]:
    """Containers that processes with these ids made on this machine, when they had a minute to go."""

    async def find() -> list[str]:
        engine = DockerEngine()
        try:
            found = await engine.call(lambda: engine.client.api.containers(all=True, filters={"label": LABEL_OWNER}))
        finally:
            await engine.close()
        names = {f"{machine()}:{pid}" for pid in owners}
        return [c["Id"] for c in found if c["Labels"][LABEL_OWNER].rpartition(":")[0] in names]

    deadline = time.monotonic() + 60
    while (left := asyncio.run(find())) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def pids(command: TrainCommand) -> set[int]:
    """Process ids of everything that the command was seen to start."""
    command.watch()
    return {process.pid for process in command.descendants}


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.xdist_group("demo-images")
@pytest.mark.timeout(3600)
def test_a_run_trains_in_real_containers_and_leaves_none(tmp_path: Path) -> None:
    """Cases C and D8: a runtime that is killed in mid-episode leaves containers, which the same command sweeps when it
    goes on; Ctrl-C, with episodes under way, leaves none. What is trained ended by itself or by a cap."""
    words = [str(TINY), f"runs_dir={tmp_path}", *SMALL, "learner.steps=50"]
    folder = tmp_path / "swe_tiny"
    with training(*words, output=tmp_path / "first") as command:
        command.wait_for(lambda: last_step(folder) >= 1, within_s=2400)
        owners = pids(command)
        command.child("agent.runtime").kill()
        assert command.end(within_s=600) == 1
        assert "the runtime ended with code -9" in command.said
        assert command.survivors() == []
    reached = last_step(folder)
    with training(*words, output=tmp_path / "second") as command:
        command.wait_for(lambda: last_step(folder) > reached, within_s=1200)
        owners |= pids(command)
        command.process.send_signal(signal.SIGINT)
        assert command.end(within_s=600) == 0, command.said[-2000:]
        assert command.survivors() == []
    assert containers_of(owners) == []
    steps = [line["step"] for line in metrics(folder) if "rollout/reward" in line]
    with EpisodeReader(folder / "episodes.sqlite") as reader:
        rows = reader.list(EpisodeFilter(status="trained", limit=1000))
    assert len(rows) == 4 * max(steps)
    assert {row.env_id for row in rows} == {"sao/SWEBench-v0"}
    assert {row.stop_reason for row in rows} <= {"terminated", "truncated_context", "truncated_turns"}
