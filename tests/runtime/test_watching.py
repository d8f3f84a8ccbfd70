"""A runtime seen from outside: figures that Prometheus reads, spans of episodes, episodes followed while they grow."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from runtime_tools import AnyStore, EchoEnv, Reply, ScriptedEngine, settings, ticket

from agent.chat.renderer import ChatRenderer
from agent.doors.door import DoorFault, bearer
from agent.engines.base import EngineFault
from agent.inspect.__main__ import main as inspect
from agent.inspect.following import NothingRuns, follow
from agent.inspect.live_view import Seen, event_line, live_screen, one_line
from agent.live import LiveEpisode, LiveEvent, LiveReport
from agent.runtime.rollout import rollout
from agent.runtime.runtime import Runtime
from agent.runtime.settings import RuntimeConfig
from agent.runtime.watching.board import EVENTS, Board
from agent.runtime.watching.port import RuntimePort
from agent.runtime.watching.spans import Spans, wanted
from agent.runtime.watching.watch import EpisodeWatch, Watching
from agent.store.client import StoreClient
from envs.core import EnvironmentFault

DOCS = Path(__file__).parents[2] / "docs"
KEY = "the-key-of-this-run"
WAIT_S = 60.0


class Shown:
    """A runtime with a port, on a scripted engine that waits for `engine.hold`, if that is set."""

    def __init__(
        self, renderer: ChatRenderer, store: AnyStore, script: Callable[[str, int], Reply], *, slots: int = 2
    ) -> None:
        limits = {"shutdown_s": 8.0}
        plain = {"store": store.url, "engines": ["e"], "model": "m", "env": {"id": "test/Echo-v0"}, "limits": limits}
        config = RuntimeConfig.model_validate({**plain, "worker": "w", "concurrency": slots})
        self.engine = ScriptedEngine(renderer, script)
        self.client = StoreClient(store.url)
        self.board = Board()
        self.runtime = Runtime(
            config,
            store=self.client,
            engines={"engine-0": self.engine},
            renderer=renderer,
            make_env=lambda env: EchoEnv(tasks=20),
            watching=Watching(self.board),
        )
        runtime = self.runtime
        self.port = RuntimePort(runtime.worker, runtime.progress, self.board, runtime.engines, KEY)

    @contextlib.asynccontextmanager
    async def running(self, port_file: Path | None = None) -> AsyncIterator[str]:
        """The runtime at work; gives the address of its port."""
        async with self.port.listening("127.0.0.1", 0, port_file) as url:
            task = asyncio.create_task(self.runtime.run())
            try:
                yield url
            finally:
                task.cancel()
                await asyncio.wait({task}, timeout=20)
                await self.client.close()

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not met():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)


async def scraped(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession(headers=bearer(KEY)) as session, session.get(url + "/metrics") as answer:
        assert answer.status == 200
        families = text_string_to_metric_families(await answer.text())
        return {family.name: family for family in families}


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    [found] = [sample.value for sample in families[name].samples if sample.labels == labels]
    return float(found)


def documented(page: str, prefix: str) -> set[str]:
    """The names of figures on a page, as the page of figures names families: counters without `_total`."""
    names = re.findall(rf"`({prefix}\w+)`", (DOCS / page).read_text(encoding="utf-8"))
    return {name.removesuffix("_total") for name in names}


async def test_a_runtimes_figures_are_read_by_prometheus_and_are_those_of_the_page(
    renderer: ChatRenderer, store: AnyStore
) -> None:
    replies = ["more", "right", EngineFault("out of memory")]
    shown = Shown(renderer, store, lambda prompt, number: replies[number] if number < 3 else "right", slots=1)
    async with shown.running() as url:
        await shown.until(lambda: shown.runtime.counters["episodes"] >= 4)
        families = await scraped(url)
        async with aiohttp.ClientSession() as session:
            for path, status in (("/health", 200), ("/metrics", 401), ("/episodes", 401)):
                async with session.get(url + path) as answer:
                    assert answer.status == status
    assert value(families, "sao_runtime_episodes", stop_reason="terminated") >= 4
    assert value(families, "sao_runtime_turns") >= 5
    assert value(families, "sao_runtime_tickets") >= 4
    assert value(families, "sao_runtime_action_tokens") > 0
    assert value(families, "sao_runtime_sampled_tokens") >= value(families, "sao_runtime_action_tokens")
    assert value(families, "sao_runtime_faults", kind="environment") == 0
    assert value(families, "sao_runtime_mean_reward") == 1.0
    assert value(families, "sao_runtime_engine_sound", engine="engine-0") == 1
    assert value(families, "sao_runtime_engine_version", engine="engine-0") == 0
    assert sum(sample.value for sample in families["sao_runtime_slots"].samples) == 1
    assert set(families) == documented("runtime.md", "sao_runtime_")


async def test_a_stores_figures_are_read_by_prometheus_and_are_those_of_the_page(
    renderer: ChatRenderer, store: AnyStore, client: StoreClient
) -> None:
    shown = Shown(renderer, store, lambda prompt, number: "right")
    async with shown.running():
        await client.set_version(1)
        batch = await client.claim(10, version=3, wait_s=WAIT_S)
        assert batch is not None
        families = await scraped(store.url)
    assert value(families, "sao_store_policy_version") == 1
    assert value(families, "sao_store_episodes", state="claimed") == 10
    assert value(families, "sao_store_consumed_lag_versions", at="max") == 3
    assert value(families, "sao_store_events", event="claimed") == 10
    assert value(families, "sao_store_events", event="claimed_lag") == 30
    assert value(families, "sao_store_requests", route="POST /claim", status="200") == 1
    assert value(families, "sao_store_received_bytes") > 1000
    assert value(families, "sao_store_sent_bytes") > 1000
    assert value(families, "sao_store_file_bytes") > 10_000
    assert set(families) == documented("store.md", "sao_store_")


# -- spans


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Spans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(provider.get_tracer("test"))


def tree(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The one episode's span, and those under it in order of their beginning."""
    finished = exporter.get_finished_spans()
    [root] = [span for span in finished if span.parent is None]
    children = [span for span in finished if span.parent is not None and span.parent.span_id == root.context.span_id]
    assert len(children) == len(finished) - 1
    return root, sorted(children, key=lambda span: span.start_time or 0)


