"""`python -m agent.store prune RUN`: take the tokens of finished episodes, and give the room back to the disk.

    python -m agent.store prune runs/tir_tiny --dry-run            # what it would take
    python -m agent.store prune runs/tir_tiny --keep 2000          # the newest 2,000 finished episodes stay whole
    python -m agent.store prune old/episodes.sqlite                # all that are finished

Finished is what no claim takes again: trained, too old, or dropped. Their rows stay, with reward, length, versions and
times; tokens and text go. The store of the run may be running: the work is done in steps of some milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.store import retention
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger
from agent.store.protocol import StoreFault, StoreInUse
from agent.store.tables import SCHEMA_VERSION

_BUSY_S = 30.0
_MIB = 2**20


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit status (0, or 2 with one line on what is wrong)."""
    parser = argparse.ArgumentParser(
        prog="python -m agent.store prune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the run's folder, or its episodes.sqlite")
    parser.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="finished episodes that stay whole (default: the run's keep_trained, or 0)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and change nothing")
    arguments = parser.parse_args(argv)
    path = arguments.run / "episodes.sqlite" if arguments.run.is_dir() else arguments.run
    try:
        if arguments.keep is not None and arguments.keep < 0:
            raise StoreFault(f"--keep {arguments.keep}: a number of episodes is 0 or more")
        if not path.is_file():
            raise StoreFault(f"no episode store at {path}: check the name of the run")
        for line in prune(path, arguments.keep, dry_run=arguments.dry_run):
            print(line, flush=True)
    except (StoreFault, OSError, sqlite3.Error) as error:
        print(f"agent.store prune: {error}", file=sys.stderr)
        return 2
    return 0


def prune(path: Path, keep: int | None, *, dry_run: bool) -> Iterator[str]:
    """Prune the file to the newest `keep` finished episodes (None: as its run is configured), and say what was done.

    Raises `StoreFault`, `sqlite3.Error`.
    """
    with _at_rest(path, dry_run) as resting, contextlib.closing(_open(path, read_only=dry_run)) as sql:
        keep = _configured(sql) if keep is None else keep
        found = retention.prunable(sql, keep)
        if dry_run:
            size = f"{found.bytes / _MIB:,.1f} MiB"
            yield f"{found.episodes:,} finished episodes would go, {size}; the newest {keep:,} stay"
            return
        before = path.stat().st_size
        pruned, step = retention.NOTHING, found
        while step.episodes and (left := found.episodes - pruned.episodes):  # not what a learner trains meanwhile
            step = _step(sql, keep, left)
            pruned += step
        yield f"pruned {pruned.episodes:,} finished episodes, {pruned.bytes / _MIB:,.1f} MiB; the newest {keep:,} stay"
        yield from _shrink(sql, resting)
        yield f"{path} takes {path.stat().st_size / _MIB:,.1f} MiB, {before / _MIB:,.1f} before"


def _step(sql: sqlite3.Connection, keep: int, most: int) -> retention.Pruned:
    began = time.monotonic()
    sql.execute("BEGIN IMMEDIATE")
    step = retention.prune_step(sql, keep, most)
    sql.execute("COMMIT")
    time.sleep(time.monotonic() - began)  # the store's own turn
    return step


def _shrink(sql: sqlite3.Connection, resting: bool) -> Iterator[str]:
    if retention.shrinks_in_steps(sql):
        sql.execute("PRAGMA synchronous=NORMAL")  # moving pages is lost or done; nothing waits for it
        for _ in range(math.ceil(retention.free_pages(sql) / retention.STEP_PAGES)):
            began = time.monotonic()
            retention.shrink_step(sql)
            if not resting:
                time.sleep(time.monotonic() - began)
    elif resting:
        yield "the file was made by an older version: it is written anew, which takes a while"
        sql.execute("PRAGMA auto_vacuum=INCREMENTAL")
        sql.execute("VACUUM")
    else:
        yield "the file was made by an older version: its room is used again; stop the store and repeat to give it back"
    sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


@contextlib.contextmanager
def _at_rest(path: Path, dry_run: bool) -> Iterator[bool]:
    """Keep stores off the file for so long; False where one is running on it. The layout is brought up to date."""
    if dry_run:
        yield False
        return
    try:
        ledger = Ledger(path)
    except StoreInUse:
        yield False
        return
    try:
        yield True
    finally:
        ledger.close()


def _open(path: Path, *, read_only: bool) -> sqlite3.Connection:
    address = f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rw'}"
    sql = sqlite3.connect(address, uri=True, timeout=_BUSY_S, isolation_level=None)
    try:
        sql.execute("PRAGMA secure_delete=ON")
        written = sql.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    except sqlite3.DatabaseError as error:
        sql.close()
        raise StoreFault(f"{path} is no episode store: {error}") from error
    if written is None or int(written[0]) != SCHEMA_VERSION:
        sql.close()
        raise StoreFault(
            f"{path} has schema {written and written[0]}, this program reads {SCHEMA_VERSION}: "
            "leave --dry-run out while no store runs on it, or use the version of the program that does"
        )
    return sql


def _configured(sql: sqlite3.Connection) -> int:
    saved = sql.execute("SELECT value FROM meta WHERE key = 'config'").fetchone()
    kept = StoreConfig.model_validate_json(saved[0]).keep_trained if saved else None
    return kept or 0
