"""The script that writes Python-TIR's traces: right where it is meant to be, wrong in every way a weak policy is."""

from __future__ import annotations

import json
import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import make_core
from envs.python_tir.traces import Chain, Solver, UnknownProblem, parse_chain, write_traces

OPERATORS = ("+", "-", "*", "lcm")


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    operands = draw(st.lists(st.integers(1, 99), min_size=2, max_size=6))
    operators = draw(st.lists(st.sampled_from(OPERATORS), min_size=len(operands) - 1, max_size=len(operands) - 1))
    return Chain(tuple(map(str, operands)), tuple(operators))


def fold(chain: Chain) -> int:
    value = int(chain.operands[0])
    for operator, right in zip(chain.operators, map(int, chain.operands[1:]), strict=True):
        value = {"+": value + right, "-": value - right, "*": value * right, "lcm": math.lcm(value, right)}[operator]
    return value


def code_of(action: str) -> str | None:
    """The Python of a well-formed call; None for a malformed one."""
    try:
        return str(json.loads(action.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]["code"])
    except json.JSONDecodeError:
        return None


def play(solver: Solver, *, limit: int = 40) -> tuple[list[str], str]:
    """Feed the solver with what its calls really give; (its actions, its answer)."""
    actions, seen = [], None
    while True:
        action = solver.next_action(seen)
        if solver.done:
            return actions, action
        actions.append(action)
        assert len(actions) < limit
        code = code_of(action)
        assert (code is None) == solver.malformed
        if code is None:
            seen = "error: not a tool call"
            continue
        scope = {"math": math}
        seen = str(eval(code.splitlines()[-1], scope))


@given(chains(), st.integers(0, 2**32))
@settings(deadline=None)
def test_a_clean_trace_always_reaches_the_answer_one_operation_a_call(chain: Chain, seed: int) -> None:
    actions, answer = play(Solver(chain, random.Random(seed)))
    assert answer == f"\\boxed{{{fold(chain)}}}"
    assert len(actions) == len(chain.operators)


@given(chains(), st.integers(0, 2**32), st.floats(0, 1))
@settings(deadline=None)
def test_an_imperfect_trace_always_ends(chain: Chain, seed: int, rate: float) -> None:
    _, answer = play(Solver(chain, random.Random(seed), rate))
    assert answer.startswith("\\boxed{")


def operands(actions: list[str]) -> tuple[str, ...]:
    """The right operand of every call."""
    return tuple(re.findall(r"(\d+)\)?\"\}", " ".join(actions)))


def test_every_kind_of_mistake_occurs_and_many_traces_stay_right() -> None:
    chain = Chain(("12", "7", "30", "4", "9"), ("+", "-", "*", "+"))
    clean, _ = play(Solver(chain, random.Random(0)))
    kinds = dict.fromkeys(("right", "stop", "operator", "skip", "malformed and retried", "malformed, given up"), 0)
    for seed in range(600):
        actions, answer = play(Solver(chain, random.Random(seed), 0.3))
        malformed = [code_of(a) is None for a in actions]
        if answer == f"\\boxed{{{fold(chain)}}}":
            kinds["right"] += 1
        elif malformed and malformed[-1]:
            kinds["malformed, given up"] += 1
        elif any(malformed):
            pass
        elif actions == clean[: len(actions)]:
            kinds["stop"] += 1
        elif operands(actions) != chain.operands[1 : 1 + len(actions)]:
            kinds["skip"] += 1
        else:
            kinds["operator"] += 1
        kinds["malformed and retried"] += any(malformed[:-1])
    assert all(count >= 10 for count in kinds.values()), kinds
    assert kinds["right"] < 400


@pytest.mark.parametrize(
    ("problem", "chain"),
    [
        ("State the final answer to the following arithmetic problem: 12 + 7 - 30 =", ("12 7 30", "+ -")),
        ("Find the Least Common Multiple (LCM) of these numbers: 18, 4, 12", ("18 4 12", "lcm lcm")),
        ("Solve the following multiplication: 3 * 5 * 9. Give only the result as your final answer.", ("3 5 9", "* *")),
        ("-5 + 3 =", ("-5 3", "+")),
    ],
)
def test_problems_are_read_in_the_families_own_words(problem: str, chain: tuple[str, str]) -> None:
    assert parse_chain(problem) == Chain(tuple(chain[0].split()), tuple(chain[1].split()))


def test_a_problem_that_the_script_cannot_solve_is_an_error() -> None:
    with pytest.raises(UnknownProblem, match="How many"):
        parse_chain("How many legs do 3 cows have?")


async def test_clean_traces_earn_the_reward_in_the_real_environment() -> None:
    """Traces over the tiny recipe's own problems, executed by a real interpreter, graded by the environment itself."""
    env = make_core(
        "sao/PythonTIR-v0", problems={"source": "tiny_fold", "size": 200, "seed": 5}, system_prompt="", max_turns=12
    )
    try:
        task_ids = list(env.task_ids[:16])
        clean = [messages async for messages in write_traces(env, task_ids, seed=1, error_rate=0.0)]
        assert len(clean) == 16
        assert len({messages[0]["content"] for messages in clean}) == 16
        assert any("LCM" in messages[0]["content"] for messages in clean)
        for task_id, messages in zip(task_ids, clean, strict=True):
            _, info = await env.areset(options={"task_id": task_id})
            assert messages[0] == info["messages"][0]
            for message in messages[1:]:
                if message["role"] == "assistant":
                    _, reward, terminated, _, _ = await env.astep(message["content"])
            assert terminated
            assert reward == 1.0, messages
    finally:
        await env.aclose()
