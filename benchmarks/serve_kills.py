"""Does feedback survive the server's death: killed under load again and again, while the learner trains.

    python benchmarks/serve_kills.py [--quick] [--kills 10] [--clients 16] [--json FILE]

The tiny recipe (`recipes/style_shift_tiny.yaml`, after its cold start) is served with `--learn`. Clients stream answers
and judge them; once the learner has published since the start, the server gets SIGKILL, at a moment drawn at random
within two seconds, and is started again on the same run. After the last kill it is left to train what it has. Then the
store's file is read:

    lost            judged with a 200 and in no episode of the store, or with another reward
    twice           responses in two episodes, and episodes in two batches that were trained
    left            episodes that are ready: fewer than a batch
    checkpoint      how many episodes the learner's last checkpoint has learned from: as many as are marked trained

The exit status is 1 if anything is lost, trained twice, or neither trained nor ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sqlite3
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from agent.episode import decode
from agent.store.protocol import EpisodeRow
from agent.store.reading import EpisodeFilter, EpisodeReader
from benchmarks.report import save_json, show
from benchmarks.serving import RECIPE, ServedRun, ask, get, judge, questions, session

_ROUND_S = 600.0
_DRAIN_S = 900.0
BATCH = 128
# Frequent checkpoints: every life of the server is to write one. Batches that keep up with the clients.
OVERRIDES = (f"learner.batch_size={BATCH}", "learner.checkpoint_every=2", "learner.steps=100000")


@dataclass
class Given:
    """What clients know: the reward of every response whose feedback had a 200, and of those with no answer at all."""

    accepted: dict[str, float] = field(default_factory=dict)
    unanswered: dict[str, float] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)


async def use(http: aiohttp.ClientSession, run: ServedRun, given: Given, rng: random.Random) -> None:
    """Ask and judge until the server is gone."""
    asked = questions()
    with contextlib.suppress(aiohttp.ClientError, ConnectionError):
        while True:
            reply = await ask(http, run.url, run.name, rng.choice(asked), rng.randrange(2**31))
            if reply.fault:
                given.refused[reply.fault[:60]] += 1
                continue
            reward = round(rng.random(), 3)
            given.unanswered[reply.id] = reward
            status, _ = await judge(http, run.url, reply, reward)
            del given.unanswered[reply.id]
            if status == 200:
                given.accepted[reply.id] = reward
            else:
                given.refused[f"feedback {status}"] += 1


async def live(run: ServedRun, given: Given, clients: int, rng: random.Random) -> int:
    """One life of the server, from its start to its death under load; how many versions were published in it."""
    await run.start(learn=True)
    async with session() as http:
        first = (await get(http, run.url, "/v1/versions"))["served"]
        using = [
            asyncio.create_task(use(http, run, given, random.Random(rng.randrange(2**31)))) for _ in range(clients)
        ]
        deadline, last = time.monotonic() + _ROUND_S, first
        # The first version of a resumed learner is its checkpoint; two more, and it has written another one.
        while last < first + 3:
            last = (await get(http, run.url, "/v1/versions"))["served"]
            if time.monotonic() > deadline:
                await run.kill()
                raise RuntimeError(f"nothing was published in {_ROUND_S:g} s: see {run.folder / 'learner.log'}")
            await asyncio.sleep(0.2)
        await asyncio.sleep(rng.random() * 2)
        last = (await get(http, run.url, "/v1/versions"))["served"]
        await run.kill()
        await asyncio.gather(*using)
    return last - first


async def drain(run: ServedRun) -> float:
    """Serve once more, without clients, until less than a batch is left; the seconds that took."""
    began, first = time.monotonic(), None
    await run.start(learn=True)
    try:
        while time.monotonic() - began < _DRAIN_S:
            async with session() as http:
                served = (await get(http, run.url, "/v1/versions"))["served"]
                first = served if first is None else first
                waiting = 'sao_conversations{state="answered"}'
                async with http.get(f"{run.url}/metrics") as page:
                    lines = (await page.text()).splitlines()
            undelivered = any(line.startswith(waiting) and not line.endswith(" 0.0") for line in lines)
            states = await asyncio.to_thread(_states, run.folder)
            # The learner publishes when it has resumed: only then is its last life's unfinished batch ready again.
            if served > first and states["ready"] < BATCH and not undelivered:
                break
            await asyncio.sleep(0.5)
    finally:
        await run.stop()  # the learner writes a checkpoint and commits
    return time.monotonic() - began


def _states(folder: Path) -> Counter[str]:
    with _opened(folder) as sql:
        return Counter(dict(sql.execute("SELECT status, count(*) FROM episodes GROUP BY status").fetchall()))


def _opened(folder: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(f"file:{folder / 'episodes.sqlite'}?mode=ro", uri=True, timeout=30))


def audit(folder: Path, given: Given) -> dict[str, Any]:
    """What the store's file and the last checkpoint say about what clients know."""
    rewards: dict[str, float] = {}
    seen: Counter[str] = Counter()
    with EpisodeReader(folder / "episodes.sqlite") as reader:
        rows: list[EpisodeRow] = []
        page = 0
        while more := reader.list(EpisodeFilter(limit=10_000, offset=page * 10_000)):
            rows, page = rows + more, page + 1
        for row in rows:
            episode = decode(reader.get(row.id))
            for response, reward in zip(episode.metrics["responses"], episode.turn_rewards, strict=True):
                seen[response] += 1
                rewards[response] = reward
    with _opened(folder) as sql:
        batches = dict(
            sql.execute(
                "SELECT m.episode, count(*) FROM claim_members m JOIN claims c ON c.id = m.claim "
                "WHERE c.status = 'committed' GROUP BY m.episode"
            ).fetchall()
        )
        claims = dict(sql.execute("SELECT status, count(*) FROM claims GROUP BY status").fetchall())
    states = Counter(row.status for row in rows)
    trained = {row.id for row in rows if row.status == "trained"}
    checkpoints = sorted((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    progress = json.loads((checkpoints[-1] / "progress.json").read_text(encoding="utf-8"))
    return {
        "accepted": len(given.accepted),
        "lost": sum(rewards.get(response) != reward for response, reward in given.accepted.items()),
        "unanswered": len(given.unanswered),
        "unanswered_in_store": sum(response in rewards for response in given.unanswered),
        "episodes": len(rows),
        "responses_twice": sum(count > 1 for count in seen.values()),
        "states": dict(states),
        "trained_twice": sum(count > 1 for count in batches.values()),
        "trained_without_batch": len(trained ^ batches.keys()),
        "claims": claims,
        "checkpoint_episodes": progress["episodes"],
        "checkpoint_step": progress["step"],
        "refused": dict(given.refused),
    }


def sound(audited: dict[str, Any]) -> bool:
    """Whether nothing is lost and nothing was trained twice."""
    states = audited["states"]
    wrongs = ("lost", "responses_twice", "trained_twice", "trained_without_batch")
    return (
        not any(audited[wrong] for wrong in wrongs)
        and set(states) <= {"ready", "trained"}
        and states.get("ready", 0) < BATCH
        and audited["checkpoint_episodes"] == states.get("trained", 0)
    )


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """All lives and the audit."""
    rng, given, published = random.Random(options.seed), Given(), []
    with tempfile.TemporaryDirectory(prefix="serve_kills") as scratch:
        served = ServedRun(options.recipe, options.runs or Path(scratch), "kills", OVERRIDES)
        await served.prepare()
        try:
            for number in range(options.kills):
                published.append(await live(served, given, options.clients, rng))
                states = await asyncio.to_thread(_states, served.folder)
                print(
                    f"kill {number + 1}: {len(given.accepted)} accepted so far, {published[-1]} versions in this life, "
                    f"store {dict(states)}",
                    flush=True,
                )
            seconds = await drain(served)
        finally:
            await served.kill()
        audited = await asyncio.to_thread(audit, served.folder, given)
    return {"kills": options.kills, "versions_by_life": published, "drained_s": seconds, **audited}


def main() -> int:
    """Command line; see `--help`."""
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--quick", action="store_true", help="two kills")
    parser.add_argument("--runs", type=Path, help="where the run and the cold-started model are kept")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.kills < 1 or options.clients < 1:
        parser.error("--kills and --clients must be positive")
    if options.quick:
        options.kills = min(options.kills, 2)
    audited = asyncio.run(run(options))
    well = sound(audited)
    states = audited["states"]
    show(
        f"{audited['kills']} kills under load",
        [
            "accepted",
            "lost",
            "responses twice",
            "trained twice",
            "trained",
            "left",
            "checkpoint",
            "no answer: in store",
        ],
        [
            [
                str(audited["accepted"]),
                str(audited["lost"]),
                str(audited["responses_twice"]),
                str(audited["trained_twice"]),
                str(states.get("trained", 0)),
                str(states.get("ready", 0)),
                str(audited["checkpoint_episodes"]),
                f"{audited['unanswered']} / {audited['unanswered_in_store']}",
            ]
        ],
        [
            "sound" if well else f"NOT SOUND: {audited}",
            f"versions in each life: {audited['versions_by_life']}; batches: {audited['claims']}; "
            f"trained at last in {audited['drained_s']:.0f} s",
        ],
    )
    save_json(options.json, audited)
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
