"""Feedback: what a caller may say about a response, and what follows from it. Decisions only; no disk, no HTTP.

Feedback is idempotent by response id (case G5): the same again is a duplicate, another verdict is a conflict, an
unknown response is 404, one whose time is over is 410.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from agent.serve.conversations.conversation import CLOSED, Conversation, Turn
from agent.wire.errors import ApiError
from agent.wire.request import storable

MAX_METADATA = 4096
"""Bytes of JSON that may come with feedback."""
_LEVELS = 16


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    response_id: str
    reward: float | None = None
    thumbs: Literal["up", "down"] | None = None
    final: bool | None = None
    metadata: dict[str, Any] | None = None


class Feedback(msgspec.Struct, frozen=True):
    """Checked feedback. `final` None: the default, which is true outside of sessions and false inside."""

    response_id: str
    reward: float
    final: bool | None
    metadata: dict[str, Any]


class Verdict(msgspec.Struct, frozen=True):
    """What to write: nothing for a duplicate. `closes`: the conversation has had its final feedback."""

    duplicate: bool
    closes: bool
    final: bool


def read_feedback(data: bytes) -> Feedback:
    """Read the body of /v1/feedback; raises `ApiError` 400 (not readable) or 422 (out of range)."""
    try:
        body = msgspec.json.decode(data, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"bad feedback: {error}") from error
    if (body.reward is None) == (body.thumbs is None):
        raise ApiError(422, "give either reward (0 to 1) or thumbs (up or down)", param="reward")
    reward = body.reward if body.reward is not None else float(body.thumbs == "up")
    if not (math.isfinite(reward) and 0 <= reward <= 1):
        raise ApiError(422, f"reward must be in [0, 1], got {reward}", param="reward")
    metadata = body.metadata or {}
    if not storable(metadata, _LEVELS):
        message = f"metadata: whole numbers have at most 64 bits, and at most {_LEVELS} levels nest"
        raise ApiError(422, message, param="metadata")
    if len(msgspec.json.encode(metadata)) > MAX_METADATA:
        raise ApiError(422, f"metadata must be at most {MAX_METADATA} bytes of JSON", param="metadata")
    return Feedback(body.response_id, reward, body.final, metadata)


def decide(feedback: Feedback, conversation: Conversation, turn: Turn, *, now: float, ttl_s: float) -> Verdict:
    """What `feedback` on `turn` of `conversation` does; raises `ApiError` 409 or 410."""
    subject = f"response {turn.response_id}"
    if conversation.status in ("wiping", "wiped"):
        raise ApiError(410, f"{subject}: its conversation was deleted, or is past its retention time", code="gone")
    default = not conversation.session
    if turn.reward is not None:
        return _again(feedback, conversation, turn)
    if conversation.status in CLOSED:
        raise ApiError(409, f"{subject}: its conversation has had its final feedback", code="conversation_closed")
    if conversation.status == "expired" or now > turn.created_at + ttl_s:
        raise ApiError(
            410, f"{subject}: feedback is too late, it was awaited for {ttl_s:g} s", code="feedback_too_late"
        )
    final = default if feedback.final is None else feedback.final
    return Verdict(duplicate=False, closes=final, final=final)


def _again(feedback: Feedback, conversation: Conversation, turn: Turn) -> Verdict:
    """A second feedback on the same response: the same, or only closing what was left open, or a conflict."""
    if feedback.reward != turn.reward:
        raise ApiError(
            409, f"response {turn.response_id} has feedback {turn.reward:g} already", code="feedback_conflict"
        )
    closes = bool(feedback.final) and not turn.final and conversation.status == "open"
    if feedback.final is not None and feedback.final != turn.final and not closes:
        raise ApiError(
            409, f"response {turn.response_id} has feedback with final={turn.final} already", code="feedback_conflict"
        )
    return Verdict(duplicate=not closes, closes=closes, final=turn.final or closes)
