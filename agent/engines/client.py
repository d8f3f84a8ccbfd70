"""`HttpEngine`: the one client of every engine, over the token protocol of `vllm serve`. Works without torch.

It checks every answer and never repairs one: a log-prob that is missing is a fault (case B4), because a made-up
log-prob is a made-up ratio. It never retries; the runtime does, in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from agent.engines.base import Completion, ContextOverflow, EngineFault, EngineHealth, EngineRefused
from agent.episode import SamplingParams

_ID_PREFIX = "generate-tokens-"  # the server puts it before a request's id, and wants it in aborts
_MISSING = -9999.0  # what vLLM writes for a log-prob that it does not have
_TOO_LONG = ("maximum context length", "maximum model length")
_CLEANUP_S = 5.0


class _LogProb(msgspec.Struct):
    token_id: int
    logprob: float | None = None


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_answers = msgspec.json.Decoder(_Answer)


class HttpEngine:
    """An `Engine` behind `url`.

        engine = HttpEngine("http://127.0.0.1:8000")
        completion = await engine.generate(prompt_ids, SamplingParams(max_tokens=256, stop_token_ids=(2,)))
        await engine.publish(1, Path("runs/x/weights/1"))
        await engine.close()

    `timeout_s` bounds one generation, `control_timeout_s` each control call; past them `EngineFault` is raised and
    the request is aborted at the server. An answer of 4xx is `EngineRefused` (asking again won't help; a prompt that
    is too long is `ContextOverflow`), 5xx and a broken connection are plain `EngineFault`.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0, control_timeout_s: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._control_timeout_s = control_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._publishing = asyncio.Lock()
        self._max_context: int | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Sample one action. Cancelling it aborts the request at the server."""
        request_id = request_id or uuid.uuid4().hex
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "logprobs": 0,
            "detokenize": False,
        }
        if sampling.seed is not None:
            params["seed"] = sampling.seed
        body = {"request_id": request_id, "token_ids": prompt_ids, "sampling_params": params, "stream": False}
        try:
            data = await self._request(
                "POST", "/inference/v1/generate", body, timeout_s=self._timeout_s if timeout_s is None else timeout_s
            )
        except (asyncio.CancelledError, _TimedOut):
            with contextlib.suppress(EngineFault):
                await self._abort(request_id, _CLEANUP_S)
            raise
        return _completion(self._decode(_answers.decode, data, "generate"), self.url)

    async def publish(self, version: int, weights: Path) -> None:
        """See `Engine.publish`. `weights` must be readable where the engine runs.

        On an error the engine goes on under the weights that it has.
        """
        folder = _absolute(weights)
        async with self._publishing:
            try:
                await self._control("/pause?mode=keep")
                await self._control("/start_weight_update")
                await self._control("/update_weights", {"update_info": {"path": folder}})
                await self._control("/finish_weight_update", {"weight_version": str(version)})
                # Keys and values of the old weights are never served as if they were new (case D6).
                await self._control("/reset_prefix_cache?reset_running_requests=true")
            finally:
                await self._resume()

    async def abort(self, request_id: str) -> None:
        """End a generation from outside: its `generate` returns with finish reason "abort". Unknown ids are ignored."""
        await self._abort(request_id, self._control_timeout_s)

    async def health(self) -> EngineHealth:
        """Ask the engine how it is; raises `EngineFault` if it is not well. Version -1: never published to."""
        await self._request("GET", "/health", timeout_s=self._control_timeout_s)
        info, metrics = await asyncio.gather(
            self._request("GET", "/weight_info", timeout_s=self._control_timeout_s),
            self._request("GET", "/metrics", timeout_s=self._control_timeout_s),
        )
        if self._max_context is None:
            models = await self._request("GET", "/v1/models", timeout_s=self._control_timeout_s)
            found = self._decode(msgspec.json.Decoder(_Models).decode, models, "models").data
            self._max_context = (found[0].max_model_len or 0) if found else 0
        label = self._decode(msgspec.json.Decoder(_WeightInfo).decode, info, "weight_info").weight_version
        figures = _figures(metrics.decode())
        return EngineHealth(
            version=int(label) if label.isdecimal() else -1,
            running=int(figures.get("vllm:num_requests_running", 0)),
            waiting=int(figures.get("vllm:num_requests_waiting", 0)),
            max_context=self._max_context,
            tokens_generated=int(figures.get("vllm:generation_tokens_total", 0)),
            busy_s=figures.get("engine:busy_seconds_total", 0.0),
            uptime_s=figures.get("engine:uptime_seconds", 0.0),
        )

    async def close(self) -> None:
        """Close the connections. May be called any number of times."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _resume(self) -> None:
        # To its end even if the caller is cancelled: an engine left in pause would stall every episode.
        resuming = asyncio.ensure_future(self._control("/resume"))
        try:
            await asyncio.shield(resuming)
        except asyncio.CancelledError:
            await resuming
            raise

    async def _abort(self, request_id: str, timeout_s: float) -> None:
        body = {"request_ids": [_ID_PREFIX + request_id]}
        await self._request("POST", "/abort_requests", body, timeout_s=timeout_s)

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> None:
        await self._request("POST", path, body, timeout_s=self._control_timeout_s, close=True)

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float,
        close: bool = False,
    ) -> bytes:
        # `close`: a connection for this call alone. vLLM resets the one on which it has failed, and /resume, coming
        # next on it, would be lost: an engine in pause for good.
        if self._session is None:
            # The runtime bounds how many generations run; a second bound here would only hide it.
            # Idle connections go before the server closes them (5 s for vLLM): a POST into one is lost.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if close:
            headers["Connection"] = "close"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, self.url + path, data=data, headers=headers) as response,
            ):
                content = await response.read()
        except TimeoutError as error:
            raise _TimedOut(f"engine {self.url}{path}: no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineFault(f"engine {self.url}{path}: {error}; is it running?") from error
        if response.status >= 400:
            raise _refusal(response.status, f"engine {self.url}{path}", content)
        return content

    def _decode(self, decode: Any, data: bytes, what: str) -> Any:
        try:
            return decode(data)
        except msgspec.DecodeError as error:
            raise EngineFault(f"engine {self.url}: its {what} answer can't be read ({error})") from error


class _TimedOut(EngineFault):
    """Past the time limit; the request may still be running at the server."""


def _absolute(path: Path) -> str:
    return str(path.absolute())  # the engine may run in another folder


def _refusal(status: int, where: str, content: bytes) -> EngineFault:
    text = content.decode(errors="replace")[:2000]
    with contextlib.suppress(msgspec.DecodeError, LookupError, TypeError):  # another shape: the raw text is shown
        text = msgspec.json.decode(content)["error"]["message"]
    message = f"{where}: {status}: {text}"
    if status >= 500:
        return EngineFault(message)
    if status == 400 and any(words in text for words in _TOO_LONG):
        return ContextOverflow(message, status)
    return EngineRefused(message, status)


def _completion(answer: _Answer, url: str) -> Completion:
    """Check an answer, and spread its version spans over its tokens."""

    def fault(what: str) -> EngineFault:
        return EngineFault(f"engine {url}: {what}")

    if len(answer.choices) != 1:
        raise fault(f"{len(answer.choices)} completions, expected 1")
    choice = answer.choices[0]
    tokens, reason = choice.token_ids or [], choice.finish_reason or ""
    if reason not in ("stop", "length", "abort"):
        raise fault(f"unknown finish reason {reason!r}")
    if not tokens and reason != "abort":
        raise fault("an empty completion")
    entries = (choice.logprobs.content if choice.logprobs else None) or []
    if [e.token_id for e in entries] != tokens:
        raise fault(f"{len(entries)} log-probs for {len(tokens)} tokens, or of other tokens")
    logprobs = tuple(e.logprob for e in entries if e.logprob is not None)
    if len(logprobs) != len(tokens) or not all(math.isfinite(p) and p > _MISSING for p in logprobs):
        raise fault("a log-prob is missing or not a number")
    versions: list[int] = []
    for span in choice.weight_versions or []:
        if span.start != len(versions) or span.end <= span.start or not span.version.isdecimal():
            raise fault(f"bad weight version span {span}; label the weights with a whole number (publish does)")
        if versions and int(span.version) < versions[-1]:
            raise fault(f"the policy version goes back from {versions[-1]} to {span.version} inside a completion")
        versions.extend([int(span.version)] * (span.end - span.start))
    if len(versions) != len(tokens):
        raise fault(f"versions of {len(versions)} tokens for {len(tokens)} tokens")
    return Completion(tuple(tokens), logprobs, tuple(versions), reason)


def _figures(text: str) -> dict[str, float]:
    """Prometheus text, summed over labels."""
    figures: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            with contextlib.suppress(ValueError):
                name = name.partition("{")[0]
                figures[name] = figures.get(name, 0.0) + float(value)
    return figures
