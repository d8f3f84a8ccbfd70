"""Whose is what, on a real server: what others see, what a verdict may still do, what deletion leaves on the disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from serve_tools import Client, ServerProcess, client, engine_process, serving, write_recipe

from agent.doors.door import bearer
from agent.store.client import StoreClient

pytestmark = pytest.mark.xdist_group("serve-owners")

KEYS = {"ann": "ann-secret-1", "bob": "bob-secret-1", "admin-eve": "eve-secret-1"}
SIGNALS = {"regenerate": 0.0, "edit": 0.3, "copy": 1.0}


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("owners")
    keys = folder / "keys"
    keys.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    with engine_process(models[0], folder) as engine:
        recipe = write_recipe(folder, models[0], engine=engine, keys_file=str(keys), feedback={"signals": SIGNALS})
        everything = ("store.max_lag=100", "store.max_share_per_user=1")  # in one claim, whoever judged it
        with serving(recipe, *everything) as running:
            yield running


@pytest.fixture
async def ann(server: ServerProcess) -> AsyncIterator[Client]:
    async with client(server.url, KEYS["ann"]) as connected:
        yield connected


@pytest.fixture
async def bob(server: ServerProcess) -> AsyncIterator[Client]:
    async with client(server.url, KEYS["bob"]) as connected:
        yield connected


@contextlib.asynccontextmanager
async def store_of(server: ServerProcess) -> AsyncIterator[StoreClient]:
    url = re.findall(r"episodes\.sqlite at (http://\S+)", (server.run_dir / "store.log").read_text())[-1]
    async with StoreClient(url, key=server.key) as store:
        yield store


async def eventually(holds: Callable[[], Awaitable[bool]], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def watching(server: ServerProcess, name: str, query: str = "") -> AsyncIterator[list[tuple[str, Any]]]:
    """The events that the key's holder gets, as they come; the first one is there when the block begins."""
    seen: list[tuple[str, Any]] = []
    first = asyncio.Event()

    async def read(answer: aiohttp.ClientResponse) -> None:
        kind = ""
        async for line in answer.content:
            if line.startswith(b"event: "):
                kind = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                seen.append((kind, json.loads(line[6:])))
                first.set()

    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(headers=bearer(KEYS[name]), timeout=timeout, read_bufsize=1 << 22) as session,
        session.get(server.url + "/v1/events" + query) as answer,
    ):
        reading = asyncio.create_task(read(answer))
        try:
            async with asyncio.timeout(60):
                await first.wait()
            yield seen
        finally:
            reading.cancel()
            await asyncio.wait((reading,))


async def test_events_show_nobody_whose_response_it_was_but_its_owner(
    server: ServerProcess, ann: Client, bob: Client
) -> None:
    """A response id that was read there let another user judge, read and delete the conversation."""
    async with (
        watching(server, "bob") as of_bob,
        watching(server, "ann") as of_the_key,
        watching(server, "ann", "?user=cat") as of_cat,
        watching(server, "ann", "?user=ann") as of_ann,
    ):
        answer = await ann.chat("hello", user="ann")
        metadata = {"style": "hacked", "target": "hacked", "note": "private"}
        status, given = await ann.feedback(answer["id"], reward=0.375, metadata=metadata)
        assert status == 200, given

        async def told() -> bool:
            watchers = (of_bob, of_the_key, of_cat, of_ann)
            return all("feedback" in [kind for kind, _ in seen] for seen in watchers)

        await eventually(told)
        async with watching(server, "bob") as late:
            others = json.dumps([of_bob, of_the_key, of_cat, late])
    assert not [secret for secret in (answer["id"], answer["conversation"], "hacked", "private") if secret in others]
    for seen in (of_bob, of_the_key, of_cat):
        assert [event.keys() for kind, event in seen if kind in ("response", "feedback")] == [{"kind", "at"}] * 2
    [event] = [event for kind, event in of_ann if kind == "feedback"]
    assert (event["response_id"], event["reward"], event["metadata"]) == (answer["id"], 0.375, metadata)
    assert [event["response_id"] for kind, event in of_ann if kind == "response"] == [answer["id"]]
    # An id that leaked all the same opens nothing to another key, nor to another user of this one.
    for them, query in ((bob, ""), (ann, "?user=cat"), (ann, "?user=")):
        assert (await them.call("GET", f"/v1/conversations/{answer['conversation']}{query}"))[0] == 404
        assert (await them.call("DELETE", f"/v1/conversations/{answer['conversation']}{query}"))[0] == 404
    for them, more in ((bob, {}), (bob, {"user": "ann"}), (ann, {"user": "cat"})):
        assert (await them.feedback(answer["id"], reward=0, **more))[0] == 404
        pair = {"chosen": answer["id"], "rejected": answer["id"] + "x", **more}
        assert (await them.call("POST", "/v1/feedback/preference", pair))[0] == 404
    assert (await ann.call("GET", f"/v1/conversations/{answer['conversation']}?user=ann"))[0] == 200


