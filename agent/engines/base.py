"""What a rollout engine is: token ids in; token ids, log-probs and policy versions out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from agent.episode import SamplingParams


class EngineFault(RuntimeError):
    """The engine failed (down, 5xx, bad answer, time limit): an infrastructure fault. The message says what to do."""


class EngineRefused(EngineFault):
    """The engine understood and refused (4xx, `status`): the same request will be refused again."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ContextOverflow(EngineRefused):
    """The prompt leaves no room for a token in the engine's context."""


class Completion(msgspec.Struct, frozen=True):
    """One sampled action. The three sequences have one entry a token.

    `logprobs` are of the distribution the token was drawn from (temperature applied). `versions` are the policy
    version that sampled each token. `finish_reason`: "stop" (a stop token, which is in `token_ids`), "length"
    (`max_tokens` reached or the context is full), "abort" (aborted from outside; the tokens so far are there).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str


class EngineHealth(msgspec.Struct, frozen=True):
    """What an engine says of itself."""

    version: int
    running: int
    waiting: int
    max_context: int
    tokens_generated: int = 0
    busy_s: float = 0.0
    uptime_s: float = 0.0


Call = Callable[[str, str, dict[str, Any] | None], Awaitable[bytes]]
"""(method, path, body) -> the engine's answer; raises `EngineFault`."""


class WeightStream(Protocol):
    """Weights that reach an engine without a file: see `agent.engines.weight_stream`."""

    def connected(self, url: str, call: Call) -> AbstractAsyncContextManager[Callable[[], Awaitable[object]]]:
        """Connect to the engine at `url`; gives what sends the weights, in the midst of an update."""
        ...


class Engine(Protocol):
    """A client's view of an engine. Every call has a time limit and raises `EngineFault` past it."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion: ...

    async def publish(self, version: int, weights: Path | WeightStream) -> None:
        """Swap in `weights`, a folder of safetensors or a stream, between two decode steps, as `version`.

        Requests in flight go on under the new weights with their keys and values computed again.
        """
        ...

    async def abort(self, request_id: str) -> None: ...

    async def health(self) -> EngineHealth: ...

    async def close(self) -> None: ...
