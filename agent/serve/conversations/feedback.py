"""Feedback: what a caller may say about a response, and what follows from it. Decisions only; no disk, no HTTP.

A verdict can be given again and otherwise until the learner has claimed the episode; what was said before is kept as
history. The same again is a duplicate, an unknown response is 404, one whose time is over is 410 (case G5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from agent.serve.conversations.conversation import CLOSED, Conversation, Turn
from agent.wire.errors import ApiError
from agent.wire.request import storable

MAX_METADATA = 4096
"""Bytes of JSON that may come with feedback."""
MAX_WORDS = 1 << 16
"""Characters of a comment or of a correction."""
_LEVELS = 16
B = TypeVar("B")


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    response_id: str
    reward: float | None = None
    score: float | None = None
    thumbs: Literal["up", "down"] | None = None
    signal: str | None = None
    comment: str | None = None
    correction: str | None = None
    final: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


class _Preference(msgspec.Struct, forbid_unknown_fields=True):
    chosen: str
    rejected: str
    margin: float = 1.0
    comment: str | None = None
    user: str | None = None


class Feedback(msgspec.Struct, frozen=True):
    """Checked feedback. `reward` None: words only. `final` None: the default, which is true outside of sessions and
    false inside, and false for a signal.

    `signal`: the name of an implicit one, "" for a verdict. `user`: whose response it must be; None: anybody's of the
    key. `other`: with a preference, the response that this one was compared with.
    """

    response_id: str
    reward: float | None
    final: bool | None
    metadata: dict[str, Any]
    signal: str = ""
    comment: str = ""
    correction: str = ""
    user: str | None = None
    other: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """What to write: nothing for a duplicate. `closes`: the conversation has had its final feedback.

    `counts`: the turn has another reward (or metadata) from now on; a signal after a verdict does not count.
    """

    duplicate: bool
    closes: bool
    final: bool
    counts: bool = True


def read_feedback(data: bytes, signals: Mapping[str, float] | None = None) -> Feedback:
    """Read the body of /v1/feedback; raises `ApiError` 400 (not readable) or 422 (out of range).

    `signals`: what implicit ones are worth, by name.
    """
    body = _decoded(data, _Body)
    verdicts = [body.reward, body.score, None if body.thumbs is None else float(body.thumbs == "up")]
    given = [verdict for verdict in verdicts if verdict is not None]
    if len(given) + (body.signal is not None) > 1:
        raise ApiError(422, "give one of reward (or score, 0 to 1), thumbs (up or down) and signal", param="reward")
    if body.signal is not None:
        given = [_worth(body.signal, signals or {})]
    if not given and not body.comment and not body.correction:
        message = "give reward (or score, 0 to 1), thumbs (up or down) or signal, or a comment or a correction"
        raise ApiError(422, message, param="reward")
    if not given and (body.final is not None or body.metadata):
        raise ApiError(422, "final and metadata belong to a verdict: give reward, thumbs or signal", param="final")
    reward = given[0] if given else None
    if reward is not None and not (math.isfinite(reward) and 0 <= reward <= 1):
        raise ApiError(422, f"reward must be in [0, 1], got {reward}", param="reward")
    metadata = body.metadata or {}
    if not storable(metadata, _LEVELS):
        message = f"metadata: whole numbers have at most 64 bits, and at most {_LEVELS} levels nest"
        raise ApiError(422, message, param="metadata")
    if len(msgspec.json.encode(metadata)) > MAX_METADATA:
        raise ApiError(422, f"metadata must be at most {MAX_METADATA} bytes of JSON", param="metadata")
    return Feedback(
        body.response_id,
        reward,
        body.final,
        metadata,
        signal=body.signal or "",
        comment=_words("comment", body.comment),
        correction=_words("correction", body.correction),
        user=body.user,
    )


def read_preference(data: bytes) -> tuple[Feedback, Feedback]:
    """Read the body of /v1/feedback/preference: what it says about the chosen and about the rejected response.

    With margin 1 that is 1 and 0, with m it is (1 + m) / 2 and (1 - m) / 2. The rejected one ends its conversation,
    which nobody goes on with. Raises `ApiError` 400 or 422.
    """
    body = _decoded(data, _Preference)
    if not 0 < body.margin <= 1:
        raise ApiError(422, f"margin must be in (0, 1], got {body.margin}", param="margin")
    if body.chosen == body.rejected:
        raise ApiError(422, "chosen and rejected are the same response", param="rejected")
    comment = _words("comment", body.comment)
    better, worse = (1 + body.margin) / 2, (1 - body.margin) / 2
    return (
        Feedback(body.chosen, better, None, {}, comment=comment, user=body.user, other=body.rejected),
        Feedback(body.rejected, worse, True, {}, comment=comment, user=body.user, other=body.chosen),
    )


def _decoded(data: bytes, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"bad feedback: {error}") from error


def _worth(signal: str, signals: Mapping[str, float]) -> float:
    if signal not in signals:
        known = ", ".join(sorted(signals)) or "none: serve.feedback.signals of the recipe names them"
        raise ApiError(422, f"no signal {signal[:40]!r}; this server knows {known}", param="signal")
    return signals[signal]


def _words(name: str, text: str | None) -> str:
    if text is not None and len(text) > MAX_WORDS:
        raise ApiError(422, f"{name} has at most {MAX_WORDS} characters", param=name)
    return text or ""


def decide(feedback: Feedback, conversation: Conversation, turn: Turn, *, now: float, ttl_s: float) -> Verdict:
    """What `feedback` on `turn` of `conversation` does, as far as is known here: whether the learner has the episode
    already is the store's to say. Raises `ApiError` 409 or 410."""
    subject = f"response {turn.response_id}"
    if conversation.status in ("wiping", "wiped"):
        raise ApiError(410, f"{subject}: its conversation was deleted, or is past its retention time", code="gone")
    adds_words = any(
        said and said != before
        for said, before in ((feedback.comment, turn.comment), (feedback.correction, turn.correction))
    )
    if feedback.reward is None:
        return Verdict(duplicate=not adds_words, closes=False, final=turn.final, counts=False)
    outranked = bool(feedback.signal) and turn.reward is not None and turn.explicit
    same = turn.reward == feedback.reward and feedback.metadata in ({}, turn.metadata)
    same = same and turn.explicit == (not feedback.signal)
    closed = conversation.status in CLOSED
    if closed and feedback.final is False and not feedback.signal:
        raise ApiError(
            409, f"{subject}: its conversation has had its final feedback and stays closed", code="conversation_closed"
        )
    closes = not closed and conversation.status == "open" and _closes(feedback, conversation, turn)
    late = conversation.status == "expired" or now > turn.created_at + ttl_s
    if late and not same and not outranked:
        raise ApiError(410, f"{subject}: feedback is too late, it is taken for {ttl_s:g} s", code="feedback_too_late")
    return Verdict(
        duplicate=same and not adds_words and not closes,
        closes=closes,
        final=turn.final or closes,
        counts=not same and not outranked,
    )


def _closes(feedback: Feedback, conversation: Conversation, turn: Turn) -> bool:
    if feedback.final is not None:
        return feedback.final
    # A signal waits for a verdict, and a second verdict closes no more than the first one did.
    first = turn.reward is None or not turn.explicit
    return first and not conversation.session and not feedback.signal