async def test_metadata_of_an_ordinary_key_is_nobody_elses_figure(server: ServerProcess, ann: Client) -> None:
    """One client's `style` and `target` were everybody's chart and phase, with as many names as it liked."""
    async with client(server.url, KEYS["admin-eve"]) as eve:
        for caller, style in ((ann, "forged"), (eve, "measured"), *((eve, f"s{i}") for i in range(20))):
            answer = await caller.chat("hello")
            await caller.feedback(answer["id"], reward=1, metadata={"style": style, "target": style})
    async with watching(server, "bob") as seen:
        hello = seen[0][1]
    assert "forged" not in json.dumps(hello)
    assert hello["phase"] == "s19"
    async with watching(server, "bob") as seen:
        await eventually(lambda: _has(seen, "status"))
    styles = next(event for kind, event in seen if kind == "status")["style_share"]
    assert "other" in styles, "a bounded number of names"


async def _has(seen: list[tuple[str, Any]], kind: str) -> bool:
    return kind in [each for each, _ in seen]


async def test_a_verdict_is_replaced_until_the_learner_has_it(server: ServerProcess, ann: Client) -> None:
    """A misclick was a 409 from the first second on."""
    answers = [await ann.chat("hello", max_tokens=4) for _ in range(4)]
    async with store_of(server) as store:
        for answer in answers:
            assert (await ann.feedback(answer["id"], thumbs="down"))[1]["in_store"]
        first = answers[0]
        status, given = await ann.feedback(first["id"], score=0.75, comment="on second thoughts")
        assert (status, given["counted"], given["reward"], given["in_store"]) == (200, True, 0.75, True)
        assert (await store.episode(first["conversation"])).turn_rewards == (0.75,)
        ready = (await store.status()).ready
        claim = await store.claim(ready, 0, wait_s=30.0)
        assert claim is not None
        status, refused = await ann.feedback(first["id"], reward=0)
        assert (status, refused["error"]["code"]) == (409, "feedback_claimed")
        assert "learner" in refused["error"]["message"]
        status, again = await ann.feedback(first["id"], reward=0.75)
        assert (status, again["duplicate"]) == (200, True)
        status, words = await ann.feedback(first["id"], correction="Good day.")
        assert (status, words["counted"], words["reward"]) == (200, False, 0.75)
        _, kept = await ann.call("GET", f"/v1/conversations/{first['conversation']}")
        assert kept["responses"][0]["comment"] == "on second thoughts"
        assert kept["responses"][0]["correction"] == "Good day."
        await store.commit(claim.id, 0)


async def test_a_preference_and_signals_become_episodes(server: ServerProcess, ann: Client) -> None:
    ask: dict[str, Any] = {"user": "ann", "session": "pair", "max_tokens": 6}
    chosen, rejected = [await ann.chat("which one?", seed=seed, **ask) for seed in (1, 2)]
    other = await ann.chat("another question", seed=3, **ask)
    pair = {"chosen": chosen["id"], "rejected": other["id"]}
    status, refused = await ann.call("POST", "/v1/feedback/preference", pair)
    assert (status, refused["error"]["param"]) == (422, "rejected")
    status, said = await ann.feedback(rejected["id"], signal="regenerate")
    assert (status, said["reward"], said["final"]) == (200, 0.0, False)
    pair = {"chosen": chosen["id"], "rejected": rejected["id"], "margin": 0.5, "user": "ann"}
    status, answer = await ann.call("POST", "/v1/feedback/preference", pair)
    assert status == 200, answer
    assert (answer["chosen"]["reward"], answer["rejected"]["reward"]) == (0.75, 0.25)
    assert (answer["chosen"]["final"], answer["rejected"]["final"]) == (False, True)
    assert answer["rejected"]["in_store"]
    status, late = await ann.feedback(rejected["id"], signal="copy")
    assert (status, late["counted"], late["reward"]) == (200, False, 0.25), "what a person said outranks it"
    async with store_of(server) as store:
        assert (await store.episode(rejected["conversation"])).turn_rewards == (0.25,)


def holds(folder: Path, needles: list[bytes]) -> list[str]:
    """The files below `folder` that hold any of `needles`."""
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and any(needle in path.read_bytes() for needle in needles)
    ]


