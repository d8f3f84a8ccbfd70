"""One sandbox pool and one grader for all episodes on an event loop, counted, and closed with their last user."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sandboxes.base import Limits

if TYPE_CHECKING:
    from envs.python_tir.grading import Grader
    from sandboxes.pool import PythonPool


@dataclass(frozen=True, slots=True)
class Settings:
    """What two episodes must agree on to share their machinery."""

    sandbox: str
    limits: Limits
    spares: int
    grader_workers: int
    grader_timeout_s: float


@dataclass(slots=True, eq=False)
class Machinery:
    """A pool of interpreters and a grader, shared by `users` environments."""

    pool: PythonPool
    grader: Grader
    settings: Settings
    users: int = field(default=0)


# Keyed by loop: the machinery's processes and pipes belong to the event loop that opened them.
_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Settings, Machinery]] = weakref.WeakKeyDictionary()


def acquire(settings: Settings) -> Machinery:
    """The running loop's machinery for `settings`, made if it is not there. Pair each call with one `release`."""
    from envs.python_tir.grading import Grader
    from sandboxes.pool import PythonPool

    shared = _by_loop.setdefault(asyncio.get_running_loop(), {})
    machinery = shared.get(settings)
    if machinery is None:
        machinery = shared[settings] = Machinery(
            PythonPool(backend=settings.sandbox, limits=settings.limits, spares=settings.spares),
            Grader(workers=settings.grader_workers, timeout_s=settings.grader_timeout_s),
            settings,
        )
    machinery.users += 1
    return machinery


async def release(machinery: Machinery) -> None:
    """Give one use back; the last one closes pool and grader."""
    machinery.users -= 1
    if machinery.users:
        return
    # Out of the table before the first await, so that nobody is handed machinery that is closing.
    shared = _by_loop.get(asyncio.get_running_loop(), {})
    if shared.get(machinery.settings) is machinery:
        del shared[machinery.settings]
    try:
        await machinery.pool.close()
    finally:
        await machinery.grader.close()
