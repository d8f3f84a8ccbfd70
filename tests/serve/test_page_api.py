"""What the page may ask for and who may ask it; the style that is read of what people judged. No engine, no browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agent.episode import SamplingParams, Segment
from agent.serve.api.guide import Guide
from agent.serve.api.limits import Keys
from agent.serve.api.page_api import PageApi
from agent.serve.children.simulated import SimulatedUsers
from agent.serve.config import ServeError, ServeRecipe
from agent.serve.conversations.conversation import Plan
from agent.serve.conversations.feedback import Feedback
from agent.serve.conversations.journal import Journal
from agent.serve.server import _guide_of
from agent.store.database_thread import DatabaseThread
from agent.wire.errors import errors_as_json

ADMIN, ANN = "key-of-the-admin", "key-of-ann-herself"
CUTE = "yay, look, rain is so fluffy and tiny, i love it so much~"
RECIPE = {"name": "x", "env": {"id": "sao/StyleShift-v0", "kwargs": {"prompts": "tiny", "show_candidates": False}}}


class Site:
    def __init__(self, page: PageApi, journal: Journal, thread: DatabaseThread, http: aiohttp.ClientSession) -> None:
        self.page, self.journal, self.thread, self.http = page, journal, thread, http

    async def post(self, path: str, body: Any, key: str = ADMIN) -> tuple[int, Any]:
        async with self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            return answer.status, await answer.json()

    async def answered(self, response_id: str, said: str, reward: float | None, *, version: int = 0) -> str:
        """A conversation with one answer, and its verdict if there is one; its id."""
        segment = Segment("prompt", (1,), "x")
        action = Segment("action", (2,), said, logprobs=(-1.0,), versions=(version,), finish_reason="stop")

        def record() -> str:
            name = self.journal.record(
                Plan("", 0, segment.token_ids, "x", segment),
                response_id,
                action,
                key="ann",
                user="",
                session="",
                messages=[{"role": "user", "content": "Write about rain."}, {"role": "assistant", "content": said}],
                tools=[],
                sampling=SamplingParams(),
                trainable=True,
                version=version,
                started_at=0.0,
            )
            if reward is not None:
                self.journal.give(Feedback(response_id, reward, True, {}), "ann", 1e9)
            return name

        return await self.thread.run(record)


@contextlib.asynccontextmanager
async def site(folder: Path, guide: Guide | None, simulated: SimulatedUsers | None) -> AsyncIterator[Site]:
    journal = Journal(folder / "journal.sqlite")
    thread = DatabaseThread(journal)
    page = PageApi(Keys({ADMIN: "admin", ANN: "ann"}), thread, journal, guide, simulated)
    app = web.Application(middlewares=[errors_as_json])
    app.add_routes(page.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:
            yield Site(page, journal, thread, http)
    finally:
        await runner.cleanup()
        await asyncio.to_thread(thread.close)


@pytest.fixture
def guide() -> Guide:
    made = Guide.of(ServeRecipe.model_validate(RECIPE))
    assert made is not None
    return made


async def test_anyone_has_texts_parsed_or_users_let_in(tmp_path: Path, guide: Guide) -> None:
    users = SimulatedUsers(Path("x.yaml"), [], tmp_path / "simulated.log", per_minute=60)
    async with site(tmp_path, guide, users) as there:
        assert (await there.post("/page/markdown", {"text": "**a**"}, "no-key-at-all"))[0] == 401
        assert (await there.post("/page/simulated_users", {"running": True}, "no-key-at-all"))[0] == 401
        assert (await there.post("/page/simulated_users", {"running": True}, ANN))[0] == 403
        assert not users.state.running
        assert (await there.post("/page/simulated_users", {"run": True}))[0] == 400
        status, body = await there.post("/page/markdown", {"text": "**a**"}, ANN)
        assert (status, body["tree"][0]["in"][0]["tag"]) == (200, "strong")
        assert (await there.post("/page/markdown", {"text": "a" * 20_001}, ANN))[0] == 413


async def test_users_are_offered_who_cannot_judge_this(tmp_path: Path) -> None:
    assert Guide.of(ServeRecipe.model_validate({"name": "x"})) is None
    async with site(tmp_path, None, None) as there:
        status, body = await there.post("/page/simulated_users", {"running": True})
        assert status == 404
        assert "env.id" in body["error"]["message"]
        assert there.page.simulated() is None


async def test_simulated_users_outlive_the_server_or_show_their_key(
    tmp_path: Path, guide: Guide, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@"; echo "key $SAO_API_KEY"; exec sleep 600\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    users = SimulatedUsers(Path("x.yaml"), ["a=1"], tmp_path / "simulated.log", per_minute=30)
    users.url = "http://127.0.0.1:1"
    async with site(tmp_path, guide, users) as there:
        assert (await there.post("/page/simulated_users", {"running": True}))[1] == {"running": True, "detail": ""}
        assert (await there.post("/page/simulated_users", {"running": True}))[1]["running"], "twice is one"
        process = users._process
        assert process is not None
        async with asyncio.timeout(30):
            while True:
                if "key" in users._log.read_text():
                    break
                await asyncio.sleep(0.01)
        command, key = users._log.read_text().splitlines()
        assert "--users 2 --pace 4" in command, "30 verdicts a minute of two users"
        assert key == f"key {ADMIN}"
        assert ADMIN not in command
        assert (await there.post("/page/simulated_users", {"running": False}))[1] == {"running": False, "detail": ""}
        assert process.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


async def test_users_that_have_ended_are_shown_as_running(
    tmp_path: Path, guide: Guide, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "error: the policy has stayed at step 0"; exit 1\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    users = SimulatedUsers(Path("x.yaml"), [], tmp_path / "simulated.log", per_minute=30)
    await users.start("")
    assert users._waiting is not None
    async with asyncio.timeout(30):
        await users._waiting
    assert "has stayed at step 0" in users.state.detail
    await users.stop()


async def test_a_persons_verdicts_count_for_no_style(tmp_path: Path, guide: Guide) -> None:
    async with site(tmp_path, guide, None) as there:
        name = await there.answered("r1", CUTE, 1.0)
        read = await there.page.with_style({"note": 1}, "r1", name)
        assert read == {"note": 1, "style": "cute"}
        named = await there.page.with_style({"style": "mine"}, "r1", name)
        assert named == {"style": "mine"}, "whoever says the style is believed"
        await there.thread.run(lambda: there.journal.delete(name, "ann"))
        assert await there.page.with_style({}, "r1", name) == {}


async def test_a_versions_score_is_of_other_answers(tmp_path: Path) -> None:
    async with site(tmp_path, None, None) as there:
        for number, (version, reward) in enumerate([(0, 0.0), (0, 1.0), (1, 1.0), (1, None), (2, None)]):
            await there.answered(f"r{number}", "x", reward, version=version)
        listing = {"versions": [{"version": version} for version in range(3)]}
        found = (await there.page.with_scores(listing))["versions"]
        assert [(row["verdicts"], row["score"]) for row in found] == [(2, 0.5), (1, 1.0), (0, None)]


def test_prompts_are_all_of_one_form_or_one_topic(guide: Guide) -> None:
    assert len(set(guide.prompts)) == 24
    assert len({prompt.split()[0] for prompt in guide.prompts}) == 3


def test_wrong_keys_of_the_environment_are_found_by_the_first_user() -> None:
    recipe = {"name": "x", "env": {"id": "sao/StyleShift-v0", "kwargs": {"phasen": []}}}
    with pytest.raises(ServeError, match="phasen"):
        _guide_of(ServeRecipe.model_validate(recipe))
