"""`python -m agent.solve` on other environments than SWE-bench: what is shown, what is drawn, what is refused."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_model import write_byte_model
from engine_process import local_engine_process
from rich.console import Console
from scripted_engine import scripted_engine

from agent.episode import Episode, StopReason, decode
from agent.solve.__main__ import main, parser
from learner.config import TinyModelConfig
from learner.model.tiny import write_tiny_model

PROBLEMS = [{"problem": f"What is {i}*7?", "answer": str(i * 7)} for i in range(20)]
MATH = ["--env", "sao/PythonTIR-v0", "--env-kwargs", f"problems={json.dumps(PROBLEMS)}", "max_turns=3"]
STYLES = ["--env", "sao/StyleShift-v0", "--env-kwargs", "prompts=tiny", "show_candidates=false", "step=0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("solve") / "model")


async def solved(*words: str) -> tuple[int, str]:
    """Exit status and what was shown; the command has an event loop of its own, so it is given a thread."""
    shown = io.StringIO()
    console = Console(file=shown, width=100, force_terminal=False)
    return await asyncio.to_thread(main, list(words), console), shown.getvalue()


def calculates(prompt: str) -> str:
    """Asks Python first, then answers with what it said."""
    if "<|im_start|>tool" not in prompt:
        i = prompt.partition("What is ")[2].partition("*")[0]
        return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': f'print({i}*7)'}})}</tool_call>"
    answer = prompt.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0].strip()
    return rf"\boxed{{{answer}}}"


async def test_a_math_problem_is_shown_with_its_call_its_output_and_its_grade(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "episode.msgpack"
    async with scripted_engine(model, calculates) as url:
        status, shown = await solved(*MATH, "--engine", url, "--model", str(model), "--out", str(out))
    assert status == 0
    episode = decode(out.read_bytes())
    assert (episode.env_id, episode.reward) == ("sao/PythonTIR-v0", 1.0)
    for words in ("user", "What is 0*7?", "turn 1", "print(0*7)", "calls: python", "turn 2", r"\boxed{0}"):
        assert words in shown, shown
    assert "tool_calls=1" in shown
    assert "correct=True" in shown
    assert "reward 1, terminated, 2 turns" in shown
    assert "patch" not in shown


async def test_a_task_is_named_or_drawn_by_the_seed_or_the_first(model: Path, tmp_path: Path) -> None:
    async def task_of(*words: str) -> str:
        out = tmp_path / "episode.msgpack"
        status, _ = await solved(*words, *MATH, "--engine", url, "--model", str(model), "--out", str(out))
        assert status == 0
        return decode(out.read_bytes()).task_id

    async with scripted_engine(model, lambda prompt: "I do not know.") as url:
        first = await task_of()
        drawn = [await task_of("--seed", seed) for seed in ("1", "1", "2")]
        assert drawn[0] == drawn[1]
        assert len({first, *drawn}) == 3
        assert await task_of(drawn[2]) == drawn[2]


async def test_a_short_text_is_shown_with_its_verdict_and_no_word_on_calls(model: Path) -> None:
    async with scripted_engine(
        model, lambda prompt: "yay, look, a cat is so fluffy and tiny, what a cutie pie!"
    ) as url:
        status, shown = await solved(*STYLES, "--engine", url, "--model", str(model))
    assert status == 0
    assert "yay, look" in shown
    assert "style=cute" in shown
    assert "quality=" in shown
    assert "terminated, 1 turns" in shown
    assert "calls:" not in shown


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: what it says is noise, and the environment's answers to it are real."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = TinyModelConfig(vocab_size=300, hidden_size=32, layers=2, experts=0, max_context=512)
    write_tiny_model(folder, shape, [entry["problem"] for entry in PROBLEMS], seed=0)
    return folder


@pytest.fixture(scope="module")
def local_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real engine. It ends when its standard input does, with this process."""
    options = ("--max-context", "512")
    with local_engine_process(tiny_model, tmp_path_factory.mktemp("engine"), *options) as url:
        yield url


async def test_on_the_real_engine_the_same_seed_gives_the_same_episode(
    local_engine: str, tiny_model: Path, tmp_path: Path
) -> None:
    async def episode_of(seed: int) -> Episode:
        out = tmp_path / f"{seed}.msgpack"
        words = ["--max-tokens-per-turn", "24", "--seed", str(seed), "--out", str(out)]
        short = ['system_prompt=""', "tool_format=fenced"]
        status, shown = await solved(*MATH, *short, "--engine", local_engine, "--model", str(tiny_model), *words)
        assert status == 0, shown
        assert "version 0" in shown
        return decode(out.read_bytes())

    one, again, other = [await episode_of(seed) for seed in (5, 5, 6)]
    assert one.stop_reason in (StopReason.TERMINATED, StopReason.TRUNCATED_TURN_TOKENS)
    assert one.task_id == again.task_id
    assert [action.token_ids for action in one.actions] == [action.token_ids for action in again.actions]
    assert [action.token_ids for action in one.actions] != [action.token_ids for action in other.actions]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([*MATH, "--source", "demo"], "--source is short for an argument of sao/SWEBench-v0; give sao/PythonTIR-v0"),
        ([*MATH, "--scaffold", "bash"], "--scaffold is short for an argument of sao/SWEBench-v0"),
        ([*STYLES, "--max-turns", "3"], "--max-turns is short for an argument of sao/SWEBench-v0"),
        (["--source", "demo", "--env-kwargs", "instances=demo"], "--source and --env-kwargs instances= are the same"),
        (["--env", "sao/Nothing-v0"], "unknown environment 'sao/Nothing-v0'"),
        ([*MATH, "turns=3"], "sao/PythonTIR-v0 cannot be made with them"),
        ([*MATH, "max_turns=0"], "max_turns must be at least 1"),
        ([*MATH, "a-task"], "--env-kwargs: cannot read 'a-task': write key=value (and TASK_ID before --env-kwargs)"),
        ([*MATH, "spares={"], "the value of spares"),
        (["a-task", *MATH], "TASK_ID: there is no 'a-task' among the 20 tasks of sao/PythonTIR-v0"),
    ],
)
async def test_a_wrong_argument_of_the_environment_is_named(
    words: list[str], named: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = await solved(*words, "--engine", "http://127.0.0.1:9", "--model", str(model))
    assert status == 2
    assert named in capsys.readouterr().err


def test_help_has_an_example_of_several_environments() -> None:
    text = parser().format_help()
    for env_id in ("sao/PythonTIR-v0", "sao/StyleShift-v0"):
        assert f"python -m agent.solve --env {env_id} --env-kwargs" in text
