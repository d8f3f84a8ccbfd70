"""What any web page, any other user and any socket may do to a server that has made its own key: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest
from browser_tools import chromium
from playwright.async_api import expect
from serve_tools import NAME, Client, ServerProcess, client, engine_process, serving, write_recipe

pytestmark = [pytest.mark.xdist_group("serve-door"), pytest.mark.timeout(240)]

FOREIGN = "http://evil.example"
LISTED = "https://chat.example.org"
PROXY = "127.0.0.3"
READING = ("/v1/models", "/v1/versions", "/v1/events", "/v1/conversations/x", "/healthz", "/metrics", "/")


@pytest.fixture(scope="module")
def engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with engine_process(models[0], tmp_path_factory.mktemp("engine")) as url:
        yield url


@pytest.fixture(scope="module")
def guarded(
    models: tuple[Path, Path], engine: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server whose key is the one that it has made."""
    doors = {
        **{"cors_origins": [LISTED], "hosts": ["chat.example.org"], "trusted_proxies": [PROXY]},
        **{"wrong_keys_per_minute": 5, "header_s": 1.0},
    }
    with serving(write_recipe(tmp_path_factory.mktemp("door"), models[0], engine=engine, doors=doors)) as running:
        yield running


def made_key(server: ServerProcess) -> str:
    return (server.run_dir / "serve" / "key").read_text().strip()


@pytest.fixture
async def outside(guarded: ServerProcess) -> AsyncIterator[Client]:
    """Whoever can reach the port."""
    async with client(guarded.url) as connected:
        yield connected


@pytest.fixture
async def inside(guarded: ServerProcess) -> AsyncIterator[Client]:
    """Whoever has the key."""
    async with client(guarded.url, made_key(guarded)) as connected:
        yield connected


@contextlib.asynccontextmanager
async def coming_from(address: str, url: str, key: str = "") -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(local_addr=(address, 0))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=limit) as session:
        yield Client(url, session)


