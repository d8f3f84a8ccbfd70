"""How many connections there are, of whom; which one goes when there are too many. Decisions only.

A connection *waits* until its first header is whole. One more than may be is let in if a waiting one can go for it,
the oldest of the same address first: so sockets that never send anything keep nobody out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class _Closable(Protocol):
    def drop(self) -> None:
        """Close at once."""


V = TypeVar("V", bound=_Closable)


@dataclass
class _Group(Generic[V]):
    inside: int = 0
    waiting: dict[V, None] = field(default_factory=dict)


class Visitors(Generic[V]):
    """At most `most` at once, and `most_each` of one address; addresses for which `is_exempt` holds are not counted.

    admit ──▶ (came ──▶ waiting ──arrived──▶ inside) ──left──▶ gone; `left` may be called again.
    """

    def __init__(self, most: int, most_each: int, is_exempt: Callable[[str], bool] = lambda address: False) -> None:
        self.most, self._most_each, self._is_exempt = most, most_each, is_exempt
        self._groups: dict[str, _Group[V]] = {}
        self._of: dict[V, str] = {}
        self._waiting: dict[V, None] = {}
        self.refused = self.dropped = 0

    @property
    def inside(self) -> int:
        """Connections at this moment."""
        return len(self._of)

    def admit(self, address: str) -> bool:
        """Whether one more of `address` may come; a waiting one may be dropped for it. Call `came` if it does."""
        group = self._groups.get(address)
        if group is not None and group.inside >= self._most_each and not self._is_exempt(address):
            return self._makes_room(group.waiting)
        return len(self._of) < self.most or self._makes_room(self._waiting)

    def came(self, visitor: V, address: str) -> None:
        """A connection of `address` is there, and waits."""
        group = self._groups.setdefault(address, _Group())
        group.inside += 1
        self._of[visitor] = address
        group.waiting[visitor] = self._waiting[visitor] = None

    def arrived(self, visitor: V) -> None:
        """Its first header is whole: it is not dropped for others any more."""
        self._waiting.pop(visitor, None)
        if (address := self._of.get(visitor)) is not None:
            self._groups[address].waiting.pop(visitor, None)

    def left(self, visitor: V) -> None:
        """It is gone."""
        self.arrived(visitor)
        if (address := self._of.pop(visitor, None)) is not None:
            group = self._groups[address]
            group.inside -= 1
            if not group.inside:
                del self._groups[address]

    def drop_oldest(self) -> bool:
        """Drop the connection that has waited longest; whether there was one."""
        return self._drop(self._waiting)

    def _makes_room(self, waiting: dict[V, None]) -> bool:
        if self._drop(waiting):
            return True
        self.refused += 1
        return False

    def _drop(self, waiting: dict[V, None]) -> bool:
        if not waiting:
            return False
        oldest = next(iter(waiting))
        self.left(oldest)
        oldest.drop()
        self.dropped += 1
        return True
