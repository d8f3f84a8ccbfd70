"""`Episode`: the one record that crosses from the runtime to the learner.

Everything the learner trains on is in it, as it was sampled; nothing is computed again from text.
"""

from __future__ import annotations

import enum
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from agent.packed import NO_LOGPROBS, NO_TOKEN_IDS, NO_VERSIONS, LogProbs, TokenIds, Versions

SCHEMA_VERSION = 2
"""Version 1 had lists of numbers where there are packed arrays now; `decode` reads both."""
LARGEST_REWARD = 1e18
"""The learner computes in float32, where a larger reward's square would be infinite."""


class StopReason(enum.StrEnum):
    """Why an episode ended, and what follows from it."""

    TERMINATED = "terminated"  # answered or submitted: trained
    TRUNCATED_TURNS = "truncated_turns"  # graded as it stands: trained, see the recipe's `truncation`
    TRUNCATED_CONTEXT = "truncated_context"  # likewise
    TRUNCATED_TURN_TOKENS = "truncated_turn_tokens"  # likewise
    TRUNCATED_WALL_CLOCK = "truncated_wall_clock"  # likewise
    ABORTED = "aborted"  # shutdown: resumable, not trained
    INFRASTRUCTURE_ERROR = "infrastructure_error"  # never trained, never reward 0; counted, retried with a cap

    @property
    def trainable(self) -> bool:
        return self is StopReason.TERMINATED or self.truncated

    @property
    def truncated(self) -> bool:
        return self.value.startswith("truncated")


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """How actions are sampled. The learner must be able to reproduce the distribution, so the list is short."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 1024
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Strings that end an action; the token that completes one is its last."""


