"""What the learner saw in an episode it trained on, token by token: written by the learner, read by displays.

Kept beside the episodes (`runs/<name>/annotations.sqlite`) and not in them: an episode is what was sampled, and this
is one update's view of it. Losing the file costs a display, never a training step, so it isn't synced to disk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike

FILE_NAME = "annotations.sqlite"


class TokenAnnotations(msgspec.Struct, frozen=True):
    """Per action token of one episode, in the episode's order (observations and prompt have no entry).

    `trained_version` is the policy version that the update began from: a token's lag is `trained_version` minus the
    version that sampled it. `logprobs` (natural log) and `values` are the learner's at that step, `advantages` what
    the loss used. `gated`: 0 for a trusted token, -1 where the ratio was too low, 1 too high, 2 not finite.
    """

    episode_id: str
    trained_version: int
    logprobs: Sequence[float] | np.ndarray[Any, Any]
    values: Sequence[float] | np.ndarray[Any, Any]
    advantages: Sequence[float] | np.ndarray[Any, Any]
    gated: Sequence[int] | np.ndarray[Any, Any]


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    episode_id: str
    trained_version: int
    logprobs: bytes
    values: bytes
    advantages: bytes
    gated: bytes


_PER_TOKEN = ("logprobs", "values", "advantages", "gated")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def encode_annotations(annotations: TokenAnnotations) -> bytes:
    """Serialise; numbers are kept as float32. Raises `ValueError` when the four sequences differ in length."""
    lengths = {name: len(getattr(annotations, name)) for name in _PER_TOKEN}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"annotations of {annotations.episode_id} differ in length: {lengths}")
    packed = _Packed(
        annotations.episode_id,
        annotations.trained_version,
        _to_bytes(annotations.logprobs),
        _to_bytes(annotations.values),
        _to_bytes(annotations.advantages),
        np.asarray(annotations.gated, dtype="i1").tobytes(),
    )
    return _encoder.encode(packed)


def _to_bytes(numbers: ArrayLike) -> bytes:
    return np.asarray(numbers, dtype="<f4").tobytes()


def _from_bytes(data: bytes) -> tuple[float, ...]:
    return tuple(np.frombuffer(data, dtype="<f4").tolist())


def decode_annotations(data: bytes) -> TokenAnnotations:
    """Read `encode_annotations` back; raises `ValueError` on other bytes."""
    try:
        packed = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"no token annotations: {error}") from error
    return TokenAnnotations(
        packed.episode_id,
        packed.trained_version,
        _from_bytes(packed.logprobs),
        _from_bytes(packed.values),
        _from_bytes(packed.advantages),
        tuple(np.frombuffer(packed.gated, dtype="i1").tolist()),
    )


class AnnotationWriter:
    """Writes annotations into `<run>/annotations.sqlite`; an episode that is annotated again replaces the first.

    with AnnotationWriter(run) as writer:
        writer.write([TokenAnnotations(...), ...])    # one transaction
    """

    def __init__(self, run: Path | str) -> None:
        self._sql = sqlite3.connect(Path(run) / FILE_NAME, timeout=10, isolation_level=None)
        self._sql.execute("PRAGMA journal_mode = WAL")
        self._sql.execute("PRAGMA synchronous = OFF")
        self._sql.execute("CREATE TABLE IF NOT EXISTS annotations (episode TEXT PRIMARY KEY, data BLOB NOT NULL)")

    def write(self, annotations: Iterable[TokenAnnotations]) -> None:
        """Write all of them, or (on an error) none; raises `ValueError` or `sqlite3.Error`."""
        rows = [(one.episode_id, encode_annotations(one)) for one in annotations]
        self._sql.execute("BEGIN")
        try:
            self._sql.executemany("INSERT OR REPLACE INTO annotations VALUES (?, ?)", rows)
        except sqlite3.Error:
            self._sql.execute("ROLLBACK")
            raise
        self._sql.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self._sql.close()

    def __enter__(self) -> AnnotationWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_annotations(run: Path | str, episode_id: str) -> TokenAnnotations | None:
    """The annotations of one episode of a run, or None: it has not been trained on, or nothing was annotated."""
    path = Path(run) / FILE_NAME
    if not path.is_file():
        return None
    sql = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10)
    try:
        row = sql.execute("SELECT data FROM annotations WHERE episode = ?", (episode_id,)).fetchone()
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} holds no token annotations: {error}") from error
    finally:
        sql.close()
    return None if row is None else decode_annotations(row[0])
