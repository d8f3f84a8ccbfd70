"""`python -m agent.solve` on a repository: one agent, watched; and what it says to bad arguments."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from byte_model import write_byte_model
from rich.console import Console
from scripted_engine import scripted_engine, unused_port

from agent.episode import StopReason, decode
from agent.solve.__main__ import main, parser
from envs.swe_bench.demo.scripts import SUBMIT, call, malformed
from sandboxes.docker.engine import DockerEngine
from sandboxes.docker.labels import LABEL_OWNER, owner

ROW = "sao-demo__tablet-1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("solve") / "model")


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[str]:
    async with scripted_engine(model) as url:
        yield url


async def solved(*words: str) -> tuple[int, str]:
    """Exit status and what was shown; the command has an event loop of its own, so it is given a thread."""
    shown = io.StringIO()
    console = Console(file=shown, width=100, force_terminal=False)
    return await asyncio.to_thread(main, list(words), console), shown.getvalue()


async def ours() -> list[str]:
    """Containers that this process owns."""
    docker = DockerEngine()
    try:
        label = f"{LABEL_OWNER}={owner()}"
        found = await docker.call(lambda: docker.client.api.containers(all=True, filters={"label": label}))
        return [item["Id"] for item in found]
    finally:
        await docker.close()


@pytest.mark.docker
@pytest.mark.xdist_group("demo-images")
@pytest.mark.timeout(900)
async def test_an_agent_that_mends_it_is_shown_turn_by_turn(model: Path, engine: str, tmp_path: Path) -> None:
    out = tmp_path / "episode.msgpack"
    status, shown = await solved(
        ROW, "--engine", engine, "--model", str(model), "--scaffold", "bash", "--out", str(out)
    )
    assert status == 0
    for words in (
        "system",
        "user",
        "turn 1",
        "turn 3",
        "cat > tablet/formats/markdown.py",
        "[exit 0]",
        "calls: submit",
    ):
        assert words in shown, shown
    assert "+++ b/tablet/formats/markdown.py" in shown, "the patch is shown"
    assert "correct=True" in shown
    assert "reward 1, terminated, 3 turns" in shown
    assert "version 0" in shown
    episode = decode(out.read_bytes())
    assert (episode.reward, episode.stop_reason, episode.task_id) == (1.0, StopReason.TERMINATED, ROW)
    assert episode.metrics["fail_to_pass_passed"] == episode.metrics["fail_to_pass"] > 0
    assert await ours() == []


@pytest.mark.docker
@pytest.mark.xdist_group("demo-images")
@pytest.mark.timeout(900)
async def test_what_fails_is_told_and_markup_stays_text(model: Path) -> None:
    """A malformed call, a refusal, and a text that looks like terminal markup; a cap on turns grades as it stands."""

    def script(prompt: str) -> str:
        turn = prompt.count("<|im_start|>assistant\n")
        return [malformed("ls"), call("echo '[red]not markup[/red]'"), SUBMIT][turn - 1]

    async with scripted_engine(model, script) as url:
        words = [ROW, "--engine", url, "--model", str(model), "--scaffold", "bash"]
        status, shown = await solved(*words)
        assert status == 0
        assert "unreadable call: Malformed tool call" in shown
        assert "[red]not markup[/red]" in shown
        assert "refusal: no_patch" in shown
        assert "reward 0, terminated, 3 turns" in shown
        status, shown = await solved(*words, "--max-turns", "2", "--shown-chars", "100")
        assert status == 0
        assert "reward 0, truncated_turns, 2 turns" in shown
        assert "characters not shown" in shown
    assert await ours() == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["sao-demo__table-1"], "sao-demo__tablet-1"),
        (["x", "--source", "nowhere.jsonl"], "nowhere.jsonl"),
        ([ROW, "--model", "/no/such/folder"], "--model: no such model folder"),
        ([ROW, "--temperature", "-1"], "--temperature"),
        ([ROW, "--max-context-tokens", "100000"], "--max-context-tokens: 100000 is more than the 32768"),
        ([ROW, "--scaffold", "openhands"], "make openhands"),
        ([ROW, "--max-turns", "0"], "max_turns must be at least 1"),
        ([ROW, "--out", "/no/such/folder/episode"], "--out: there is no folder /no/such/folder"),
        ([ROW, "--out", "/tmp"], "--out: /tmp is a folder"),
    ],
)
async def test_a_wrong_argument_is_one_paragraph_and_status_2(
    words: list[str], named: str, model: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, shown = await solved("--engine", engine, "--model", str(model), *words)
    told = capsys.readouterr().err
    assert status == 2, told
    assert named in told
    assert "\n\n" not in told
    assert "Traceback" not in told + shown


async def test_an_engine_that_is_down_is_status_3(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{await unused_port()}"
    status, _ = await solved(ROW, "--engine", url, "--model", str(model))
    told = capsys.readouterr().err
    assert status == 3
    assert url in told
    assert "is it running?" in told


async def test_no_docker_engine_is_status_3_and_says_how_to_get_one(
    model: Path, engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    status, _ = await solved(ROW, "--engine", engine, "--model", str(model), "--scaffold", "bash")
    assert status == 3
    assert "make sandboxes" in capsys.readouterr().err


def test_help_has_an_example() -> None:
    assert "python -m agent.solve sao-demo__durations-1 --engine" in parser().format_help()
