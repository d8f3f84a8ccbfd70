"""Whether two written answers mean the same. Slow and unbounded on hostile input: call it in a worker only."""

from __future__ import annotations

from math_verify import parse, verify

from envs.python_tir.answers import normalize


def equivalent(answer: str, gold: str) -> bool:
    """Return whether `answer` says what `gold` says."""
    left, right = normalize(answer), normalize(gold)
    if left == right:
        return True
    parsed_gold = parse(f"${right}$", parsing_timeout=None)
    parsed_answer = parse(f"${left}$", parsing_timeout=None)
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=None, allow_set_relation_comp=True))
