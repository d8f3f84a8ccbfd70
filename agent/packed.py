"""Token ids, log-probs and policy versions as packed bytes that read like tuples.

A Python number takes 28 bytes and a tuple's place for it 8 more; here a token id or a log-prob takes 4, and a stretch
of tokens of one version 8 in all. They are msgspec structs, so any codec of msgspec reads and writes them: msgpack as
bytes, JSON as base64 (`list(...)` gives numbers). They hold nothing that could be part of a cycle, and the garbage
collector does not look at them.
"""

from __future__ import annotations

import abc
import itertools
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, overload

import msgspec
import numpy as np

N = TypeVar("N", int, float)
Array = np.ndarray[Any, Any]

_SHOWN = 8


class _Meta(msgspec.StructMeta, abc.ABCMeta):
    """A struct that is an abstract base class's child."""


class Packed(
    Sequence[N], msgspec.Struct, Generic[N], metaclass=_Meta, frozen=True, array_like=True, gc=False, eq=False
):
    """A sequence of numbers in `data`, little-endian. Immutable.

    It does what a tuple of Python numbers does: indices, slices (of the same type), `in`, `+` with any sequence, `==`
    with tuples and lists too, `hash` as a tuple's. `numpy.asarray` of it copies nothing where the numbers lie as
    they are (`Versions` are laid out).

        ids = TokenIds.of([5, 6, 7])
        ids[1:] == (6, 7)
        numpy.asarray(ids)                       # int32, read-only
        TokenIds.join([ids, ids])                # of many, in one go
    """

    data: bytes

    @classmethod
    def of(cls, values: Iterable[N]) -> Self:
        """Pack `values`: any iterable of numbers, or a numpy array of one dimension. Raises `TypeError` or `ValueError`
        for what is no such number, or does not fit."""
        raise NotImplementedError

    @classmethod
    def join(cls, parts: Iterable[Packed[N]]) -> Self:
        """One after the other."""
        return cls(b"".join([part.data for part in parts]))

    def array(self) -> Array:
        """The numbers as a numpy array, read-only."""
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = self.array()
        if dtype is not None and found.dtype != dtype:
            if copy is False:
                raise ValueError(f"{type(self).__name__} are {found.dtype}: another type takes a copy")
            return found.astype(dtype)
        return found.copy() if copy else found

    def __iter__(self) -> Iterator[N]:
        return iter(self.array().tolist())

    @overload
    def __getitem__(self, place: int) -> N: ...

    @overload
    def __getitem__(self, place: slice) -> Self: ...

    def __getitem__(self, place: int | slice) -> N | Self:
        found = self.array()[place]
        return self.of(found) if isinstance(place, slice) else cast(N, found.item())

    def __reversed__(self) -> Iterator[N]:
        return iter(self.array()[::-1].tolist())

    def __add__(self, other: Iterable[N]) -> Self:
        if not isinstance(other, Iterable):
            return NotImplemented
        return self.join([self, self.of(other)])

    def __radd__(self, other: tuple[N, ...]) -> Self:
        # Not a list: `a_list += ids` must extend that very list, as it does with a tuple.
        return self.join([self.of(other), self]) if isinstance(other, tuple) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return self.data == cast("Packed[N]", other).data
        if isinstance(other, str | bytes) or not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == len(self) and self._equals(other)

    def __ne__(self, other: object) -> bool:  # that of a struct would not ask the one above
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def _equals(self, other: Sequence[Any]) -> bool:
        return list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        shown = [*map(str, self[:_SHOWN])] + ["..."] * (len(self) > _SHOWN)
        return f"<{len(self)} {type(self).__name__}: {', '.join(shown)}>"


class _Flat(Packed[N], frozen=True, array_like=True, gc=False, eq=False):
    """Four bytes a number."""

    _dtype: ClassVar[str]
    _struct: ClassVar[struct.Struct]
    _code: ClassVar[str]

    @classmethod
    def of(cls, values: Iterable[N]) -> Self:
        if type(values) is cls:
            return values
        if hasattr(values, "__array__"):
            return cls(cls._checked(np.asarray(values)).astype(f"<{cls._dtype}", copy=False).tobytes())
        try:
            found = array(cls._code, values if isinstance(values, list | tuple) else iter(values))
        except OverflowError as error:
            raise ValueError(f"a number does not fit into 4 bytes: {error}") from error
        if sys.byteorder == "big":
            found.byteswap()
        return cls(found.tobytes())

    @classmethod
    def _checked(cls, values: Array) -> Array:
        raise NotImplementedError

    def array(self) -> Array:
        return np.frombuffer(self.data, f"<{self._dtype}")

    def __len__(self) -> int:
        return len(self.data) // 4

    @overload
    def __getitem__(self, place: int) -> N: ...

    @overload
    def __getitem__(self, place: slice) -> Self: ...

    def __getitem__(self, place: int | slice) -> N | Self:
        if isinstance(place, slice):
            if place.step in (None, 1):
                start, stop, _ = place.indices(len(self))
                return type(self)(self.data[4 * start : 4 * max(start, stop)])
            return type(self)(self.array()[place].tobytes())
        size = len(self)
        place = place.__index__()
        if not -size <= place < size:
            raise IndexError(f"index {place} of {size} {type(self).__name__}")
        return cast(N, self._struct.unpack_from(self.data, 4 * (place % size))[0])


