"""What a newcomer meets on the page, in a real Chromium: how far it is, prompts to try, answers that can be read, asked
again, reworded and copied; versions with their scores; simulated users. One server, with no learner, for all of it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from axe_playwright_python.async_playwright import Axe
from browser_tools import chromium
from page_tools import WAIT_MS, Relay, Watched, ask, opened, write_parrot
from playwright.async_api import Browser, expect
from serve_tools import ServerProcess, client, serving, write_recipe

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.browser,
    pytest.mark.xdist_group("serve-page"),
    pytest.mark.timeout(500),
]

SAID = "<think>they like it soft</think>**Yay**, `rain` is so fluffy, what a cutie!"
SHOWN = "Yay, rain is so fluffy, what a cutie!"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}

expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parrot")
    write_parrot(folder, SAID)
    return folder


@pytest.fixture(scope="module")
def server(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = write_recipe(tmp_path_factory.mktemp("newcomer"), parrot, simulated_per_minute=600)
    recipe = yaml.safe_load(path.read_text())
    recipe["runtime"]["sampling"] = {"top_k": 1}
    kwargs = {"prompts": "tiny", "show_candidates": False, "steps": 50, "phases": [{"start": 0, "style": "cute"}]}
    recipe["env"] = {"id": "sao/StyleShift-v0", "kwargs": kwargs}
    path.write_text(yaml.safe_dump(recipe))
    with serving(path, within_s=300.0) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def watched(browser: Browser, server: ServerProcess) -> AsyncIterator[Watched]:
    """The page, live; at the end nothing in it has failed and nothing has left its origin."""
    permissions = ["clipboard-read", "clipboard-write"]
    async with opened(browser, server.url, permissions=permissions) as page:
        await expect(page.page.locator("#state")).to_have_text("live")
        yield page
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(server.url + "/")] == []


async def in_one_conversation(page: Any) -> None:
    await expect(page.get_by_label("Each message on its own")).to_be_checked()
    await page.get_by_label("Each message on its own").uncheck()


async def test_a_newcomer_does_not_know_what_to_ask_or_how_far_it_is(watched: Watched, server: ServerProcess) -> None:
    page = watched.page
    prompts = page.get_by_role("group", name="Prompts to try").get_by_role("button")
    await expect(prompts).to_have_count(3)
    asked = await prompts.first.inner_text()
    await prompts.first.click()
    await expect(page.locator(".message.user .text")).to_have_text(asked)
    await expect(page.locator("#progress")).to_have_text(re.compile(r"no learner: .*; \d+ verdicts are kept for it"))
    kept = int(re.findall(r"(\d+) verdicts", await page.locator("#progress").inner_text())[0])
    await page.get_by_role("button", name="Good").click()
    await expect(page.locator("#progress")).to_contain_text(f"{kept + 1} verdicts are kept")
    assert re.search(r"INFO no learner: .*verdicts are kept", server.said), "the log says it too"
    # The judge of the recipe reads the style of what a person has judged; nobody has named it.
    await expect(page.locator("#style")).to_have_text("100 %")
    await expect(page.locator("#style-note")).to_contain_text("cute · reward")


async def test_reasoning_and_stars_are_in_the_way_of_the_answer(watched: Watched) -> None:
    answer = await ask(watched.page, "Hello")
    await expect(answer.locator("strong")).to_have_text("Yay")
    await expect(answer.locator("code")).to_have_text("rain")
    assert await answer.locator("> .text").inner_text() == SHOWN
    reasoning = answer.locator("details")
    await expect(reasoning.locator(".text")).to_be_hidden()
    await reasoning.locator("summary").click()
    await expect(reasoning.locator(".text")).to_have_text("they like it soft")
    await expect(watched.page.locator("#said")).to_have_text(re.compile("^..Yay"))


async def test_a_second_answer_replaces_the_first_or_asks_twice(watched: Watched) -> None:
    page = watched.page
    await in_one_conversation(page)
    await ask(page, "one")
    first = await ask(page, "Hello")
    async with page.expect_request("**/v1/chat/completions") as seen:
        await first.get_by_role("button", name="Another answer").click()
    sent = json.loads((await seen.value).post_data or "")
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    second = page.locator(".message.model").nth(2)
    await expect(second.get_by_role("button", name="Good")).to_be_visible()
    await expect(page.locator(".message.user")).to_have_count(2)
    await expect(page.get_by_role("button", name="Another answer")).to_have_count(1)
    conversations = []
    for answer, verdict in ((first, "Bad"), (second, "Good")):
        async with page.expect_response("**/v1/feedback") as told:
            await answer.get_by_role("button", name=verdict).click()
        conversations.append((await (await told.value).json())["conversation"])
    assert len(set(conversations)) == 2, "siblings: each an episode of its own"
    closed = list[str]()

    async def note(response: Any) -> None:
        if response.url.endswith("/v1/feedback"):
            closed.append((await response.json())["conversation"])

    page.on("response", note)
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.locator("#progress")).to_contain_text(re.compile(r"\d+ verdicts are kept"))
    for _ in range(600):
        if len(closed) == 2:
            break
        await page.wait_for_timeout(50)
    assert sorted(closed) == sorted(conversations), "both are closed"


async def test_a_reworded_message_leaves_the_old_one_in_the_history(watched: Watched) -> None:
    page = watched.page
    await in_one_conversation(page)
    await ask(page, "one")
    await ask(page, "two, badly said")
    await page.get_by_role("button", name="Edit this message").click()
    await expect(page.get_by_label("Message", exact=True)).to_have_value("two, badly said")
    await expect(page.locator(".message")).to_have_count(2)
    await page.get_by_label("Message", exact=True).fill("two")
    async with page.expect_request("**/v1/chat/completions") as seen:
        await page.get_by_role("button", name="Send").click()
    messages = json.loads((await seen.value).post_data or "")["messages"]
    assert [message["content"] for message in messages] == ["one", SAID, "two"] or messages[-1]["content"] == "two"
    assert len(messages) == 3


async def test_what_people_do_is_told_to_a_server_that_listens_and_to_no_other(watched: Watched) -> None:
    page, told = watched.page, list[dict[str, Any]]()

    async def feedback(route: Any) -> None:
        told.append(json.loads(route.request.post_data))
        await route.fulfill(status=200, json={})

    await page.route("**/v1/feedback", feedback)
    answer = await ask(page, "Hello")
    await answer.get_by_role("button", name="Copy").click()
    await expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert await page.evaluate("navigator.clipboard.readText()") == SAID.rpartition(">")[2]
    assert told == []
    await page.evaluate(
        "import('/static/signals.js').then((signals) => signals.accept(['copy', 'edit', 'regenerate']))"
    )
    await answer.get_by_role("button", name="Copied").click()
    await answer.get_by_role("button", name="Another answer").click()
    await expect(page.locator(".message.model")).to_have_count(2)
    await expect(page.get_by_role("button", name="Edit this message")).to_be_visible()
    await page.get_by_role("button", name="Edit this message").click()
    await expect(page.locator(".message")).to_have_count(0)
    assert [sorted(said) for said in told] == [["response_id", "signal"]] * 3
    assert [said["signal"] for said in told] == ["copy", "regenerate", "edit"]


async def test_a_reload_loses_the_conversation_its_verdicts_or_what_is_being_written(watched: Watched) -> None:
    page = watched.page
    await in_one_conversation(page)
    first = await ask(page, "one")
    await first.get_by_role("button", name="Good").click()
    await expect(first).to_contain_text("reward 1")
    await ask(page, "Hello")
    await page.get_by_label("Message", exact=True).fill("half a sent")
    await page.reload()
    await expect(page.get_by_label("Message", exact=True)).to_have_value("half a sent")
    await expect(page.locator(".message")).to_have_count(4)
    await expect(page.locator(".message.model").first).to_contain_text("reward 1 · counts when the conversation ends")
    await expect(page.locator(".message.model").first.get_by_role("button", name="Good")).to_be_disabled()
    await expect(page.locator(".message.model strong")).to_have_count(2)
    await expect(page.get_by_label("Each message on its own")).not_to_be_checked()
    await expect(page.locator("#state")).to_have_text("live")
    # It goes on where it was: the same session and the whole history.
    async with page.expect_request("**/v1/chat/completions") as seen:
        await ask(page, "three")
    assert len(json.loads((await seen.value).post_data or "")["messages"]) == 5
    await page.get_by_role("button", name="New conversation").click()
    assert await page.evaluate("sessionStorage.length") == 0


async def test_a_fault_loses_what_was_written(browser: Browser, server: ServerProcess) -> None:
    async with Relay(server.url) as relay, opened(browser, relay.url) as watched:
        page = watched.page
        await expect(page.locator("#state")).to_have_text("live")
        await ask(page, "Hello")
        await relay.cut()
        await page.get_by_label("Message", exact=True).fill("a long question")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator("#error")).not_to_be_empty()
        await expect(page.get_by_label("Message", exact=True)).to_have_value("a long question")
        await relay.listen()
        await expect(page.locator("#state")).to_have_text("live")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".message.model").last.get_by_role("button", name="Good")).to_be_visible()
        await expect(page.locator(".message.user")).to_have_count(2)
        await expect(page.get_by_label("Message", exact=True)).to_have_value("")


async def test_versions_are_numbers_without_a_score_and_cannot_be_gone_back_to(
    watched: Watched, server: ServerProcess, parrot: Path
) -> None:
    page = watched.page
    page.on("dialog", lambda dialog: dialog.accept())
    answer = await ask(page, "Hello")
    await answer.get_by_role("button", name="Good").click()
    rows = page.locator("#versions-rows tr")
    await expect(rows.last.locator("td").nth(1)).to_have_text(re.compile(r"[1-9]\d*"))
    await expect(rows.last.locator("td").first).to_have_text(re.compile(r"^[01]\.\d\d$"))
    served = int(await page.locator("#version").inner_text())
    await page.get_by_role("button", name="Pin", exact=True).click()
    await expect(page.locator("#version-note")).to_have_text("pinned")
    await page.get_by_role("button", name="Unpin").click()
    await expect(page.locator("#version-note")).to_have_text("served now")
    async with client(server.engine, server.key) as engine:  # as the learner does it
        assert (await engine.call("POST", "/update_weights", {"update_info": {"path": str(parrot)}}))[0] == 200
        assert (await engine.call("POST", "/finish_weight_update", {"weight_version": str(served + 1)}))[0] == 200
    await page.get_by_role("button", name=f"Roll back to version {served}", exact=True).click()
    await expect(page.locator("#version")).to_have_text(str(served + 2))
    await expect(rows.first).to_contain_text(f"rollback to {served}")
    await expect(page.locator("#version-note")).to_have_text("pinned")
    await page.get_by_role("button", name="Unpin").click()
    await expect(page.locator("#version-note")).to_have_text("served now")


async def test_nobody_clicks_while_one_person_looks(watched: Watched, server: ServerProcess) -> None:
    page = watched.page
    async with client(server.url) as api:
        before = int(
            re.findall(r"of (\d+) verdicts", await page.locator("#reward-note").inner_text() or "of 0 verdicts")[0]
        )
        await page.get_by_role("button", name="Let simulated users click").click()
        await expect(page.get_by_role("button", name="Stop the simulated users")).to_be_visible()
        # Without a learner they are at most two batches ahead.
        await expect(page.locator("#reward-note")).to_contain_text(f"of {before + 8} verdicts")
        await page.get_by_role("button", name="Stop the simulated users").click()
        await expect(page.get_by_role("button", name="Let simulated users click")).to_be_enabled()
        assert (await api.call("GET", "/healthz"))[0] == 200


async def test_feedback_on_a_phone_is_one_row(browser: Browser, server: ServerProcess) -> None:
    async with opened(browser, server.url, **PHONE) as watched:
        page = watched.page
        answer = await ask(page, "Hello")
        row = answer.get_by_role("group", name="How good was this answer?")
        boxes = [await control.bounding_box() for control in await row.locator("button, input").all()]
        assert len(boxes) == 4
        middles = {round(box["y"] + box["height"] / 2) for box in boxes if box}
        assert len(middles) == 1, boxes
        assert max(box["x"] + box["width"] for box in boxes if box) <= 360
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        for button in await page.get_by_role("button").all():
            box = await button.bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) >= 44, await button.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["phone", "screen"])
async def test_someone_cannot_read_or_reach_a_part(
    browser: Browser, server: ServerProcess, scheme: str, size: str
) -> None:
    shape = PHONE if size == "phone" else {"viewport": {"width": 1360, "height": 850}}
    async with opened(browser, server.url, color_scheme=scheme, **shape) as watched:
        page = watched.page
        answer = await ask(page, "Hello")
        await answer.get_by_role("button", name="Bad").click()
        await expect(answer).to_contain_text("reward 0")
        await answer.locator("summary").click()
        await expect(page.locator("#versions-rows tr").first).to_be_visible()
        await expect(page.locator("#chart-queue .main-svg").first).to_be_visible()
        results = await Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
