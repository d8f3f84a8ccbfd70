"""What do 200 streaming clients get of the server, and what does learning, and each publication, cost them?

    python benchmarks/serve_load.py [--quick] [--clients 200] [--seconds 60] [--json FILE]

The tiny recipe (`recipes/style_shift_tiny.yaml`, after its cold start) is served twice, without and with `--learn`.
Each client streams an answer over HTTP, gives it a reward (random: what is learned does not matter here), and asks
again. By clients' clocks:

    first token   from the request until the first piece of text
    between       the time between two pieces of text of one answer
    publication   the longest time between two pieces, of all streams, that touches a publication (from when the server
                  begins with it until it says that the version is served), against the longest that touches as long a
                  window half-way between two publications

Clients, server, engine, store and learner share the CPUs, so this is what one machine gives to all of them together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.report import machine, save_json, show
from benchmarks.serving import RECIPE, Reply, ServedRun, ask, get, judge, questions, session

_LEARNING_S = 300.0


@dataclass
class Load:
    """`clients` closed loops against one server, counted from `begin` until `until` (Unix seconds)."""

    http: aiohttp.ClientSession
    url: str
    model: str
    clients: int
    most: int
    stop: bool = False
    begun: int = 0
    replies: list[Reply] = field(default_factory=list)
    feedback_s: list[float] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Until `stop` is set or `most` answers have been asked for."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.clients):
                group.create_task(self._client(random.Random(number)))

    async def _client(self, rng: random.Random) -> None:
        asked = questions()
        while not self.stop and self.begun < self.most:
            self.begun += 1
            try:
                reply = await ask(self.http, self.url, self.model, rng.choice(asked), rng.randrange(2**31))
                if reply.fault:
                    self.faults[reply.fault[:60]] += 1
                    continue
                self.replies.append(reply)
                sent = time.time()
                status, _ = await judge(self.http, self.url, reply, rng.random())
                self.feedback_s.append(time.time() - sent)
                if status != 200:
                    self.faults[f"feedback {status}"] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.faults[type(error).__name__] += 1


async def publications(http: aiohttp.ClientSession, url: str, ends: dict[int, float]) -> None:
    """Follow the server's events until cancelled; `ends` gets the moment at which each version was said to be served.

    A server drops who reads too slowly, as this process may on a busy machine; what it said meanwhile is missed.
    """
    while True:
        try:
            async with http.get(f"{url}/v1/events", timeout=aiohttp.ClientTimeout(total=None)) as answer:
                await _follow(answer.content, ends)
            print("the server has closed its stream of events; opening it again", flush=True)
        except aiohttp.ClientError as error:
            print(f"the stream of events broke, opening it again: {error!r}", flush=True)
        await asyncio.sleep(0.2)


async def _follow(stream: aiohttp.StreamReader, ends: dict[int, float]) -> None:
    kind, buffer = "", b""
    async for data in stream.iter_any():  # the first event may be longer than a line may be
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            if line.startswith(b"event: "):
                kind = line[7:].decode()
            elif line.startswith(b"data: ") and kind == "version":
                event = json.loads(line[6:])
                ends[event["version"]] = event["at"]


def longest(replies: Sequence[Reply], begin: float, end: float) -> float | None:
    """The longest gap of a stream that touches begin..end; None if no stream was under way."""
    gaps = [b - a for reply in replies for a, b in reply.gaps if a < end and b > begin]
    return max(gaps, default=None)


def quantile(values: Sequence[float], share: float) -> float | None:
    """A quantile; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def figures_of(
    load: Load, begin: float, end: float, windows: Sequence[tuple[float, float]], trained: int
) -> dict[str, Any]:
    """What clients saw of begin..end; `windows` are the publications (from, to) inside it. Seconds."""
    done = [reply for reply in load.replies if reply.pieces and begin <= reply.pieces[-1] < end]
    gaps = [b - a for reply in done for a, b in reply.gaps]
    first = [reply.pieces[0] - reply.sent for reply in done]
    during = [gap for a, b in windows if (gap := longest(load.replies, a, b)) is not None]
    outside = []
    for (_, last), (following, after) in itertools.pairwise(windows):
        middle, half = (last + following) / 2, (after - following) / 2
        if last < middle - half and (gap := longest(load.replies, middle - half, middle + half)) is not None:
            outside.append(gap)
    return {
        "seconds": end - begin,
        "answers": len(done),
        "answers_per_s": len(done) / (end - begin),
        "pieces_per_s": sum(len(reply.pieces) for reply in done) / (end - begin),
        "first_token_s": {"p50": quantile(first, 0.5), "p99": quantile(first, 0.99)},
        "between_s": {"p50": quantile(gaps, 0.5), "p99": quantile(gaps, 0.99), "max": max(gaps, default=None)},
        "feedback_s": {"p50": quantile(load.feedback_s, 0.5), "p99": quantile(load.feedback_s, 0.99)},
        "answers_of_two_versions": sum(len(reply.versions) > 1 for reply in done),
        "faults": dict(load.faults),
        "steps": trained,
        "publications": len(windows),
        "publication_s": [b - a for a, b in windows],
        "gap_during_s": during,
        "gap_outside_s": outside,
    }


