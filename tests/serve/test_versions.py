"""Publications, pins and rollbacks, through the learner's way in and on a real engine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from serve_tools import NAME, Client, ServerProcess, client, write_recipe

from agent.doors.door import WrongKey
from agent.engines.base import EngineFault, EngineRefused
from agent.engines.client import HttpEngine
from agent.episode import SamplingParams
from agent.serve.versions.version_table import Version, prunable, to_serve

pytestmark = [pytest.mark.xdist_group("serve-versions"), pytest.mark.timeout(300)]

ASK = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "seed": 5, "max_tokens": 24}


async def says(api: Client) -> tuple[int, str]:
    """The served version and what it says to a fixed question with a fixed seed: a fingerprint of the weights."""
    status, answer = await api.call("POST", "/v1/chat/completions", ASK)
    assert status == 200, answer
    assert answer["policy_versions"] == [answer["policy_version"]]
    assert answer["id"].startswith(f"chatcmpl-v{answer['policy_version']}-")
    return answer["policy_version"], answer["choices"][0]["message"]["content"]


async def streams_through_a_publication(server: ServerProcess, api: Client, weights: Path, number: int) -> None:
    """Case G6: streams in flight neither stop nor break, and say which versions they are of."""
    learner = HttpEngine(server.engine, key=server.key)
    began = [asyncio.Event() for _ in range(4)]

    async def read(i: int) -> list[Any]:
        chunks = []
        body = {**ASK, "stream": True, "max_tokens": 400, "seed": i}
        async with api.session.post(server.url + "/v1/chat/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    chunks.append(json.loads(line[6:]))
                    if len(chunks) == 4:
                        began[i].set()
        return chunks

    reading = [asyncio.create_task(read(i)) for i in range(4)]
    await asyncio.gather(*(event.wait() for event in began))
    await learner.publish(number, weights)
    whole = await asyncio.gather(*reading)
    await learner.close()
    for chunks in whole:
        assert not any("error" in chunk for chunk in chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop")
        assert "\ufffd" not in "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:1])
    assert any(len(chunks[-1]["policy_versions"]) == 2 for chunks in whole)


async def closed_without_the_key(server: ServerProcess) -> None:
    """Whoever else is on the machine cannot publish past the server."""
    for key in ("", "the-key-of-another-run"):
        async with client(server.engine, key) as outside:
            for path in ("/update_weights", "/finish_weight_update", "/inference/v1/generate", "/pause"):
                status, answer = await outside.call("POST", path, {})
                assert status == 401
                assert "SAO_KEY" in answer["error"]["message"]
        stranger = HttpEngine(server.engine, key=key)
        with pytest.raises(WrongKey):
            await stranger.health()
        await stranger.close()


async def test_versions_are_published_pinned_rolled_back_and_found_again(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Cases G6 and G7, one after the other on one server that is killed in between."""
    first, second = models
    recipe = write_recipe(tmp_path, first, keep_versions=3)
    snapshot = tmp_path / "snapshot"
    shutil.copytree(second, snapshot)
    server = ServerProcess(recipe)
    server.start()
    try:
        async with client(server.url) as api:
            assert (await says(api))[0] == 0
            await closed_without_the_key(server)
            old = (await says(api))[1]
            await streams_through_a_publication(server, api, snapshot, 1)
            number, new = await says(api)
            assert (number, new != old) == (1, True)
            shutil.rmtree(snapshot)  # the learner removes old ones; ours stay

            learner = HttpEngine(server.engine, key=server.key)
            assert (await learner.health()).version == 1
            done = await learner.generate([1, 2, 3], SamplingParams(max_tokens=3))
            assert set(done.versions) == {1}
            for taken in (0, 1):
                with pytest.raises(EngineRefused, match="next_version=2") as refused:
                    await learner.publish(taken, first)
                assert refused.value.status == 409
            with pytest.raises(EngineFault):
                await learner.publish(2, tmp_path / "nothing")

            status, answer = await api.call("POST", "/v1/versions/rollback", {"version": 0})
            assert (status, answer["version"], answer["pinned"]) == (200, 2, True)
            assert await says(api) == (2, old)
            await learner.publish(3, second)
            await learner.publish(3, second)  # an answer that was lost
            assert await says(api) == (2, old), "held"
            assert (await learner.health()).version == 2
            await learner.close()
            assert (await api.call("POST", "/v1/versions/rollback", {"version": 77}))[0] == 404
            assert (await api.call("POST", "/v1/versions/rollback", {"versions": 0}))[0] == 400
        server.kill()

        server.start()
        async with client(server.url) as api:
            assert await says(api) == (2, old), "what was rolled back to is served after a restart"
            _, listing = await api.call("GET", "/v1/versions")
            assert listing["pinned"] is True
            assert [(v["version"], v["status"]) for v in listing["versions"]] == [
                (0, "served"),
                (1, "served"),
                (2, "serving"),
                (3, "held"),
            ]
            status, answer = await api.call("POST", "/v1/versions/unpin")
            assert (status, answer["served"], answer["pinned"]) == (200, 3, False)
            assert await says(api) == (3, new)
            learner = HttpEngine(server.engine, key=server.key)
            await learner.publish(4, first)
            await learner.close()
            assert await says(api) == (4, old)

            # The engine dies: it comes back with the same weights, and nobody has to do anything.
            engine = next(p for p in _children(server) if "agent.engines.local" in p.cmdline())
            engine.kill()
            async with asyncio.timeout(120):
                while (await api.call("POST", "/v1/chat/completions", ASK))[0] != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert await says(api) == (4, old)
    finally:
        server.stop()


def _children(server: ServerProcess) -> list[Any]:
    return psutil.Process(server.process.pid).children(recursive=True)


def version(
    number: int, path: str, status: str = "served", source: str = "learner", origin: int | None = None
) -> Version:
    return Version(number, path, source, origin, 0.0, status)


def test_a_start_serves_the_newest_weights_that_are_there(tmp_path: Path) -> None:
    there = str(tmp_path)
    rows = [version(0, there, source="start"), version(1, there), version(2, "/gone"), version(3, there, "held")]
    assert to_serve(rows) == rows[1]
    rows.append(version(4, there, "publishing"))
    assert to_serve(rows) == rows[-1], "a publication that a crash cut short may have sampled tokens already"
    rows.append(version(5, there, "failed"))
    assert to_serve(rows) == rows[-2]
    assert to_serve([version(0, "/gone")]) is None


def test_weights_are_pruned_but_never_the_served_ones(tmp_path: Path) -> None:
    there = str(tmp_path)
    rows = [version(0, "/the/users/own", source="start"), *(version(i, there) for i in range(1, 6))]
    assert [v.number for v in prunable(rows, 2)] == [1, 2, 3]
    rows += [version(6, there, source="rollback", origin=1)]
    rows += [version(i, there, "held") for i in range(7, 12)]
    assert {1, 6, 10, 11} & {v.number for v in prunable(rows, 2)} == set()


def test_a_missing_model_says_which_command_makes_it(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tmp_path / "nothing")
    for words, message in (
        ([], "python -m learner.sft"),
        (["serve.prot=1"], "serve.prot: unknown key"),
        (["serve.host=0.0.0.0"], "serve: doors.open"),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "agent.serve", str(recipe), *words],
            capture_output=True,
            text=True,
            timeout=100,
            env={k: v for k, v in os.environ.items() if k != "SAO_SERVE_KEYS"},
        )
        assert ended.returncode == 2
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_server_starts_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import agent.serve.server, agent.serve.__main__"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
