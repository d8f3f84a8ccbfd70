"""What crosses HTTP between an engine and its client, and the checks on it. Nothing is repaired here."""

from __future__ import annotations

import contextlib
import math

import msgspec

from agent.engines.base import Completion, ContextOverflow, EngineFault, EngineRefused

_MISSING = -9999.0  # what vLLM writes for a log-prob that it does not have
_TOO_LONG = ("maximum context length", "maximum model length")


class LogProb(msgspec.Struct):
    """A sampled token with its log-prob."""

    token_id: int
    logprob: float | None = None


class LogProbs(msgspec.Struct):
    """Log-probs of a choice, one entry a token."""

    content: list[LogProb] | None = None


class Span(msgspec.Struct):
    """Tokens `start` to `end` were sampled by the weights with the label `version`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    """A completion; in a stream the tokens are those since the last chunk, and versions come with the last one."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: LogProbs | None = None
    weight_versions: list[Span] | None = None


class Answer(msgspec.Struct):
    """A response of /inference/v1/generate, whole or one chunk of a stream."""

    choices: list[Choice]


answers = msgspec.json.Decoder(Answer)


def refusal(status: int, where: str, content: bytes) -> EngineFault:
    """The typed error of an answer with `status` >= 400."""
    text = content.decode(errors="replace")[:2000]
    with contextlib.suppress(msgspec.DecodeError, LookupError, TypeError):  # another shape: the raw text is shown
        text = msgspec.json.decode(content)["error"]["message"]
    message = f"{where}: {status}: {text}"
    if status >= 500:
        return EngineFault(message)
    if status == 400 and any(words in text for words in _TOO_LONG):
        return ContextOverflow(message, status)
    return EngineRefused(message, status)


def completion(answer: Answer, url: str) -> Completion:
    """Check an answer, and spread its version spans over its tokens."""

    def fault(what: str) -> EngineFault:
        return EngineFault(f"engine {url}: {what}")

    if len(answer.choices) != 1:
        raise fault(f"{len(answer.choices)} completions, expected 1")
    choice = answer.choices[0]
    tokens, reason = choice.token_ids or [], choice.finish_reason or ""
    if reason not in ("stop", "length", "abort"):
        raise fault(f"unknown finish reason {reason!r}")
    if not tokens and reason != "abort":
        raise fault("an empty completion")
    entries = (choice.logprobs.content if choice.logprobs else None) or []
    if [e.token_id for e in entries] != tokens:
        raise fault(f"{len(entries)} log-probs for {len(tokens)} tokens, or of other tokens")
    logprobs = tuple(e.logprob for e in entries if e.logprob is not None)
    if len(logprobs) != len(tokens) or not all(math.isfinite(p) and p > _MISSING for p in logprobs):
        raise fault("a log-prob is missing or not a number")
    versions: list[int] = []
    for span in choice.weight_versions or []:
        if span.start != len(versions) or span.end <= span.start or not span.version.isdecimal():
            raise fault(f"bad weight version span {span}; label the weights with a whole number (publish does)")
        if versions and int(span.version) < versions[-1]:
            raise fault(f"the policy version goes back from {versions[-1]} to {span.version} inside a completion")
        versions.extend([int(span.version)] * (span.end - span.start))
    if len(versions) != len(tokens):
        raise fault(f"versions of {len(versions)} tokens for {len(tokens)} tokens")
    return Completion(tuple(tokens), logprobs, tuple(versions), reason)
