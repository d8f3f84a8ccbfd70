"""`python -m agent.store replay RUN --into RUN`: offer the episodes of one store to another run's learner.

    python -m agent.store replay runs/old --into runs/new --dry-run      # how many there are
    python -m agent.store replay runs/old --into runs/new                # a store runs there, such as a server's
    python -m agent.store replay runs/old --into runs/new batch=32       # a new file, for a store that is started later

Nobody is asked anything: it is what was sampled and judged, with the log-probs of then. A learner of the new run
(`python -m agent.serve RECIPE name=new --learn`, say) claims it like any other episode. Its tokens are of versions
below zero there, and the source's newest is -1: every one is off-policy, by as many versions as it was behind the
source's newest and the new run has made since. What the numbers were in the source is in the episode's metrics, as
`replayed`.
Twice is harmless: an episode keeps its id. Evaluations are left out, and what was pruned or deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from agent.doors.door import DoorFault
from agent.doors.keys import given_key
from agent.episode import Episode, EpisodeError, Segment, decode, encode
from agent.packed import Versions
from agent.store.client import StoreClient
from agent.store.config import read_config
from agent.store.ledger import Ledger
from agent.store.protocol import EpisodeRow, StoreFault, StoreInUse
from agent.store.reading import EpisodeFilter, EpisodeReader

_PAGE = 1000


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit status (0, or 2 with one line on what is wrong)."""
    parser = argparse.ArgumentParser(
        prog="python -m agent.store replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the folder of the run whose episodes are offered, or its file")
    parser.add_argument(
        "--into", required=True, metavar="RUN|URL", help="the other run's folder, or its store's address"
    )
    parser.add_argument("--key-file", type=Path, help="the shared key of a store at a URL; default: what is in SAO_KEY")
    parser.add_argument("--kind", choices=("served", "train"), help="only conversations, or only what tickets gave")
    parser.add_argument("--limit", type=int, metavar="N", help="the newest N of them")
    parser.add_argument("--dry-run", action="store_true", help="count them, and offer nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of a store that is not there yet")
    given = parser.parse_intermixed_args(argv)
    try:
        source = given.run / "episodes.sqlite" if given.run.is_dir() else given.run
        name = source.resolve().parent.name
        with EpisodeReader(source) as reader:
            rows = list(replayable(reader, kind=given.kind))[-(given.limit or 0) :]
            newest = max((row.newest_version for row in rows), default=0)
            print(f"{len(rows):,} episodes of {source}, by versions up to {newest}", flush=True)
            if not given.dry_run and rows:
                episodes = (replayed(decode(reader.get(row.id)), name, newest) for row in rows)
                outcomes = _offer_all(episodes, given)
                print(", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items())))
    except (StoreFault, DoorFault, EpisodeError, OSError, ValueError) as error:
        print(f"agent.store replay: {error}", file=sys.stderr)
        return 2
    return 0


def replayable(reader: EpisodeReader, *, kind: str | None = None) -> Iterator[EpisodeRow]:
    """The rows of episodes that can be learned from again, in order of completion."""
    offset = 0
    while rows := reader.list(EpisodeFilter(kind=kind, limit=_PAGE, offset=offset)):
        offset += len(rows)
        yield from (row for row in rows if row.kind != "evaluate" and row.gone is None)


def replayed(episode: Episode, source: str, newest: int) -> Episode:
    """`episode` of the run `source` for another run: its versions counted back from -1, which stands for `newest`.

    Their own numbers mean other weights there. Everything else stays as it was sampled.
    """

    def back(segment: Segment) -> Segment:
        runs = [(version - newest - 1, count) for version, count in segment.versions.runs()]
        return msgspec.structs.replace(segment, versions=Versions.of_runs(runs)) if runs else segment

    said: dict[str, Any] = {"from": source, "versions": episode.sampled_by}
    return msgspec.structs.replace(
        episode,
        segments=tuple(back(segment) for segment in episode.segments),
        branches=tuple(
            msgspec.structs.replace(branch, segments=tuple(back(segment) for segment in branch.segments))
            for branch in episode.branches
        ),
        metrics={**episode.metrics, "replayed": said},
    )


def _offer_all(episodes: Iterator[Episode], given: argparse.Namespace) -> dict[str, int]:
    if "://" in given.into:
        return asyncio.run(_over_http(episodes, given.into, given_key(given.key_file)))
    folder = Path(given.into)
    if not given.overrides and not (folder / "episodes.sqlite").is_file():
        raise StoreFault(
            f"no episode store at {folder}: start the new run first, or give at least batch=N for a new file"
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        ledger = Ledger(folder / "episodes.sqlite", read_config(None, given.overrides))
    except StoreInUse:
        port, key = (folder / "store.port").read_text().strip(), (folder / "key").read_text().strip()
        return asyncio.run(_over_http(episodes, f"http://127.0.0.1:{port}", key))
    outcomes: Counter[str] = Counter()
    try:
        for episode in episodes:
            [ending] = ledger.apply([partial(ledger.offers.take, episode, encode(episode))])
            if isinstance(ending, Exception):
                raise ending
            outcomes[ending.outcome] += 1
    finally:
        ledger.close()
    return outcomes


async def _over_http(episodes: Iterator[Episode], url: str, key: str) -> dict[str, int]:
    outcomes: Counter[str] = Counter()
    async with StoreClient(url, key=key) as store:
        for episode in episodes:
            outcomes[(await store.offer(episode)).outcome] += 1
    return outcomes
