"""Playing attackers: a weak scorer is caught, seeds are tests of their own, the command tells and exits as it says."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import weak_env
from weak_env import Weak, make_arena

from envs.attack import __main__ as command
from envs.attack import play as playing
from envs.attack.arena import Arena, Attempt
from envs.attack.play import play
from envs.core import AsyncEnv


def make(env_id: str, kwargs: Mapping[str, Any]) -> AsyncEnv:
    return Weak(**kwargs)


async def test_a_weak_scorer_is_caught_and_a_strict_one_is_not() -> None:
    weak = {row.policy: row for row in await play(make_arena(), [0], make=make)}
    assert (weak["many digits"].episodes, weak["many digits"].earned) == (4, 4)
    assert weak["many digits"].examples
    assert (weak["cut short"].earned, weak["wrong"].earned, weak["right"].share) == (2, 0, 1.0)
    strict = {row.policy: row for row in await play(make_arena(), [0], kwargs={"strict": True}, make=make)}
    assert [strict[name].earned for name in ("many digits", "cut short", "wrong")] == [0, 0, 0]
    assert strict["right"].share == 1.0


async def test_a_fault_is_no_episode_that_earned_nothing() -> None:
    arena = make_arena()

    @arena.attacker
    def breaking(mark: str, rng: random.Random) -> Iterator[Attempt]:
        """Breaks the scorer."""
        yield Attempt(("fault",))

    rows = {row.policy: row for row in await play(arena, [0], make=make)}
    assert (rows["breaking"].episodes, rows["breaking"].faults, rows["breaking"].wrong) == (2, 2, True)
    assert rows["right"].faults == 0, "the others go on"


def test_a_seed_is_the_same_test_again_and_another_seed_another() -> None:
    arena = command.arena_of("sao/PythonTIR-v0")
    for policy in (one for one in arena.policies if one.name in ("infinities", "off by scale", "number with words")):
        source = arena.sources(0, 6, {})[-1]
        first, again = (arena.plan(source, policy, 0) for _ in range(2))
        assert first == again
        assert first != arena.plan(source, policy, 1)


def test_a_policy_without_a_docstring_or_with_a_taken_name_is_refused() -> None:
    arena: Arena[str] = make_arena()

    def silent(mark: str, rng: random.Random) -> Iterator[Attempt]:
        yield Attempt(("",))

    with pytest.raises(ValueError, match=r"silent.* has no docstring"):
        arena.attacker(silent)
    silent.__doc__, silent.__name__ = "Something.", "wrong"
    with pytest.raises(ValueError, match="already"):
        arena.attacker(silent)


def test_no_attacker_gives_the_right_answer_itself() -> None:
    """An attack that is a solution would forbid solving."""
    arena = command.arena_of("sao/PythonTIR-v0")
    for source in arena.sources(5, 8, {}):
        for policy in arena.policies:
            for task, attempt in arena.plan(source, policy, 5):
                if not policy.honest:
                    assert attempt.actions[-1].strip() != rf"\boxed{{{task.mark.gold}}}" or len(attempt.actions) > 1


@pytest.fixture
def weak_command(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(playing.play.__kwdefaults__, "make", make)
    monkeypatch.setitem(sys.modules, "weak_env", weak_env)
    return "weak_env:ARENA"


def test_the_command_reports_and_exits_with_1_above_0(
    weak_command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "attack.json"
    assert command.main([weak_command, "--seeds", "0", "1", "--json", str(out)]) == 1
    told = capsys.readouterr().out
    assert "many digits" in told
    assert "EARNED" in told
    report = json.loads(out.read_text())
    assert report["attackers"] == {"episodes": 16, "earned": 12, "faults": 0, "share": 0.75}
    assert report["honest"]["share"] == 1.0
    assert {row["policy"] for row in report["rows"]} == {"many digits", "wrong", "cut short", "right"}
    assert command.main([weak_command, "--kwargs", '{"strict": true}']) == 0


def test_what_cannot_be_played_exits_with_2_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["sao/StyleShift-v0", "--kwargs", '{"prompts": "none such"}']) == 2
    assert "prompts must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["sao/Other-v0"], ["weak:NOTHING"], ["--episodes", "0"], ["--kwargs", "{}"], ["--seeds", "x"]]
)
def test_wrong_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_the_list_says_what_each_policy_tries(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    told = capsys.readouterr().out
    assert "xfail in calls" in told
    assert "infinities" in told
