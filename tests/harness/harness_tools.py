"""Sessions over real HTTP, and harnesses whose steps a test writes as a coroutine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from runtime_tools import EchoEnv, ScriptedEngine, settings, ticket

from agent.chat.renderer import ChatRenderer
from agent.episode import Episode, Segment
from agent.harness import episodes
from agent.harness.door import SessionDoor
from agent.harness.episodes import HarnessEpisodes
from agent.harness.process import harness_of
from agent.harness.task import HarnessTask
from agent.runtime.episode_clock import EpisodeClock
from agent.runtime.settings import HarnessConfig
from envs.core import AsyncEnv

Script = Callable[[str, int], Any]
NOWHERE = "harness_tools:solve"


def says(*turns: str) -> Script:
    """An engine's script: these replies in turn, the last one again and again."""
    return lambda prompt, number: turns[min(number, len(turns) - 1)]


def hears(replies: dict[str, str]) -> Script:
    """A script that answers by what the prompt ends on; in any order."""

    def script(prompt: str, number: int) -> str:
        last = prompt.rsplit("<|im_start|>", 2)[-2]
        return next(reply for words, reply in replies.items() if words in last)

    return script


async def solve(task: HarnessTask) -> None:
    """Stands in a configuration where a test gives the function itself."""


class EndsOnce(EpisodeClock):
    """An episode's clock that is over once something has happened, however slow this machine is."""

    def __init__(self, happened: Callable[[], bool]) -> None:
        super().__init__(600.0)
        self._happened = happened

    @property
    def left_s(self) -> float:
        return 0.0 if self._happened() else 2.0

    @property
    def over(self) -> bool:
        return self._happened()


async def run(
    renderer: ChatRenderer,
    script: Script | ScriptedEngine,
    harness: Callable[[HarnessTask], Awaitable[Any]] | None = None,
    *,
    env: AsyncEnv | None = None,
    given: Any = None,
    limits: dict[str, Any] | None = None,
    ends_once: Callable[[], bool] | None = None,
    **config: Any,
) -> Episode:
    """The episode of a harness: the coroutine function `harness`, or what `config` names.

    `ends_once`: its time is over once that holds.
    """
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(renderer, script)
    chosen = HarnessConfig(**({"call": NOWHERE} if harness is not None else {}), **config)
    with pytest.MonkeyPatch.context() as patch:
        if ends_once is not None:
            patch.setattr(episodes, "EpisodeClock", lambda limit_s: EndsOnce(ends_once))
        return await _run(renderer, engine, harness, chosen, env, given, limits)


async def _run(
    renderer: ChatRenderer,
    engine: ScriptedEngine,
    harness: Callable[[HarnessTask], Awaitable[Any]] | None,
    chosen: HarnessConfig,
    env: AsyncEnv | None,
    given: Any,
    limits: dict[str, Any] | None,
) -> Episode:
    async with SessionDoor.listening(chosen) as door:
        make = HarnessEpisodes(chosen, door, _inside(harness) if harness is not None else harness_of(chosen))
        return await make(given or ticket(), env or EchoEnv(), engine, renderer, settings(**(limits or {})))


def _inside(function: Callable[[HarnessTask], Awaitable[Any]]) -> Any:
    from agent.harness.process import _Inside

    return _Inside("the test's harness", function)


@asynccontextmanager
async def openai_client(task: HarnessTask, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client at the session's address."""
    async with openai.AsyncOpenAI(base_url=task.openai_base_url, api_key=task.api_key, **options) as client:
        yield client


@asynccontextmanager
async def anthropic_client(task: HarnessTask, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's own client at the session's address."""
    async with anthropic.AsyncAnthropic(base_url=task.anthropic_base_url, api_key=task.api_key, **options) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, *messages: Any, **options: Any) -> Any:
    """One reply's message."""
    completion = await client.chat.completions.create(model="any", messages=list(messages), **options)
    return completion.choices[0].message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def post(task: HarnessTask, what: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """POST below the session's address."""
    async with aiohttp.ClientSession() as client, client.post(f"{task.session_url}/{what}", json=body) as response:
        return response.status, await response.json()


def kinds(segments: tuple[Segment, ...]) -> str:
    """The first letters: "pao" is a prompt, an action and an observation."""
    return "".join(segment.kind[0] for segment in segments)


def tokens(segments: tuple[Segment, ...]) -> list[int]:
    return [token for segment in segments for token in segment.token_ids]


def write_program(folder: Path, text: str) -> Path:
    """A Python program that is to be a harness."""
    path = folder / "program.py"
    path.write_text(text)
    return path
