"""The HTTP server of the `local` engine, which speaks the token protocol of `vllm serve`.

Endpoints, with vLLM's paths and bodies: POST /inference/v1/generate, /abort_requests, /pause?mode=keep|abort, /resume,
/start_weight_update, /update_weights, /finish_weight_update, /v1/load_lora_adapter, /update_weight_version,
/reset_prefix_cache; GET /weight_info, /is_paused, /health, /metrics, /v1/models. One thing is our own: `update_info` of
/update_weights is {"path": folder} of a safetensors snapshot that this process can read.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from agent.doors.guard import guard
from agent.engines import adapters
from agent.engines.local.loop import LoopDead, ModelLoop
from agent.engines.local.model import ModelError
from agent.engines.local.scheduler import Generation
from agent.engines.local.steered import MAX_LOGPROBS
from agent.engines.local.stop_strings import StopStrings
from agent.engines.local.stream_writer import logprob_entries, stream, version_spans
from agent.engines.steering import Steering
from agent.episode import SamplingParams
from agent.metrics_page import counter, gauge, metrics_page

Body = TypeVar("Body")
_ID_PREFIX = "generate-tokens-"  # vLLM's: an abort must name a request by its prefixed id


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    """The part of vLLM's sampling parameters that is served here; any other is refused, not ignored.

    What bends the distribution (penalties, biases, `min_p`, `min_tokens`) is for callers that nothing is learned from:
    the learner could not reproduce it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    n: int = 1
    detokenize: bool = False
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = True


class GenerateBody(msgspec.Struct):
    """Body of /inference/v1/generate. Fields of vLLM's that mean nothing here (priority, cache_salt) are ignored."""

    token_ids: list[int]
    sampling_params: SamplingBody
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = False


class AbortBody(msgspec.Struct):
    """Body of /abort_requests; None: all of them."""

    request_ids: list[str] | None = None


class UpdateInfo(msgspec.Struct):
    """Where the new weights are: a folder of safetensors."""

    path: str


class UpdateBody(msgspec.Struct):
    """Body of /update_weights."""

    update_info: UpdateInfo


class FinishBody(msgspec.Struct):
    """Body of /finish_weight_update; None: the version stays."""

    weight_version: str | None = None


class RelabelBody(msgspec.Struct):
    """Body of /update_weight_version."""

    new_version: str


class AdapterBody(msgspec.Struct):
    """Body of /v1/load_lora_adapter. The adapter is for every request from then on, whatever its name."""

    lora_path: str


