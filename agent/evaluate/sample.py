"""`Sample`: what is kept of one episode, one line of JSON each."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA_VERSION = 1


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens as they are billed. `prompt` counts a conversation again in each of its requests; `cached` and
    `reasoning` are the parts of `prompt` and `completion` that an endpoint tells."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.prompt + other.prompt,
            self.completion + other.completion,
            self.cached + other.cached,
            self.reasoning + other.reasoning,
        )


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a transcript. `text` is what was said; of an action also its `reasoning` and structured `calls`
    (name and arguments as the endpoint wrote them), why it ended (`finish`), and the `reward` that followed."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = ""
    reward: float = 0.0
    tokens: int = 0


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One episode of a task. `reward` is None where it is a fault (`fault` says which): void, neither right nor wrong.

    `stop_reason`: of `agent.episode.StopReason`. `number`: which of the task's samples. `versions`: the oldest and the
    newest policy version of its tokens, from an engine. `seconds`: of the whole episode, `generate_s` of them in
    requests (waiting included), `environment_s` in the environment.
    """

    task_id: str
    number: int
    stop_reason: str
    reward: float | None = None
    fault: str = ""
    turns: int = 0
    tokens: Tokens = Tokens()
    requests: int = 0
    retries: int = 0
    seconds: float = 0.0
    generate_s: float = 0.0
    environment_s: float = 0.0
    versions: tuple[int, int] | None = None
    metrics: dict[str, Any] = {}
    transcript: tuple[Said, ...] = ()
    finished_at: float = 0.0
    schema: int = SCHEMA_VERSION

    @property
    def key(self) -> tuple[str, int]:
        """What tells samples of one evaluation apart."""
        return self.task_id, self.number


class SampleError(ValueError):
    """A line that is no sample of this schema."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Sample)


def encode(sample: Sample) -> bytes:
    """One line of JSON, with its line end."""
    return _encoder.encode(sample) + b"\n"


def decode(line: bytes) -> Sample:
    """Read a line back; raises `SampleError`."""
    try:
        sample = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SampleError(f"not a sample: {error}") from error
    if sample.schema != SCHEMA_VERSION:
        raise SampleError(f"schema {sample.schema}, this program reads {SCHEMA_VERSION}")
    return sample
