"""A Gymnasium space of text: every Python string is in it.

Gymnasium's own `Text` wants a finite alphabet and a largest length. Models and tools write any character, lone
surrogates included, at any length.
"""

from __future__ import annotations

import multiprocessing
import struct
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from gymnasium.spaces.utils import flatdim, flatten, flatten_space, unflatten
from gymnasium.vector.utils import (
    create_empty_array,
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

_CODE_POINTS = 0x110000
_LENGTH = struct.Struct("<I")


class Unicode(Space[str]):
    """All strings, of at most `max_length` characters if that is given.

    `shared_bytes` is what `AsyncVectorEnv` sets aside for one observation (as UTF-8) in its shared memory.
    """

    SAMPLE_LENGTH = 32

    def __init__(
        self,
        max_length: int | None = None,
        *,
        shared_bytes: int = 2**18,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        if max_length is not None and max_length < 0:
            raise ValueError(f"max_length must not be negative, got {max_length}")
        if shared_bytes < 1:
            raise ValueError(f"shared_bytes must be positive, got {shared_bytes}")
        self.max_length = max_length
        self.shared_bytes = shared_bytes
        super().__init__(shape=None, dtype=str, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A short string of code points drawn from all of Unicode. Masks have no meaning here and are refused."""
        if mask is not None or probability is not None:
            raise ValueError("a space of all strings cannot be masked")
        longest = self.SAMPLE_LENGTH if self.max_length is None else min(self.max_length, self.SAMPLE_LENGTH)
        length = int(self.np_random.integers(longest + 1))
        return "".join(map(chr, self.np_random.integers(_CODE_POINTS, size=length).tolist()))

    def contains(self, x: Any) -> bool:
        """Whether `x` is a string that is not too long."""
        return isinstance(x, str) and (self.max_length is None or len(x) <= self.max_length)

    @property
    def is_np_flattenable(self) -> bool:
        """Never: strings have no fixed shape."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unicode) and self.max_length == other.max_length

    # A space holds a generator that moves, so it is no key; Gymnasium's own spaces are not hashable either.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Unicode()" if self.max_length is None else f"Unicode({self.max_length})"


class SharedTexts(Sequence[str]):
    """A live view of the texts in an `AsyncVectorEnv`'s shared memory; its deep copy is a plain tuple."""

    def __init__(self, memory: Any, slots: int, slot_bytes: int) -> None:
        self._memory, self._slots, self._slot_bytes = memory, slots, slot_bytes

    def __len__(self) -> int:
        return self._slots

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(self._slots)[index])
        start = range(self._slots)[index] * (self._slot_bytes + _LENGTH.size)
        data = memoryview(self._memory.get_obj()).cast("B")
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        return bytes(data[start : start + length]).decode("utf-8", "surrogatepass")

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"SharedTexts({tuple(self)!r})"


# As for Gymnasium's own spaces without a fixed shape: a text is its own flat form, so that a `Dict` or `Tuple` with
# texts among numbers can be flattened, and what has no number of dimensions says why.


@flatten_space.register(Unicode)
def _flatten_text_space(space: Unicode) -> Unicode:
    return space


@flatten.register(Unicode)
def _flatten_text(space: Unicode, x: str) -> str:  # type: ignore[misc]
    return x


@unflatten.register(Unicode)
def _unflatten_text(space: Unicode, x: str) -> str:  # type: ignore[misc]
    return x


@flatdim.register(Unicode)
def _text_has_no_dimensions(space: Unicode) -> int:
    raise ValueError(f"{space} has no flat array of numbers: its texts have any length. Tokenize them first")


@create_empty_array.register(Unicode)
def _create_empty_texts(space: Unicode, n: int = 1, fn: Callable[..., Any] = np.zeros) -> tuple[str, ...]:
    return ("",) * n


@create_shared_memory.register(Unicode)
def _create_shared_texts(space: Unicode, n: int = 1, ctx: ModuleType = multiprocessing) -> Any:
    return ctx.Array("B", n * (space.shared_bytes + _LENGTH.size))


@read_from_shared_memory.register(Unicode)
def _read_shared_texts(space: Unicode, shared_memory: Any, n: int = 1) -> SharedTexts:
    # Gymnasium reads once, before any text is there, and copies what it got at every step: hence a live view.
    return SharedTexts(shared_memory, n, space.shared_bytes)


@write_to_shared_memory.register(Unicode)
def _write_shared_text(space: Unicode, index: int, value: str, shared_memory: Any) -> None:
    data = value.encode("utf-8", "surrogatepass")
    if len(data) > space.shared_bytes:
        raise ValueError(
            f"an observation of {len(data)} bytes does not fit the {space.shared_bytes} bytes that shared memory holds "
            "for it: use vector_kwargs={'shared_memory': False}, or limit the tool's output"
        )
    start = index * (space.shared_bytes + _LENGTH.size)
    view = memoryview(shared_memory.get_obj()).cast("B")
    _LENGTH.pack_into(view, start, len(data))
    start += _LENGTH.size
    view[start : start + len(data)] = data
