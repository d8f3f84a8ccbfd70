"""Everything that was said and judged, as JSON lines: `python -m agent.serve export RUN`.

python -m agent.serve export runs/my_run --out conversations.jsonl
python -m agent.serve export runs/my_run --key app --user ann        # one user's, on the standard output

A line is a conversation: its messages, and of each response the policy versions, the verdict that counts, comment,
correction, and everything that was said before (history); and what became of its episode. Deleted ones are not there.
The server may be running.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from agent.serve.conversations.conversation import Conversation, Turn
from agent.serve.conversations.journal_reading import JournalReader, history
from agent.store.protocol import StoreFault


def main(argv: Sequence[str]) -> int:
    """Command line; 0, or 2 with one line on what is wrong."""
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m agent.serve export",
        description=description,
        epilog="example:\n" + rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the standard output")
    parser.add_argument("--key", metavar="NAME", help="only what came with the bearer key of this name")
    parser.add_argument("--user", metavar="USER", help="only of this user; `` is what came without one")
    given = parser.parse_args(argv)
    try:
        with contextlib.closing(JournalReader(given.run / "serve" / "journal.sqlite")) as reader:
            lines = export(reader, given.run / "episodes.sqlite", key=given.key, user=given.user)
            if given.out is None:
                _write(sys.stdout.buffer, lines)
            else:
                # People's words: for whoever runs this, and nobody else.
                descriptor = os.open(given.out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    print(f"{_write(file, lines)} conversations in {given.out}", file=sys.stderr)
    except (StoreFault, OSError, sqlite3.Error) as error:
        print(f"agent.serve export: {error}", file=sys.stderr)
        return 2
    return 0


def _write(file: BinaryIO, lines: Iterator[dict[str, Any]]) -> int:
    count = 0
    for line in lines:
        file.write(msgspec.json.encode(line) + b"\n")
        count += 1
    return count


def export(
    reader: JournalReader, store: Path, *, key: str | None = None, user: str | None = None
) -> Iterator[dict[str, Any]]:
    """The lines, oldest conversation first. `store`: the run's file of episodes, if it is there."""
    with contextlib.closing(_open_store(store)) as episodes:
        for conversation in reader.conversations(key=key, user=user):
            yield {
                "id": conversation.id,
                "key": conversation.key,
                "user": conversation.user or None,
                "session": conversation.session or None,
                "status": conversation.status,
                "created_at": conversation.created_at,
                "updated_at": conversation.updated_at,
                "trainable": conversation.trainable,
                "sampling": msgspec.to_builtins(conversation.sampling),
                "tools": conversation.tools,
                "messages": conversation.messages,
                "responses": [_response(reader, turn) for turn in conversation.turns],
                "episode": _episode(episodes, conversation),
            }


def _response(reader: JournalReader, turn: Turn) -> dict[str, Any]:
    return {
        "id": turn.response_id,
        "text": turn.action.text,
        "tokens": len(turn.action.token_ids),
        "policy_versions": sorted(set(turn.action.versions)),
        "created_at": turn.created_at,
        "reward": turn.reward,
        "explicit": turn.explicit if turn.reward is not None else None,
        "final": turn.final,
        "comment": turn.comment or None,
        "correction": turn.correction or None,
        "metadata": turn.metadata,
        "history": history(reader.sql, turn.response_id),
    }


def _open_store(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        return sqlite3.connect(":memory:")
    sql = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    sql.row_factory = sqlite3.Row
    return sql


def _episode(sql: sqlite3.Connection, conversation: Conversation) -> dict[str, Any] | None:
    """What the store knows of it; None: it is in none, or in another one."""
    with contextlib.suppress(sqlite3.OperationalError):  # a file without its tables
        query = "SELECT status, reward, claimed_at FROM episode_rows WHERE id = ?"
        row = sql.execute(query, (conversation.id,)).fetchone()
        return None if row is None else dict(row)
    return None
