"""Resources that the users of an event loop share: made for the first one, closed with the last."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Resource = TypeVar("Resource")


@dataclass(slots=True)
class _Entry(Generic[Resource]):
    resource: Resource
    users: int = 0


class SharedByLoop(Generic[Key, Resource]):
    """One resource a key and event loop, counted.

        pools = SharedByLoop(close=Pool.close)
        pool = pools.acquire(settings, lambda: Pool(settings))     # made, or counted where it is there
        ...
        await pools.release(pool)                                  # the last user closes it

    A resource's life: absent ──first acquire──▶ held by n users ──last release──▶ closing, and absent again at once.
    By loop, since processes, sockets and pipes belong to the loop that opened them; what is acquired on a loop is
    released there. A loop that is gone takes its table along.
    """

    def __init__(self, close: Callable[[Resource], Awaitable[None]]) -> None:
        self._close = close
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Key, _Entry[Resource]]] = (
            weakref.WeakKeyDictionary()
        )

    def acquire(self, key: Key, make: Callable[[], Resource]) -> Resource:
        """The running loop's resource for `key`, made if it is not there. Pair each call with one `release`.

        What `make` raises comes through, and nothing is held then.
        """
        entries = self._by_loop.setdefault(asyncio.get_running_loop(), {})
        entry = entries.get(key)
        if entry is None:
            entry = entries[key] = _Entry(make())
        entry.users += 1
        return entry.resource

    async def release(self, resource: Resource) -> None:
        """Give one use back; the last one closes the resource, and what its closing raises comes through.

        Raises `LookupError` for a resource that this loop does not hold (any more).
        """
        entries = self._entries()
        match = next(((key, entry) for key, entry in entries.items() if entry.resource is resource), None)
        if match is None:
            raise LookupError(f"{resource!r} is not held on this event loop: released too often, or on another loop")
        key, entry = match
        entry.users -= 1
        if entry.users:
            return
        # Out of the table before the first await, so that nobody is handed a resource that is closing.
        del entries[key]
        await self._close(resource)

    def users(self, resource: Resource) -> int:
        """How many users of the running loop hold `resource`; 0 for one that is not held."""
        return next((entry.users for entry in self._entries().values() if entry.resource is resource), 0)

    def held(self) -> list[Resource]:
        """What the running loop holds, oldest first."""
        return [entry.resource for entry in self._entries().values()]

    def _entries(self) -> dict[Key, _Entry[Resource]]:
        return self._by_loop.get(asyncio.get_running_loop(), {})