class TokenIds(_Flat[int], frozen=True, array_like=True, gc=False, eq=False):
    """Token ids, int32."""

    _dtype, _struct, _code = "i4", struct.Struct("<i"), "i"

    @classmethod
    def _checked(cls, values: Array) -> Array:
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise TypeError(f"expected integers in one dimension, got {values.dtype} of shape {values.shape}")
        if values.size and not -(2**31) <= int(values.min()) <= int(values.max()) < 2**31:
            raise ValueError("a number does not fit into 4 bytes")
        return values


class LogProbs(_Flat[float], frozen=True, array_like=True, gc=False, eq=False):
    """Log-probs, float32, which is what engines compute them in.

    A log-prob given as a Python number is rounded to the nearest float32, and so is the other side of a comparison:
    `LogProbs.of([-0.1]) == (-0.1,)`, though what is read back is the float32, -0.10000000149011612.
    """

    _dtype, _struct, _code = "f4", struct.Struct("<f"), "f"

    @classmethod
    def _checked(cls, values: Array) -> Array:
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iuf"):
            raise TypeError(f"expected numbers in one dimension, got {values.dtype} of shape {values.shape}")
        return values

    def _equals(self, other: Sequence[Any]) -> bool:
        try:
            return bool((self.array() == self.of(other).array()).all())
        except (TypeError, ValueError):
            return False


class Versions(Packed[int], frozen=True, array_like=True, gc=False, eq=False):
    """The policy version of every token, as runs: int32 pairs of a version and of how many tokens it sampled."""

    @classmethod
    def of(cls, values: Iterable[int]) -> Self:
        if type(values) is cls:
            return values
        if hasattr(values, "__array__"):
            values = TokenIds.of(values).array().tolist()
        values = values if isinstance(values, list | tuple) else list(values)
        if not values:
            return cls(b"")
        if values.count(values[0]) == len(values):
            return cls.of_runs([(values[0], len(values))])
        return cls.of_runs((version, len(list(run))) for version, run in itertools.groupby(values))

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, int]]) -> Self:
        """From pairs of a version and of how many tokens, above 0, it sampled."""
        try:
            return cls(b"".join([_RUN.pack(version, count) for version, count in runs]))
        except struct.error as error:
            raise ValueError(f"a version is no whole number of 4 bytes: {error}") from error

    @classmethod
    def join(cls, parts: Iterable[Packed[int]]) -> Self:
        """One after the other; runs that meet become one."""
        runs: list[tuple[int, int]] = []
        for part in parts:
            for version, count in cast(Versions, part).runs():
                if runs and runs[-1][0] == version:
                    version, count = version, count + runs.pop()[1]
                runs.append((version, count))
        return cls.of_runs(runs)

    def runs(self) -> list[tuple[int, int]]:
        """Pairs of a version and of how many tokens it sampled, in order. Two that follow each other differ."""
        return list(_RUN.iter_unpack(self.data))

    def array(self) -> Array:
        runs = np.frombuffer(self.data, "<i4").reshape(-1, 2)
        found = np.repeat(runs[:, 0], runs[:, 1])
        found.flags.writeable = False
        return found

    def __len__(self) -> int:
        if len(self.data) == _RUN.size:  # nearly always
            return max(0, _RUN.unpack(self.data)[1])
        if len(self.data) % _RUN.size:
            raise ValueError(f"{len(self.data)} bytes are no whole number of runs")
        counts = [count for _, count in _RUN.iter_unpack(self.data)]
        if min(counts, default=1) < 1:
            raise ValueError("a run of versions without a token")
        return sum(counts)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(itertools.repeat(*run) for run in self.runs())


_RUN = struct.Struct("<ii")
NO_TOKEN_IDS, NO_LOGPROBS, NO_VERSIONS = TokenIds(b""), LogProbs(b""), Versions(b"")
