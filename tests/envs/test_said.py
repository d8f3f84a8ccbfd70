r"""What counts as said: outside thinking and tool calls (case I7)."""

from __future__ import annotations

import json
import random
import time

import pytest

from envs.python_tir.grading.answers import extract_answer
from envs.said import said

CALL = '<tool_call>{"name": "python", "arguments": {"code": "# \\\\boxed{42}"}}</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        r"<think>perhaps \boxed{42}</think> I give up.",
        r"<think>perhaps \boxed{42}",
        r"perhaps \boxed{42}</think> I give up.",
        r"<thinking>\boxed{42}</thinking> no",
        r"<think>a</think> a draft \boxed{42} </think> I give up.",
        r"<think>\boxed{42}</think><think>\boxed{42}",
        CALL,
        r'<tool_call>{"name": "python", "arguments": {"code": "# \boxed{42}',
        r"<tool_call># \boxed{42}</tool_call>",
        r"<tool_response>\boxed{42}</tool_response>",
        "",
    ],
)
def test_a_draft_is_no_answer(text: str) -> None:
    """Case I7."""
    assert extract_answer(said(text)) is None


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{42}",
        r"<think>perhaps \boxed{41}</think> So \boxed{42}.",
        r"perhaps \boxed{41}</think> So \boxed{42}.",
        r"\boxed{42} <think>or \boxed{41}?</think>",
        r"\boxed{42} <think>or \boxed{41}?",
        rf"{CALL} It is \boxed{{42}}",
        r'<tool_call>{"name": "python", "arguments": {"code": "</tool_call></think>"}}</tool_call>\boxed{42}',
        r"\boxed{42} </tool_call>",
    ],
)
def test_what_is_said_counts(text: str) -> None:
    assert extract_answer(said(text)) == "42"


@pytest.mark.parametrize("language", ["python", "py", "Python"])
def test_fenced_code_is_not_said(language: str) -> None:
    block = f"```{language}\n# \\boxed{{42}}\n```\n"
    assert extract_answer(said(block, "fenced")) is None
    assert extract_answer(said(block[:-5], "fenced")) is None
    assert extract_answer(said(f"{block}So \\boxed{{7}}", "fenced")) == "7"
    assert extract_answer(said("```\n\\boxed{42}\n```", "fenced")) == "42"


@pytest.mark.parametrize("seed", range(20))
def test_only_what_stands_outside_comes_back(seed: int) -> None:
    """Drafts, calls and speech in any order: speech comes back, in order, and nothing else."""
    rng = random.Random(seed)
    text, speech = "", ""
    for index in range(rng.randint(1, 12)):
        kind = rng.choice(("think", "call", "say"))
        if kind == "think":
            text += f"<think>draft {index} {rng.choice(['<tool_call>', chr(10), ''])}</think>"
        elif kind == "call":
            code = f"print({index}) # {rng.choice(['</tool_call>', '<think>', '</think>', ''])}"
            text += f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"
        else:
            text += f"word {index} "
            speech += f"word {index} "
    assert said(text) == speech


@pytest.mark.parametrize(
    "piece", ["<think>", "</think>", "<tool_call>", "</tool_call>", '<tool_call>"</tool_call>', "<tool_call>{"]
)
def test_hostile_text_costs_linear_time(piece: str) -> None:
    started = time.process_time()
    said(piece * (400_000 // len(piece)))
    assert time.process_time() - started < 3
