"""Nothing that was acknowledged is lost and nothing is trained twice, whatever dies, fills up or takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serve_tools import NAME, Client, ServerProcess, client, engine_process, serving, write_recipe
from store_process import store_process

from agent.episode import decode
from agent.store.client import StoreClient
from agent.store.reading import EpisodeFilter, EpisodeReader

pytestmark = pytest.mark.xdist_group("serve-durability")

RecipeFor = Callable[..., Path]


@pytest.fixture(scope="module")
def engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One engine for every server here, since its start takes the longest; it dies with its server elsewhere."""
    with engine_process(models[0], tmp_path_factory.mktemp("engine")) as url:
        yield url


@pytest.fixture
def recipe_for(models: tuple[Path, Path], engine: str, tmp_path: Path) -> RecipeFor:
    """Makes the recipe of a test; takes keys of section `serve`."""
    return functools.partial(write_recipe, tmp_path, models[0], engine=engine)


def stored(server: ServerProcess, **wanted: Any) -> dict[str, str]:
    """Ids and states of the episodes in the store's file."""
    with EpisodeReader(server.run_dir / "episodes.sqlite") as reader:
        return {row.id: row.status for row in reader.list(EpisodeFilter(limit=10_000, **wanted))}


async def eventually(holds: Callable[[], Any], within_s: float = 60.0) -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not (await holds() if asyncio.iscoroutinefunction(holds) else holds()):
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.05)


async def talk(api: Client, accepted: dict[str, str], started: asyncio.Event) -> None:
    """Chat and judge until the server is gone; `accepted` gets what was answered with 200."""
    for turn in itertools.count():
        try:
            answer = await api.chat(f"hello {turn}", max_tokens=4, stream=False)
            status, given = await api.feedback(answer["id"], reward=0.5)
        except (aiohttp.ClientError, ConnectionError, AssertionError):
            return
        if status == 200:
            accepted[answer["id"]] = given["conversation"]
            if len(accepted) > 8:
                started.set()


@pytest.mark.timeout(300)
async def test_every_accepted_feedback_survives_kills_under_load(recipe_for: RecipeFor) -> None:
    """Case G5, D3: SIGKILL of the server, and of the store with it, again and again."""
    server = ServerProcess(recipe_for(delivery_wait_s=0.02))
    accepted: dict[str, str] = {}
    for _ in range(2):
        server.start()
        before, started = len(accepted), asyncio.Event()
        async with client(server.url) as api:
            talking = [asyncio.create_task(talk(api, accepted, started)) for _ in range(12)]
            async with asyncio.timeout(60):
                await started.wait()
            server.kill()
            await asyncio.gather(*talking)
        assert len(accepted) > before
    server.start()
    try:
        await eventually(lambda: set(accepted.values()) <= stored(server).keys())
        async with client(server.url) as api:
            for response_id in list(accepted)[:20]:
                status, answer = await api.feedback(response_id, reward=0.5)
                assert (status, answer["duplicate"]) == (200, True)
    finally:
        server.stop()
    with EpisodeReader(server.run_dir / "episodes.sqlite") as reader:
        responses = Counter(r for name in stored(server) for r in decode(reader.get(name)).metrics["responses"])
    assert set(accepted) <= responses.keys()
    assert set(responses.values()) == {1}, "no response is in two episodes"


