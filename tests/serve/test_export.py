"""What leaves a server as JSON lines: everything of a user, and nothing of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_journal import Bench

from agent.serve.__main__ import main
from agent.serve.conversations.conversation import episode_of
from agent.store.client import encode
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Bench]:
    folder = tmp_path / "serve"
    folder.mkdir()
    return tmp_path, Bench(folder)


def lines(capsysbinary: pytest.CaptureFixture[bytes], *words: str) -> list[dict[str, Any]]:
    assert main(["export", *words]) == 0
    return [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]


def test_all_that_was_said_and_judged_is_exported_beside_the_server(
    run: tuple[Path, Bench], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The journal is open, as a server has it."""
    folder, bench = run
    first, conversation = bench.reply(user="ann", session="s", asked="zebra")
    bench.reply(conversation, 1, user="ann", session="s", asked="zebra")
    bench.give(first, 0.3, signal="edit", correction="a better one")
    bench.give(first, 1.0, comment="after all", final=True)
    kept = bench.journal.conversation(conversation)
    assert kept is not None
    ledger = Ledger(folder / "episodes.sqlite", StoreConfig(batch=1))
    episode = episode_of(kept, "w")
    ledger.apply([lambda: ledger.offers.take(episode, encode(episode))])
    bench.now += 1
    bench.reply(user="bob")
    deleted = bench.reply(user="cat", asked="gone for good")[1]
    bench.do(lambda: bench.journal.delete(deleted, "k"))

    exported = lines(capsysbinary, str(folder))
    assert [line["user"] for line in exported] == ["ann", "bob"]
    told = exported[0]
    assert (told["key"], told["session"], told["status"]) == ("k", "s", "answered")
    assert told["messages"][0] == {"role": "user", "content": "zebra"}
    assert (told["episode"]["status"], told["episode"]["reward"]) == ("ready", 1.0)
    one, other = told["responses"]
    assert (one["reward"], one["explicit"], one["comment"], one["correction"]) == (
        1.0,
        True,
        "after all",
        "a better one",
    )
    assert [(said["reward"], said["signal"], said["correction"]) for said in one["history"]] == [
        (0.3, "edit", "a better one"),
        (1.0, None, None),
    ]
    assert (other["reward"], other["explicit"], other["history"]) == (None, None, [])

    assert [line["user"] for line in lines(capsysbinary, str(folder), "--user", "bob")] == ["bob"]
    assert lines(capsysbinary, str(folder), "--user", "ann", "--key", "another") == []
    out = folder / "said.jsonl"
    assert lines(capsysbinary, str(folder), "--key", "k", "--out", str(out)) == []
    assert len(out.read_text().splitlines()) == 2
    assert out.stat().st_mode & 0o077 == 0, "people's words are not for everybody on the machine"


def test_a_run_without_a_journal_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path)]) == 2
    assert "no journal" in capsys.readouterr().err
