"""The attackers that ship, played for real: none earns that `known.py` does not name, and honest policies are taken."""

from __future__ import annotations

import pytest
from known import KNOWN_TO_EARN

from envs.attack.__main__ import arena_of
from envs.attack.play import play
from envs.attack.report import Row


def hold(env_id: str, rows: list[Row]) -> None:
    earning = {row.policy: row.examples for row in rows if row.earned and not row.honest}
    assert set(earning) <= KNOWN_TO_EARN[env_id], earning
    assert not [row for row in rows if row.faults]
    honest = [row for row in rows if row.honest]
    assert honest
    assert [row for row in honest if row.earned < row.episodes] == []


async def test_math_cases_i1_to_i7() -> None:
    """Cases I1-I7: universal answers, echo, scale, drafts; another seed is another test."""
    rows = await play(arena_of("sao/PythonTIR-v0"), [3], episodes=2)
    assert sum(row.episodes for row in rows if not row.honest) > 300
    hold("sao/PythonTIR-v0", rows)


async def test_style() -> None:
    rows = await play(arena_of("sao/StyleShift-v0"), [3], episodes=9)
    assert sum(row.episodes for row in rows if not row.honest) > 500
    hold("sao/StyleShift-v0", rows)


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.timeout(1800)
async def test_repositories_cases_k1_to_k9() -> None:
    """Cases K1-K3, K7-K9 and F3: every demo row."""
    hold("sao/SWEBench-v0", await play(arena_of("sao/SWEBench-v0"), [0]))


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.timeout(600)
async def test_repositories_one_row() -> None:
    """Cases K1-K3 and K9 on one row."""
    hold("sao/SWEBench-v0", await play(arena_of("sao/SWEBench-v0"), [0], episodes=1))
