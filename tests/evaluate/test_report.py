"""The report: what models, tools and tasks say is text in it, and folded where it is long."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser_tools import chromium
from hypothesis import given
from hypothesis import strategies as st

from agent.evaluate import report
from agent.evaluate.figures import summarise
from agent.evaluate.report import page, pieces
from agent.evaluate.sample import Said, Sample
from envs.tool_calls import FAMILY_FORMATS, FamilyFormat, write_calls
from envs.tool_formats.reading import ToolCall

EVIL = (
    "</pre></details><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<style>*{display:none}</style>'\"&lt;{{ 7*7 }}{% raw %}\x00\x08\ud800"
)
# Of the page itself; everything else in it would be somebody's text that has become markup.
OWN_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "table", "tr", "th", "td", "span", "p"),
    *("details", "summary", "div", "pre"),
}


def written(samples: list[Sample], **changes: object) -> str:
    names = list(dict.fromkeys(sample.task_id for sample in samples))
    described = {"ENV": EVIL, "--env-arg": {EVIL: EVIL}}
    options = {"title": EVIL, "described": described, "tool_format": "hermes", "passes_at": None, **changes}
    return page(summarise(samples, names, 2, None), samples, **options).decode()  # type: ignore[arg-type]


def hostile_samples() -> list[Sample]:
    said = (
        Said(EVIL, EVIL),
        Said("assistant", f"<think>{EVIL}</think>{EVIL}", reasoning=EVIL, calls=((EVIL, EVIL),), finish=EVIL),
        Said("tool", EVIL),
    )
    metrics = {EVIL: EVIL, "family": EVIL}
    return [
        Sample(EVIL, 0, "terminated", reward=1.0, turns=1, transcript=said, metrics=metrics),
        Sample(EVIL, 1, "infrastructure_error", fault=EVIL, transcript=said),
        Sample("other", 0, "truncated_context", reward=0.0, metrics={"family": "two"}),
    ]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_nothing_that_anybody_says_is_markup() -> None:
    text = written(hostile_samples())
    tags = Tags()
    tags.feed(text)
    assert {tag for tag, _ in tags.found} <= OWN_TAGS
    assert not [name for _, attributes in tags.found for name in attributes if name.startswith("on") or name == "src"]
    assert sum(tag == "style" for tag, _ in tags.found) == 1
    assert "{{ 7*7 }}" in text  # a template is filled, never made of what somebody says
    assert "\x00" not in text
    assert "script-src" not in text
    assert "default-src 'none'" in text


def test_figures_faults_and_folds_are_there() -> None:
    call = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    said = (Said("user", "What?"), Said("assistant", f"<think>secret plan</think>So: {call}", reward=1.0, tokens=9))
    samples = [
        Sample("task-1", 0, "terminated", reward=1.0, turns=1, transcript=said),
        Sample("task-1", 1, "infrastructure_error", fault="EndpointFault: away"),
    ]
    text = written(samples, title="m on env")
    for words in (
        "m on env",
        "task-1",
        "1/1 passed",
        "1 faults",
        "EndpointFault: away",
        "9 tokens, reward 1",
        "pass@1",
    ):
        assert words in text, words
    for kind in ("thinking", "call"):
        assert f'<details class="fold"><summary>{kind}, ' in text


def test_transcripts_beyond_the_room_are_counted_and_every_task_shows_one_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "MOST_TRANSCRIPTS", 25)
    said = (Said("assistant", "0123456789"),)
    samples = [Sample(f"t{i}", n, "terminated", reward=0.0, transcript=said) for i in range(2) for n in range(2)]
    text = written(samples)
    assert "2 transcripts are left out" in text
    assert text.count("0123456789") == 2
    assert text.count("Its transcript is in samples.jsonl.") == 2


def test_a_long_message_is_shown_by_its_ends() -> None:
    text = written([Sample("t", 0, "terminated", reward=0.0, transcript=(Said("tool", "a" * 30_000 + "END"),))])
    assert "10003 characters not shown" in text
    assert "END" in text


@pytest.mark.parametrize("form", FAMILY_FORMATS)
def test_calls_in_every_form_are_folded(form: FamilyFormat) -> None:
    text = write_calls([ToolCall("python", {"code": "1"})], form)
    found = list(pieces(text if form in ("harmony", "llama3") else f"<think>hm</think>{text}", form))
    assert [piece.kind for piece in found][-1] == "call"


@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "{", "so", "\n"]), max_size=12))
def test_pieces_hold_all_that_is_said(parts: list[str]) -> None:
    text = "".join(parts)
    assert "".join("".join(piece.text for piece in pieces(text, "hermes")).split()) == "".join(text.split())


@pytest.mark.browser
@pytest.mark.xdist_group("serve-page")
async def test_a_browser_shows_it_unfolds_it_and_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(page(
        summarise(samples := hostile_samples(), [EVIL, "other"], 2, None), samples, title="The report",
        described={"ENV": EVIL}, tool_format="hermes", passes_at=None,
    ))  # fmt: skip
    complaints: list[str] = []
    requests: list[str] = []
    async with chromium() as browser, await browser.new_context() as profile:
        shown = await profile.new_page()
        shown.on("console", lambda message: complaints.append(message.text))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on("request", lambda request: requests.append(request.url))
        await shown.goto(path.as_uri())
        assert await shown.title() == "The report"
        for fold in ("details.task", "details.sample", "details.fold"):
            await shown.locator(f"{fold} > summary").first.click()
        thought = shown.locator("details.fold > pre").first
        assert await thought.is_visible()
        assert "<script>document.title='owned'</script>" in await thought.inner_text()
        assert await shown.title() == "The report"
        assert await shown.locator("script, img").count() == 0
    assert requests == [path.as_uri()]
    assert complaints == []