async def test_an_episode_is_a_span_with_its_turns_under_it(
    renderer: ChatRenderer, spans: Spans, exporter: InMemorySpanExporter
) -> None:
    engine = ScriptedEngine(renderer, lambda prompt, turn: ["more", "right"][turn])
    watch = EpisodeWatch(spans=spans)
    watch.sits(lambda: "engine-7")
    episode = await rollout(ticket(), EchoEnv(), engine, renderer, settings(), watch=watch)
    root, children = tree(exporter)
    assert root.name == "episode"
    assert [span.name for span in children] == ["reset", "generate", "step", "generate", "step"]
    said = dict(root.attributes or {})
    assert said["sao.episode.id"] == episode.id
    assert said["sao.task.id"] == "echo-0"
    assert said["sao.episode.stop_reason"] == "terminated"
    assert said["sao.episode.reward"] == 1.0
    assert said["sao.episode.turns"] == 2
    turns = [dict(span.attributes or {}) for span in children if span.name == "generate"]
    assert [turn["gen_ai.usage.output_tokens"] for turn in turns] == [len(a.token_ids) for a in episode.actions]
    assert [turn["sao.turn"] for turn in turns] == [1, 2]
    assert turns[0]["sao.engine"] == "engine-7"
    assert turns[0]["sao.policy.version"] == 0
    assert turns[0]["gen_ai.response.finish_reasons"] == ("stop",)
    assert turns[1]["gen_ai.usage.input_tokens"] > turns[0]["gen_ai.usage.input_tokens"]


async def test_an_episode_that_is_cut_is_graded_in_a_span_of_its_own(
    renderer: ChatRenderer, spans: Spans, exporter: InMemorySpanExporter
) -> None:
    engine = ScriptedEngine(renderer, lambda prompt, turn: "right and long")
    await rollout(
        ticket(), EchoEnv(), engine, renderer, settings(max_tokens_per_turn=3), watch=EpisodeWatch(spans=spans)
    )
    root, children = tree(exporter)
    assert [span.name for span in children] == ["reset", "generate", "grade"]
    assert (root.attributes or {})["sao.episode.stop_reason"] == "truncated_turn_tokens"


