"""`python -m agent.evaluate` from the command line to the report, over real HTTP and with the real environments."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from byte_model import write_byte_model
from chat_server import ChatServer, asked, calculates, call, refuses
from rich.console import Console
from scripted_engine import scripted_engine

from agent.evaluate.__main__ import main
from agent.evaluate.sample import Sample, decode

PROBLEMS = [{"problem": f"What is {i}*7?", "answer": str(i * 7)} for i in range(6)]
MATH = ["sao/PythonTIR-v0", "--env-arg", f"problems={json.dumps(PROBLEMS)}", "--env-arg", "max_turns=4"]
STYLES = ["sao/StyleShift-v0", "--env-arg", "prompts=tiny", "--env-arg", "step=0", "--env-arg", "show_candidates=false"]


@pytest.fixture
async def server() -> AsyncIterator[ChatServer]:
    async with ChatServer(calculates).running() as running:
        yield running


async def evaluated(*words: str, terminal: bool = False) -> tuple[int, str]:
    """Exit status and what was shown; the command has an event loop of its own, so it is given a thread."""
    shown = io.StringIO()
    console = Console(file=shown, width=110, force_terminal=terminal)
    return await asyncio.to_thread(main, list(words), console), shown.getvalue()


def at(server: ChatServer, out: Path, *words: str) -> list[str]:
    return ["--url", server.url, "--model", "m", "--out", str(out), *words]


def kept(out: Path) -> list[Sample]:
    return [decode(line) for line in (out / "samples.jsonl").read_bytes().splitlines(keepends=True)]


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


async def test_math_with_the_real_sandbox_by_structured_calls(server: ChatServer, tmp_path: Path) -> None:
    status, shown = await evaluated(*MATH, *at(server, tmp_path), "--samples", "2", "--concurrency", "3")
    assert status == 0, shown
    samples = kept(tmp_path)
    assert len(samples) == 12
    assert {sample.reward for sample in samples} == {1.0}
    assert all(sample.metrics["tool_calls"] == 1 and sample.turns == 2 for sample in samples)
    assert server.most_in_flight <= 3
    for words in ("12 of 12", "pass@2", "Wilson over tasks", "inline/5", "report.html"):
        assert words in shown, shown
    page = (tmp_path / "report.html").read_text()
    assert "print(5*7)" in page
    assert "<b>easy</b>" not in page
    tool_turn = next(body for body in server.bodies if body["messages"][-1]["role"] == "tool")
    assert tool_turn["messages"][-2]["tool_calls"][0]["id"] == tool_turn["messages"][-1]["tool_call_id"] == "call_abc"
    assert tool_turn["tools"][0]["function"]["name"] == "python"


async def test_calls_in_the_text_are_carried_out_too_in_the_models_own_form(server: ChatServer, tmp_path: Path) -> None:
    def glm(body: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][-1]["role"] == "tool":
            return {"content": rf"\boxed{{{body['messages'][-1]['content'].strip()}}}"}
        number = asked(body).partition("What is ")[2].partition("*")[0]
        code = f"<arg_key>code</arg_key><arg_value>print({number}*7)</arg_value>"
        return {"content": f"<think>hm</think><tool_call>python\n{code}</tool_call>"}

    server.script = glm
    for mode in ("structured", "text"):
        out = tmp_path / mode
        status, shown = await evaluated(
            *MATH, *at(server, out), "--calls", mode, "--tool-format", "glm", "--limit", "2"
        )
        assert status == 0, shown
        assert [sample.reward for sample in kept(out)] == [1.0, 1.0]
    assert server.bodies[-1]["tool_choice"] == "none"


async def test_several_calls_and_malformed_ones_are_answered_and_the_model_goes_on(
    server: ChatServer, tmp_path: Path
) -> None:
    def careless(body: dict[str, Any]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if turn == 0:
            return {"tool_calls": [call("python", {"code": "1"}, "x"), call("python", {"code": "2"}, "x")]}
        if turn == 1:
            return {"tool_calls": [call("python", '{"code": "1', "y")]}
        return {"content": r"\boxed{0}"}

    server.script = careless
    status, shown = await evaluated(*MATH, *at(server, tmp_path), "--limit", "1")
    assert status == 0, shown
    (sample,) = kept(tmp_path)
    assert (sample.reward, sample.metrics["malformed_calls"]) == (1.0, 2)
    answers = [message for message in server.bodies[-1]["messages"] if message["role"] == "tool"]
    assert ["2 calls in one message" in answers[0]["content"], "2 calls" in answers[1]["content"]] == [True, True]
    assert "not an object" in answers[2]["content"]


async def test_styles_are_judged_and_texts_beside_each_other_differ(server: ChatServer, tmp_path: Path) -> None:
    def writes(body: dict[str, Any]) -> dict[str, Any]:
        assert "tools" not in body
        return {"content": f"yay, look, a {asked(body).split()[-1]} is so fluffy and tiny, what a cutie pie!"}

    server.script = writes
    status, shown = await evaluated(*STYLES, *at(server, tmp_path), "--limit", "3", "--passes-at", "1")
    assert status == 0, shown
    assert all(sample.metrics["style"] == "cute" and sample.turns == 1 for sample in kept(tmp_path))


async def test_limits_truncate_and_are_graded_as_they_stand(server: ChatServer, tmp_path: Path) -> None:
    def one_way_each(body: dict[str, Any]) -> dict[str, Any]:
        number = asked(body)[8]
        if number == "0":
            return {"content": r"so \boxed{0} and", "finish_reason": "length", "usage": {"completion_tokens": 16}}
        if number == "1":
            return {"content": r"so \boxed{7} and", "finish_reason": "length", "usage": {"completion_tokens": 9}}
        return {"tool_calls": [call("python", {"code": "1"})], "content": r"\boxed{14}" if number == "2" else ""}

    async def door(number: int, body: dict[str, Any]) -> web.Response | None:
        if asked(body)[8] == "3" and len(body["messages"]) > 2:
            return refuses(400, "This model's maximum context length is 100 tokens")
        return None

    server.script, server.door = one_way_each, door
    status, shown = await evaluated(
        *MATH, *at(server, tmp_path), "--limit", "4", "--max-tokens", "16", "--max-turns", "2"
    )
    assert status == 0, shown
    found = {sample.task_id: (sample.stop_reason, sample.reward) for sample in kept(tmp_path)}
    assert found == {
        "inline/0": ("truncated_turn_tokens", 1.0),
        "inline/1": ("truncated_context", 1.0),
        "inline/2": ("truncated_turns", 1.0),
        "inline/3": ("truncated_context", 0.0),
    }
    assert summary(tmp_path)["truncated"] == {"turn_tokens": 1, "context": 2, "turns": 1}


async def test_a_hanging_endpoint_ends_an_episode_by_its_wall_clock(server: ChatServer, tmp_path: Path) -> None:
    async def door(number: int, body: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    server.door = door
    status, shown = await evaluated(*MATH, *at(server, tmp_path), "--limit", "1", "--episode-timeout", "0.5")
    assert status == 0, shown
    assert kept(tmp_path)[0].stop_reason == "truncated_wall_clock"


async def test_a_terminal_shows_how_far_it_is_the_score_and_who_asks_to_wait(
    server: ChatServer, tmp_path: Path
) -> None:
    async def door(number: int, body: dict[str, Any]) -> web.Response | None:
        return refuses(429, Retry_After="2") if number == 5 else None

    server.door = door
    status, shown = await evaluated(*MATH, *at(server, tmp_path), "--concurrency", "1", terminal=True)
    assert status == 0, shown
    for words in ("2/6", "/min, ", " left", "reward 1.000, passed 100.0%", "asked to wait 2 s", "6 of 6"):
        assert words in shown, words


async def test_the_same_command_goes_on_and_runs_only_what_is_missing(server: ChatServer, tmp_path: Path) -> None:
    async def refuses_some(number: int, body: dict[str, Any]) -> web.Response | None:
        return refuses(403, "flagged by moderation") if asked(body)[8] in "24" else None

    words = [*MATH, *at(server, tmp_path), "--concurrency", "2"]
    server.door = refuses_some
    status, shown = await evaluated(*words)
    assert status == 1, shown
    assert summary(tmp_path)["fault_kinds"] == {"EndpointFault": 2}
    assert summary(tmp_path)["samples"] == 4

    async def opened(number: int, body: dict[str, Any]) -> None:
        return None

    server.door, before = opened, len(server.bodies)
    status, shown = await evaluated(*words)
    assert status == 0, shown
    assert {asked(body)[8] for body in server.bodies[before:]} == {"2", "4"}
    assert (summary(tmp_path)["samples"], summary(tmp_path)["faults"]) == (6, 0)

    before = len(server.bodies)
    status, shown = await evaluated(*words, "--samples", "2", "--tasks", "inline/3", "inline/1")
    assert status == 0, shown
    assert sorted(asked(body)[8] for body in server.bodies[before:]) == ["1", "1", "3", "3"]  # two turns each
    assert summary(tmp_path)["samples"] == 4
    before = len(server.bodies)
    assert (await evaluated(*words))[0] == 0
    assert len(server.bodies) == before


async def test_half_a_line_of_a_killed_session_is_no_sample_and_harms_none(server: ChatServer, tmp_path: Path) -> None:
    words = [*MATH, *at(server, tmp_path), "--limit", "2"]
    assert (await evaluated(*words))[0] == 0
    lines = tmp_path / "samples.jsonl"
    first, second = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(first + second[: len(second) // 2])
    assert (await evaluated(*words))[0] == 0
    assert sorted(sample.key for sample in kept(tmp_path)) == [("inline/0", 0), ("inline/1", 0)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--temperature", "0.5"], "--temperature is null there, 0.5 now"),
        (["--model", "other"], '--model is "m" there, "other" now'),
        (["--env-arg", "max_turns=3"], "--env-arg is "),
        (["--body", "reasoning_effort=low"], "--body is "),
    ],
    ids=["temperature", "model", "env-arg", "body"],
)
async def test_another_evaluation_in_the_same_folder_is_refused_by_name(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], named: str
) -> None:
    words = [*MATH, *at(server, tmp_path), "--limit", "1"]
    assert (await evaluated(*words))[0] == 0
    before = (tmp_path / "samples.jsonl").read_bytes()
    status, _ = await evaluated(*words, *change)
    assert status == 2
    assert named in capsys.readouterr().err
    assert (tmp_path / "samples.jsonl").read_bytes() == before


async def test_a_first_try_that_kept_nothing_ties_nobody(server: ChatServer, tmp_path: Path) -> None:
    async def door(number: int, body: dict[str, Any]) -> web.Response | None:
        return refuses(404, "no such model") if body["model"] == "wrong" else None

    server.door = door
    words = [*MATH, "--url", server.url, "--limit", "1", "--out", str(tmp_path)]
    assert (await evaluated(*words, "--model", "wrong"))[0] == 3
    status, shown = await evaluated(*words, "--model", "m")
    assert status == 0, shown


async def test_faults_alone_tie_nobody_and_are_not_lost(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert (await evaluated("own_envs:Broken", *at(server, tmp_path)))[0] == 1
    assert (await evaluated(*MATH, *at(server, tmp_path), "--limit", "1"))[0] == 0
    assert [sample.reward for sample in kept(tmp_path)] == [1.0]
    assert len((tmp_path / "void.jsonl").read_bytes().splitlines()) == 2
    (tmp_path / "evaluation.json").unlink()
    assert (await evaluated(*MATH, *at(server, tmp_path), "--limit", "1"))[0] == 2
    assert "does not say of what the samples are" in capsys.readouterr().err


async def test_a_wrong_key_is_said_in_one_paragraph_and_asked_once_a_worker(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def door(number: int, body: dict[str, Any]) -> web.Response:
        return refuses(401, "Incorrect API key")

    server.door = door
    status, _ = await evaluated(*MATH, *at(server, tmp_path), "--samples", "50", "--concurrency", "4")
    assert status == 3
    said = capsys.readouterr().err.strip()
    assert said.startswith("agent.evaluate: http://127.0.0.1")
    assert "Incorrect API key" in said
    assert "\n" not in said
    assert len(server.bodies) <= 4
    assert kept(tmp_path) == []


async def test_an_environment_that_always_fails_stops_the_evaluation(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    words = ["own_envs:Broken", *at(server, tmp_path), "--samples", "30", "--concurrency", "2"]
    status, shown = await evaluated(*words)
    assert status == 3, shown
    assert "in a row ended as faults, so it stops here; the last: EnvironmentFault" in capsys.readouterr().err
    assert summary(tmp_path)["faults"] < 20


async def test_anybodys_gymnasium_environment_by_its_class(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    server.script = lambda body: {"content": str(int(body["messages"][-1]["content"].split()[-1]) + 1)}
    words = ["own_envs:Counting", "--env-arg", "seeds={start: 3, count: 4}", *at(server, tmp_path), "--samples", "2"]
    status, shown = await evaluated(*words)
    assert status == 0, shown
    assert sorted({sample.task_id for sample in kept(tmp_path)}) == ["seed-3", "seed-4", "seed-5", "seed-6"]
    assert {(sample.reward, sample.turns) for sample in kept(tmp_path)} == {(1.5, 3)}
    assert summary(tmp_path)["reward"]["method"] == "none"  # all alike, and no share


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("evaluate") / "model")


async def test_an_engine_is_evaluated_by_the_runtimes_own_rollout(model: Path, tmp_path: Path) -> None:
    def acts(prompt: str) -> str:
        if "<|im_start|>tool" not in prompt:
            number = prompt.partition("What is ")[2].partition("*")[0]
            arguments = {"name": "python", "arguments": {"code": f"print({number}*7)"}}
            return f"<tool_call>{json.dumps(arguments)}</tool_call>"
        return rf"\boxed{{{prompt.rpartition('<|im_start|>tool')[2].partition('<|im_end|>')[0].strip()}}}"

    async with scripted_engine(model, acts) as url:
        words = [*MATH, "--engine", url, "--model-folder", str(model), "--out", str(tmp_path), "--limit", "3"]
        status, shown = await evaluated(*words)
        assert status == 0, shown
        again, shown = await evaluated(*words)
        assert again == 0, shown
    samples = kept(tmp_path)
    assert [sample.reward for sample in samples] == [1.0] * 3
    assert all(sample.versions == (0, 0) and sample.tokens.completion > 10 for sample in samples)
    assert samples[0].tokens.prompt > samples[0].tokens.completion
    assert json.loads((tmp_path / "evaluation.json").read_text())["policy version"] == 0
    assert "print(2*7)" in (tmp_path / "report.html").read_text()


async def test_an_engine_behind_a_door_is_named_and_not_asked_for_every_sample(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with scripted_engine(model, lambda prompt: r"\boxed{7}", key="a-key-of-the-team") as url:
        words = [*MATH, "--engine", url, "--model-folder", str(model), "--out", str(tmp_path), "--limit", "2"]
        status, _ = await evaluated(*words)
        said = capsys.readouterr().err
        assert (status, said.count("SAO_KEY")) == (3, 1), said
        monkeypatch.setenv("SAO_KEY", "a-key-of-the-team")
        status, shown = await evaluated(*words)
        assert status == 0, shown


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([*MATH[:1], "--url", "http://host/v1"], "--url and --model say which chat endpoint"),
        ([*MATH, "--url", "ftp://host", "--model", "m"], "--url: must be the endpoint's base"),
        ([*MATH, "--url", "http://host/v1", "--model", "m", "--engine", "http://e"], "--engine for rollout engines"),
        ([*MATH, "--engine", "http://e"], "--engine and --model-folder go together"),
        (["sao/Nothing-v0", "--url", "http://host/v1", "--model", "m"], "unknown environment"),
        ([*MATH, "--env-arg", "turns=3", "--url", "http://host/v1", "--model", "m"], "cannot be made with them"),
        ([*MATH, "--env-arg", "turns", "--url", "http://host/v1", "--model", "m"], "write --env-arg key=value"),
        ([*MATH, "--samples", "0", "--url", "http://host/v1", "--model", "m"], "--samples: "),
        ([*MATH, "--temperature", "-1", "--url", "http://host/v1", "--model", "m"], "--temperature: "),
        ([*MATH, "--tasks", "inline/77", "--url", "http://host/v1", "--model", "m"], "for example, inline/"),
        ([*MATH, "--tasks", "a", "--limit", "1", "--url", "http://host/v1", "--model", "m"], "exclude each other"),
        ([*MATH, "--api-key-env", "sk-1", "--url", "http://host/v1", "--model", "m"], "not the key"),
        ([*MATH, "--body", "model=x", "--url", "http://host/v1", "--model", "m"], "--body: model is not for --body"),
        ([*MATH, "--env-file", "/no/such.yaml", "--url", "http://h/v1", "--model", "m"], "--env-file: cannot read"),
    ],
    ids=[
        *("no-model", "scheme", "both", "half", "env", "argument", "word", "samples", "temperature", "task", "limit"),
        *("key", "body", "file"),
    ],
)
async def test_a_wrong_argument_is_named_before_anything_is_asked(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = await evaluated(*words, "--out", str(tmp_path / "out"))
    assert status == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


async def test_arguments_of_the_environment_come_from_a_file_too(server: ChatServer, tmp_path: Path) -> None:
    file = tmp_path / "env.yaml"
    file.write_text("problems: [{problem: 'What is 3*7?', answer: '21'}]\nmax_turns: 1\n")
    words = [MATH[0], "--env-file", str(file), "--env-arg", "max_turns=3", *at(server, tmp_path / "out")]
    assert (await evaluated(*words))[0] == 0
    assert kept(tmp_path / "out")[0].reward == 1.0
