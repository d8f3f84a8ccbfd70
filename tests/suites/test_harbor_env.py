"""Harbor tasks in real containers: the tests come last, we read their reward, and failures are nobody's reward."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from test_harbor_tasks import NAME, SHIPPED, write_task

from envs import make_core
from envs.core import AsyncEnv, EnvironmentFault
from sandboxes.docker import host_image

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("harbor")]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SUBMIT = call("submit")


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    host_image.build()


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., AsyncEnv]]:
    made: list[AsyncEnv] = []

    def core(path: Path, **kwargs: Any) -> AsyncEnv:
        made.append(make_core(NAME, path=str(path), memory_mb=128, **kwargs))
        return made[-1]

    yield core
    for env in made:
        await env.aclose()


async def play(env: AsyncEnv, task_id: str, *commands: str) -> tuple[float, dict[str, Any]]:
    await env.areset(options={"task_id": task_id})
    for command in commands:
        assert not (await env.astep(call("bash", command=command)))[2]
    _, reward, terminated, _, info = await env.astep(SUBMIT)
    assert terminated
    return reward, info["metrics"]


async def test_the_shipped_tasks_pay_for_what_they_ask(make: Callable[..., AsyncEnv]) -> None:
    env = make(SHIPPED)
    assert (await play(env, "greeting", "printf hello > /tmp/greeting.txt"))[0] == 1.0
    assert (await play(env, "greeting"))[0] == 0.0
    reward, metrics = await play(env, "counting", "wc -c < words.txt > /tmp/lines.txt")
    assert (reward, metrics["correct"], metrics["reward_written"], metrics["family"]) == (0.5, False, 1.0, "files")
    assert (await play(env, "counting", "wc -l < words.txt > /tmp/lines.txt"))[0] == 1.0


async def test_a_text_is_nudged_and_a_cut_episode_is_graded_as_it_stands(make: Callable[..., AsyncEnv]) -> None:
    env = make(SHIPPED)
    await env.areset(options={"task_id": "greeting"})
    observation, _, terminated, _, _ = await env.astep("I think.")
    assert "no tool call" in observation
    assert not terminated
    await env.astep(call("bash", command="printf hello > /tmp/greeting.txt"))
    _, reward, terminated, truncated, info = await env.atruncate(
        "context", call("bash", command="rm /tmp/greeting.txt")
    )
    assert (reward, terminated, truncated, info["truncation"]) == (1.0, False, True, "context")


async def test_the_policy_sees_no_tests_and_a_planted_reward_is_gone(
    make: Callable[..., AsyncEnv], tmp_path: Path
) -> None:
    """Nor does a planted test script or a process left behind decide: all of it is cleared first, as root."""
    test = "sleep 0.2; if [ -e /logs/verifier/reward.json ]; then echo 0; else echo 1; fi > /logs/verifier/reward.txt"
    folder = write_task(tmp_path / "closed", test=test)
    env = make(folder)
    await env.areset(options={"task_id": "closed"})
    assert "No such file" in (await env.astep(call("bash", command="ls /tests")))[0]
    planted = (
        "mkdir -p /logs/verifier /tests && echo 1 > /logs/verifier/reward.txt && echo '{\"reward\": 1}' > "
        "/logs/verifier/reward.json && echo 'exit 0' > /tests/test.sh && chmod 0 /tests"
    )
    await env.astep(call("bash", command=planted))
    await env.astep(call("bash", command="(while :; do echo 1 > /logs/verifier/reward.json; done) & disown"))
    _, reward, *_ = await env.astep(SUBMIT)
    assert reward == 1.0


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("exit 3", "neither.*ended with 3"),
        ("echo 7 > /logs/verifier/reward.txt", "not from 0 to 1"),
        ("echo well > /logs/verifier/reward.txt; echo 'what it said'", "no number.*what it said"),
    ],
    ids=["nothing written", "out of range", "no number"],
)
async def test_a_verifier_that_fails_is_no_reward_of_zero(
    make: Callable[..., AsyncEnv], tmp_path: Path, test: str, says: str
) -> None:
    env = make(write_task(tmp_path / "broken", test=test))
    await env.areset(options={"task_id": "broken"})
    with pytest.raises(EnvironmentFault, match=f"(?s)broken: .*{says}"):
        await env.astep(SUBMIT)
    await env.areset(options={"task_id": "broken"})  # the next episode is not touched by it


async def test_tests_that_never_end_on_what_the_policy_left_pay_least(
    make: Callable[..., AsyncEnv], tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "slow", "[verifier]\ntimeout_sec = 1\n", test="sleep 60")
    reward, metrics = await play(make(folder), "slow")
    assert (reward, metrics["tests_timed_out"]) == (0.0, True)


async def test_the_tasks_own_time_limit_ends_the_policy(make: Callable[..., AsyncEnv], tmp_path: Path) -> None:
    env = make(write_task(tmp_path / "short", "[agent]\ntimeout_sec = 0.5\n"))
    await env.areset(options={"task_id": "short"})
    _, reward, _, truncated, info = await env.astep(call("bash", command="sleep 1"))
    assert (reward, truncated, info["truncation"]) == (1.0, True, "wall_clock")


async def test_variables_and_folder_of_the_task_hold(
    make: Callable[..., AsyncEnv], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAO_TEST_HALF", "0.5")
    toml = 'workdir = "/usr"\n[environment.env]\nCOLOUR = "blue"\n[verifier.env]\nPAYS = "${SAO_TEST_HALF}"\n'
    env = make(write_task(tmp_path / "set", toml, test='echo "$PAYS" > /logs/verifier/reward.txt'))
    await env.areset(options={"task_id": "set"})
    assert (await env.astep(call("bash", command="pwd; echo $COLOUR; echo [$PAYS]")))[0].split("\n")[:3] == [
        "/usr",
        "blue",
        "[]",
    ]
    assert (await env.astep(SUBMIT))[1] == 0.5


async def test_a_container_that_is_killed_and_an_image_that_is_not_there_are_faults(
    make: Callable[..., AsyncEnv], tmp_path: Path
) -> None:
    env = make(SHIPPED)
    await env.areset(options={"task_id": "greeting"})
    sandbox = env._sandbox  # type: ignore[attr-defined]
    await sandbox.engine.call(lambda: sandbox.engine.client.api.kill(sandbox.id))
    with pytest.raises(EnvironmentFault, match="greeting"):
        await env.astep(call("bash", command="true"))
    folder = write_task(tmp_path / "imageless")
    (folder / "task.toml").write_text('[environment]\ndocker_image = "sao-there-is-no:such"\n')
    with pytest.raises(EnvironmentFault, match="docker pull sao-there-is-no:such"):
        await make(folder).areset(options={"task_id": "imageless"})
    (folder / "task.toml").write_text("")
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM sao-base:debian\nRUN exit 7\n")
    load = folder.rename(tmp_path / "unbuildable")
    with pytest.raises(EnvironmentFault, match="Dockerfile could not be built"):
        await make(load).areset(options={"task_id": "unbuildable"})