class BadRequest(ValueError):
    """What the caller got wrong; answered with `status`."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class LocalServer:
    """The HTTP face of a `ModelLoop`. `app()` is an aiohttp application; the loop starts and stops with it."""

    def __init__(self, loop: ModelLoop, *, name: str, folder: Path | None = None, key: str = "") -> None:
        """`folder`: where the model's tokenizer is, for requests with stop strings. `key`: asked for, if not ""."""
        self._key = key
        self._engine = loop
        self._stop_strings = StopStrings(folder)
        self._name = name
        self._started = time.monotonic()
        self._alive: dict[str, set[Generation]] = {}
        self._keeps_cache = False  # as the present pause was asked for

    def app(self) -> web.Application:
        """The aiohttp application; its start-up and clean-up start and stop the model's thread."""
        app = web.Application(client_max_size=64 * 2**20, middlewares=[guard(self._key, _unauthorized), _errors])
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/abort_requests", self._abort),
                web.post("/inference/v1/abort_requests", self._abort),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/start_weight_update", self._start_update),
                web.post("/update_weights", self._update),
                web.post("/finish_weight_update", self._finish_update),
                web.post("/v1/load_lora_adapter", self._load_adapter),
                web.post("/update_weight_version", self._relabel),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/weight_info", self._weight_info),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
            ]
        )
        app.on_startup.append(self._on_startup)
        app.on_cleanup.append(self._on_cleanup)
        return app

    async def _on_startup(self, app: web.Application) -> None:
        self._engine.start()

    async def _on_cleanup(self, app: web.Application) -> None:
        await asyncio.to_thread(self._engine.stop)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _read(request, GenerateBody)
        sampling = self._checked(body)
        eos = frozenset() if body.sampling_params.ignore_eos else self._engine.model.eos_token_ids
        request_id = _ID_PREFIX + (request.headers.get("X-Request-Id") or body.request_id or uuid.uuid4().hex)
        generation = Generation.new(request_id, body.token_ids, sampling, eos, self._engine.model.max_context)
        generation.steering = self._steering(body.sampling_params)
        if sampling.stop:
            try:
                generation.ends_text = self._stop_strings.watch(sampling.stop)
            except ValueError as error:
                raise BadRequest(str(error)) from error
        self._alive.setdefault(request_id, set()).add(generation)
        with_logprobs = body.sampling_params.logprobs is not None
        try:
            if body.stream:
                return await stream(request, self._engine, generation, with_logprobs=with_logprobs)
            await self._engine.generate(generation)
        finally:
            same = self._alive[request_id]
            same.discard(generation)
            if not same:
                del self._alive[request_id]
        if generation.finish_reason == "error":
            raise LoopDead(f"the weights of version {self._engine.version} give NaN; publish sound ones")
        return _json(_answer(generation, self._name, with_logprobs))

    def _checked(self, body: GenerateBody) -> SamplingParams:
        """The request's sampling parameters; raises `BadRequest` for what can't be served."""
        given, model = body.sampling_params, self._engine.model
        room = model.max_context - len(body.token_ids)
        if body.model not in (None, self._name):
            raise BadRequest(f"the model {body.model!r} does not exist; this engine serves {self._name!r}", 404)
        if given.n != 1:
            raise BadRequest("n > 1 is not supported by the local engine")
        if not body.token_ids or min(body.token_ids) < 0 or max(body.token_ids) >= model.vocabulary:
            raise BadRequest(f"token_ids must hold at least one id, each in [0, {model.vocabulary})")
        if room < 1:
            raise BadRequest(
                f"the prompt has {len(body.token_ids)} tokens and the maximum context length is {model.max_context}, "
                "which leaves no room for a token; shorten the prompt"
            )
        max_tokens = room if given.max_tokens is None else given.max_tokens
        if max_tokens < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {max_tokens}")
        if not 0 <= given.temperature < float("inf"):
            raise BadRequest(f"temperature must be a number that is not negative, got {given.temperature}")
        if not 0 < given.top_p <= 1:
            raise BadRequest(f"top_p must be in (0, 1], got {given.top_p}")
        if given.top_k < -1:
            raise BadRequest(f"top_k must be -1 or 0 (off) or at least 1, got {given.top_k}")
        if not all(given.stop):
            raise BadRequest("stop: a stop string has at least one character")
        if given.logprobs is not None and not 0 <= given.logprobs <= min(MAX_LOGPROBS, model.vocabulary):
            raise BadRequest(f"logprobs: at most {MAX_LOGPROBS} a token, and no more than there are tokens")
        return SamplingParams(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=min(given.top_k or -1, model.vocabulary),  # more does not fit a tensor, and means no more
            max_tokens=max_tokens,
            seed=given.seed,
            stop_token_ids=given.stop_token_ids or (),
            stop=given.stop,
        )

    def _steering(self, given: SamplingBody) -> Steering:
        """What bends the distribution; raises `BadRequest` for what can't be served."""
        if given.structured_outputs is not None:
            raise BadRequest("structured_outputs is not supported by the local engine; serve this model with vLLM")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(given, name) <= 2:
                raise BadRequest(f"{name} must be in [-2, 2], got {getattr(given, name)}")
        if not 0 < given.repetition_penalty < float("inf"):
            raise BadRequest(f"repetition_penalty must be more than 0, got {given.repetition_penalty}")
        if not 0 <= given.min_p <= 1 or given.min_tokens < 0:
            raise BadRequest("min_p must be in [0, 1], and min_tokens at least 0")
        bias = given.logit_bias or {}
        if not all(0 <= i < self._engine.model.vocabulary and -100 <= b <= 100 for i, b in bias.items()):
            raise BadRequest("logit_bias: token ids of the vocabulary, each with a number in [-100, 100]")
        return Steering(
            min_tokens=given.min_tokens,
            min_p=given.min_p,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
            repetition_penalty=given.repetition_penalty,
            logit_bias=bias,
            top_logprobs=given.logprobs or 0,
        )

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await _read(request, AbortBody)).request_ids
        wanted = [g for i in (ids or list(self._alive)) for g in self._alive.get(i, ())]
        await self._engine.abort(wanted)
        return _json({"status": "aborted", "aborted": len(ids) if ids else len(wanted)})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("keep", "abort"):
            raise BadRequest(f"pause mode {mode!r} is not supported; use keep or abort")
        self._keeps_cache = request.query.get("clear_cache", "true") == "false"
        await self._engine.pause()
        if mode == "abort":
            await self._engine.abort([g for same in self._alive.values() for g in same])
        return _json({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._keeps_cache = False
        await self._engine.resume()
        return _json({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return _json({"is_paused": self._engine.paused})

    async def _start_update(self, request: web.Request) -> web.Response:
        return _json({"message": "Weight update started"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await _read(request, UpdateBody)
        await self._engine.stage(Path(body.update_info.path))
        return _json({"message": "Weights updated"})

    async def _finish_update(self, request: web.Request) -> web.Response:
        given = (await _read(request, FinishBody)).weight_version
        version = self._engine.version if given is None else _version(given)
        await self._engine.commit(version, keep_cache=self._keeps_cache)
        return _json({"message": "Weight update finished"})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await _read(request, AdapterBody)
        await self._engine.stage(Path(body.lora_path))
        await self._engine.commit(self._engine.version, keep_cache=self._keeps_cache)
        return _json({"message": "Adapter loaded"})

    async def _relabel(self, request: web.Request) -> web.Response:
        new = (await _read(request, RelabelBody)).new_version
        await self._engine.relabel(_version(new))
        return _json({"success": True, "new_version": new})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        await self._engine.forget()
        return _json({"success": True})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return _json({"weight_version": str(self._engine.version)})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.alive else 503)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self._name, "object": "model", "max_model_len": self._engine.model.max_context}
        adapter = {"id": adapters.NAME, "object": "model", "parent": self._name}
        return _json({"object": "list", "data": [card, adapter]})

    async def _metrics(self, request: web.Request) -> web.Response:
        engine = self._engine
        label = "model_name"

        def of(value: float) -> dict[str, float]:
            return {self._name: value}

        # Under vLLM's names, where it has one.
        return metrics_page(
            [
                gauge("vllm:num_requests_running", "Sequences decoded now", of(len(engine.scheduler.running)), label),
                gauge("vllm:num_requests_waiting", "Requests without a slot", of(len(engine.scheduler.waiting)), label),
                counter("vllm:generation_tokens", "Tokens sampled", of(engine.tokens_generated), label),
                counter("vllm:prompt_tokens", "Tokens read", of(engine.prompt_tokens), label),
                counter("vllm:prefix_cache_hits", "Tokens not read again", of(engine.reused_tokens), label),
                counter("engine:steps", "Forwards", of(engine.steps), label),
                counter("engine:busy_seconds", "Seconds in forwards", of(engine.busy_s), label),
                gauge("engine:uptime_seconds", "Since the start", of(time.monotonic() - self._started), label),
            ]
        )


def _answer(generation: Generation, model: str, with_logprobs: bool) -> dict[str, Any]:
    """A response of /inference/v1/generate."""
    tokens = generation.sampled
    return {
        "request_id": generation.id,
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "finish_reason": generation.finish_reason,
                "stop_reason": generation.stop_reason,
                "token_ids": tokens,
                "logprobs": {"content": logprob_entries(generation, 0, len(tokens))} if with_logprobs else None,
                "weight_versions": version_spans(generation.versions) or None,
            }
        ],
        "usage": {
            "prompt_tokens": generation.prompt_length,
            "completion_tokens": len(tokens),
            "total_tokens": len(generation.tokens),
            "prompt_tokens_details": {"cached_tokens": generation.reused},
        },
    }


def _version(text: str) -> int:
    if not text.isdecimal():
        raise BadRequest(f"the weight version must be a whole number, got {text!r}")
    return int(text)


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def _read(request: web.Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise BadRequest(f"bad request body: {error}") from error


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        answer: web.StreamResponse = await handler(request)
    except BadRequest as error:
        return _error(error.status, str(error))
    except ModelError as error:
        return _error(400, str(error))
    except LoopDead as error:
        return _error(500, str(error))
    return answer


def _unauthorized(message: str) -> web.Response:
    return _error(401, message)


def _error(status: int, message: str) -> web.Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return _json({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
