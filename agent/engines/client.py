"""`HttpEngine`: the one client of every engine, over the token protocol of `vllm serve`. Works without torch.

It checks every answer and never repairs one: a log-prob that is missing is a fault (case B4), because a made-up
log-prob is a made-up ratio. It never retries; the runtime does, in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from agent.doors.door import bearer
from agent.doors.keys import given_key
from agent.engines import adapters
from agent.engines.base import (
    Call,
    Completion,
    Disconnected,
    EngineFault,
    EngineHealth,
    EngineRefused,
    OutOfTime,
    WeightStream,
)
from agent.engines.overtime import Overtime
from agent.engines.steering import NO_STEERING, Steering
from agent.engines.stream_reader import Partial, StreamReader
from agent.engines.wire import answers, completion, data_parallel_ranks, figures_of, generate_body, refusal
from agent.episode import SamplingParams

_ID_PREFIX = "generate-tokens-"  # the server puts it before a request's id, and wants it in aborts
_GENERATE = "/inference/v1/generate"
_CLEANUP_S = 5.0

HANDED_OVER_S = 2.0
"""How long an engine may take to hand over what it has sampled of a request that it was told to abort."""


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class HttpEngine:
    """An `Engine` behind `url`.

        engine = HttpEngine("http://127.0.0.1:8000")
        completion = await engine.generate(prompt_ids, SamplingParams(max_tokens=256, stop_token_ids=(2,)))
        await engine.publish(1, Path("runs/x/weights/1"))
        await engine.close()

    `timeout_s` bounds one generation, `control_timeout_s` each control call. A generation past it is aborted at the
    server and raises `OutOfTime` with what was sampled; so does a control call that takes longer. An answer of 4xx is
    `EngineRefused` (asking again won't help; a prompt that is too long is `ContextOverflow`), or `EngineBusy` if it
    asks to come later; a broken connection is `Disconnected`; 5xx and what can't be read are plain `EngineFault`.

    Connections that nobody uses are kept for `keepalive_s`: less than the engine keeps them, for a POST into one that
    it has just closed is lost. vLLM closes them after 5 s, unless VLLM_HTTP_TIMEOUT_KEEP_ALIVE says otherwise.

    With `keep_stale_cache` a publication leaves keys and values as the old weights made them, and what is sampled
    next reads them: nothing is computed again, but the log-probs are of no one set of weights.

    `key`: the shared key (vLLM calls it the API key), "" for none; None: that of $SAO_KEY, if there is one. An engine
    that refuses it raises `agent.doors.door.WrongKey`, which is no `EngineFault`: nothing helps but another key.

    `goes_back`: whoever publishes may load an earlier version again while completions run, as a trial of a new version
    does. Else tokens of an earlier version behind those of a later one are a fault of the engine.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        control_timeout_s: float = 120.0,
        keepalive_s: float = 2.0,
        keep_stale_cache: bool = False,
        key: str | None = None,
        goes_back: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._keepalive_s = keepalive_s
        self._headers = bearer(given_key() if key is None else key)
        self._keep_stale_cache, self._goes_back = keep_stale_cache, goes_back
        self._timeout_s = timeout_s
        self._control_timeout_s = control_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._publishing = asyncio.Lock()
        self._max_context: int | None = None
        self._name, self._first_rank, self._ranks = uuid.uuid4().hex, random.randrange(2**16), 1

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Sample one action. Cancelling it aborts the request at the server."""
        return await self.generate_in(None, prompt_ids, sampling, request_id=request_id, timeout_s=timeout_s)

    async def generate_in(
        self,
        session: int | None,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """As `generate`, in a session (see `agent.engines.base.Sticky`).

        It goes out as `X-Session-ID`, which gateways can be told to keep together, and where vLLM runs several
        data-parallel engines behind one address, as the rank of the one that has the session's prefix.
        """
        request_id = request_id or uuid.uuid4().hex
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        call_name = f"engine {self.url}{_GENERATE}"
        # What is sampled by the limit is handed over when it is aborted.
        overtime = Overtime(limit_s, lambda: self._abort(request_id, _CLEANUP_S), HANDED_OVER_S)
        try:
            async with overtime:
                body = generate_body(request_id, prompt_ids, sampling, stream=False)
                answer = await self._exchange("POST", _GENERATE, body, self._kept_together(session))
        except TimeoutError as error:
            raise OutOfTime(f"{call_name}: no answer within {limit_s:g} s") from error
        except asyncio.CancelledError:
            if not overtime.reached:
                with contextlib.suppress(EngineFault):
                    await self._abort(request_id, _CLEANUP_S)
            raise
        sampled = completion(self._decode(answers.decode, answer, "generate"), self.url, goes_back=self._goes_back)
        if overtime.reached and sampled.finish_reason == "abort":
            raise OutOfTime(f"{call_name}: no answer within {limit_s:g} s", sampled)
        return sampled

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        steering: Steering = NO_STEERING,
    ) -> AsyncGenerator[Partial, None]:
        """Sample one action and give its tokens as they come; the last `Partial` holds the whole `completion`.

            async with contextlib.aclosing(engine.stream(prompt_ids, sampling)) as partials:
                async for partial in partials: ...

        Closing it early, cancelling and the time limit abort the request at the server. `steering`: what is asked
        beyond `sampling`; an engine that does not know it refuses (`EngineRefused`).
        """
        request_id = request_id or uuid.uuid4().hex
        body = generate_body(request_id, prompt_ids, sampling, stream=True, steering=steering)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        call_name = f"engine {self.url}{_GENERATE}"
        reader = StreamReader(self.url, goes_back=self._goes_back)
        settled = False
        try:
            async with self._open().post(
                self.url + _GENERATE,
                data=_payload(body),
                timeout=aiohttp.ClientTimeout(total=limit_s),
            ) as response:
                if response.status >= 400:
                    settled = True
                    raise refusal(response.status, call_name, await response.read(), _retry_after(response))
                async for block in response.content.iter_any():
                    for partial in reader.feed(block):
                        settled = settled or partial.completion is not None
                        yield partial
            if not settled:
                raise Disconnected(f"{call_name}: the stream broke off after {reader.tokens} tokens; is it running?")
        except TimeoutError as error:
            raise OutOfTime(f"{call_name}: no end within {limit_s:g} s") from error
        except aiohttp.ClientError as error:
            raise Disconnected(f"{call_name}: {error}; is it running?") from error
        finally:
            if not settled:
                with contextlib.suppress(EngineFault):
                    await self._abort(request_id, _CLEANUP_S)

    async def publish(self, version: int, weights: Path | WeightStream) -> None:
        """See `Engine.publish`. A folder must be readable where the engine runs; it may hold an adapter.

        On an error the engine goes on under the weights that it has; or it ends, if half of them are new. One of which
        it is not known whether it has taken an adapter stays in pause, until a publication succeeds.
        """
        if isinstance(weights, Path) and adapters.base_of(weights) is not None:
            await self._publish_adapter(version, weights)
            return
        stream = _Snapshot(weights) if isinstance(weights, Path) else weights
        async with self._publishing, stream.connected(self.url, self._call) as send:
            try:
                await self._pause()
                await self._start()
                try:
                    await send()
                except BaseException as error:
                    if not _said_by_engine(error):
                        await self._abandon()
                    raise
                await _to_its_end(self._finish(version))
            except BaseException as error:
                await self._resume_after(error)
                raise
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
            served = await self._models()
            self._max_context = (served[0].max_model_len or 0) if served else 0
        label = self._decode(msgspec.json.Decoder(_WeightInfo).decode, info, "weight_info").weight_version
        text = metrics.decode()
        figures, self._ranks = figures_of(text), data_parallel_ranks(text)
        return EngineHealth(
            version=int(label) if label.isdecimal() else -1,
            running=int(figures.get("vllm:num_requests_running", 0)),
            waiting=int(figures.get("vllm:num_requests_waiting", 0)),
            max_context=self._max_context,
            tokens_generated=int(figures.get("vllm:generation_tokens_total", 0)),
            busy_s=figures.get("engine:busy_seconds_total", 0.0),
            uptime_s=figures.get("engine:uptime_seconds", 0.0),
        )

    async def _models(self) -> list[_Model]:
        models = await self._request("GET", "/v1/models", timeout_s=self._control_timeout_s)
        found: list[_Model] = self._decode(msgspec.json.Decoder(_Models).decode, models, "models").data
        return found

    async def close(self) -> None:
        """Close the connections. May be called any number of times."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        return await self._request(method, path, body, timeout_s=self._control_timeout_s, close=True)

    async def _abandon(self) -> None:
        # Without it vLLM would wait for the rest for ever, and refuse the next publication.
        body = {"update_info": {"abandon": True}}
        abandoning = asyncio.ensure_future(
            self._request("POST", "/update_weights", body, timeout_s=_CLEANUP_S, close=True)
        )
        with contextlib.suppress(EngineFault):  # it is refused: that is how it ends
            await asyncio.shield(abandoning)

    async def _pause(self) -> None:
        await self._control(f"/pause?mode=keep&clear_cache={'false' if self._keep_stale_cache else 'true'}")

    async def _publish_adapter(self, version: int, folder: Path) -> None:
        # A request that began without the adapter would end without it, under a version that it does not have.
        if adapters.NAME not in [model.id for model in await self._models()]:
            raise EngineRefused(
                f"engine {self.url} has served no adapter {adapters.NAME!r} from its start; docs/engines.md says how "
                "to start it, or write model.policy_adapter.publish=merged"
            )
        body = {"lora_name": adapters.NAME, "lora_path": adapters.address(folder), "load_inplace": True}
        has_old, has_new = True, False

        async def switch() -> None:
            nonlocal has_old, has_new
            try:
                await self._control("/v1/load_lora_adapter", body)
            except EngineFault as error:
                has_old = _said_by_engine(error)
                raise
            has_old = False
            await self._control("/update_weight_version", {"new_version": str(version)})
            has_new = True

        async with self._publishing:
            try:
                await self._pause()
                await _to_its_end(switch())
            except BaseException as error:
                if has_old or has_new:
                    await self._resume_after(error)
                raise
            await self._resume()

    async def _start(self) -> None:
        try:
            await self._control("/start_weight_update")
        except BaseException:
            # It may have started all the same; or it is still in the update of a trainer that was killed.
            await self._abandon()
            raise

    async def _finish(self, version: int) -> None:
        await self._control("/finish_weight_update", {"weight_version": str(version)})
        if not self._keep_stale_cache:
            # Keys and values of the old weights are never served as if they were new (case D6).
            await self._control("/reset_prefix_cache?reset_running_requests=true")

    async def _resume(self) -> None:
        # An engine left in pause would stall every episode.
        await _to_its_end(self._control("/resume"))

    async def _resume_after(self, error: BaseException) -> None:
        # What the caller hears is what came first, above all that it was cancelled.
        try:
            await self._resume()
        except EngineFault as fault:
            error.add_note(f"and then: {fault}")

    async def _abort(self, request_id: str, timeout_s: float) -> None:
        body = {"request_ids": [_ID_PREFIX + request_id]}
        await self._request("POST", "/abort_requests", body, timeout_s=timeout_s)

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> None:
        await self._request("POST", path, body, timeout_s=self._control_timeout_s, close=True)

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None = None,
        *,
        timeout_s: float,
        close: bool = False,
    ) -> bytes:
        # `close`: a connection for this call alone. vLLM resets the one on which it has failed, and /resume, coming
        # next on it, would be lost: an engine in pause for good.
        headers = {"Connection": "close"} if close else None
        content = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(method, path, content, headers)
        except TimeoutError as error:
            raise OutOfTime(f"engine {self.url}{path}: no answer within {timeout_s:g} s") from error

    def _kept_together(self, session: int | None) -> dict[str, str] | None:
        """The headers of a session's requests."""
        if session is None:
            return None
        headers = {"X-Session-ID": f"{self._name}-{session}"}
        if self._ranks > 1:
            headers["X-data-parallel-rank"] = str((self._first_rank + session) % self._ranks)
        return headers

    async def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None
    ) -> bytes:
        """The content of an answer, however long it takes."""
        data = None if body is None else _payload(body)
        try:
            async with self._open().request(method, self.url + path, data=data, headers=headers) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            raise Disconnected(f"engine {self.url}{path}: {error}; is it running?") from error
        if response.status >= 400:
            raise refusal(response.status, f"engine {self.url}{path}", content, _retry_after(response))
        return content

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The runtime bounds how many generations run; a second bound here would only hide it.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            )
        return self._session

    def _decode(self, decode: Any, data: bytes, what: str) -> Any:
        try:
            return decode(data)
        except msgspec.DecodeError as error:
            raise EngineFault(f"engine {self.url}: its {what} answer can't be read ({error})") from error


def _retry_after(response: aiohttp.ClientResponse) -> str | None:
    return response.headers.get("Retry-After")


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """`work`, even if the caller is cancelled meanwhile; the cancellation comes after it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it counts no more
        raise


def _said_by_engine(error: BaseException) -> bool:
    """Whether `error` is an engine's own answer; one that it was not heard for has a cause."""
    return isinstance(error, EngineFault) and error.__cause__ is None


def _payload(body: bytes) -> aiohttp.BytesPayload:
    return aiohttp.BytesPayload(body, content_type="application/json")


class _Snapshot:
    """A folder of safetensors, as a `WeightStream` that only says where it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # the engine may run in another folder

    @contextlib.asynccontextmanager
    async def connected(self, url: str, call: Call) -> AsyncGenerator[Callable[[], Awaitable[object]], None]:
        yield lambda: call("POST", "/update_weights", {"update_info": {"path": str(self._folder)}})
