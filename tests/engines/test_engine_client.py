"""The client against answers that a broken engine could give, from a real server on the loopback interface."""

from __future__ import annotations

import asyncio
import base64
import io
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from agent.engines.base import ContextOverflow, Disconnected, EngineBusy, EngineFault, EngineRefused
from agent.engines.client import HttpEngine
from agent.engines.stream_reader import StreamReader
from agent.episode import SamplingParams

ONCE = SamplingParams(max_tokens=3)


def answer(**changes: Any) -> dict[str, Any]:
    """A sound answer of three tokens, with `changes` in its choice."""
    content = [{"token_id": t, "logprob": -0.5, "rank": 1, "top_logprobs": []} for t in (4, 5, 6)]
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": [4, 5, 6],
        "logprobs": {"content": content},
        "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}],
    }
    return {"request_id": "generate-tokens-x", "choices": [choice | changes]}


def logprobs(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip((4, 5, 6), values, strict=False)]}}


def npy(ids: np.ndarray[Any, Any]) -> str:
    """As vLLM sends an array."""
    file = io.BytesIO()
    np.save(file, ids, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


class Engine:
    """Answers /inference/v1/generate with `reply`, and notes the calls."""

    def __init__(self) -> None:
        self.reply: Callable[[], web.Response] = lambda: web.json_response(answer())
        self.calls: list[tuple[str, Any]] = []
        self.hang = False
        self.arrived = asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.calls.append((request.path_qs, msgspec.json.decode(body) if body else None))
        self.arrived.set()
        if request.path != "/inference/v1/generate":
            return web.json_response({}, status=500 if request.path == "/update_weights" else 200)
        if self.hang:
            await asyncio.Event().wait()
        return self.reply()


@pytest.fixture
async def broken() -> AsyncIterator[Engine]:
    engine = Engine()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield engine
    await runner.cleanup()


@pytest.fixture
async def client(broken: Engine) -> AsyncIterator[HttpEngine]:
    client = HttpEngine(broken.url, timeout_s=5, control_timeout_s=5)
    yield client
    await client.close()


async def test_a_sound_answer_passes(client: HttpEngine, broken: Engine) -> None:
    done = await client.generate([1], ONCE, request_id="x")
    assert (done.token_ids, done.logprobs, done.versions) == ((4, 5, 6), (-0.5, -0.5, -0.5), (1, 1, 2))
    (path, body), *_ = broken.calls
    assert path == "/inference/v1/generate"
    assert body["sampling_params"]["logprobs"] == 0, "vLLM gives no log-probs unless asked"


async def test_experts_come_with_an_answer_and_with_the_end_of_a_stream(client: HttpEngine, broken: Engine) -> None:
    ids = np.arange(24, dtype=np.uint8).reshape(3, 4, 2)
    broken.reply = lambda: web.json_response(answer(routed_experts=npy(ids)))
    done = await client.generate([1], ONCE)
    assert done.experts is not None
    assert done.experts.array().tolist() == ids.tolist()
    data = msgspec.json.encode(answer(routed_experts=npy(ids)))
    *_, last = StreamReader("engine").feed(b"data: " + data + b"\n")
    assert last.completion == done


@pytest.mark.parametrize(
    "changes",
    [
        {"routed_experts": "?"},
        {"routed_experts": ""},
        {"routed_experts": npy(np.zeros((2, 3), dtype=np.uint8))},
        {"routed_experts": npy(np.zeros((2, 0, 3), dtype=np.uint8))},
        {"routed_experts": npy(np.zeros((2, 3, 1)))},
        {"routed_experts": npy(np.full((2, 3, 1), -1))},
        {"routed_experts": npy(np.full((2, 3, 1), 70_000))},
        {"routed_experts": npy(np.zeros((2, 3, 1), dtype=np.uint8))[:40]},
        logprobs(-0.5, -0.5),
        logprobs(-0.5, None, -0.5),
        logprobs(-0.5, -9999.0, -0.5),
        {"logprobs": None},
        {"logprobs": {"content": None}},
        {"token_ids": [4, 5, 7]},
        {"token_ids": [], "logprobs": {"content": []}, "weight_versions": None},
        {"token_ids": None},
        {"finish_reason": "error"},
        {"weight_versions": None},
        {"weight_versions": [{"version": "1", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "1", "start": 1, "end": 3}]},
        {"weight_versions": [{"version": "2", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}]},
        {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
    ],
    ids=lambda changes: msgspec.json.encode(changes).decode()[:60],
)
async def test_a_broken_completion_is_a_fault_and_is_never_repaired(
    client: HttpEngine, broken: Engine, changes: dict[str, Any]
) -> None:
    """Case B4: an engine that returns fewer log-probs than tokens, or none, or not-a-number."""
    broken.reply = lambda: web.json_response(answer(**changes))
    with pytest.raises(EngineFault):
        await client.generate([1], ONCE)


@pytest.mark.parametrize("text", ["", "not json", '{"choices": []}', '{"choices": [{"token_ids": "4"}]}', "[NaN]"])
async def test_what_is_no_answer_is_a_fault(client: HttpEngine, broken: Engine, text: str) -> None:
    broken.reply = lambda: web.Response(text=text)
    with pytest.raises(EngineFault):
        await client.generate([1], ONCE)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, '{"error": {"message": "the maximum context length is 8"}}', ContextOverflow),
        (400, '{"error": {"message": "bad"}}', EngineRefused),
        (404, "plain text", EngineRefused),
        (408, "", EngineBusy),
        (429, '{"error": {"message": "slow down"}}', EngineBusy),
        (500, '{"error": "odd"}', EngineFault),
        (503, "", EngineFault),
    ],
)
async def test_errors_are_typed_by_who_must_act(
    client: HttpEngine, broken: Engine, status: int, body: str, kind: type[EngineFault]
) -> None:
    broken.reply = lambda: web.Response(status=status, text=body)
    with pytest.raises(EngineFault) as error:
        await client.generate([1], ONCE)
    assert type(error.value) is kind


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        ("-3", 0, 0),
        (format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True), 1, 3600),
        ("Wed, 01 Jan 2020 00:00:00 GMT", 0, 0),
    ],
    ids=["seconds", "fraction", "negative", "a date to come", "a date that is past"],
)
async def test_a_busy_engine_is_asked_again_when_it_says(
    client: HttpEngine, broken: Engine, header: str, low: float, high: float
) -> None:
    """Case M11."""
    broken.reply = lambda: web.Response(status=429, headers={"Retry-After": header})
    with pytest.raises(EngineBusy) as error:
        await client.generate([1], ONCE)
    assert error.value.retry_after_s is not None
    assert low <= error.value.retry_after_s <= high


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "soon"}, {"Retry-After": "nan"}])
async def test_a_busy_engine_that_does_not_say_when(
    client: HttpEngine, broken: Engine, headers: dict[str, str]
) -> None:
    broken.reply = lambda: web.Response(status=429, headers=headers)
    with pytest.raises(EngineBusy) as error:
        await client.generate([1], ONCE)
    assert error.value.retry_after_s is None


