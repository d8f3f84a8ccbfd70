"""`LLMJudge`: a language model behind an OpenAI-compatible endpoint as the judge."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from envs.retry_after import retry_after_s
from envs.style_shift.judging import rubric
from envs.style_shift.judging.cache import VerdictCache, cache_key
from envs.style_shift.judging.judge import Judge, JudgeFault, Verdict

_ANSWER_BYTES = 1 << 20
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


@dataclass(frozen=True, slots=True)
class LLMJudgeSettings:
    """Where the judge is and what it may cost.

    `url`: the endpoint's base, as OpenAI clients take it (".../v1"). `api_key_env`: the environment variable that
    holds the key; unset is no key. `attempts`: requests a verdict may take, all reasons together; this is the only
    place where anything is retried. `concurrency`: requests at once. `request_timeout_s`: one request;
    `deadline_s`: one verdict with its retries and waits. `max_tokens`: of an answer, thinking included.
    `temperature`: of the first attempt; after an unreadable answer `retry_temperature`, since 0 would repeat it.
    `backoff_s`: the first wait between attempts, doubled each time, with jitter. `cache`: an SQLite file, or None.
    """

    url: str
    model: str
    api_key_env: str = "JUDGE_API_KEY"
    attempts: int = 4
    concurrency: int = 16
    request_timeout_s: float = 60.0
    deadline_s: float = 240.0
    max_tokens: int = 2048
    temperature: float = 0.0
    retry_temperature: float = 0.5
    backoff_s: float = 0.5
    cache: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")) or not self.model:
            raise ValueError(f"judge: url must be http(s)://.../v1 and model a name, not {self.url!r}, {self.model!r}")
        for name in ("attempts", "concurrency", "request_timeout_s", "deadline_s", "max_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"judge: {name} must be more than 0, not {getattr(self, name)!r}")


@dataclass(slots=True)
class JudgeCosts:
    """What a judge has used so far. `calls` are HTTP requests, `cached` verdicts that needed none."""

    verdicts: int = 0
    cached: int = 0
    calls: int = 0
    retries: int = 0
    faults: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Retryable(Exception):
    """An attempt that failed and may be made again, `wait_s` from now or later."""

    def __init__(self, fault: JudgeFault, *, wait_s: float = 0.0, unreadable: bool = False) -> None:
        super().__init__(str(fault))
        self.fault, self.wait_s, self.unreadable = fault, wait_s, unreadable


class LLMJudge(Judge):
    """Asks `settings.model` for verdicts. `costs` counts what that took.

    Used from one event loop; the HTTP session starts with the first question and ends with `aclose`.
    """

    def __init__(self, settings: LLMJudgeSettings) -> None:
        self.settings = settings
        self.costs = JudgeCosts()
        self._cache = VerdictCache(settings.cache) if settings.cache else None
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def judge(self, prompt: str, text: str, style: str) -> Verdict:
        """A verdict, from the cache or the model. `JudgeFault` after the last attempt or past the deadline."""
        # Half a surrogate pair cannot be sent; the judge sees a question mark there.
        prompt, text = (part.encode("utf-8", "replace").decode() for part in (prompt, text))
        key = cache_key(
            model=self.settings.model, rubric_version=rubric.RUBRIC_VERSION, style=style, prompt=prompt, text=text
        )
        if self._cache is not None and (kept := await self._cache.get(key)) is not None:
            self.costs.cached += 1
            self.costs.verdicts += 1
            return kept
        try:
            async with asyncio.timeout(self.settings.deadline_s):
                verdict = await self._ask(rubric.messages(prompt, text))
        except TimeoutError as error:
            self.costs.faults += 1
            raise JudgeFault(f"the judge gave no verdict within deadline_s={self.settings.deadline_s:g} s") from error
        except JudgeFault:
            self.costs.faults += 1
            raise
        self.costs.verdicts += 1
        if self._cache is not None:
            await self._cache.put(key, verdict)
        return verdict

    async def aclose(self) -> None:
        """Close the HTTP session and the cache."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        if self._cache is not None:
            await self._cache.aclose()

    async def _ask(self, messages: list[dict[str, str]]) -> Verdict:
        """Ask until there is a verdict: the one loop of retries."""
        began, temperature, failed = time.monotonic(), self.settings.temperature, 0
        while True:
            try:
                async with self._slots:
                    return _read_completion(await self._request(messages, temperature), self.costs)
            except _Retryable as error:
                failed += 1
                if failed >= self.settings.attempts:
                    raise JudgeFault(f"no verdict after {failed} attempts; the last: {error.fault}") from error.fault
                if error.unreadable:
                    temperature = self.settings.retry_temperature
                backoff = self.settings.backoff_s * 2 ** (failed - 1) * random.uniform(0.5, 1.0)
                wait = max(error.wait_s, backoff)
                if time.monotonic() - began + wait >= self.settings.deadline_s:
                    raise JudgeFault(f"the judge asks to wait past deadline_s: {error.fault}") from error.fault
                self.costs.retries += 1
                await asyncio.sleep(wait)

    async def _request(self, messages: list[dict[str, str]], temperature: float) -> Any:
        """One HTTP request; the decoded body of a 200."""
        key = os.environ.get(self.settings.api_key_env)
        body = {
            "model": self.settings.model,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": self.settings.max_tokens,
            "n": 1,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "strict": True, "schema": rubric.SCHEMA},
            },
        }
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.settings.request_timeout_s),
                connector=aiohttp.TCPConnector(limit=self.settings.concurrency),
            )
        self.costs.calls += 1
        try:
            async with self._session.post(
                self.settings.url.rstrip("/") + "/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else None,
                allow_redirects=False,
            ) as response:
                raw = await _read_at_most(response.content, _ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = JudgeFault(f"the judge at {self.settings.url} did not answer: {error or type(error).__name__}")
            raise _Retryable(fault) from error
        if response.status != 200:
            said = raw[:300].decode("utf-8", "replace")
            fault = JudgeFault(f"the judge at {self.settings.url} answered HTTP {response.status}: {said}")
            if response.status in _TRANSIENT:
                raise _Retryable(fault, wait_s=retry_after_s(response.headers.get("Retry-After")) or 0.0)
            raise fault
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise _Retryable(JudgeFault(f"the judge's reply is not JSON: {error}")) from error


async def _read_at_most(stream: aiohttp.StreamReader, limit: int) -> bytes:
    read = bytearray()
    async for piece in stream.iter_chunked(65536):
        read += piece
        if len(read) > limit:
            raise aiohttp.ClientPayloadError(f"its answer is longer than {limit} bytes")
    return bytes(read)


def _read_completion(body: Any, costs: JudgeCosts) -> Verdict:
    """The verdict in a chat completion, whose tokens are counted whether it can be read or not.

    Only `content` is read: `reasoning_content` is a draft. Raises `_Retryable` for a truncated, refused or
    unreadable answer.
    """
    try:
        usage = body.get("usage") or {}
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            costs.prompt_tokens += int(usage.get("prompt_tokens") or 0)
            costs.completion_tokens += int(usage.get("completion_tokens") or 0)
        (choice,) = body["choices"]
        message, reason = choice["message"], choice.get("finish_reason")
        content, refusal = message.get("content"), message.get("refusal")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fault = JudgeFault(f"the judge's reply is no chat completion with one choice: {error!r}")
        raise _Retryable(fault, unreadable=True) from error
    if refusal:
        raise _Retryable(JudgeFault(f"the judge refused: {str(refusal)[:200]}"), unreadable=True)
    if reason != "stop":
        fault = JudgeFault(f"the judge's answer ended for {reason!r}, not 'stop'; with 'length', raise max_tokens")
        raise _Retryable(fault, unreadable=True)
    if not isinstance(content, str):
        raise _Retryable(JudgeFault("the judge's answer has no content"), unreadable=True)
    try:
        return rubric.read_verdict(content)
    except JudgeFault as error:
        raise _Retryable(error, unreadable=True) from error