async def test_no_web_page_can_roll_the_model_back(outside: Client, inside: Client) -> None:
    """As a form or a script of any page can send it, without asking first and without a key."""
    page = {"Origin": FOREIGN, "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}
    body = b'{"version": 0}'
    assert (await outside.call("POST", "/v1/versions/rollback", body, **page))[0] == 403
    assert (await inside.call("POST", "/v1/versions/rollback", body, **page))[0] == 403, "with a key neither"
    assert (await inside.call("POST", "/v1/versions/rollback", body, **{"Content-Type": "text/plain"}))[0] == 415
    assert (await outside.call("POST", "/v1/versions/rollback", body))[0] == 401
    for path in ("/v1/versions/pin", "/v1/versions/unpin", "/v1/feedback", "/v1/chat/completions"):
        assert (await outside.call("POST", path, **{"Origin": FOREIGN}))[0] == 403
    _, listing = await inside.call("GET", "/v1/versions")
    assert (listing["served"], listing["pinned"]) == (0, False)


@pytest.mark.parametrize("path", READING)
async def test_no_web_page_reads_anything(outside: Client, inside: Client, path: str) -> None:
    for caller in (outside, inside):
        for headers in ({"Origin": FOREIGN}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
            status, answer = await caller.call("GET", path, **headers)
            assert (status, answer["error"]["code"]) == (403, "foreign_origin")
        async with caller.session.get(caller.url + path, headers={"Origin": FOREIGN}) as refused:
            assert "Access-Control-Allow-Origin" not in refused.headers


@pytest.mark.parametrize("path", READING)
async def test_a_name_that_is_made_to_point_at_us_gets_nothing(inside: Client, path: str) -> None:
    """DNS rebinding: to the browser that page and this server are one origin."""
    host = "evil.example:8000"
    for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
        status, answer = await inside.call("GET", path, **headers)
        assert (status, answer["error"]["code"]) == (421, "unknown_host")


async def test_own_names_and_own_pages_are_answered(guarded: ServerProcess, inside: Client) -> None:
    port = guarded.url.rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "chat.example.org"):
        assert (await inside.call("GET", "/v1/models", Host=host, Origin=f"http://{host}"))[0] == 200


async def test_without_a_key_a_server_that_was_just_started_serves_nobody(outside: Client) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
    assert (await outside.call("POST", "/v1/chat/completions", chat))[0] == 401
    for path in ("/v1/models", "/v1/versions", "/v1/events", "/v1/nothing"):
        assert (await outside.call("GET", path))[0] == 401
    for path in ("/", "/static/page.js", "/healthz", "/metrics"):
        assert (await outside.call("GET", path))[0] == 200


async def test_the_key_is_made_and_said_once_and_opens_everything(guarded: ServerProcess, inside: Client) -> None:
    key, file = made_key(guarded), guarded.run_dir / "serve" / "key"
    assert f"page:  {guarded.url}/#key={key}\n" in guarded.said
    assert str(file) in guarded.said
    assert guarded.said.count(key) == 1
    assert key != guarded.key, "the key of the run's own processes opens other doors"
    answer = await inside.chat("hello")
    assert (await inside.feedback(answer["id"], reward=1))[0] == 200
    async with openai.AsyncOpenAI(base_url=guarded.url + "/v1", api_key=key, max_retries=0) as them:
        assert [model.id async for model in await them.models.list()] == [NAME]
    assert (await inside.call("POST", "/v1/versions/pin"))[0] == 200
    assert (await inside.call("POST", "/v1/versions/unpin"))[0] == 200


async def test_the_ports_of_store_and_engine_are_closed_to_whoever_has_a_users_key(
    guarded: ServerProcess, models: tuple[Path, Path]
) -> None:
    """A store that handed out an episode, a way to the engine that took weights under the number 777."""
    [store] = [
        found.laddr.port
        for process in psutil.Process(guarded.process.pid).children()
        if "agent.store" in process.cmdline()
        for found in process.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    ]
    for key in ("", made_key(guarded)):
        async with client(f"http://127.0.0.1:{store}", key) as api:
            assert (await api.call("POST", "/claims", {}))[0] == 401
            assert (await api.call("GET", "/status"))[0] == 401
        async with client(guarded.engine, key) as api:
            given = {"update_info": {"path": str(models[1])}}
            assert (await api.call("POST", "/update_weights", given))[0] == 401
            assert (await api.call("POST", "/finish_weight_update", {"weight_version": "777"}))[0] == 401
    async with client(guarded.engine, guarded.key) as api:
        assert (await api.call("GET", "/weight_info"))[0] == 200


async def test_a_listed_page_asks_first_and_may_then_use_the_api(outside: Client, inside: Client) -> None:
    asks = {
        "Origin": LISTED,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    async with outside.session.options(outside.url + "/v1/chat/completions", headers=asks) as answer:
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == LISTED
        assert answer.headers["Access-Control-Allow-Headers"] == asks["Access-Control-Request-Headers"]
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
    url = inside.url + "/v1/chat/completions"
    async with inside.session.post(url, json=body, headers={"Origin": LISTED}) as answer:
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == LISTED
        assert "Origin" in answer.headers["Vary"]
    async with outside.session.get(outside.url + "/v1/models", headers={"Origin": LISTED}) as answer:
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (401, LISTED), "it can read why not"
    foreign = {**asks, "Origin": FOREIGN}
    async with outside.session.options(outside.url + "/v1/chat/completions", headers=foreign) as answer:
        assert answer.status == 403


async def test_behind_a_proxy_limits_count_the_client_and_a_forged_header_counts_for_nothing(
    guarded: ServerProcess,
) -> None:
    key = made_key(guarded)
    wrong = {"Authorization": "Bearer not-the-key"}
    async with coming_from(PROXY, guarded.url) as proxy:
        guessed = {**wrong, "X-Forwarded-For": "203.0.113.1"}
        seen = [(await proxy.call("GET", "/v1/models", **guessed))[0] for _ in range(8)]
        assert seen == [401] * 5 + [429] * 3
        right = {"Authorization": f"Bearer {key}"}
        assert (await proxy.call("GET", "/v1/models", **right, **{"X-Forwarded-For": "203.0.113.1"}))[0] == 429
        assert (await proxy.call("GET", "/v1/models", **right, **{"X-Forwarded-For": "203.0.113.2"}))[0] == 200
        secure = {"Host": "chat.example.org", "X-Forwarded-Proto": "https", **right}
        assert (await proxy.call("GET", "/v1/models", **secure, Origin="https://chat.example.org"))[0] == 200
        body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
        status, text = await proxy.call("POST", "/v1/chat/completions", body, **secure)
        assert (status, text[-14:]) == (200, "data: [DONE]\n\n"), "a request whose client was put in has its body still"
        inner = {**right, "Host": "upstream", "X-Forwarded-Host": "chat.example.org"}
        assert (await proxy.call("GET", "/v1/models", **inner))[0] == 200
    async with coming_from("127.0.0.4", guarded.url) as other:
        forged = [{**wrong, "X-Forwarded-For": f"203.0.113.{i}"} for i in range(10, 18)]
        assert [(await other.call("GET", "/v1/models", **headers))[0] for headers in forged] == [401] * 5 + [429] * 3
    assert guarded.said.count("wrong keys within a minute") == 2
    assert "not-the-key" not in guarded.said


async def test_who_changed_the_versions_is_written_down(guarded: ServerProcess, inside: Client) -> None:
    assert (await inside.call("POST", "/v1/versions/pin"))[0] == 200
    assert (await inside.call("POST", "/v1/versions/rollback", {"version": 77}))[0] == 404
    assert (await inside.call("POST", "/v1/versions/unpin"))[0] == 200
    answer = await inside.chat("a secret question")
    assert (await inside.call("DELETE", f"/v1/conversations/{answer['conversation']}"))[0] == 200
    text = (guarded.run_dir / "serve" / "audit.jsonl").read_text()
    last = [json.loads(line) for line in text.splitlines()][-4:]
    assert [(entry["action"], entry["arguments"], entry["status"]) for entry in last] == [
        ("POST /v1/versions/pin", {}, 200),
        ("POST /v1/versions/rollback", {"version": 77}, 404),
        ("POST /v1/versions/unpin", {}, 200),
        ("DELETE /v1/conversations/{id}", {"id": answer["conversation"]}, 200),
    ]
    assert {(entry["key"], entry["address"]) for entry in last} == {("admin", "127.0.0.1")}
    assert "77" in last[1]["outcome"]
    assert made_key(guarded) not in text
    assert "secret" not in text


async def test_what_the_server_writes_is_for_its_user_alone(guarded: ServerProcess, inside: Client) -> None:
    assert (await inside.call("POST", "/v1/versions/unpin"))[0] == 200
    found = [path for path in guarded.run_dir.rglob("*") if not path.is_symlink()]
    assert {"journal.sqlite", "episodes.sqlite", "key", "audit.jsonl", "store.log"} <= {path.name for path in found}
    others = {str(path): oct(path.stat().st_mode) for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077}
    assert others == {}


async def test_a_header_that_never_ends_is_not_waited_for(guarded: ServerProcess) -> None:
    host, _, port = guarded.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


def silent_sockets(url: str, count: int) -> list[socket.socket]:
    """Connections that have begun a header and will not end it."""
    host, _, port = url.removeprefix("http://").partition(":")
    opened = []
    for _ in range(count):
        one = socket.create_connection((host, int(port)), timeout=10)
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            one.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
        opened.append(one)
    return opened


async def test_sockets_that_never_finish_a_header_keep_nobody_out_and_fill_no_log(
    models: tuple[Path, Path], engine: str, tmp_path: Path
) -> None:
    """Three hundred of them, on a server that may open 260 files: today it stops, and writes its disk full."""
    recipe = write_recipe(tmp_path, models[0], engine=engine, doors={"header_s": 60.0})
    server = ServerProcess(recipe, descriptors=260)
    server.start()
    opened: list[socket.socket] = []
    try:
        key = made_key(server)
        opened = await asyncio.to_thread(silent_sockets, server.url, 300)
        for address in ("127.0.0.2", "127.0.0.1"):  # somebody else, and somebody who shares the attacker's address
            async with coming_from(address, server.url, key) as api, asyncio.timeout(60):
                answers = await asyncio.gather(*(api.call("GET", "/v1/models") for _ in range(20)))
                assert [status for status, _ in answers] == [200] * 20
                await api.chat("hello")
                assert (await api.call("GET", "/healthz"))[1]["status"] == "ok"
        # Even with no descriptor left at all it does not spin, and goes on once there are some.
        process = psutil.Process(server.process.pid)
        before = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() - 20, before[1]))
        opened += await asyncio.to_thread(silent_sockets, server.url, 100)
        async with asyncio.timeout(60):
            while "cannot be accepted" not in server.said:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        process.rlimit(psutil.RLIMIT_NOFILE, before)
        async with coming_from("127.0.0.2", server.url, key) as api, asyncio.timeout(60):
            assert (await api.call("GET", "/v1/models"))[0] == 200
        assert len(server.said) < 50_000, server.said[:5000]
        server.stop()
    finally:
        for one in opened:
            one.close()
        if server.process.poll() is None:
            server.kill()


