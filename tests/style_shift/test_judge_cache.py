"""The LLM judge's cache: what was paid for is kept, and nothing else is."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from judge_server import Make, Server, says, status

from envs.style_shift.judging import rubric
from envs.style_shift.judging.judge import JudgeFault


async def test_what_was_paid_for_is_kept_and_shared_by_processes(server: Server, make: Make, tmp_path: Path) -> None:
    cache = str(tmp_path / "deep" / "verdicts.sqlite")
    first, second = make(cache=cache), make(cache=cache)
    verdict = await first.judge("p", "t \ud800", "cute")
    assert await second.judge("p", "t \ud800", "cute") == verdict
    assert (len(server.bodies), second.costs.cached, second.costs.calls) == (1, 1, 0)


async def test_the_cache_key_holds_model_rubric_style_prompt_and_text(
    server: Server, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case G4: change any of them, and the question is asked anew."""
    cache = str(tmp_path / "verdicts.sqlite")
    judge, other = make(cache=cache), make(cache=cache, model="another")
    for asked, question in enumerate(
        [("p", "t", "cute"), ("p", "t", "classical"), ("p", "t2", "cute"), ("pt", "", "cute"), ("", "pt", "cute")]
    ):
        assert len(server.bodies) == asked
        await judge.judge(*question)
        await judge.judge(*question)
    await other.judge("p", "t", "cute")
    assert len(server.bodies) == 6
    monkeypatch.setattr(rubric, "RUBRIC_VERSION", "next")
    await judge.judge("p", "t", "cute")
    assert len(server.bodies) == 7


async def test_faults_are_not_cached(server: Server, make: Make, tmp_path: Path) -> None:
    server.answers = [status(400), says()]
    judge = make(cache=str(tmp_path / "verdicts.sqlite"))
    with pytest.raises(JudgeFault):
        await judge.judge("p", "t", "cute")
    assert (await judge.judge("p", "t", "cute")).quality == 1


async def test_a_cache_that_cannot_be_used_costs_money_and_nothing_else(
    server: Server, make: Make, tmp_path: Path
) -> None:
    (tmp_path / "garbage").write_bytes(b"not a database, but long enough to be read as one" * 100)
    for path in (tmp_path / "garbage", tmp_path, tmp_path / "garbage" / "below-a-file"):
        assert (await make(cache=str(path)).judge("p", "t", "cute")).quality == 1
    assert len(server.bodies) == 3


async def test_a_cached_row_that_was_tampered_with_is_asked_for_again(
    server: Server, make: Make, tmp_path: Path
) -> None:
    cache = tmp_path / "verdicts.sqlite"
    await make(cache=str(cache)).judge("p", "t", "cute")
    with sqlite3.connect(cache) as connection:
        connection.execute("UPDATE verdicts SET quality = 7")
    connection.close()
    assert (await make(cache=str(cache)).judge("p", "t", "cute")).quality == 1
    assert len(server.bodies) == 2
