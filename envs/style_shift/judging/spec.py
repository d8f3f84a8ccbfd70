"""Judges by specification, and one LLM judge for all environments of an event loop that agree on its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from envs.shared import SharedByLoop
from envs.style_shift.judging.judge import Judge
from envs.style_shift.judging.lexical import LexicalJudge
from envs.style_shift.judging.llm import LLMJudge, LLMJudgeSettings

JudgeSpec = str | Mapping[str, Any] | Judge
"""`"lexical"`, `{"kind": "llm", "url": ..., "model": ..., ...}` (`LLMJudgeSettings`), or a judge of one's own."""

_KINDS = "'lexical', {kind: llm, url: ..., model: ...} or a Judge"


def llm_settings(spec: JudgeSpec) -> LLMJudgeSettings | None:
    """The settings in `spec` if it asks for an LLM judge, else None. Raises `ValueError` for a spec that is none."""
    if isinstance(spec, Judge) or spec == "lexical":
        return None
    if not isinstance(spec, Mapping) or spec.get("kind") not in ("lexical", "llm"):
        raise ValueError(f"judge must be {_KINDS}, not {spec!r}")
    rest = {key: value for key, value in spec.items() if key != "kind"}
    known = {field.name for field in dataclasses.fields(LLMJudgeSettings)} if spec["kind"] == "llm" else set()
    if unknown := sorted(set(rest) - known):
        raise ValueError(f"judge: unknown key {unknown[0]!r}; known: {', '.join(sorted(known)) or 'none'}")
    if spec["kind"] == "lexical":
        return None
    if missing := sorted({"url", "model"} - set(rest)):
        raise ValueError(f"judge: {missing[0]!r} is missing")
    return LLMJudgeSettings(**rest)


SHARED: SharedByLoop[LLMJudgeSettings, LLMJudge] = SharedByLoop(close=LLMJudge.aclose)


def acquire_judge(spec: JudgeSpec) -> Judge:
    """The judge of `spec`, shared where it has a limit to share. Pair each call with one `release_judge`."""
    if isinstance(spec, Judge):
        return spec
    settings = llm_settings(spec)
    if settings is None:
        return LexicalJudge()
    return SHARED.acquire(settings, lambda: LLMJudge(settings))


async def release_judge(judge: Judge) -> None:
    """Give one use back; the last one closes a shared judge. A judge of the caller's own is left open."""
    if isinstance(judge, LLMJudge) and SHARED.users(judge):
        await SHARED.release(judge)