async def measure(run: ServedRun, options: argparse.Namespace, *, learn: bool) -> dict[str, Any]:
    """Serve, load, and take the figures, after a warm-up; with `learn` from the first publication on."""
    await run.prepare()
    await run.start(learn=learn)
    ends: dict[int, float] = {}
    try:
        async with session() as http:
            load = Load(http, run.url, run.name, options.clients, options.requests)
            watching = asyncio.create_task(publications(http, run.url, ends))
            loading = asyncio.create_task(load.run())
            await asyncio.sleep(options.warmup)
            waited = time.monotonic()
            while learn and not ends and not loading.done():
                if time.monotonic() - waited > _LEARNING_S:
                    raise RuntimeError(f"nothing was published in {_LEARNING_S:g} s: see {run.folder / 'learner.log'}")
                await asyncio.sleep(0.2)
            load.feedback_s.clear()
            before, begin = machine()["load_average"], time.time()
            await asyncio.wait({loading}, timeout=options.seconds)
            end = time.time()
            load.stop = True
            await loading
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            listed = (await get(http, run.url, "/v1/versions"))["versions"]
            health = await get(http, run.url, "/healthz")
    finally:
        await run.stop()
    windows = [(v["published_at"], ends[v["version"]]) for v in listed if v["version"] in ends]
    windows = [(a, b) for a, b in windows if begin <= a and b < end]
    figures = figures_of(load, begin, end, windows, len(windows))
    return figures | {"learning": learn, "learner": health["learner"]["state"], "load_average_before": before}


def milliseconds(values: Sequence[float | None]) -> str:
    """Figures in a cell."""

    def one(value: float) -> str:
        return f"{1000 * value:.0f}" if value >= 0.01 else f"{1000 * value:.2f}"

    return " / ".join("-" if value is None else one(value) for value in values)


def summary(values: Sequence[float]) -> str:
    """Median and largest in milliseconds."""
    return milliseconds([statistics.median(values), max(values)]) if values else "-"


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Both ways of serving, one after the other."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="serve_load") as scratch:
        runs = options.runs or Path(scratch)
        for learn in (False, True):
            print(f"serving {'with' if learn else 'without'} the learner", flush=True)
            name = "learning" if learn else "serving"
            rows.append(await measure(ServedRun(options.recipe, runs, name, options.overrides), options, learn=learn))
    return {"clients": options.clients, "rows": rows}


def table(report: dict[str, Any]) -> None:
    """Print it."""
    columns = ["learner", "answers/s", "pieces/s", "first token ms p50 / p99", "between ms p50 / p99 / max"]
    columns += ["feedback ms p50 / p99", "steps", "gap at a publication ms median / max", "elsewhere"]
    show(
        f"{report['clients']} streaming clients",
        columns,
        [
            [
                "on" if row["learning"] else "off",
                f"{row['answers_per_s']:.1f}",
                f"{row['pieces_per_s']:.0f}",
                milliseconds([row["first_token_s"]["p50"], row["first_token_s"]["p99"]]),
                milliseconds([row["between_s"]["p50"], row["between_s"]["p99"], row["between_s"]["max"]]),
                milliseconds([row["feedback_s"]["p50"], row["feedback_s"]["p99"]]),
                str(row["steps"]),
                summary(row["gap_during_s"]),
                summary(row["gap_outside_s"]),
            ]
            for row in report["rows"]
        ],
        [
            *(
                f"{'on' if row['learning'] else 'off'}: {row['answers']} answers in {row['seconds']:.0f} s, "
                f"{row['answers_of_two_versions']} of two versions, publications of "
                f"{summary(row['publication_s'])} ms (median / max), load average at the start "
                f"{row['load_average_before'][0]}, faults {row['faults'] or 'none'}"
                for row in report["rows"]
            ),
            "steps: publications that began and ended while it was measured; nothing between: pieces came together",
        ],
    )


def main() -> int:
    """Command line; see `--help`."""
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring, each way")
    parser.add_argument("--requests", type=int, default=20_000, help="at most so many answers are asked for, each way")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds before, each way")
    parser.add_argument("--quick", action="store_true", help="10 seconds each way")
    parser.add_argument("--runs", type=Path, help="where runs and the cold-started model are kept (else: thrown away)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args()
    if min(options.clients, options.requests) < 1 or options.seconds <= 0:
        parser.error("--clients, --requests and --seconds must be positive")
    if options.quick:
        options.seconds, options.warmup = min(options.seconds, 10.0), min(options.warmup, 2.0)
    report = asyncio.run(run(options))
    table(report)
    save_json(options.json, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
