"""The prompt of an episode's requests, kept as it is sent.

Each turn's prompt is the one before it, the action and the observation. Kept as JSON, only what is new has to be
encoded, and no Python number is held for a token: 300 turns to 128K tokens encode 128K numbers and not 19 million.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

_numbers = msgspec.json.Decoder(list[int])


class Prompt(Sequence[int]):
    """Token ids, immutable. To everybody but the engine's client a sequence like any other.

    prompt = Prompt([5, 6])
    longer = prompt + completion.token_ids     # encodes the new ones only
    longer.json                                # b"5,6,7": the inside of a JSON list
    """

    __slots__ = ("_length", "json")

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.json = _encoded(token_ids)
        self._length = len(token_ids)

    def __add__(self, token_ids: Sequence[int]) -> Prompt:
        if not token_ids:
            return self
        longer = Prompt.__new__(Prompt)
        new = _encoded(token_ids)
        longer.json = b"%b,%b" % (self.json, new) if self.json else new
        longer._length = self._length + len(token_ids)
        return longer

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._list())

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        return self._list()[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Prompt):
            return self.json == other.json
        return isinstance(other, Sequence) and len(other) == len(self) and self._list() == list(other)

    def __hash__(self) -> int:
        return hash(self.json)

    def __repr__(self) -> str:
        return f"<prompt of {self._length} tokens>"

    def _list(self) -> list[int]:
        return _numbers.decode(b"[%b]" % self.json)


def json_of(token_ids: Sequence[int]) -> bytes:
    """The inside of the JSON list of `token_ids`."""
    return token_ids.json if isinstance(token_ids, Prompt) else _encoded(token_ids)


def _encoded(token_ids: Sequence[int]) -> bytes:
    return msgspec.json.encode(token_ids if isinstance(token_ids, list | tuple) else list(token_ids))[1:-1]
