"""A backend held to its contract: every check performed, every outcome told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sandboxes.base import ContainerSandbox, Sandbox
from sandboxes.conformance.check import LIMITS, Check, Make
from sandboxes.conformance.container_checks import CONTAINER_CHECKS
from sandboxes.conformance.kernel_checks import KERNEL_CHECKS
from sandboxes.conformance.sandbox_checks import SANDBOX_CHECKS

CHECK_S = 180.0
"""How long one check may take."""


class Outcome(StrEnum):
    """How a check ended."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_PROMISED = "not promised"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check gave; `problem` is what was seen of a broken promise, else ""."""

    check: Check[Any]
    outcome: Outcome
    problem: str
    duration_s: float


def checks_of(sandbox: Sandbox) -> list[Check[Any]]:
    """Every check that a sandbox of this kind is held to."""
    return [*SANDBOX_CHECKS, *KERNEL_CHECKS, *(CONTAINER_CHECKS if isinstance(sandbox, ContainerSandbox) else ())]


async def perform_check(check: Check[Any], make: Make[Any]) -> CheckResult:
    """Perform one check, in sandboxes of its own; whatever goes wrong there is in the result."""
    begun = time.monotonic()
    promises = make(LIMITS).promises
    promised = {f"isolates.{one}" for one in promises.isolates} | {f"limits.{one}" for one in promises.limits}
    promised |= {f"refuses.{one}" for one in promises.refuses}
    outcome, problem = Outcome.KEPT, ""
    if check.needs and check.needs not in promised:
        outcome = Outcome.NOT_PROMISED
    else:
        try:
            async with asyncio.timeout(CHECK_S):
                await check.perform(make)
        except Exception as error:  # of a backend that nobody has read: any, and each is that backend's
            outcome, problem = Outcome.BROKEN, f"{type(error).__name__}: {error}"
    return CheckResult(check, outcome, problem, time.monotonic() - begun)


async def check_sandbox(make: Make[Any]) -> list[CheckResult]:
    """Perform every check on the backend whose sandboxes `make` makes, one after the other."""
    return [await perform_check(check, make) for check in checks_of(make(LIMITS))]


def broken(report: Iterable[CheckResult]) -> list[str]:
    """The broken promises of a report, each with what was seen."""
    return [f"{one.check.name}: {one.problem}" for one in report if one.outcome is Outcome.BROKEN]
