"""`python -m envs.chains known`: the ceiling is that of the player who really plays."""

from __future__ import annotations

import math
import statistics

import pytest

from envs.chains.__main__ import main
from envs.chains.chain import Mix
from envs.chains.env import Chains
from envs.chains.known import best_values, explained, known


async def test_the_best_values_are_calibrated_and_know_more_the_later_it_is() -> None:
    env = Chains(size=1500, seed=3)
    success, found = await known(env, 1500, 0.3)
    promised = [best_values(env.chain(task_id), 0, 1, 0.3)[0] for task_id in env.task_ids]
    assert success == pytest.approx(statistics.fmean(promised), abs=0.04)
    assert found["prompt"] > 0.4
    assert found["middle"] > 0.65
    assert list(found.values()) == sorted(found.values())


def test_what_is_lost_is_worth_nothing_and_an_answer_to_come_is_worth_all() -> None:
    chain = Mix(least=3, most=3, sum_shares=(1.0,), guess_shares=(0.0,), skips=0.0).draw("x", 1)
    assert best_values(chain, 1, 4, 0.5)[2:] == [0.0, 0.0]
    assert best_values(chain, 3, 4, 0.5)[3] == 1.0
    assert best_values(chain, 3, 4, 0.5)[2] == pytest.approx(0.5 * (1 - 0.5 * 0.02))


def test_returns_that_are_all_the_same_have_no_explained_variance() -> None:
    assert math.isnan(explained([1.0, 1.0], [0.5, 0.5]))
    assert explained([1.0, 0.0], [1.0, 0.0]) == 1.0


def test_the_command_prints_the_ceiling_and_refuses_what_it_cannot_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["known", "--episodes", "50", "--set", "tail=0.5"]) == 0
    assert "three quarters" in capsys.readouterr().out
    assert main(["known", "--set", "tial=0.5"]) == 2
    assert "tial" in capsys.readouterr().err
    assert main(["known", "--error-rate", "0"]) == 2
