r"""Other people's scorers: reasoning-gym's own and a function by its name, in the worker (case I3)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from envs.core import EnvironmentFault
from envs.python_tir.grading.grader import Grader
from envs.python_tir.grading.rules import Rules
from envs.python_tir.grading.scorers import is_arithmetic, spellings
from envs.python_tir.problems.sets import ProblemSourceError
from envs.python_tir.problems.sources import check_spec, load_problems

OWN = """
import time
calls = 0
def palindrome(answer, problem):
    if answer == "raise":
        raise ValueError("no")
    if answer == "sleep":
        time.sleep(60)
    if answer == "half":
        return 0.5
    return answer == answer[::-1] and problem["answer"] in answer
"""


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    made = Grader(workers=1, timeout_s=2.0)
    yield made
    made.close_sync()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "scorer_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "scorer_of_mine:palindrome"


def family(name: str, **more: object) -> dict[str, object]:
    return {"source": "reasoning_gym", "size": 4, "seed": 0, "families": {name: {}}, **more}


@pytest.mark.parametrize("name", ["countdown", "puzzle24"])
def test_the_target_itself_is_no_expression_of_the_numbers(grader: Grader, name: str) -> None:
    """Case I3: what the family's own scorer says counts, on every item."""
    problems = load_problems(family(name))
    for index in range(len(problems)):
        problem = problems[index]
        assert problem.rules.scorer == "reasoning_gym"
        assert grader.grade_sync(rf"\boxed{{{problem.answer}}}", problem.answer, problem.rules)
        latex = problem.answer.replace("*", r" \times ").replace("/", r" \div ")
        assert grader.grade_sync(rf"\boxed{{{latex}}}", problem.answer, problem.rules)
        target = str(eval(problem.answer)).removesuffix(".0")
        for wrong in (target, f"{target}+0", f"{target}*1", "0", problem.answer + "+1"):
            assert not grader.grade_sync(rf"\boxed{{{wrong}}}", problem.answer, problem.rules), wrong


def test_no_answer_is_run_as_python(grader: Grader, tmp_path: Path) -> None:
    """countdown's scorer evaluates the answer: nothing but arithmetic may reach it."""
    problem = load_problems(family("countdown"))[0]
    mark = tmp_path / "mark"
    for attack in (f"open('{mark}','w')", "exec(chr(49))", "().__class__", "[x for x in (1,)]", "lambda: 1"):
        assert not is_arithmetic(attack)
        assert not grader.grade_sync(rf"\boxed{{{attack}}}", problem.answer, problem.rules)
    assert not mark.exists()
    assert is_arithmetic("6*(98 - 54) - sqrt(x)/2")


def test_families_without_a_scorer_need_plain_numbers() -> None:
    """Case I3: compared as literal numbers, or refused by name."""
    problem = load_problems(family("lcm"))[0]
    assert problem.rules == Rules(answer_form="number")
    for name in ("caesar_cipher", "syllogism"):
        with pytest.raises(ProblemSourceError, match=name):
            load_problems(family(name))
    assert load_problems(family("caesar_cipher", answer_form="expression"))[0].rules == Rules()


def test_the_tiny_mixture_takes_literal_numbers(grader: Grader) -> None:
    problems = load_problems({"source": "tiny_fold", "size": 6, "seed": 11})
    for index in range(len(problems)):
        problem = problems[index]
        assert problem.rules == Rules(answer_form="number")
        assert grader.grade_sync(rf"\boxed{{{problem.answer}.0}}", problem.answer, problem.rules)
        for wrong in (f"{problem.answer}+x-x", f"{problem.answer}+0", rf"{problem.answer}\cdot\pi/\pi", r"-\infty x"):
            assert not grader.grade_sync(rf"\boxed{{{wrong}}}", problem.answer, problem.rules)


def test_a_function_of_ones_own_scores(grader: Grader, own: str) -> None:
    problems = load_problems(
        [{"problem": "q", "answer": "bc", "scorer": own}, {"problem": "r", "answer": "b", "scorer": own}]
    )
    problem = problems[0]
    assert json.loads(problem.rules.item)["question"] == "q"
    assert grader.grade_sync(r"\boxed{abccba}", problem.answer, problem.rules)
    assert grader.grade_sync(r"\boxed{cbc}", problem.answer, problem.rules)
    for wrong in ("bc", "raise", "half"):
        assert not grader.grade_sync(rf"\boxed{{{wrong}}}", problem.answer, problem.rules)
    assert not grader.grade_sync("no box", problem.answer, problem.rules)


def test_a_slow_scorer_is_killed_and_costs_its_own_answer(own: str) -> None:
    grader = Grader(workers=1, timeout_s=0.5)
    rules = Rules(scorer=own, item=json.dumps({"answer": "b"}))
    try:
        assert not grader.grade_sync(r"\boxed{sleep}", "b", rules)
        assert grader.grade_sync(r"\boxed{b}", "b", rules)
    finally:
        grader.close_sync()


async def test_partial_scores_are_handed_on(grader: Grader, own: str) -> None:
    item = json.dumps({"answer": "b"})
    assert await grader.score(r"\boxed{half}", "b", Rules(scorer=own, partial=True, item=item)) == 0.5
    assert await grader.grade(r"\boxed{half}", "b", Rules(scorer=own, solved_at=0.5, item=item))


@pytest.mark.parametrize(("keys", "reward"), [({}, 0.0), ({"partial": True}, 0.5), ({"solved_at": 0.5}, 1.0)])
def test_the_reward_is_the_score_or_what_it_solves(own: str, keys: dict[str, object], reward: float) -> None:
    environment = gymnasium.make("sao/PythonTIR-v0", problems=[{"problem": "q", "answer": "b", "scorer": own, **keys}])
    try:
        environment.reset(seed=0)
        _, earned, terminated, _, info = environment.step(r"\boxed{half}")
        assert (earned, terminated, info["metrics"]["score"]) == (reward, True, 0.5)
    finally:
        environment.close()


def test_a_scorer_that_cannot_be_loaded_is_a_fault(grader: Grader) -> None:
    with pytest.raises(EnvironmentFault, match="no_such_module"):
        grader.grade_sync(r"\boxed{1}", "1", Rules(scorer="no_such_module:score", item="{}"))
    assert "no_such_module" not in sys.modules


@pytest.mark.parametrize(
    "keys",
    [
        {"answer_form": "digits"},
        {"scorer": "os.system"},
        {"scorer": "a b:c"},
        {"solved_at": 0},
        {"solved_at": 2},
        {"partial": 1},
    ],
)
def test_rules_are_refused_at_the_door(keys: dict[str, object]) -> None:
    with pytest.raises(ProblemSourceError, match=next(iter(keys))):
        check_spec({"source": "tiny_fold", **keys})


@pytest.mark.parametrize(
    ("answer", "shown"),
    [(r"6 \times (98-54)", "6 * (98-54)"), (r"\text{yes}", "yes"), (r"1{,}234", "1234"), (r"x = 1{,}234", "1234"),
     (r"\frac{3}{4}", "(3)/(4)"), (r"\{1, 2\}", "{1, 2}")],
)  # fmt: skip
def test_scorers_are_shown_text(answer: str, shown: str) -> None:
    assert shown in spellings(answer)