async def test_an_engine_that_is_gone_is_a_fault() -> None:
    client = HttpEngine("http://127.0.0.1:9", timeout_s=5)
    with pytest.raises(Disconnected, match="running"):
        await client.generate([1], ONCE)
    with pytest.raises(EngineFault):
        await client.health()
    await client.close()
    await client.close()


async def test_a_hanging_engine_meets_the_time_limit_and_an_abort(client: HttpEngine, broken: Engine) -> None:
    broken.hang = True
    with pytest.raises(EngineFault, match="no answer"):
        await client.generate([1], ONCE, request_id="slow", timeout_s=0.05)
    assert broken.calls[-1] == ("/abort_requests", {"request_ids": ["generate-tokens-slow"]})


async def test_cancelling_aborts_at_the_server(client: HttpEngine, broken: Engine) -> None:
    broken.hang = True
    task = asyncio.create_task(client.generate([1], ONCE, request_id="gone"))
    await broken.arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert broken.calls[-1] == ("/abort_requests", {"request_ids": ["generate-tokens-gone"]})


async def test_a_failed_publication_never_leaves_the_engine_paused(
    client: HttpEngine, broken: Engine, tmp_path
) -> None:
    with pytest.raises(EngineFault):
        await client.publish(3, tmp_path)
    assert [path for path, _ in broken.calls] == [
        "/pause?mode=keep&clear_cache=true",
        "/start_weight_update",
        "/update_weights",
        "/resume",
    ]


def test_the_client_and_the_launcher_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import agent.engines.client, agent.engines.local.launch, agent.engines.vllm.launch"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
