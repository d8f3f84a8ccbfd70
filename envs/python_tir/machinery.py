"""What the episodes of an event loop share: a pool of interpreters and a grader."""

from __future__ import annotations

from dataclasses import dataclass

from envs.python_tir.grading.grader import Grader
from envs.shared import SharedByLoop
from sandboxes.base import Limits
from sandboxes.pool import PythonPool


@dataclass(frozen=True, slots=True)
class MachinerySettings:
    """What two episodes must agree on to share their machinery."""

    sandbox: str
    limits: Limits
    spares: int
    grader_workers: int
    grader_timeout_s: float
    packages: tuple[str, ...] = ()


class Machinery:
    """A pool of interpreters and a grader. Making one starts no process; the first session or answer does."""

    def __init__(self, settings: MachinerySettings) -> None:
        self.pool = PythonPool(
            backend=settings.sandbox, limits=settings.limits, spares=settings.spares, packages=settings.packages
        )
        self.grader = Grader(workers=settings.grader_workers, timeout_s=settings.grader_timeout_s)

    async def close(self) -> None:
        """End every interpreter and grading worker."""
        try:
            await self.pool.close()
        finally:
            await self.grader.close()


SHARED: SharedByLoop[MachinerySettings, Machinery] = SharedByLoop(close=Machinery.close)


def acquire_machinery(settings: MachinerySettings) -> Machinery:
    """The running loop's machinery for `settings`, made if it is not there. Pair each call with one release."""
    return SHARED.acquire(settings, lambda: Machinery(settings))


async def release_machinery(machinery: Machinery) -> None:
    """Give one use back; the last one closes pool and grader."""
    await SHARED.release(machinery)
