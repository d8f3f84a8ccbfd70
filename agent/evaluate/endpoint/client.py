"""`ChatClient`: the one client of chat endpoints. Every request is made again here or nowhere."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from agent.backoff import backoff_s
from agent.evaluate.config import Endpoint, EvaluationError, Pacing, Sampling
from agent.evaluate.endpoint import wire
from agent.evaluate.endpoint.pace import Pace
from agent.runtime.episode_clock import EpisodeClock
from envs.retry_after import retry_after_s

log = logging.getLogger(__name__)

_ANSWER_BYTES = 64 << 20
_CONNECT_S = 30.0
_SHOWN = 600
"""Characters of an endpoint's own words in an error."""
FIRST_TRIES = 3
"""Failed connections after which an endpoint that never answered is taken for one that is not there."""


class EndpointUnusable(EvaluationError):
    """No request to this endpoint will ever work (wrong key, wrong address, wrong model, no credit)."""


class EndpointFault(RuntimeError):
    """One turn got no answer: the endpoint stayed away, or refused this request."""


class ContextFull(RuntimeError):
    """The conversation does not fit into the model's context any more."""


class _Later(Exception):
    """An attempt that may be made again. `wait_s`: how long the endpoint asks to wait; None where it does not say.
    `answered`: whether there was an answer at all."""

    def __init__(self, problem: str, *, wait_s: float | None = None, answered: bool = True) -> None:
        super().__init__(problem)
        self.wait_s, self.answered = wait_s, answered


@dataclass(slots=True)
class Counts:
    """What a client has asked so far. `retries`: requests that were made again."""

    requests: int = 0
    retries: int = 0


