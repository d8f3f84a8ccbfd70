"""`ChatEndpoint`: one OpenAI-compatible endpoint, asked with time limits. The one home of retries of such requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from envs.core import EnvironmentFault, Message
from envs.retry_after import retry_after_s

T = TypeVar("T")

_ANSWER_BYTES = 1 << 20
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class ModelFault(EnvironmentFault):
    """A model that an environment asks gave no answer that can be used. The episode is void, not wrong."""


class ModelEndpoint(BaseModel):
    """Where a model is, and what it may cost.

    `url`: the endpoint's base, as OpenAI clients take it (".../v1"). `name`: the model's, as the endpoint knows it.
    `key_env`: the environment variable that holds the key; None or unset is no key. `attempts`: requests an answer may
    take, all reasons together. `concurrency`: requests at once, of all environments of an event loop together.
    `request_timeout_s`: one request; `deadline_s`: one answer with its retries and waits. `backoff_s`: the first wait
    between attempts, doubled each time, with jitter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://")
    name: str = Field(min_length=1)
    key_env: str | None = None
    attempts: int = Field(default=4, ge=1)
    concurrency: int = Field(default=16, ge=1)
    request_timeout_s: float = Field(default=60.0, gt=0)
    deadline_s: float = Field(default=240.0, gt=0)
    backoff_s: float = Field(default=0.5, ge=0)


@dataclass(slots=True)
class ChatCosts:
    """What an endpoint was asked so far. `calls` are HTTP requests, `retries` those made again."""

    calls: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The one choice of a chat completion. `tokens`: how many were sampled, as far as the endpoint says."""

    content: str | None
    finish_reason: str | None
    refusal: str | None
    tokens: int = 0


class _Retryable(Exception):
    """An attempt that failed and may be made again, `wait_s` from now or later."""

    def __init__(self, fault: EnvironmentFault, *, wait_s: float = 0.0, unreadable: bool = False) -> None:
        super().__init__(str(fault))
        self.fault, self.wait_s, self.unreadable = fault, wait_s, unreadable


class ChatEndpoint:
    """Asks one endpoint. `costs` counts what that took; `who` and `fault` are how its failures are told.

    Used from one event loop; the HTTP session starts with the first question and ends with `aclose`.
    """

    def __init__(
        self,
        endpoint: ModelEndpoint,
        *,
        who: str = "the model",
        fault: Callable[[str], EnvironmentFault] = ModelFault,
        costs: ChatCosts | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.costs = costs or ChatCosts()
        self._who, self._fault = who, fault
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self,
        messages: Sequence[Message],
        read: Callable[[Reply], T],
        *,
        temperature: float,
        retry_temperature: float | None = None,
        **body: Any,
    ) -> T:
        """What `read` makes of the answer. `body` holds further keys of the request, such as `max_tokens`.

        An answer that `read` refuses with an `EnvironmentFault` is asked for again, at `retry_temperature` if there is
        one, since 0 would repeat it. Raises this endpoint's fault after the last attempt, or past its deadline.
        """
        limit_s = self.endpoint.deadline_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._until_read(list(messages), read, temperature, retry_temperature, body)
        except TimeoutError as error:
            raise self._fault(f"{self._who} gave no answer within deadline_s={limit_s:g} s") from error

    async def aclose(self) -> None:
        """Close the HTTP session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _until_read(
        self,
        messages: list[Message],
        read: Callable[[Reply], T],
        temperature: float,
        retry_temperature: float | None,
        body: dict[str, Any],
    ) -> T:
        began, failed = time.monotonic(), 0
        while True:
            try:
                async with self._slots:
                    answer = await self._request({"messages": messages, "temperature": temperature, **body})
                return self._read(answer, read)
            except _Retryable as error:
                failed += 1
                if failed >= self.endpoint.attempts:
                    raise self._fault(f"no answer after {failed} attempts; the last: {error.fault}") from error.fault
                if error.unreadable and retry_temperature is not None:
                    temperature = retry_temperature
                backoff = self.endpoint.backoff_s * 2 ** (failed - 1) * random.uniform(0.5, 1.0)
                wait = max(error.wait_s, backoff)
                if time.monotonic() - began + wait >= self.endpoint.deadline_s:
                    raise self._fault(f"{self._who} asks to wait past deadline_s: {error.fault}") from error.fault
                self.costs.retries += 1
                await asyncio.sleep(wait)

    async def _request(self, body: dict[str, Any]) -> Any:
        """One HTTP request; the decoded body of a 200."""
        url = self.endpoint.url
        key = os.environ.get(self.endpoint.key_env) if self.endpoint.key_env else None
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.endpoint.request_timeout_s),
                connector=aiohttp.TCPConnector(limit=self.endpoint.concurrency),
            )
        self.costs.calls += 1
        try:
            async with self._session.post(
                url.rstrip("/") + "/chat/completions",
                json={"model": self.endpoint.name, "n": 1, **body},
                headers={"Authorization": f"Bearer {key}"} if key else None,
                allow_redirects=False,
            ) as response:
                raw = await _read_at_most(response.content, _ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = self._fault(f"{self._who} at {url} did not answer: {error or type(error).__name__}")
            raise _Retryable(fault) from error
        if response.status != 200:
            said = raw[:300].decode("utf-8", "replace")
            fault = self._fault(f"{self._who} at {url} answered HTTP {response.status}: {said}")
            if response.status in _TRANSIENT:
                raise _Retryable(fault, wait_s=retry_after_s(response.headers.get("Retry-After")) or 0.0)
            raise fault
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise _Retryable(self._fault(f"the reply of {self._who} is not JSON: {error}")) from error

    def _read(self, body: Any, read: Callable[[Reply], T]) -> T:
        """`read` of the one choice in `body`, whose tokens are counted whether it can be read or not.

        Only `content` is looked at: `reasoning_content` is a draft. Raises `_Retryable` for what cannot be used.
        """
        try:
            tokens = self._count(body.get("usage") or {})
            (choice,) = body["choices"]
            message = choice["message"]
            reply = Reply(message.get("content"), choice.get("finish_reason"), message.get("refusal"), tokens)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            fault = self._fault(f"the reply of {self._who} is no chat completion with one choice: {error!r}")
            raise _Retryable(fault, unreadable=True) from error
        if reply.refusal:
            raise _Retryable(self._fault(f"{self._who} refused: {str(reply.refusal)[:200]}"), unreadable=True)
        if not isinstance(reply.content, str):
            raise _Retryable(self._fault(f"the answer of {self._who} has no content"), unreadable=True)
        try:
            return read(reply)
        except EnvironmentFault as error:
            raise _Retryable(error, unreadable=True) from error

    def _count(self, usage: Any) -> int:
        tokens = 0
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            self.costs.prompt_tokens += int(usage.get("prompt_tokens") or 0)
            tokens = int(usage.get("completion_tokens") or 0)
            self.costs.completion_tokens += tokens
        return tokens


async def _read_at_most(stream: aiohttp.StreamReader, limit: int) -> bytes:
    read = bytearray()
    async for piece in stream.iter_chunked(65536):
        read += piece
        if len(read) > limit:
            raise aiohttp.ClientPayloadError(f"its answer is longer than {limit} bytes")
    return bytes(read)
