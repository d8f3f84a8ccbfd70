"""Judges by specification, and one LLM judge for all environments of an event loop that agree on its settings."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

from envs.style_shift.judge import Judge
from envs.style_shift.lexical_judge import LexicalJudge
from envs.style_shift.llm_judge import LLMJudge, LLMJudgeSettings

Spec = str | Mapping[str, Any] | Judge
"""`"lexical"`, `{"kind": "llm", "url": ..., "model": ..., ...}` (`LLMJudgeSettings`), or a judge of one's own."""

_KINDS = "'lexical', {kind: llm, url: ..., model: ...} or a Judge"


def llm_settings(spec: Spec) -> LLMJudgeSettings | None:
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


# Keyed by loop: a session's sockets belong to the event loop that opened them.
_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[LLMJudgeSettings, LLMJudge]] = (
    weakref.WeakKeyDictionary()
)
_users: weakref.WeakKeyDictionary[LLMJudge, int] = weakref.WeakKeyDictionary()


def acquire(spec: Spec) -> Judge:
    """The judge of `spec`, shared where it has a limit to share. Pair each call with one `release`."""
    if isinstance(spec, Judge):
        return spec
    settings = llm_settings(spec)
    if settings is None:
        return LexicalJudge()
    shared = _by_loop.setdefault(asyncio.get_running_loop(), {})
    judge = shared.get(settings)
    if judge is None:
        judge = shared[settings] = LLMJudge(settings)
    _users[judge] = _users.get(judge, 0) + 1
    return judge


async def release(judge: Judge) -> None:
    """Give one use back; the last one closes a shared judge. A judge of the caller's own is left open."""
    if not isinstance(judge, LLMJudge) or judge not in _users:
        return
    _users[judge] -= 1
    if _users[judge]:
        return
    # Out of the tables before the first await, so that nobody is handed a judge that is closing.
    del _users[judge]
    shared = _by_loop.get(asyncio.get_running_loop(), {})
    if shared.get(judge.settings) is judge:
        del shared[judge.settings]
    await judge.aclose()