async def test_a_fault_is_the_error_of_the_span_in_which_it_happened(
    renderer: ChatRenderer, spans: Spans, exporter: InMemorySpanExporter
) -> None:
    async def fail(_: str) -> None:
        raise EnvironmentFault("the sandbox is gone")

    engine = ScriptedEngine(renderer, lambda prompt, turn: "more")
    watch = EpisodeWatch(spans=spans)
    with pytest.raises(EnvironmentFault):
        await rollout(ticket(), EchoEnv(on_step=fail), engine, renderer, settings(), watch=watch)
    root, children = tree(exporter)
    failed = [span.name for span in (root, *children) if not span.status.is_ok and span.status.description]
    assert failed == ["episode", "step"]
    assert "the sandbox is gone" in (root.status.description or "")


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "sao"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "true"}, False),
    ],
    ids=["nothing", "a_name_alone", "an_endpoint", "an_exporter", "none", "disabled"],
)
def test_spans_are_made_where_opentelemetrys_own_variables_ask_for_them(
    environment: dict[str, str], asked: bool
) -> None:
    assert wanted(environment) is asked


SPANS_IN_A_PROCESS = """
import sys
if "blocked" in sys.argv: sys.modules["opentelemetry"] = None
import agent.runtime.__main__, agent.runtime.runtime
from agent.runtime.watching.spans import configured_spans
with configured_spans() as spans:
    with spans.open("episode"): pass
print("imported" if any(name.startswith("opentelemetry.") for name in sys.modules) else "left alone")
"""


