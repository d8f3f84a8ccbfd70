"""What deletion leaves in an SQLite file: rows as they are usually kept, and rows of `agent.store.texts`.

    python benchmarks/deleted_words.py
    python benchmarks/deleted_words.py --rows 10000 --seeds 3

Rows of random lengths are written, and four in ten are deleted at random meanwhile, all with `secure_delete` on. Then
the log is emptied into the file, and the file is searched for each deleted row's own tag.
"""

from __future__ import annotations

import argparse
import random
import re
import sqlite3
import tempfile
import time
from pathlib import Path

from agent.store import texts

SIZES = {"short": (100, 800, 3000), "long": (5000, 50_000)}
TABLES = {
    "rows by number": "CREATE TABLE t (id INTEGER PRIMARY KEY, data BLOB)",
    "rows by id": "CREATE TABLE t (id TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID",
    "agent.store.texts": texts.SCHEMA,
}


def measure(path: Path, table: str, sizes: tuple[int, ...], rows: int, seed: int) -> tuple[int, int, int, float]:
    """Deleted rows, those of them that can be read in the file, its bytes, microseconds a change."""
    rng, alive, gone = random.Random(seed), [], []
    sql = sqlite3.connect(path, isolation_level=None)
    for word in (
        "page_size=4096",
        "auto_vacuum=INCREMENTAL",
        "journal_mode=WAL",
        "secure_delete=ON",
        "synchronous=OFF",
    ):
        sql.execute(f"PRAGMA {word}")
    sql.executescript(TABLES[table])
    began = time.perf_counter()
    for number in range(rows):
        tag = b"<%08d>" % number
        data = tag * (rng.randrange(10, rng.choice(sizes)) // 10 + 1)
        if table == "agent.store.texts":
            key: int | str = texts.put(sql, data)
        else:
            key = number if table == "rows by number" else f"{rng.getrandbits(128):032x}"
            sql.execute("INSERT INTO t VALUES (?, ?)", (key, data))
        alive.append((key, tag))
        if rng.random() < 0.4:
            key, tag = alive.pop(rng.randrange(len(alive)))
            sql.execute(
                f"DELETE FROM {'texts' if table == 'agent.store.texts' else 't'} WHERE {_key(table)} = ?", (key,)
            )
            gone.append(tag)
    seconds = time.perf_counter() - began
    sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    sql.close()
    found = set(re.findall(rb"<\d{8}>", path.read_bytes()))
    return len(gone), len(found.intersection(gone)), path.stat().st_size, 1e6 * seconds / (rows + len(gone))


def _key(table: str) -> str:
    return "number" if table == "agent.store.texts" else "id"


def main() -> None:
    """Print a line for each table and length."""
    description, _, example = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=example, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    print(
        "| rows | lengths | deleted | still readable | file, MiB | microseconds a change |\n|---|---|---|---|---|---|"
    )
    for table in TABLES:
        for lengths, sizes in SIZES.items():
            with tempfile.TemporaryDirectory() as folder:
                found = [
                    measure(Path(folder) / f"{seed}.sqlite", table, sizes, options.rows, seed)
                    for seed in range(options.seeds)
                ]
            deleted, left, size, micros = (sum(column) for column in zip(*found, strict=True))
            mean = (size / len(found) / 2**20, micros / len(found))
            print(f"| {table} | {lengths} | {deleted:,} | {left} | {mean[0]:.1f} | {mean[1]:.0f} |")


if __name__ == "__main__":
    main()