async def say(api: Client, word: str, **ask: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A session of two turns, judged with words and closed; both answers."""
    first = await api.chat(f"{word} one", max_tokens=12, **ask)
    history = [{"role": "user", "content": f"{word} one"}, first["choices"][0]["message"]]
    second = await api.chat(messages=[*history, {"role": "user", "content": f"{word} two"}], max_tokens=12, **ask)
    assert second["conversation"] == first["conversation"]
    await api.feedback(first["id"], reward=0.5, comment=f"comment {word}", metadata={"note": f"note {word}"})
    _, given = await api.feedback(second["id"], reward=1, correction=f"correction {word}", final=True)
    assert given["in_store"]
    return first, second


async def test_deletion_leaves_no_bytes_while_everything_runs(server: ServerProcess, ann: Client) -> None:
    """Words and tokens were left in write-ahead logs, in free parts of pages and in batches that a learner recorded."""
    words = {name: f"zebra-{name}-crossing" for name in ("trained", "claimed", "ready", "silent", "kept")}
    said = {name: await say(ann, word, user=name, session="s") for name, word in words.items() if name != "silent"}
    await ann.chat(f"{words['silent']} one", user="silent")
    batches = server.run_dir / "batches"
    batches.mkdir(exist_ok=True)
    needles: dict[str, list[bytes]] = {
        name: [word.encode(), f"comment {word}".encode()] for name, word in words.items()
    }
    async with store_of(server) as store:
        for name, (first, _) in said.items():
            episode = await store.episode(first["conversation"])
            assert len(episode.actions) == 2
            # The tokens of the two questions in packed form; each has its own word in it.
            needles[name] += [s.token_ids.data for s in episode.segments if s.kind != "action"]
        kept = said["kept"][0]["conversation"]
        for name in words:
            assert holds(server.run_dir, needles[name]), f"{name} is somewhere before it is deleted"
        claim = await store.claim((await store.status()).ready, 0, wait_s=30.0)
        assert claim is not None
        for number, name in enumerate(("trained", "kept")):
            data = next(data for data in claim.episodes if said[name][0]["conversation"].encode() in data)
            recorded = {"step": number, "version": 0, "weights": "start", "rng": b"", "episodes": [data]}
            (batches / f"step_{number:05d}.msgpack").write_bytes(msgspec.msgpack.encode(recorded))
        await store.commit(claim.id, 0)
        await say(ann, words["claimed"] + "-again", user="claimed", session="t")
        again = await store.claim((await store.status()).ready, 0, wait_s=30.0)
        assert again is not None

        assert (await ann.call("DELETE", "/v1/sessions/s?user=trained"))[1]["conversations"] == 1
        assert (await ann.call("DELETE", "/v1/users/claimed"))[1]["conversations"] == 2
        assert (await ann.call("DELETE", "/v1/users/silent"))[1]["conversations"] == 1
        path = f"/v1/conversations/{said['ready'][0]['conversation']}"
        assert (await ann.call("DELETE", path))[0] == 200
        gone = [needle for name in words if name != "kept" for needle in needles[name]]

        async def no_byte_is_left() -> bool:
            return not holds(server.run_dir, gone)

        try:
            await eventually(no_byte_is_left, within_s=30.0)
        except TimeoutError:
            pytest.fail(f"still in {holds(server.run_dir, gone)}")
        assert server.process.poll() is None
        assert (await ann.call("GET", path))[0] == 404
        assert holds(server.run_dir, needles["kept"]), "and nothing else is gone"
        assert not (batches / "step_00000.msgpack").exists()
        assert (batches / "step_00001.msgpack").exists()
        await store.release(again.id)
        rows = {row.id: row for row in await store.episodes()}
        assert rows[kept].gone is None
        assert rows[said["ready"][0]["conversation"]].gone == "wiped"
        assert (await store.status()).ready == 0, "what was deleted is not dealt again"


async def test_names_with_slashes_and_nothing_to_delete_are_no_error(ann: Client) -> None:
    for path in ("/v1/users/no%2Fbody%20here", "/v1/sessions/a/b?user=x%2Fy"):
        status, answer = await ann.call("DELETE", path)
        assert (status, answer["deleted"], answer["conversations"]) == (200, True, 0)
    await ann.chat("x", user="a/b c", max_tokens=4)
    assert (await ann.call("DELETE", "/v1/users/a%2Fb%20c"))[1] == {
        "id": "a/b c",
        "object": "user.deleted",
        "deleted": True,
        "conversations": 1,
    }