class Experts(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Which experts of a mixture an engine chose: a packed array [tokens, layers, top_k] of ids, little-endian.

    `layers` counts the model's layers, those without experts too (what stands there has no meaning). `bits` an id: 8
    or 16.
    """

    layers: int
    top_k: int
    data: bytes
    bits: Literal[8, 16] = 8

    @classmethod
    def pack(cls, ids: np.ndarray[Any, Any]) -> Experts:
        """From ids [tokens, layers, top_k] of any integer type."""
        bits: Literal[8, 16] = 8 if ids.size == 0 or ids.max() < 256 else 16
        return cls(ids.shape[1], ids.shape[2], ids.astype(f"<u{bits // 8}").tobytes(), bits)

    def array(self) -> np.ndarray[Any, Any]:
        """The ids [tokens, layers, top_k]. Raises `ValueError` if the bytes are no whole number of tokens."""
        return np.frombuffer(self.data, f"<u{self.bits // 8}").reshape(-1, self.layers, self.top_k)


Kind = Literal["prompt", "action", "observation"]


class Segment(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A run of tokens of one origin: the `prompt`, an `action` of the policy, or an `observation`.

    `logprobs` and `versions` have one entry a token on actions and are empty elsewhere. `experts` are of its first
    tokens, at most of all: an engine does not run the last token that it samples.

    Any sequence of numbers may be given; it is packed (`agent.packed`) and reads like a tuple. Log-probs are kept as
    float32, which is what engines compute them in. Raises `EpisodeError` for numbers that do not fit.
    """

    kind: Kind
    token_ids: TokenIds
    text: str = ""
    logprobs: LogProbs = NO_LOGPROBS
    versions: Versions = NO_VERSIONS
    finish_reason: str = ""
    experts: Experts | None = None

    if TYPE_CHECKING:  # what is made by msgspec, but for the wider types

        def __init__(
            self,
            kind: Kind,
            token_ids: Iterable[int],
            text: str = "",
            logprobs: Iterable[float] = (),
            versions: Iterable[int] = (),
            finish_reason: str = "",
            experts: Experts | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if type(self.token_ids) is TokenIds and type(self.logprobs) is LogProbs and type(self.versions) is Versions:
            return
        keep = msgspec.structs.force_setattr
        try:
            keep(self, "token_ids", TokenIds.of(self.token_ids))
            # The very defaults where they are empty: these are not written.
            keep(self, "logprobs", LogProbs.of(self.logprobs) if len(self.logprobs) else NO_LOGPROBS)
            keep(self, "versions", Versions.of(self.versions) if len(self.versions) else NO_VERSIONS)
        except (TypeError, ValueError) as error:
            raise EpisodeError(f"a segment of kind {self.kind} cannot be packed: {error}") from error


class Branch(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A chain of segments beside an episode's main one: what was asked with another prompt than what had been sampled.

    An agent that compacts its history, asks a sub-agent, strips thinking or talks in parallel makes them. A branch has
    the shape of the main chain: it begins with a prompt, which may repeat tokens that another chain has as actions, and
    `turn_rewards[i]` followed its i-th action. `Episode` says what that is worth.
    """

    segments: tuple[Segment, ...]
    turn_rewards: tuple[float, ...]

    @property
    def actions(self) -> list[Segment]:
        return [s for s in self.segments if s.kind == "action"]

    @property
    def tokens(self) -> int:
        """All of them, prompt and observations too."""
        return sum([len(s.token_ids) for s in self.segments])


class Timings(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Wall-clock of an episode. `issued_at` and `finished_at` are Unix seconds, the others durations in seconds."""

    issued_at: float = 0.0
    finished_at: float = 0.0
    generate_s: float = 0.0
    environment_s: float = 0.0


class Episode(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished rollout. `turn_rewards[i]` is the reward that followed the i-th action segment.

    `environment`: by which name a run of several environments, or of several evaluation sets, knows the one that this
    is of; "" where there is one only.

    `branches`: chains of segments beside `segments`, in the order in which they began; most episodes have none.
    Actions, tokens, versions and the reward are counted over all chains, the main one first. The learner trains every
    chain as a row of its own, whose last action gets what is missing to the episode's reward.
    """

    id: str
    env_id: str
    task_id: str
    segments: tuple[Segment, ...]
    turn_rewards: tuple[float, ...]
    stop_reason: StopReason
    sampling: SamplingParams = SamplingParams()
    timings: Timings = Timings()
    worker: str = ""
    group_id: str | None = None
    attempt: int = 0
    metrics: dict[str, Any] = {}
    # Made by a function, so that it is always written: a record without it is of version 1.
    schema: int = msgspec.field(default_factory=lambda: SCHEMA_VERSION)
    environment: str = ""
    branches: tuple[Branch, ...] = ()

    @property
    def chains(self) -> tuple[Branch, ...]:
        """The main chain in the form of a branch, and the branches."""
        return (Branch(self.segments, self.turn_rewards), *self.branches)

    @property
    def actions(self) -> list[Segment]:
        """The actions of every chain, the main one's first."""
        return [action for chain in self.chains for action in chain.actions]

    @property
    def tokens(self) -> int:
        """All of them, prompts and observations too, in every chain."""
        return sum([chain.tokens for chain in self.chains])

    @property
    def action_tokens(self) -> int:
        return sum([len(s.token_ids) for s in self.actions])

    @property
    def reward(self) -> float:
        """The undiscounted return of the episode: every reward of every chain."""
        return math.fsum(reward for chain in self.chains for reward in chain.turn_rewards)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of this episode; None without an action token."""
        return min((version for s in self.actions for version, _ in s.versions.runs()), default=None)

    @property
    def sampled_by(self) -> list[int]:
        """The policy versions that sampled its action tokens, oldest first."""
        return sorted({version for s in self.actions for version, _ in s.versions.runs()})


class EpisodeError(ValueError):
    """An episode that nobody may train on; the message says which rule it breaks."""


def validate(episode: Episode) -> Episode:
    """Return `episode`, or raise `EpisodeError` if it breaks a rule of the record.

    Log-probs that are missing are an error, never padded: a made-up log-prob is a made-up ratio.
    """
    if episode.schema != SCHEMA_VERSION:
        raise EpisodeError(f"episode {episode.id}: schema {episode.schema}, this program reads {SCHEMA_VERSION}")
    for number, chain in enumerate(episode.chains):
        whose = f"episode {episode.id}" + (f", branch {number - 1}" if number else "")
        try:
            _validate_chain(chain, whose)
        except EpisodeError:
            raise
        except ValueError as error:  # bytes of no whole number of tokens
            raise EpisodeError(f"{whose}: {error}") from error
    if not abs(episode.reward) <= LARGEST_REWARD:
        raise EpisodeError(f"episode {episode.id}: its reward is not finite, or above {LARGEST_REWARD:g}")
    if episode.stop_reason.trainable and episode.action_tokens == 0:
        raise EpisodeError(f"episode {episode.id}: no action token")
    if any(not sum(len(action.token_ids) for action in branch.actions) for branch in episode.branches):
        raise EpisodeError(f"episode {episode.id}: a branch has no action token")
    return episode


def _validate_chain(chain: Branch, whose: str) -> None:
    if not chain.segments or chain.segments[0].kind != "prompt":
        raise EpisodeError(f"{whose}: the first segment must be the prompt")
    if len(chain.turn_rewards) != len(chain.actions):
        raise EpisodeError(f"{whose}: {len(chain.turn_rewards)} rewards for {len(chain.actions)} actions")
    if not all(abs(r) <= LARGEST_REWARD for r in chain.turn_rewards):
        raise EpisodeError(f"{whose}: a reward is not finite, or above {LARGEST_REWARD:g}")
    _check_segments(whose, chain.segments)


def _check_segments(whose: str, segments: Sequence[Segment]) -> None:
    # What can be is looked at in bytes, or all together: a long episode has hundreds of segments.
    for index, segment in enumerate(segments):
        size, logprobs, versions = len(segment.token_ids.data), segment.logprobs, segment.versions
        if segment.kind == "action":
            sound = len(logprobs.data) == size and 4 * len(versions) == size
        else:
            sound = not logprobs.data and not versions.data
        if not sound or size % 4:
            want = f"{size / 4:g}" if segment.kind == "action" else "0"
            raise EpisodeError(
                f"{whose}, segment {index} ({segment.kind}, {size / 4:g} tokens): {len(logprobs.data) / 4:g} log-probs "
                f"and {len(versions)} versions, expected {want} of each"
            )
        if segment.experts is not None:
            known, rest = _tokens_of(segment.experts)
            if rest or 4 * known > size:
                raise EpisodeError(
                    f"{whose}, segment {index}: experts of {known} tokens and {rest} bytes for {size // 4} tokens"
                )
    ids = TokenIds.join([s.token_ids for s in segments]).array()
    if ids.size and ids.min() < 0:
        raise EpisodeError(f"{whose}: a token id is negative, {ids.min()}")
    # -inf is a probability of 0, which the gate knows.
    if not (LogProbs.join([s.logprobs for s in segments]).array() < np.inf).all():
        index = next(i for i, s in enumerate(segments) if not (s.logprobs.array() < np.inf).all())
        raise EpisodeError(f"{whose}, segment {index}: a log-prob is NaN or inf")


def _tokens_of(experts: Experts) -> tuple[int, int]:
    """How many tokens the bytes are of, and how many bytes are left over."""
    size = max(experts.layers, 0) * max(experts.top_k, 0) * (experts.bits // 8)
    return divmod(len(experts.data), size) if size else (0, len(experts.data) + 1)


class _Columns(msgspec.Struct, array_like=True):
    """An episode as it lies on a disk: numbers and text of all segments together, by kind, each kind compressed.

    Like beside like takes less room, and is written faster: of ids the upper bytes are few, log-probs repeat nothing.
    """

    episode: Episode
    """Its segments have neither numbers (but versions, which are runs) nor text."""
    lengths: list[tuple[int, int]]
    """How many tokens and how many characters each segment has, chain after chain."""
    token_ids: bytes
    logprobs: bytes
    text: bytes


_COMPACT_BEGINS = bytes([0x90 + len(_Columns.__struct_fields__)])
"""The first byte of a msgpack array of so many; an encoded episode is a map."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Episode)
_segment_decoder = msgspec.msgpack.Decoder(Segment)
_columns_decoder = msgspec.msgpack.Decoder(_Columns)


def encode(episode: Episode) -> bytes:
    """Serialise to msgpack."""
    return _encoder.encode(episode)


def decode(data: bytes) -> Episode:
    """Read back what `encode` or `compact` wrote, of this schema or of version 1.

    Raises `EpisodeError` on bytes that are no episode.
    """
    if data[:1] == _COMPACT_BEGINS:
        return validate(_from_columns(data))
    try:
        return validate(_decoder.decode(data))
    except msgspec.DecodeError as error:
        try:
            return validate(msgspec.convert(_packed(msgspec.msgpack.decode(data)), Episode))
        except msgspec.DecodeError:
            raise EpisodeError(f"not an episode: {error}") from error


def decode_segment(data: bytes) -> Segment:
    """Read one segment back that was written alone, by this schema or by version 1."""
    try:
        return _segment_decoder.decode(data)
    except msgspec.ValidationError:
        return msgspec.convert(_packed_segment(msgspec.msgpack.decode(data)), Segment)


_PACKED: dict[str, Callable[[Any], Any]] = {
    "token_ids": TokenIds.of,
    "logprobs": LogProbs.of,
    "versions": Versions.of,
}


def _packed(record: Any) -> Any:
    """A decoded record of version 1 with packed arrays in the places of lists; another thing as it is."""
    if not isinstance(record, dict) or not isinstance(record.get("segments"), list):
        return record
    written = record.get("schema", 1)
    if written != 1:
        raise EpisodeError(f"episode {record.get('id')}: schema {written}, this program reads 1 and {SCHEMA_VERSION}")
    return {**record, "segments": [_packed_segment(s) for s in record["segments"]], "schema": SCHEMA_VERSION}


def _packed_segment(record: Any) -> Any:
    try:
        return {key: _PACKED[key](value) if key in _PACKED else value for key, value in record.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise EpisodeError(f"a segment cannot be packed: {error}") from error


def compact(episode: Episode) -> bytes:
    """Serialise a valid episode for a disk: about 60 % of what `encode` gives. `decode` reads it.

    It takes about 0.2 ms of CPU time a thousand tokens, in which other threads may run.
    """
    segments = [segment for chain in episode.chains for segment in chain.segments]
    bare = iter([replace(s, token_ids=NO_TOKEN_IDS, logprobs=NO_LOGPROBS, text="") for s in segments])
    columns = _Columns(
        _with_segments(episode, bare),
        [(len(s.token_ids), len(s.text)) for s in segments],
        _deflated(b"".join([s.token_ids.data for s in segments])),
        _deflated(b"".join([s.logprobs.data for s in segments]), zlib.Z_HUFFMAN_ONLY),
        _deflated("".join([s.text for s in segments]).encode()),
    )
    return _encoder.encode(columns)


def _from_columns(data: bytes) -> Episode:
    try:
        columns = _columns_decoder.decode(data)
        token_ids, logprobs = zlib.decompress(columns.token_ids), zlib.decompress(columns.logprobs)
        text = zlib.decompress(columns.text).decode()
    except (msgspec.DecodeError, zlib.error, UnicodeDecodeError) as error:
        raise EpisodeError(f"not an episode: {error}") from error
    bare = [segment for chain in columns.episode.chains for segment in chain.segments]
    if len(bare) != len(columns.lengths):
        raise EpisodeError(f"not an episode: lengths of {len(columns.lengths)} segments, and {len(bare)} segments")
    segments, id_at, logprob_at, text_at = [], 0, 0, 0
    for segment, (tokens, characters) in zip(bare, columns.lengths, strict=True):
        sampled = 4 * tokens if segment.kind == "action" else 0
        whole = replace(
            segment,
            token_ids=TokenIds(token_ids[id_at : id_at + 4 * tokens]),
            logprobs=LogProbs(logprobs[logprob_at : logprob_at + sampled]) if sampled else NO_LOGPROBS,
            text=text[text_at : text_at + characters],
        )
        segments.append(whole)
        id_at, logprob_at, text_at = id_at + 4 * tokens, logprob_at + sampled, text_at + characters
    if (id_at, logprob_at, text_at) != (len(token_ids), len(logprobs), len(text)):
        raise EpisodeError("not an episode: its columns are not as long as its segments say")
    return _with_segments(columns.episode, iter(segments))


def _with_segments(episode: Episode, segments: Iterator[Segment]) -> Episode:
    """`episode` with other segments in all of its chains, in order."""
    main, *branches = [
        replace(chain, segments=tuple(itertools.islice(segments, len(chain.segments)))) for chain in episode.chains
    ]
    return replace(episode, segments=main.segments, branches=tuple(branches))


def _deflated(data: bytes, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    squeezing = zlib.compressobj(1, strategy=strategy)
    return squeezing.compress(data) + squeezing.flush()
