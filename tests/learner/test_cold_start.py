"""The script that writes traces, the tiny tokenizer, and that traces are encoded as the runtime records episodes."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_tools import write_micro_model

from agent.chat import ChatRenderer
from envs import make_core
from learner.sft import batches, encode_trace
from learner.tiny import SPECIAL_TOKENS, TAGS, train_tokenizer
from learner.traces import Chain, Solver, UnknownProblem, parse_chain, write_traces

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


@pytest.fixture(scope="module")
def traces() -> list[tuple[list[dict[str, str]], str]]:
    """Traces over the tiny recipe's own problems, executed by a real interpreter, a third of them imperfect."""
    return asyncio.run(written())


async def written() -> list[tuple[list[dict[str, str]], str]]:
    env = make_core(
        "sao/PythonTIR-v0", problems={"source": "tiny_fold", "size": 200, "seed": 5}, system_prompt="", max_turns=12
    )
    found = []
    try:
        answers = {}
        for task in env.task_ids[:24]:
            _, info = await env.areset(options={"task_id": task})
            answers[task] = info["messages"][-1]["content"]
        for rate, ids in ((0.0, env.task_ids[:16]), (0.9, env.task_ids[16:24])):
            async for messages in write_traces(env, list(ids), seed=1, error_rate=rate):
                found.append((messages, "clean" if rate == 0 else "imperfect"))
        for messages, kind in found:  # the environment itself grades them
            if kind == "clean":
                task = next(t for t, text in answers.items() if text == messages[0]["content"])
                await env.areset(options={"task_id": task})
                for message in messages[1:]:
                    if message["role"] == "assistant":
                        _, reward, terminated, _, _ = await env.astep(message["content"])
                assert terminated
                assert reward == 1.0, messages
    finally:
        await env.aclose()
    return found


def test_clean_traces_earn_the_reward_in_the_real_environment(
    traces: list[tuple[list[dict[str, str]], str]],
) -> None:
    """The assertion is in the fixture, where the environment lives; this sees that it had something to look at."""
    clean = [messages for messages, kind in traces if kind == "clean"]
    assert len(clean) == 16
    assert len({messages[0]["content"] for messages in clean}) == 16
    assert any("LCM" in messages[0]["content"] for messages in clean)


def texts(traces: list[tuple[list[dict[str, str]], str]]) -> list[str]:
    return [f"{m['role']}\n{m['content']}" for messages, _ in traces for m in messages]


def test_the_vocabulary_stays_within_its_size_and_tags_are_single_tokens(
    traces: list[tuple[list[dict[str, str]], str]],
) -> None:
    tokenizer = train_tokenizer(texts(traces) * 3, 384)
    assert len(tokenizer) <= 384
    for word in (*TAGS, *SPECIAL_TOKENS):
        assert len(tokenizer.encode(f"x{word}y")) == 3, word
    for tag in TAGS:
        assert tag in tokenizer.decode(tokenizer.encode(tag), skip_special_tokens=True)
    assert len(tokenizer.encode("1234")) == 4  # digits stand alone
    for text in (*texts(traces)[:20], "naïve 漢字 \x00 🙂"):
        assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_a_trace_is_encoded_as_the_runtime_would_have_recorded_it(
    traces: list[tuple[list[dict[str, str]], str]], tmp_path: Path
) -> None:
    """`start` for the prompt, the sampled ids of an action, `extend` for what follows; the mask only on actions."""
    renderer = ChatRenderer.from_pretrained(write_micro_model(tmp_path / "model"))
    assert any(len(messages) > 4 for messages, _ in traces)
    for messages, _ in traces:
        ids, mask = encode_trace(messages, renderer)
        recorded = list(renderer.start(messages[:1], None).token_ids)
        on = [False] * len(recorded)
        for i, message in enumerate(messages[1:], start=1):
            if message["role"] == "assistant":
                action = renderer.encode_action(message["content"])
                recorded += action
                on += [True] * len(action)
            else:
                rendering = renderer.extend(messages[:i], action, [message], None)
                recorded += rendering.token_ids
                on += [False] * len(rendering.token_ids)
        assert ids.tolist() == recorded
        assert mask.tolist() == on
        assert mask[-1]  # the end of the last turn is an action token
        spoken = "".join(m["content"] for m in messages if m["role"] == "assistant")
        assert renderer.decode(ids[mask].tolist()).replace("<|im_end|>", "") == spoken


def test_batches_take_every_example_once_an_epoch() -> None:
    examples = [(torch.full((n + 2,), n), torch.ones(n + 2, dtype=torch.bool)) for n in range(12)]
    seen = [ids for ids, _ in batches(examples, 4, 6, seed=0)]
    first, second = (sorted(int(row[0]) for ids in part for row in ids) for part in (seen[:3], seen[3:]))
    assert first == second == list(range(12))
    for ids, mask in batches(examples, 4, 3, seed=0):
        assert [int(m.sum()) for m in mask] == [int(row[0]) + 2 for row in ids]  # padding is masked
