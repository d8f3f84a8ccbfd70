"""Tools of the runtime's tests: a scripted engine and a scripted environment.

The engine and the environment are real implementations of their protocols: they say what a test tells them to say.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from agent.chat.renderer import ChatRenderer
from agent.engines.base import Completion, EngineFault, EngineHealth
from agent.episode import SamplingParams
from agent.runtime.settings import RolloutSettings, SamplingConfig, StageLimits
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger
from agent.store.protocol import Ticket
from agent.store.server import StoreServer
from envs.core import AsyncEnv, Step

Reply = str | Completion | Exception


class ScriptedEngine:
    """Says `script(prompt_text, turn)`; a string is sampled token by token at `version`, with log-prob -0.5 each.

    `down`: it refuses everything; `hung`: it never says how it is. `hold`: an event that replies wait for; an abort
    ends the wait with the first `partial` tokens of the reply.
    """

    def __init__(self, renderer: ChatRenderer, script: Callable[[str, int], Reply], *, version: int = 0) -> None:
        self.renderer, self.script, self.version = renderer, script, version
        self.requests: list[tuple[list[int], SamplingParams]] = []
        self.aborted: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.started = asyncio.Event()
        self.hold: asyncio.Event | None = None
        self.partial = 3
        self.down = False
        self.hung = False
        self.asked = self.refused = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        if self.down:
            self.refused += 1
            raise EngineFault("the scripted engine is down")
        self.requests.append((list(prompt_ids), sampling))
        reply = self.script(self.renderer.decode(list(prompt_ids)), len(self.requests) - 1)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Completion):
            return reply
        ids = self.renderer.encode_action(reply)
        if self.hold is not None:
            aborted = self.running[request_id or ""] = asyncio.Event()
            self.started.set()
            waits = [asyncio.create_task(self.hold.wait()), asyncio.create_task(aborted.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                del self.running[request_id or ""]
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            if aborted.is_set():
                return self.completion(ids[: self.partial], "abort")
        if len(ids) > sampling.max_tokens:
            return self.completion(ids[: sampling.max_tokens], "length")
        return self.completion(ids, "stop")

    def completion(self, ids: Sequence[int], finish_reason: str) -> Completion:
        n = len(ids)
        return Completion(tuple(ids), (-0.5,) * n, (self.version,) * n, finish_reason)

    async def publish(self, version: int, weights: Path) -> None:
        self.version = version

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self.running:
            self.running[request_id].set()

    async def health(self) -> EngineHealth:
        if self.hung:
            await asyncio.Event().wait()
        if self.down:
            self.refused += 1
            raise EngineFault("the scripted engine is down")
        self.asked += 1
        return EngineHealth(version=self.version, running=len(self.running), waiting=0, max_context=4096)

    async def close(self) -> None: ...


class EchoEnv(AsyncEnv):
    """Answers "more" with what it was told, ends on anything else; reward 1 for an answer that holds "right"."""

    def __init__(
        self, *, tasks: int = 3, turns: int = 50, on_step: Callable[[str], Any] | None = None, prompt: str = "Say it."
    ) -> None:
        self.tasks, self.turns, self.on_step, self.prompt = tasks, turns, on_step, prompt
        self.taken = 0
        self.log: list[tuple[str, str]] = []
        self.closed = 0

    @property
    def task_ids(self) -> Sequence[str]:
        return [f"echo-{i}" for i in range(self.tasks)]

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.taken = 0
        self.log.append(("reset", (options or {})["task_id"]))
        messages = [{"role": "user", "content": self.prompt}]
        return self.prompt, {"messages": messages, "tools": [], "segment": "prompt"}

    async def astep(self, action: str) -> Step:
        self.log.append(("step", action))
        self.taken += 1
        if self.on_step is not None:
            await self.on_step(action)
        if not action.startswith("more"):
            return self._end("right" in action)
        if self.taken >= self.turns:
            return await self.atruncate("turns", action)
        said = f"heard {action}"
        messages = [{"role": "user", "content": said}]
        return said, 0.0, False, False, {"messages": messages, "segment": "observation"}

    async def atruncate(self, reason: str, action: str = "") -> Step:
        self.log.append((reason, action))
        text, reward, _, _, info = self._end("right" in action)
        return text, reward, False, True, {**info, "truncation": reason}

    def _end(self, right: bool) -> Step:
        return (
            "",
            float(right),
            True,
            False,
            {"messages": [], "segment": "observation", "metrics": {"taken": self.taken}},
        )

    async def aclose(self) -> None:
        self.closed += 1


def settings(**changes: Any) -> RolloutSettings:
    """Rollout settings with room for everything; keys of `StageLimits` may be given too."""
    limits = {key: changes.pop(key) for key in list(changes) if key in StageLimits.model_fields}
    return RolloutSettings(
        **{
            "env_id": "test/Echo-v0",
            "sampling": SamplingConfig(),
            "max_context_tokens": 4096,
            "max_tokens_per_turn": 512,
            "limits": StageLimits(**limits),
            **changes,
        }
    )


def ticket(**changes: Any) -> Ticket:
    return Ticket(**{"id": "t1", "kind": "train", "task_index": 0, "epoch": 0, "seed": 7, **changes})


class StoreProcess:
    """`python -m agent.store` as a child process that can be killed and started again on the same file and port."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.path, self.overrides = path, overrides
        self.port = 0
        self.process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        port_file = self.path.with_name("store.port")
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "agent.store", "--path", str(self.path), "--port", str(self.port)]
        with self.path.with_name("store.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, "--port-file", str(port_file), "--exit-with-parent", *self.overrides, stdout=log, stderr=log
            )
        async with asyncio.timeout(30):
            while not port_file.exists():
                assert self.process.returncode is None, self.path.with_name("store.log").read_text()
                await asyncio.sleep(0.02)
        self.port = int(port_file.read_text())

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), 20)


class AnyStore(Protocol):
    """A running store; tests need its address only."""

    @property
    def url(self) -> str: ...


class StoreInside:
    """The real store, over real HTTP, on this event loop: starts in milliseconds, cannot be killed."""

    def __init__(self, path: Path, config: StoreConfig) -> None:
        self._runner = web.AppRunner(
            StoreServer(Ledger(path, config)).application(), handler_cancellation=True, shutdown_timeout=2.0
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    async def stop(self) -> None:
        await self._runner.cleanup()
