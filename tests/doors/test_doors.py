"""Every server of a run asks for the shared key, and every client without it says what to set."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from byte_model import write_byte_model
from prometheus_client.parser import text_string_to_metric_families

from agent.chat.renderer import ChatRenderer
from agent.child_processes import stop_child
from agent.doors.door import WrongKey, bearer
from agent.doors.guard import guard
from agent.engines.client import HttpEngine
from agent.engines.local.launch import launch_local
from agent.engines.vllm import launch as vllm_launch
from agent.engines.vllm.door import Door
from agent.episode import SamplingParams
from agent.runtime.runtime import Runtime
from agent.runtime.settings import parse_config
from agent.store.__main__ import main as store_main
from agent.store.client import StoreClient
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger
from agent.store.server import StoreServer

Started = tuple[tuple[str, ...], dict[str, str]]
KEY, OTHER = "the-shared-key-of-this-run", "the-shared-key-of-another-run"
ENV = {"id": "sao/PythonTIR-v0", "kwargs": {"problems": [{"problem": "1+1", "answer": "2"}]}}


@pytest.fixture(autouse=True)
def no_key_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAO_KEY", raising=False)


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[str]:
    ledger = Ledger(tmp_path / "episodes.sqlite", StoreConfig(tasks=20, batch=10))
    async with served(StoreServer(ledger, key=KEY).application()) as url:
        yield url


async def statuses(url: str, paths: list[str], key: str) -> list[int]:
    found = []
    async with aiohttp.ClientSession(headers=bearer(key)) as session:
        for path in paths:
            async with session.get(url + path) as answer:
                found.append(answer.status)
                if answer.status == 401:
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    assert key not in await answer.text() or not key
    return found


@pytest.mark.parametrize("key", ["", OTHER], ids=["no_key", "another_key"])
async def test_the_store_lets_nobody_in_without_its_key(store: str, key: str) -> None:
    client = StoreClient(store, key=key)
    try:
        for call in (client.lease(1, "w"), client.status(), client.claim(10, 0), client.episodes(), client.forget("e")):
            with pytest.raises(WrongKey, match=r"401.*SAO_KEY.*key_file"):
                await call
        assert await client.healthy()
    finally:
        await client.close()
    assert await statuses(store, ["/metrics", "/status", "/nowhere", "/healthz"], key) == [401, 401, 401, 200]


async def test_the_store_works_for_whoever_has_the_key(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with StoreClient(store, key=KEY) as client:
        assert len(await client.lease(3, "w")) == 3
    monkeypatch.setenv("SAO_KEY", KEY)
    async with StoreClient(store) as client:
        assert (await client.status()).leased == 3


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from learner.config import TinyModelConfig
    from learner.model.tiny import write_tiny_model

    shape = {"vocab_size": 320, "hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8}
    shape |= {"experts": 2, "experts_per_token": 1, "expert_width": 8, "max_context": 128}
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, TinyModelConfig(**shape), ["some text"] * 4, 1)
    return folder


async def test_a_local_engine_samples_and_takes_weights_with_its_key_alone(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    process, url = await launch_local(tiny_model, version=3, log=log, max_context=128, max_sequences=4, key=KEY)
    try:
        for key in ("", OTHER):
            engine = HttpEngine(url, key=key)
            sampling = SamplingParams(max_tokens=4)
            stream = engine.stream([5, 6], sampling)
            calls = (engine.health(), engine.generate([5, 6], sampling), engine.publish(4, tiny_model), anext(stream))
            for call in calls:
                with pytest.raises(WrongKey, match=r"401.*SAO_KEY"):
                    await call
            await engine.close()
        engine = HttpEngine(url, key=KEY)
        assert (await engine.health()).version == 3
        assert len((await engine.generate([5, 6], SamplingParams(max_tokens=4))).token_ids) >= 1
        await engine.publish(4, tiny_model)
        health = await engine.health()
        assert health.version == 4
        assert health.tokens_generated >= 1
        await engine.close()
        async with aiohttp.ClientSession(headers=bearer(KEY)) as session, session.get(url + "/metrics") as answer:
            families = {family.name for family in text_string_to_metric_families(await answer.text())}
        assert {"vllm:num_requests_running", "vllm:generation_tokens", "engine:busy_seconds"} <= families
        assert await statuses(url, ["/health", "/metrics", "/weight_info"], "") == [200, 401, 401]
    finally:
        await stop_child(process)
    assert KEY not in log.read_text()


def guarded_engine(key: str) -> web.Application:
    app = web.Application(middlewares=[guard(key)])
    app.add_routes([web.get("/health", lambda _: asyncio.sleep(0, web.Response()))])
    return app


@pytest.mark.parametrize("wrong", ["store", "engine"])
async def test_a_runtime_with_a_wrong_key_ends_at_once_and_says_which_variable(
    wrong: str, store: str, tmp_path: Path
) -> None:
    """It would ask for `store_patience_s` or `engine_patience_s`, ten minutes, for nothing."""
    model = write_byte_model(tmp_path / "model")
    async with served(guarded_engine(KEY if wrong == "store" else OTHER)) as engine:
        config = parse_config(
            json.dumps({"store": store, "engines": [engine], "model": str(model), "env": ENV, "concurrency": 2})
        )
        sent = OTHER if wrong == "store" else KEY
        client = StoreClient(store, key=sent)
        runtime = Runtime(
            config,
            store=client,
            engines={engine: HttpEngine(engine, key=sent)},
            renderer=ChatRenderer.from_pretrained(model),
            make_env=lambda env: None,  # type: ignore[arg-type, return-value]
        )
        try:
            async with asyncio.timeout(30):
                with pytest.raises(WrongKey, match=rf"{wrong} .*401.*SAO_KEY"):
                    await runtime.run()
        finally:
            await client.close()


async def test_the_runtime_process_keeps_its_key_out_of_argv_environments_and_log(store: str, tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "model")
    (tmp_path / "key").write_text(OTHER)
    config = {"store": store, "engines": [store], "model": str(model), "env": ENV, "key_file": str(tmp_path / "key")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent.runtime"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "SAO_KEY": KEY},
    )
    async with asyncio.timeout(60):
        said, _ = await process.communicate(json.dumps(config).encode())
    assert process.returncode == 2, said.decode()
    assert b"SAO_KEY (or --key-file, key_file)" in said
    assert b"Traceback" not in said
    assert KEY.encode() not in said
    assert OTHER.encode() not in said


def test_a_store_for_all_machines_is_refused_without_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--path", str(tmp_path / "e.sqlite"), "--host", "0.0.0.0", "tasks=3", "batch=1"]
    assert store_main(words) == 2
    assert "the episode store does not listen on 0.0.0.0 without a key" in capsys.readouterr().err
    assert not (tmp_path / "e.sqlite").exists()


def test_a_local_engine_for_all_machines_is_refused_without_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    from agent.engines.local.__main__ import main

    assert main(["--model", "nowhere", "--host", "0.0.0.0"]) == 2
    assert "the local engine does not listen on 0.0.0.0 without a key" in capsys.readouterr().err


async def test_a_runtimes_port_for_all_machines_is_refused_without_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    from agent.runtime.__main__ import run

    text = json.dumps({"store": "s", "engines": ["e"], "model": "m", "env": ENV, "metrics_port": 0})
    config = parse_config(text).model_copy(update={"metrics_host": "0.0.0.0"})
    assert await run(config, exit_with_parent=False) == 2
    assert "the runtime's port (metrics_host) does not listen on 0.0.0.0 without a key" in capsys.readouterr().err


# -- vLLM, which is not installed here: what it is started with, and the door that is put before its own


@pytest.fixture
def vllm_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """The command lines and environments of servers that were only pretended to be started."""
    started: list[Started] = []

    async def start_child(*command: str, log: Path, env: dict[str, str]) -> Any:
        started.append((command, env))

    async def ready(*_: Any) -> None: ...

    monkeypatch.setattr(vllm_launch, "start_child", start_child)
    monkeypatch.setattr(vllm_launch, "_ready", ready)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return started


async def test_vllm_gets_its_key_in_its_environment_and_a_door_over_every_path(
    tmp_path: Path, vllm_started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = {"version": 0, "log": tmp_path / "log", "environment": tmp_path / "venv"}
    await vllm_launch.launch_vllm(tmp_path / "model", **start)  # type: ignore[arg-type]
    monkeypatch.setenv("SAO_KEY", OTHER)
    await vllm_launch.launch_vllm(tmp_path / "model", **start)  # type: ignore[arg-type]
    await vllm_launch.launch_vllm(tmp_path / "model", **start, key=KEY)  # type: ignore[arg-type]
    for (command, env), key in zip(vllm_started, ("", OTHER, KEY), strict=True):
        assert env.get("VLLM_API_KEY", "") == key
        assert "SAO_KEY" not in env
        assert ("agent.engines.vllm.door.Door" in command) is bool(key)
        assert not {KEY, OTHER} & set(command)


async def asked(door: Door, path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message.get("status", message["type"]))

    async def receive() -> Any:
        raise AssertionError("the door reads no body")

    await door({"type": kind, "path": path, "headers": list(headers)}, receive, send)
    return sent


async def test_the_door_of_vllm_covers_the_paths_that_change_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inside(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    monkeypatch.setenv("VLLM_API_KEY", KEY)
    door = Door(inside)
    right, wrong = (b"authorization", f"Bearer {KEY}".encode()), (b"authorization", b"Bearer \xff")
    for path in ("/update_weights", "/pause", "/metrics", "/v1/models", "/inference/v1/generate", "/"):
        assert await asked(door, path, right) == [200]
        assert (await asked(door, path))[0] == (await asked(door, path, wrong))[0] == 401
    assert await asked(door, "/health") == [200]
    assert await asked(door, "/", kind="lifespan") == [200]
    assert await asked(door, "/v1/realtime", kind="websocket") == ["websocket.close"]
    monkeypatch.delenv("VLLM_API_KEY")
    assert await asked(Door(inside), "/update_weights") == [200]
