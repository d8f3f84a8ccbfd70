"""What a check is: a small function that holds sandboxes of a backend to one promise."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sandboxes.base import Limits, Sandbox

S = TypeVar("S", bound=Sandbox)

Make = Callable[[Limits], S]
"""Makes a new sandbox, not started, with these limits."""
Perform = Callable[[Make[S]], Awaitable[None]]

LIMITS = Limits(wall_clock_s=30.0, memory_bytes=128 * 2**20, processes=32, file_bytes=2**20, output_bytes=4000)
"""What a check's sandbox may use."""


class BrokenPromise(AssertionError):
    """A sandbox did not do what its contract says; the text is what was seen."""


@dataclass(frozen=True, slots=True)
class Check(Generic[S]):
    """One promise. `needs` is what must be among a backend's `Promises` for it to hold ("isolates.network",
    "limits.cpu_s", "refuses.keyrings"), "" for a promise that all make; `perform` raises `BrokenPromise`, or whatever
    the sandbox raised that it should not."""

    name: str
    promise: str
    needs: str
    perform: Perform[S]


def check(checks: list[Check[S]], *, needs: str = "") -> Callable[[Perform[S]], Perform[S]]:
    """Decorate a function as one of `checks`: its name and its docstring are the check's."""

    def add(perform: Perform[S]) -> Perform[S]:
        checks.append(Check(perform.__name__, (perform.__doc__ or "").strip(), needs, perform))
        return perform

    return add


def expect(kept: bool, seen: object) -> None:
    """Raise `BrokenPromise` with what was seen unless `kept`."""
    if not kept:
        raise BrokenPromise(str(seen))


@contextlib.asynccontextmanager
async def started(make: Make[S]) -> AsyncIterator[S]:
    """A started sandbox, closed at the end."""
    sandbox = make(LIMITS)
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()