class ChatClient:
    """Asks `endpoint` for turns, at the pace of all its users together.

        client = ChatClient(endpoint, sampling, pacing)
        reply = await client.ask(messages, tools, clock=EpisodeClock(3600))
        await client.aclose()

    Used from one event loop. A request that failed for a while (429, 5xx, a broken connection, no answer within
    `pacing.request_s`) is made again until `pacing.patience_s` has gone since the first failure, after the delay that
    the endpoint names, or an exponential one. What the endpoint asks one to wait, all wait. The key is in no message.
    """

    def __init__(self, endpoint: Endpoint, sampling: Sampling, pacing: Pacing, pace: Pace | None = None) -> None:
        self._endpoint, self._sampling, self._pacing = endpoint, sampling, pacing
        self._key = endpoint.key()
        self.pace = pace or Pace(pacing.rpm, pacing.tpm)
        self._session: aiohttp.ClientSession | None = None
        self._worked = self._answered = False
        self._missed = 0

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        clock: EpisodeClock,
        seed: int | None = None,
        counts: Counts | None = None,
    ) -> wire.Reply:
        """One turn. Waiting for the endpoint is not counted by `clock`, the time of requests is.

        Raises `ContextFull`, `EndpointFault`, `EndpointUnusable`, and `TimeoutError` once `clock` is over.
        """
        counts = counts or Counts()
        bounded, tries, gives_up_at = True, 0, float("inf")
        while True:
            body = wire.request_body(self._endpoint, self._sampling, messages, tools, seed, bounded=bounded)
            try:
                return await self._attempt(body, clock, counts)
            except ContextFull:
                # A prompt that fits may leave less room than a whole turn: what room there is can be used.
                if not bounded or wire.turn_limit(self._endpoint, self._sampling) is None:
                    raise
                bounded = False
            except _Later as later:
                tries += 1
                gives_up_at = min(gives_up_at, time.monotonic() + self._pacing.patience_s)
                await self._wait(later, tries, gives_up_at, clock)
                counts.retries += 1

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _wait(self, later: _Later, tries: int, gives_up_at: float, clock: EpisodeClock) -> None:
        """Until the next try; raises where there is none."""
        if not later.answered and not self._answered:
            self._missed += 1
            if self._missed >= FIRST_TRIES:
                raise EndpointUnusable(f"{later}; nothing has answered there yet: check --url, and whether it runs")
        wait = backoff_s(tries, first_s=0.5, most_s=30.0)
        if later.wait_s is not None:
            wait = max(later.wait_s, min(wait, 1.0))
        if time.monotonic() + wait > gives_up_at:
            asked = "" if later.wait_s is None else f", which asks to wait {later.wait_s:g} s"
            raise EndpointFault(
                f"{later}; given up after {tries} tries{asked}: raise --patience, or lower --concurrency or --rpm"
            )
        log.info("made again in %.1f s: %s", wait, later)
        if later.wait_s is not None:
            self.pace.hold(later.wait_s)
        with clock.stopped():
            await asyncio.sleep(wait)

    async def _attempt(self, body: dict[str, Any], clock: EpisodeClock, counts: Counts) -> wire.Reply:
        with clock.stopped():
            admission = await self.pace.admit(wire.estimated_tokens(body))
        counts.requests += 1
        spent = 0
        try:
            status, raw, headers = await self._post(body, clock)
            self._answered = True
            reply = self._read(status, raw, headers)
            self._worked = True
            spent = reply.tokens.prompt + reply.tokens.completion or admission.tokens
            return reply
        finally:
            self.pace.settle(admission, spent)

    async def _post(self, body: dict[str, Any], clock: EpisodeClock) -> tuple[int, bytes, Mapping[str, str]]:
        """One request, within its own limit and the episode's. Raises `_Later`, and `TimeoutError` for the latter."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                connector=aiohttp.TCPConnector(limit=0),  # the evaluation's own concurrency is the limit
            )
        left_s = clock.left_s
        if left_s <= 0:
            raise TimeoutError
        url = f"{self._endpoint.url}/chat/completions"
        try:
            async with (
                asyncio.timeout(min(left_s, self._pacing.request_s)),
                self._session.post(
                    url,
                    json=body,
                    headers={"Authorization": f"Bearer {self._key}"} if self._key else None,
                    allow_redirects=False,  # a redirected POST loses its body, or carries the key elsewhere
                ) as response,
            ):
                return response.status, await _read_at_most(response.content, _ANSWER_BYTES), response.headers
        except aiohttp.ServerTimeoutError as error:  # no connection in time; it is a `TimeoutError` too
            raise _Later(f"{url} took no connection within {_CONNECT_S:g} s", answered=False) from error
        except TimeoutError as error:
            if left_s <= self._pacing.request_s:
                raise
            raise _Later(f"{url} gave no answer within {self._pacing.request_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            what = getattr(error, "os_error", None) or error  # aiohttp's own words for no connection speak of ssl
            problem = self._without_key(f"{url} did not answer: {str(what) or type(what).__name__}")
            raise _Later(problem, answered=not isinstance(error, aiohttp.ClientConnectorError)) from error

    def _read(self, status: int, raw: bytes, headers: Mapping[str, str]) -> wire.Reply:
        """The reply in an answer; raises what an error means."""
        said = raw.decode("utf-8", "replace")
        if status == 200:
            try:
                answer = json.loads(raw)
                error = wire.error_in(answer)
                if error is None:
                    return wire.read_reply(answer)
                status, said = error
            except (ValueError, RecursionError) as broken:
                raise _Later(f"{self._endpoint.url} answered 200 with no JSON: {said[:200]!r}") from broken
            except wire.Unreadable as broken:
                raise _Later(f"{self._endpoint.url} answered 200: {broken}: {said[:200]!r}") from broken
        shown = self._without_key(" ".join(said.split())[:_SHOWN])
        problem = f"{self._endpoint.url}/chat/completions answered {status}: {shown or 'nothing more'}"
        meaning = wire.meaning(status, said, worked_before=self._worked)
        if meaning == "later":
            raise _Later(problem, wait_s=retry_after_s(headers.get("Retry-After")))
        if meaning == "context":
            raise ContextFull(problem)
        if meaning == "refused":
            raise EndpointFault(problem)
        if 300 <= status < 400:
            problem += f" (to {self._without_key(headers.get('Location', '?'))[:200]})"
        key = self._endpoint.api_key_env if self._key else f"{self._endpoint.api_key_env} (which is not set)"
        hint = wire.advice(status, said, key)
        raise EndpointUnusable(problem + (f". {hint[0].upper()}{hint[1:]}." if hint else ""))

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


async def _read_at_most(stream: aiohttp.StreamReader, limit: int) -> bytes:
    read = bytearray()
    async for piece in stream.iter_chunked(1 << 16):
        read += piece
        if len(read) > limit:
            raise aiohttp.ClientPayloadError(f"its answer is longer than {limit} bytes")
    return bytes(read)
