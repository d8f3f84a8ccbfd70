"""What a rollout engine is: token ids in; token ids, log-probs and policy versions out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from agent.episode import Experts, SamplingParams


class EngineFault(RuntimeError):
    """The engine failed (down, 5xx, bad answer, time limit): an infrastructure fault. The message says what to do."""


class Disconnected(EngineFault):
    """No connection to the engine, or one that broke: only this speaks against the engine and not of one request."""


class OutOfTime(EngineFault):
    """A generation reached its time limit and was aborted; `completion` is what the engine handed over, if it did.

    What was sampled is no less sampled for that: a turn goes on from there.
    """

    def __init__(self, message: str, completion: Completion | None = None) -> None:
        super().__init__(message)
        self.completion = completion


class EngineBusy(EngineFault):
    """The engine, or a gateway before it, asks to come again later (408, 425, 429): nothing is wrong with it.

    `retry_after_s`: how long it asks to wait; None where it does not say.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineRefused(EngineFault):
    """The engine understood and refused (4xx, `status`): the same request will be refused again."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ContextOverflow(EngineRefused):
    """The prompt leaves no room for a token in the engine's context."""


def check_model_folder(model: Path) -> None:
    """Raise `EngineFault` if `model` holds no model. Engines say so themselves, but only after a slow start."""
    if not (model / "config.json").is_file():
        raise EngineFault(f"no model in {model}: it must be a folder with config.json and model.safetensors")


class Completion(msgspec.Struct, frozen=True):
    """One sampled action. The three sequences have one entry a token.

    `logprobs` are of the distribution the token was drawn from (temperature applied). `versions` are the policy
    version that sampled each token. `finish_reason`: "stop" (a stop token, which is in `token_ids`), "length"
    (`max_tokens` reached or the context is full), "abort" (aborted from outside; the tokens so far are there).
    `experts`, from an engine that returns them, are of all tokens that it ran: the prompt's, and those sampled but the
    last.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    experts: Experts | None = None


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
    """A client's view of an engine. Every call has a time limit and raises `EngineFault` past it.

    A generation that reaches its own is aborted, and what it sampled by then is in the error: `OutOfTime`.
    """

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Sample one action after `prompt_ids`, in at most `timeout_s` seconds. Cancelling it aborts the request."""
        ...

    async def publish(self, version: int, weights: Path | WeightStream) -> None:
        """Swap in `weights`, a folder of safetensors or a stream, between two decode steps, as `version`.

        Requests in flight go on under the new weights with their keys and values computed again.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a generation: its `generate` returns with finish reason "abort"."""
        ...

    async def health(self) -> EngineHealth:
        """How it is; an engine that does not answer is an `EngineFault`."""
        ...

    async def close(self) -> None:
        """Close the connections; the engine itself stays."""
        ...


@runtime_checkable
class Sticky(Protocol):
    """What an engine may be able to do beside: keep the requests of a session where their common prefix is cached."""

    async def generate_in(
        self,
        session: int | None,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """As `Engine.generate`. An episode is a session; its number is of its own among those of this client."""
        ...