@pytest.mark.parametrize(
    ("word", "variables", "said"),
    [
        ("", {}, "left alone"),
        ("", {"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "my-run"}, '"service.name": "my-run"'),
        ("blocked", {"OTEL_TRACES_EXPORTER": "otlp"}, "pip install 'sao-agents[otel]'"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "imported"),
        ("", {"OTEL_TRACES_EXPORTER": "nobodys"}, "no spans to nobodys"),
    ],
    ids=["not_asked_for", "console", "not_installed", "no_collector", "no_such_exporter"],
)
def test_spans_cost_nothing_unless_asked_for_and_stop_nobody(word: str, variables: dict[str, str], said: str) -> None:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", SPANS_IN_A_PROCESS, word],
        env={**environment, **variables}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert said in done.stdout + done.stderr


# -- episodes followed


async def test_a_growing_episode_is_followed_line_by_line_until_the_end(
    renderer: ChatRenderer, store: AnyStore, tmp_path: Path
) -> None:
    """Case: a run whose episodes take an hour, in a log file. Each turn is there before the next one is sampled."""
    (tmp_path / "key").write_text(KEY)
    shown = Shown(renderer, store, lambda prompt, turn: ["more of it\x1b[2J", "right"][turn % 2], slots=1)
    shown.engine.hold = asyncio.Event()
    written = io.StringIO()
    following: asyncio.Task[None] | None = None
    try:
        async with shown.running(tmp_path / "runtime.port"):
            await asyncio.wait_for(shown.engine.started.wait(), WAIT_S)
            console = Console(file=written, width=400)
            following = asyncio.create_task(follow(str(tmp_path), console, limit=10))
            await shown.until(lambda: "begins task echo-" in written.getvalue())
            await shown.until(lambda: " prompt (turn 0, " in written.getvalue())
            assert " action (" not in written.getvalue()
            shown.engine.started.clear()
            shown.engine.hold.set()
            shown.engine.hold = asyncio.Event()  # the next turn waits again
            await shown.until(lambda: "more of it" in written.getvalue())
            assert " ends (" not in written.getvalue(), "it was shown in the middle of the episode"
            shown.engine.hold.set()
            shown.engine.hold = None
            await shown.until(lambda: "terminated, reward 1" in written.getvalue())
        async with asyncio.timeout(WAIT_S):
            await following
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    lines = written.getvalue().splitlines()
    assert lines[-1] == f"{tmp_path} has ended"
    assert "\x1b" not in written.getvalue(), "what a policy says is not obeyed by the terminal"
    kinds = [re.search(r"slot 0 \S+ (\w+)", line) for line in lines[:-1]]
    assert [kind[1] for kind in kinds[:6] if kind] == ["begins", "prompt", "action", "observation", "action", "ends"]
    assert not (tmp_path / "runtime.port").exists()


async def test_the_report_says_what_an_episode_waits_for(renderer: ChatRenderer, store: AnyStore) -> None:
    shown = Shown(renderer, store, lambda prompt, turn: "right", slots=2)
    shown.engine.hold = asyncio.Event()
    async with shown.running() as url:
        await shown.until(lambda: len(shown.engine.running) == 2)
        async with aiohttp.ClientSession(headers=bearer(KEY)) as session:
            async with session.get(url + "/episodes?limit=1") as answer:
                report = msgspec.json.decode(await answer.read(), type=LiveReport)
            async with session.get(url + "/episodes?limit=many") as answer:
                assert answer.status == 400
        shown.engine.hold.set()
        await shown.until(lambda: shown.runtime.counters["episodes"] >= 2)
    assert report.worker == "w"
    assert report.running == 2
    assert report.slots == {"running": 2}
    [row] = report.episodes
    assert (row.stage, row.turn, row.engine, row.action_tokens) == ("generate", 1, "engine-0", 0)
    assert row.task.startswith("echo-")
    assert row.text.endswith("assistant\n")
    assert row.tokens > 0
    assert not shown.board.entries


async def test_following_what_does_not_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NothingRuns, match=r"nothing runs in .*, so there is nothing to follow"):
        await follow(str(tmp_path), Console(file=io.StringIO()), limit=10)
    (tmp_path / "runtime.port").write_text("9\n")  # left by a runtime that was killed
    assert await asyncio.to_thread(inspect, [str(tmp_path), "--live"]) == 2
    assert "nothing runs in" in capsys.readouterr().err


async def test_following_with_another_runs_key_is_refused(
    renderer: ChatRenderer, store: AnyStore, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("another-key-than-this")
    shown = Shown(renderer, store, lambda prompt, turn: "right")
    async with shown.running() as url, asyncio.timeout(WAIT_S):
        with pytest.raises(DoorFault, match=r"refuses the shared key.*SAO_KEY"):
            await follow(url, Console(file=io.StringIO()), limit=10, key_file=tmp_path / "key")


def test_a_reader_that_is_late_is_told_how_much_it_missed() -> None:
    board = Board()
    entry = board.enter(ticket(), 0)
    for _ in range(EVENTS + 10):
        entry.grew("action", 1, "x")
    events, missed = board.since(4)
    assert (events[0].number, missed) == (11, 6)
    assert len(events) == EVENTS
    assert board.since(events[-1].number) == ([], 0)
    entry.leave()
    assert board.rows(10) == []


def test_the_screen_of_a_terminal_shows_slots_ages_and_the_end_of_the_text() -> None:
    row = LiveEpisode("t-9", 3, "train", 0, "", task="echo-5", stage="step", stage_s=4.0, age_s=61.0, turn=2)
    row.tokens, row.action_tokens, row.generate_s, row.text = 900, 300, 2.0, "x" * 500 + "\nthe\x1b[31m end"
    report = LiveReport("w", 100.0, {"running": 1, "idle": 1}, 300, 7, 3.5, 1, [row], [])
    written = io.StringIO()
    console = Console(file=written, width=120, force_terminal=True, color_system=None)
    console.print(live_screen([Seen("runtime", report, 42.0)], ["the last event"], 120))
    text = written.getvalue()
    assert (
        "runtime: 1 episodes run, 42 tokens/s; slots: 1 idle, 1 running; 7 delivered in 100 s, mean reward 0.500"
        in text
    )
    for part in ("61 s", "900", "150", "step 4 s", "echo-5", "the\\x1b[31m end", "the last event"):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 120


def test_one_event_is_one_line_whatever_was_said() -> None:
    event = LiveEvent(1, 0.0, "t-1", 2, "action", 3, 17, "two\nlines\r\x07 and a \u202e turn")
    assert "\n" not in event_line(event, "runtime")
    assert event_line(event).endswith("slot 2 t-1 action (turn 3, 17 tokens) two\\nlines\\r\\x07 and a \\u202e turn")
    assert one_line("plain, and ümlaut") == "plain, and ümlaut"