async def test_a_full_journal_acknowledges_nothing_and_keeps_what_it_has(recipe_for: RecipeFor) -> None:
    """A disk that fills: 507, in a stream too, and what had a 200 is still there."""
    with serving(recipe_for(max_journal_bytes=100_000)) as server:
        async with client(server.url) as api:
            accepted, status, answer = [], 200, {}
            body = {"model": NAME, "messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 60}
            while status == 200:
                status, answer = await api.call("POST", "/v1/chat/completions", body)
                if status == 200 and (await api.feedback(answer["id"], reward=1))[0] == 200:
                    accepted.append(answer)
                assert len(accepted) < 500
            assert (status, answer["error"]["code"]) == (507, "disk_full")
            text = ""
            for _ in range(50):  # a short reply may still fit
                status, text = await api.call("POST", "/v1/chat/completions", {**body, "stream": True})
                if "disk_full" in text:
                    break
            assert "disk_full" in text
            assert accepted
            for answer in accepted:
                assert (await api.feedback(answer["id"], reward=1))[1]["duplicate"]
            await eventually(lambda: {a["conversation"] for a in accepted} <= stored(server).keys())
            assert (await api.call("GET", "/healthz"))[0] == 200


async def test_feedback_waits_in_the_journal_while_the_store_is_full(recipe_for: RecipeFor, tmp_path: Path) -> None:
    """A disk that fills, of the store: feedback is still accepted, and delivered when there is room again."""
    path = tmp_path / "episodes.sqlite"
    recipe = recipe_for(delivery_wait_s=30.0)
    async with contextlib.AsyncExitStack() as stack:
        async with store_process(path, "batch=4", "max_bytes=110000") as url:
            server = stack.enter_context(serving(recipe, f"store.url={url}"))
            api = await stack.enter_async_context(client(server.url))
            given = {"in_store": True}
            while given["in_store"]:
                answer = await api.chat("x" * 200, max_tokens=100)
                status, given = await api.feedback(answer["id"], reward=1)
                assert status == 200, given

            async def says_so() -> bool:
                _, health = await api.call("GET", "/healthz")
                return health["status"] == "degraded" and "room" in health["store"]

            await eventually(says_so)
        port = url.rpartition(":")[2]
        async with store_process(path, "batch=4", "max_bytes=4000000", port=port), StoreClient(url) as store:

            async def there() -> bool:
                return given["conversation"] in {row.id for row in await store.episodes(EpisodeFilter())}

            await eventually(there)


async def test_unanswered_responses_expire_unlearned_and_late_feedback_is_gone(recipe_for: RecipeFor) -> None:
    """Case G5: 410; and a session with some feedback is learned from up to there."""
    with serving(recipe_for(feedback_ttl_s=4.0)) as server:
        async with client(server.url) as api:
            silent = await api.chat("nobody answers")
            first = await api.chat("one", session="s", max_tokens=4)
            status, given = await api.feedback(first["id"], reward=0.75)
            assert (status, given["final"]) == (200, False)
            history = [
                {"role": "user", "content": "one"},
                first["choices"][0]["message"],
                {"role": "user", "content": "two"},
            ]
            await api.chat(messages=history, session="s", max_tokens=4)
            await eventually(lambda: first["conversation"] in stored(server))
            with EpisodeReader(server.run_dir / "episodes.sqlite") as reader:
                episode = decode(reader.get(first["conversation"]))
            assert [s.kind for s in episode.segments] == ["prompt", "action"]
            assert episode.turn_rewards == (0.75,)

            async def expired() -> bool:
                return (await api.call("GET", f"/v1/conversations/{silent['conversation']}"))[1]["status"] == "expired"

            await eventually(expired)
            status, answer = await api.feedback(silent["id"], reward=1)
            assert (status, answer["error"]["code"]) == (410, "feedback_too_late")
            assert (await api.feedback("chatcmpl-v0-unknown", reward=1))[0] == 404
            assert silent["conversation"] not in stored(server)


async def _leaves_its_stream_unread(server: ServerProcess, api: Client) -> None:
    """A slow client: its stream is cut, its generation stops, and nothing of it is kept."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"model": NAME, "stream": True, "messages": [{"role": "user", "content": "x"}]})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"

    async def page(name: str) -> float:
        _, text = await api.call("GET", "/metrics")
        return float(next(line for line in text.splitlines() if line.startswith(name)).rpartition(" ")[2])

    async def cut() -> bool:
        """Whether the server cut one stream before its end; a short answer fits into the buffers on the way."""
        tokens, began = await page("sao_completion_tokens_total"), await page("sao_time_to_first_token_seconds_count")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect((host, int(port)))
            connection.sendall((head + body).encode())

            async def ended() -> bool:
                started = await page("sao_time_to_first_token_seconds_count") == began + 1
                return started and await page("sao_generations_running") == 0

            await eventually(ended)
            return await page("sao_completion_tokens_total") == tokens

    assert any([await cut() for _ in range(5)]), "every answer reached a client that read none"


async def test_deleted_conversations_are_wiped_and_slow_clients_are_let_go(recipe_for: RecipeFor) -> None:
    with serving(recipe_for(write_s=0.5, write_buffer_bytes=1024)) as server:
        async with client(server.url) as api:
            await _leaves_its_stream_unread(server, api)
            kept, gone = await api.chat("keep me"), await api.chat("zebra crossing", max_tokens=4)
            for answer in (kept, gone):
                assert (await api.feedback(answer["id"], reward=1))[1]["in_store"]
            assert (await api.call("DELETE", f"/v1/conversations/{gone['conversation']}"))[0] == 200
            assert (await api.call("DELETE", f"/v1/conversations/{gone['conversation']}"))[0] == 200
            assert (await api.call("DELETE", "/v1/conversations/served-none"))[0] == 404
            assert (await api.call("GET", f"/v1/conversations/{gone['conversation']}"))[0] == 404
            assert (await api.feedback(gone["id"], reward=1))[0] == 410
            await eventually(lambda: stored(server)[gone["conversation"]] == "dropped")
        assert stored(server)[kept["conversation"]] == "ready"
    with EpisodeReader(server.run_dir / "episodes.sqlite") as reader, pytest.raises(Exception, match="no episode"):
        reader.get(gone["conversation"])
    assert b"zebra" not in (server.run_dir / "serve" / "journal.sqlite").read_bytes()


async def test_keys_keep_users_apart_and_a_flood_of_one_is_limited(recipe_for: RecipeFor, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# people\nann:ann-secret-1\nbob:bob-secret-1\nadmin-eve:eve-secret-1\n")
    with serving(recipe_for(keys_file=str(keys), feedback_per_minute=1, burst=20)) as server:
        async with client(server.url) as api:
            body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "session": "s"}
            assert (await api.call("POST", "/v1/chat/completions", body))[0] == 401
            assert (await api.call("POST", "/v1/chat/completions", body, Authorization="Bearer wrong-secret"))[0] == 401
            ann, bob = {"Authorization": "Bearer ann-secret-1"}, {"Authorization": "Bearer bob-secret-1"}
            status, answer = await api.call("POST", "/v1/chat/completions", body, **ann)
            assert status == 200
            given = {"response_id": answer["id"], "reward": 1}
            assert (await api.call("POST", "/v1/feedback", given, **bob))[0] == 404
            assert (await api.call("GET", f"/v1/conversations/{answer['conversation']}", **bob))[0] == 404
            assert (await api.call("DELETE", f"/v1/conversations/{answer['conversation']}", **bob))[0] == 404
            assert (await api.call("POST", "/v1/versions/pin", **ann))[0] == 403
            assert (await api.call("POST", "/v1/versions/pin", Authorization="Bearer eve-secret-1"))[0] == 200
            assert (await api.call("POST", "/v1/feedback", given, **ann))[0] == 200
            assert (await api.call("GET", "/healthz"))[0] == 200
            flood = [api.call("POST", "/v1/feedback", given, **ann) for _ in range(60)]
            assert Counter(status for status, _ in await asyncio.gather(*flood)) == {200: 19, 429: 41}
            assert (await api.call("POST", "/v1/feedback", given, **bob))[0] == 404, "the limit is one caller's own"
