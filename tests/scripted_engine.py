"""An engine that speaks the token protocol over HTTP and says what the demo set's scripted engineer would say.

It keeps nothing between requests: which repository, and which turn, it reads in the prompt. So an episode that is run
again after a fault gets the same actions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from agent.chat.renderer import ChatRenderer
from agent.doors.guard import guard
from envs.swe_bench.demo.scripts import SCRIPTS, SUBMIT, call
from envs.swe_bench.instance import load_instances

_TURN = "<|im_start|>assistant\n"
MAX_CONTEXT = 32_768


def fixes(prompt: str) -> str:
    """The next action of an engineer who mends the demo repository of `prompt` and hands in."""
    for instance in load_instances("demo").values():
        if instance.problem_statement.strip()[:60] in prompt:
            name = instance.instance_id.removeprefix("sao-demo__").removesuffix("-1")
            actions = [*map(call, (SCRIPTS[name].look[0], *SCRIPTS[name].fix)), SUBMIT]
            return actions[min(prompt.count(_TURN) - 1, len(actions) - 1)]
    raise AssertionError(f"no demo repository in {prompt[:500]!r}")


async def _nothing() -> None: ...


@asynccontextmanager
async def scripted_engine(
    model: Path,
    script: Callable[[str], str] = fixes,
    *,
    before: Callable[[], Awaitable[None]] = _nothing,
    key: str = "",
) -> AsyncIterator[str]:
    """Serve `script` (prompt text to action text) to those with `key`; gives the URL.

    `before` is awaited in every generation.
    """
    renderer = ChatRenderer.from_pretrained(model)

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        await before()
        ids = list(renderer.encode_action(script(renderer.decode(body["token_ids"]))))
        most = body["sampling_params"]["max_tokens"]
        reason, ids = ("length", ids[:most]) if len(ids) > most else ("stop", ids)
        entries = [{"token_id": i, "logprob": -0.5} for i in ids]
        choice = {"token_ids": ids, "finish_reason": reason, "logprobs": {"content": entries}}
        choice["weight_versions"] = [{"version": "0", "start": 0, "end": len(ids)}]
        return web.json_response({"choices": [choice]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": MAX_CONTEXT}]})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "0"})

    async def empty(request: web.Request) -> web.Response:
        return web.Response(text="")

    app = web.Application(client_max_size=2**26, middlewares=[guard(key)])
    app.add_routes(
        [
            web.post("/inference/v1/generate", generate),
            web.post("/abort_requests", empty),
            web.get("/v1/models", models),
            web.get("/weight_info", version),
            web.get("/health", empty),
            web.get("/metrics", empty),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def unused_port() -> int:
    """A port on which nothing listens."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