async def test_a_second_start_keeps_the_key_and_tells_it_to_no_log(
    models: tuple[Path, Path], engine: str, tmp_path: Path
) -> None:
    """And files of an earlier server that others may read are closed to them."""
    recipe = write_recipe(tmp_path, models[0], engine=engine, doors={})
    folder = tmp_path / "runs" / NAME / "serve"
    folder.mkdir(parents=True)
    (folder / "key").write_text("the-key-of-an-earlier-start\n")
    (folder / "key").chmod(0o644)
    with serving(recipe) as server:
        assert (folder / "key").stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        assert "the-key-of-an-earlier-start" not in server.said
        assert f"page:  {server.url}/#key=KEY" in server.said
        async with client(server.url, "the-key-of-an-earlier-start") as api:
            assert (await api.call("GET", "/v1/models"))[0] == 200


async def answer_of(url: str, request: bytes) -> Any:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(30):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_a_request_without_a_host_or_with_two_is_refused(guarded: ServerProcess) -> None:
    assert await answer_of(guarded.url, b"GET /metrics HTTP/1.0\r\n\r\n") == 421
    two = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert await answer_of(guarded.url, two) in (400, 421)


@pytest.mark.browser
async def test_the_printed_link_opens_the_page_and_leaves_no_key_in_the_address(guarded: ServerProcess) -> None:
    link = guarded.said.partition("\npage:  ")[2].partition("\n")[0]
    asked: list[str] = []
    async with chromium() as browser, await browser.new_context() as profile:
        page = await profile.new_page()
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(link)
        await expect(page.locator("#state")).to_have_text("live", timeout=30_000)
        assert page.url == guarded.url + "/"
        await page.reload()
        await expect(page.locator("#state")).to_have_text("live", timeout=30_000)
    assert not any(made_key(guarded) in url.partition("#")[0] for url in asked)
