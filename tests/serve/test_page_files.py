"""What the page is served with, and the history behind its charts; no browser."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from itertools import pairwise

import aiohttp
import pytest
from aiohttp import web
from browser_tools import find_browser

from agent.serve.api.events import Figures
from agent.serve.api.page import STATIC, Page
from agent.serve.api.samples import Samples
from agent.wire.errors import errors_as_json


@pytest.fixture
async def site() -> AsyncIterator[aiohttp.ClientSession]:
    """The page's routes on a real port."""
    app = web.Application(middlewares=[errors_as_json])
    app.add_routes(Page().routes())
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
            yield session
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/static/page.css", "/static/plotly.min.js"])
async def test_nothing_is_served_without_a_strict_policy(site: aiohttp.ClientSession, path: str) -> None:
    async with site.get(path) as answer:
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_the_chart_library_arrives_whole(site: aiohttp.ClientSession, encoding: str) -> None:
    async with site.get("/static/plotly.min.js", headers={"Accept-Encoding": encoding}) as answer:
        text = await answer.text()
    assert len(text) > 1_000_000
    assert "plotly.js v" in text[:200]


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "%2e%2e%2fapp.py", "%2fetc%2fpasswd"])
async def test_only_the_pages_own_files_are_served(site: aiohttp.ClientSession, name: str) -> None:
    async with site.get(f"/static/{name}") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["message"]


def test_no_inline_script_or_style_and_no_address_outside_is_in_the_files() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", page)
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path


def test_the_history_covers_the_whole_life_in_bounded_space() -> None:
    samples = Samples(limit=10)
    for at in range(1000):
        samples.add({"at": at})
    kept = [row["at"] for row in samples.rows]
    assert len(kept) <= 10
    assert kept[0] == 0
    assert kept[-1] >= 1000 - 2 * (kept[1] - kept[0])
    assert len({b - a for a, b in pairwise(kept)}) == 1, "evenly spaced"


def test_a_phase_holds_until_another_is_named() -> None:
    figures = Figures()
    assert figures.snapshot()["phase"] is None
    seen = []
    for metadata in ({"target": "cute", "phase": 0}, {}, {"phase": 2}, {"target": ["no", "word"]}):
        figures.judged(1.0, metadata)
        seen.append(figures.snapshot()["phase"])
    assert seen == ["cute", "cute", "2", "2"]


def test_a_missing_browser_is_a_failure_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(AssertionError, match="install_chromium"):
        find_browser()
