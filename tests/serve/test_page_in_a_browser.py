"""The page in a real Chromium, on a real server with a tiny model that says one hostile sentence."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from browser_tools import chromium
from page_tools import WAIT_MS, Relay, Watched, ask, opened, write_parrot
from playwright.async_api import Browser, expect
from serve_tools import NAME, ServerProcess, client, serving, write_recipe

# One browser for all tests: each has a profile of its own, but a start takes seconds.
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.browser,
    pytest.mark.xdist_group("serve-page"),
    pytest.mark.timeout(240),
]

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
KEY = "a-key-of-ann"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}

expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parrot")
    write_parrot(folder, HOSTILE)
    return folder


def recipe_of(folder: Path, model: Path, **serve: Any) -> Path:
    # Here the page's own words say styles and phases; else a person's say nothing of everybody's figures.
    path = write_recipe(folder, model, figures={"from_metadata": ["*"]}, **serve)
    recipe = yaml.safe_load(path.read_text())
    recipe["runtime"]["sampling"] = {"top_k": 1}
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def server(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(recipe_of(tmp_path_factory.mktemp("page"), parrot)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def watched(browser: Browser, server: ServerProcess) -> AsyncIterator[Watched]:
    """The page, live; at the end nothing in it has failed and nothing has left its origin."""
    async with opened(browser, server.url) as page:
        await expect(page.page.locator("#state")).to_have_text("live")
        yield page
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(server.url + "/")] == []


async def test_chat_then_feedback_then_the_reward_moves(watched: Watched, server: ServerProcess) -> None:
    page = watched.page
    answer = await ask(page, "Hello")
    await expect(answer).to_contain_text("version 0")
    async with page.expect_response("**/v1/feedback") as seen:
        await answer.get_by_role("button", name="Bad").click()
    given = await (await seen.value).json()
    assert (given["reward"], given["final"], given["in_store"]) == (0.0, True, True)
    await expect(answer).to_contain_text("in the queue")
    await expect(answer.get_by_role("button", name="Good")).to_be_disabled()
    # The figure comes by another connection than the answer to the feedback.
    await expect(page.locator("#reward")).to_have_text(re.compile(r"^\d\.\d\d$"))
    before = float(await page.locator("#reward").inner_text())
    answer = await ask(page, "Hello again")
    await answer.get_by_role("button", name="Good").click()
    await expect(page.locator("#reward")).not_to_have_text(f"{before:.2f}")
    assert float(await page.locator("#reward").inner_text()) > before
    answer = await ask(page, "Once more")
    await answer.get_by_label("Score from 0 to 1").fill("0.3")
    async with page.expect_response("**/v1/feedback") as seen:
        await answer.get_by_role("button", name="Give 0.3").click()
    assert (await (await seen.value).json())["reward"] == 0.3
    await expect(page.locator("#queue")).to_have_text(re.compile(r"\d+"))
    await expect(page.locator("#episodes")).to_have_text(re.compile(r"^([3-9]|\d\d+)$"))


async def test_several_turns_stay_one_episode_that_a_new_conversation_ends(
    watched: Watched, server: ServerProcess
) -> None:
    page = watched.page
    # The page ticks it when it has heard how short the model's context is, which must not come after us.
    await expect(page.get_by_label("Each message on its own")).to_be_checked()
    await page.get_by_label("Each message on its own").uncheck()
    first = await ask(page, "one")
    async with page.expect_response("**/v1/feedback") as seen:
        await first.get_by_role("button", name="Good").click()
    given = await (await seen.value).json()
    assert given["final"] is False
    second = await ask(page, "two")
    async with page.expect_response("**/v1/feedback") as seen:
        await second.get_by_role("button", name="Bad").click()
    again = await (await seen.value).json()
    assert again["conversation"] == given["conversation"]
    async with page.expect_response("**/v1/feedback") as seen:
        await page.get_by_role("button", name="New conversation").click()
    assert (await (await seen.value).json())["final"] is True
    await expect(page.locator(".message")).to_have_count(0)


async def test_a_published_version_shows_at_once(watched: Watched, server: ServerProcess, parrot: Path) -> None:
    page = watched.page
    before = int(await page.locator("#version").inner_text())
    async with client(server.engine, server.key) as engine:  # as the learner does it
        status, said = await engine.call("POST", "/update_weights", {"update_info": {"path": str(parrot)}})
        assert status == 200, said
        status, said = await engine.call("POST", "/finish_weight_update", {"weight_version": str(before + 1)})
        assert status == 200, said
    await expect(page.locator("#version")).to_have_text(str(before + 1))
    await expect(await ask(page, "Hello")).to_contain_text(f"version {before + 1}")


async def test_hostile_text_of_model_user_and_feedback_stays_text(watched: Watched, server: ServerProcess) -> None:
    page = watched.page
    answer = await ask(page, HOSTILE)
    assert await answer.locator(".text").inner_text() == HOSTILE
    assert await page.locator(".message.user .text").last.inner_text() == HOSTILE
    async with client(server.url) as api:
        reply = await api.chat("x")
        bad = {"style": "<img src=x onerror=alert(1)>", "target": "<b>bold</b>"}
        assert (await api.feedback(reply["id"], reward=0.5, metadata=bad))[0] == 200
    await expect(page.locator("#chart-reward .annotation")).to_contain_text("b>bold")
    await expect(page.locator("#style")).to_have_text("100 %")
    assert await page.locator("#log img, #log script, #figures img, #chart-styles b").count() == 0
    assert await page.title() == "Live learning"


async def test_phases_are_shaded_and_styles_have_their_lines(watched: Watched, server: ServerProcess) -> None:
    page = watched.page
    async with client(server.url) as api:
        for target in ("cute", "classical"):
            reply = await api.chat("x")
            metadata = {"style": "cute", "target": target, "phase": 1}
            assert (await api.feedback(reply["id"], reward=1, metadata=metadata))[0] == 200
            await expect(page.locator("#chart-reward .annotation").last).to_contain_text(target)
    await expect(page.locator("#style-note")).to_contain_text("cute")
    assert await page.locator("#chart-reward .shapelayer path").count() >= 2
    await expect(page.locator("#chart-styles .legendtext").filter(has_text="cute")).to_have_count(1)
    # A page that is opened later has the same phases: the server keeps the history.
    await page.reload()
    await expect(page.locator("#chart-reward .annotation").last).to_contain_text("classical")
    assert await page.locator("#chart-reward .shapelayer path").count() >= 2


async def test_a_phone_needs_no_sideways_scrolling_and_its_targets_fit_a_finger(
    browser: Browser, server: ServerProcess
) -> None:
    async with opened(browser, server.url, **PHONE) as watched:
        page = watched.page
        await ask(page, "a" * 80 + " and a sentence that is longer than the screen of a phone is wide")
        await expect(page.locator("#chart-queue .main-svg").first).to_be_visible()
        width = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1] == 360
        for button in await page.get_by_role("button").all():
            box = await button.bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) >= 44, await button.inner_text()
        chat, charts = await page.locator("#chat").bounding_box(), await page.locator("#charts").bounding_box()
        assert chat is not None
        assert charts is not None
        assert charts["y"] > chat["y"] + chat["height"], "one column"
        assert watched.complaints == []


async def test_the_keyboard_alone_is_enough_and_focus_can_be_seen(watched: Watched) -> None:
    page = watched.page
    await page.keyboard.press("Tab")  # "Skip to the message field"
    await page.keyboard.press("Enter")
    await page.keyboard.type("Hello")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("there")
    await page.keyboard.press("Enter")
    await expect(page.locator(".message.user .text")).to_have_text("Hello\nthere")
    good = page.get_by_role("button", name="Good")
    await expect(good).to_be_visible()
    # The answer is announced once, whole; the growing text is not read out piece by piece.
    await expect(page.locator("#said")).to_have_text(HOSTILE)
    for _ in range(6):
        await page.keyboard.press("Shift+Tab")
        if await good.evaluate("element => element === document.activeElement"):
            break
    await expect(good).to_be_focused()
    outline = await good.evaluate("element => getComputedStyle(element).outlineStyle")
    assert outline == "solid"
    await page.keyboard.press("Enter")
    await expect(page.locator(".feedback .note")).to_contain_text("reward 1")
    await expect(page.get_by_label("Message", exact=True)).to_be_focused()


async def test_dark_mode_is_honoured(browser: Browser, server: ServerProcess) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        async with opened(browser, server.url, color_scheme=scheme) as watched:
            background = await watched.page.evaluate("getComputedStyle(document.body).backgroundColor")
            seen[scheme] = sum(int(part) for part in background.removeprefix("rgb(").rstrip(")").split(","))
    assert seen["dark"] < 150 < 600 < seen["light"]


async def test_the_figures_come_back_when_the_connection_does(browser: Browser, server: ServerProcess) -> None:
    async with Relay(server.url) as relay, opened(browser, relay.url) as watched:
        state = watched.page.locator("#state")
        await expect(state).to_have_text("live")
        await relay.cut()
        await expect(state).to_have_text("reconnecting")
        await relay.listen()
        await expect(state).to_have_text("live")
        await ask(watched.page, "Hello")


async def test_a_key_is_asked_for_and_missing_plotly_says_what_to_install(
    browser: Browser, parrot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one server, because starting one takes seconds."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['plotly'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SAO_SERVE_KEYS", f"ann:{KEY}")
    with serving(recipe_of(tmp_path, parrot)) as running:
        async with opened(browser, running.url) as watched:
            page = watched.page
            field = page.get_by_label("This server wants a bearer key")
            await expect(field).to_be_focused()
            await expect(page.locator("#charts-error")).to_contain_text("pip install 'sao-agents[serve]'")
            await field.fill("wrong-key-entirely")
            await field.press("Enter")
            await expect(page.locator("#key-error")).to_contain_text("does not know this key")
            await field.fill(KEY)
            await field.press("Enter")
            await expect(page.locator("#state")).to_have_text("live")
            await expect(page.locator("#key-form")).to_be_hidden()
            answer = await ask(page, "Hello")
            await answer.get_by_role("button", name="Good").click()
            await expect(page.locator("#reward")).to_have_text("1.00")
            # Beside the key the conversation, for a reload; "New conversation" forgets it.
            assert set(await page.evaluate("Object.keys(sessionStorage)")) == {"sao-key", "sao-chat"}
            await page.get_by_role("button", name="New conversation").click()
            kept = await page.evaluate("JSON.stringify([sessionStorage, localStorage, document.cookie])")
            assert json.loads(kept) == [{"sao-key": KEY}, {}, ""]
            assert all(KEY not in url for url in watched.requests)
        async with client(running.url) as api:
            assert (await api.call("GET", "/v1/models"))[0] == 401
            assert (await api.call("GET", "/v1/models", Authorization=f"Bearer {KEY}"))[1]["data"][0]["id"] == NAME
