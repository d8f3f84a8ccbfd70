"""What crosses HTTP between an engine and its client, and the checks on it. Nothing is repaired here."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from agent.doors.door import DoorFault, wrong_key
from agent.engines.base import Completion, ContextOverflow, EngineBusy, EngineFault, EngineRefused
from agent.engines.prompt import json_of
from agent.engines.steering import NO_STEERING, Steering
from agent.episode import Experts, SamplingParams
from envs.retry_after import retry_after_s

_MISSING = -9999.0  # what vLLM writes for a log-prob that it does not have
_TOO_LONG = ("maximum context length", "maximum model length")
_LATER = (408, 425, 429)
_RANK = re.compile(r'^vllm:num_requests_running\{(?:.*,)?engine="([^"]*)"', re.MULTILINE)


class Likely(msgspec.Struct, gc=False):
    """One of the likeliest tokens of a place."""

    token_id: int
    logprob: float


class LogProb(msgspec.Struct, gc=False):
    """A sampled token with its log-prob. `top_logprobs`, where they were asked for: the sampled one, then by rank."""

    token_id: int
    logprob: float | None = None
    top_logprobs: list[Likely] = []


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
    routed_experts: str | None = None  # base64 of a .npy file: [tokens, layers, top-k]


class Answer(msgspec.Struct):
    """A response of /inference/v1/generate, whole or one chunk of a stream."""

    choices: list[Choice]


answers = msgspec.json.Decoder(Answer)


def refusal(status: int, call_name: str, content: bytes, retry_after: str | None = None) -> EngineFault | DoorFault:
    """The typed error of an answer with `status` >= 400. `call_name` says whose it is, and to what.

    `retry_after`: the header of that name.
    """
    if status == 401:
        return wrong_key(call_name)
    text = content.decode(errors="replace")[:2000]
    with contextlib.suppress(msgspec.DecodeError, LookupError, TypeError):  # another shape: the raw text is shown
        text = msgspec.json.decode(content)["error"]["message"]
    message = f"{call_name}: {status}: {text}"
    if status >= 500:
        return EngineFault(message)
    if status in _LATER:
        return EngineBusy(message, retry_after_s(retry_after))
    if status == 400 and any(words in text for words in _TOO_LONG):
        return ContextOverflow(message, status)
    return EngineRefused(message, status)


def generate_body(
    request_id: str,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    stream: bool,
    steering: Steering = NO_STEERING,
) -> bytes:
    """The body of a request to /inference/v1/generate. Of a `Prompt` nothing is encoded that has been sent before."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": sampling.stop_token_ids,
        "logprobs": 0,
        "detokenize": False,
    }
    if sampling.stop:  # the only case in which the engine has to read its tokens as text
        params |= {"stop": sampling.stop, "include_stop_str_in_output": True}
        params |= {"detokenize": True, "skip_special_tokens": False}
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if steering is not NO_STEERING:
        params |= steering.params
    rest = msgspec.json.encode({"request_id": request_id, "sampling_params": params, "stream": stream})
    return b'{"token_ids":[%b],%b' % (json_of(prompt_ids), rest[1:])


def completion(answer: Answer, url: str, *, goes_back: bool = False) -> Completion:
    """Check an answer, and give each token the version of its span. `goes_back`: a later one may be lower."""

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
    logprobs = tuple([e.logprob for e in entries if e.logprob is not None])
    if len(logprobs) != len(tokens) or not all(map(math.isfinite, logprobs)) or min(logprobs, default=0.0) <= _MISSING:
        raise fault("a log-prob is missing or not a number")
    versions: list[int] = []
    for span in choice.weight_versions or []:
        if span.start != len(versions) or span.end <= span.start or not span.version.isdecimal():
            raise fault(f"bad weight version span {span}; label the weights with a whole number (publish does)")
        if versions and int(span.version) < versions[-1] and not goes_back:
            raise fault(f"the policy version goes back from {versions[-1]} to {span.version} inside a completion")
        versions.extend([int(span.version)] * (span.end - span.start))
    if len(versions) != len(tokens):
        raise fault(f"versions of {len(versions)} tokens for {len(tokens)} tokens")
    try:
        experts = _experts(choice.routed_experts)
    except ValueError as error:
        raise fault(f"its routed experts can't be read ({error})") from error
    return Completion(tuple(tokens), logprobs, tuple(versions), reason, experts)


def _experts(text: str | None) -> Experts | None:
    """The experts in an answer; raises `ValueError` for anything but ids [tokens, layers, top-k]."""
    if text is None:
        return None
    try:
        ids = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except EOFError as error:
        raise ValueError("an empty file") from error
    sound = ids.ndim == 3 and ids.dtype.kind in "iu" and 0 not in ids.shape[1:]
    if not sound or (ids.size and not 0 <= ids.min() <= ids.max() < 2**16):
        raise ValueError(f"{ids.dtype} of shape {ids.shape}")
    return Experts.pack(ids)


def figures_of(text: str) -> dict[str, float]:
    """Prometheus text, summed over labels."""
    figures: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            with contextlib.suppress(ValueError):
                name = name.partition("{")[0]
                figures[name] = figures.get(name, 0.0) + float(value)
    return figures


def data_parallel_ranks(text: str) -> int:
    """Over how many engines the server of this Prometheus text spreads its requests: vLLM labels each one's figures."""
    return max(1, len(set(_RANK.findall(text))))
