"""A new version on trial: it answers a share of the time, its verdicts are compared, and it is promoted or returned.

An engine holds one set of weights, so the trial is in time: in every period the new version answers for `share` of it
and the served one for the rest, each under its own number. A second engine would answer both at once; most servers have
one GPU for it, and a publication takes what a swap takes. Replies under way go on through a swap, and those that both
have written count for neither.

    held ──trial begins──▶ on trial ──not clearly worse──▶ served
      ▲                       └──clearly worse──▶ returned (never served to all; its weights stay for a while)
      └── newer ones wait; the newest of them is next

`decide` decides; `Canary` does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from agent.engines.base import EngineFault, EngineRefused
from agent.serve.config import CanaryConfig
from agent.serve.versions.publishing import Versions

log = logging.getLogger(__name__)

_SURE = 1.645
"""Standard errors by which a difference must be below 0 to be no chance: one in twenty, to one side."""
_IDLE_S = 0.5


_FEWEST = 2
_SUSPECTS = 16
"""Without how many of the most prolific users, one at a time, a version must still be worse."""


class Verdict(msgspec.Struct, frozen=True):
    """One verdict: how good, and whose (see `Judges`)."""

    reward: float
    judge: str


class Outcome(msgspec.Struct, frozen=True):
    """What becomes of a trial. `say` "wait": more verdicts are needed."""

    say: Literal["wait", "promote", "return"]
    reason: str


def decide(old: Sequence[Verdict], new: Sequence[Verdict], config: CanaryConfig, *, over: bool) -> Outcome:
    """Whether the new version is clearly worse, by the verdicts on both during the trial. `over`: its time is up.

    Clearly worse is: by more than `tolerance`, by more than chance explains, and still so without the verdicts of any
    one user, where there are others. Nobody's verdicts weigh more than an eighth of `min_verdicts`.
    """
    if not over and min(len(old), len(new)) < config.min_verdicts:
        return Outcome("wait", f"{len(new)} and {len(old)} of {config.min_verdicts} verdicts")
    if min(len(old), len(new)) < _FEWEST:
        return Outcome("promote", "hardly anybody judged it")
    most = max(1, config.min_verdicts // 8)
    (mean_old, _), (mean_new, _) = _weighted(old, most), _weighted(new, most)
    reason = f"reward {mean_new:.3f} against {mean_old:.3f} ({len(new)} and {len(old)} verdicts)"
    worse = _is_worse(old, new, most, config.tolerance)
    judges = Counter(verdict.judge for verdict in [*old, *new]).most_common(_SUSPECTS)
    if worse and len(judges) > 1:
        worse = all(_is_worse(_without(old, j), _without(new, j), most, config.tolerance) for j, _ in judges)
    return Outcome("return" if worse else "promote", reason)


def _is_worse(old: Sequence[Verdict], new: Sequence[Verdict], most: int, tolerance: float) -> bool:
    if min(len(old), len(new)) < _FEWEST:
        return False
    (mean_old, error_old), (mean_new, error_new) = _weighted(old, most), _weighted(new, most)
    difference = mean_new - mean_old
    return difference < -tolerance and difference + _SURE * math.hypot(error_old, error_new) < 0


def _without(verdicts: Sequence[Verdict], judge: str) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.judge != judge]


def _weighted(verdicts: Sequence[Verdict], most: int) -> tuple[float, float]:
    """Mean and standard error, with `most` as the largest weight of all verdicts of one judge together."""
    counts = Counter(verdict.judge for verdict in verdicts)
    alone = len(counts) == 1
    weights = [1.0 if alone else min(1.0, most / counts[verdict.judge]) for verdict in verdicts]
    total = math.fsum(weights)
    mean = math.fsum(w * v.reward for w, v in zip(weights, verdicts, strict=True)) / total
    spread = math.fsum(w * (v.reward - mean) ** 2 for w, v in zip(weights, verdicts, strict=True)) / total
    effective = total**2 / math.fsum(w * w for w in weights)
    # Never quite 0: five verdicts that agree do not prove that the sixth will.
    return mean, math.sqrt(max(spread, 0.25 / (effective + 1)) / effective)


class Canary:
    """Puts held versions on trial, one after the other; `run` works until cancelled.

    `judged` is told of every verdict with the versions that wrote the reply. `on_change` is called with what
    `Versions.listing` shows of a trial.
    """

    def __init__(
        self, versions: Versions, config: CanaryConfig, *, on_change: Callable[[dict[str, Any]], None]
    ) -> None:
        self._versions, self._config, self._on_change = versions, config, on_change
        self._news = asyncio.Event()
        self._of: dict[int, list[Verdict]] = {}

    def judged(self, sampled_by: Sequence[int], reward: float, judge: str) -> None:
        """A verdict on a reply of these versions; it counts for a trial if one of both wrote all of it."""
        if len(sampled_by) == 1 and sampled_by[0] in self._of:
            self._of[sampled_by[0]].append(Verdict(reward, judge))
            self._news.set()

    async def run(self) -> None:
        """Try the newest version that waits, whenever there is one; never returns."""
        while True:
            candidate = self._versions.waiting
            if candidate is None:
                await asyncio.sleep(_IDLE_S)
                continue
            try:
                await self._try(candidate)
            except EngineRefused as error:
                served = self._versions.served
                await self._versions.send_back(candidate, served=served, reason=str(error))
                self._tell("returned", served, candidate, str(error))
            except EngineFault as error:  # it is started again with the served weights
                log.warning("the trial of version %d is begun again: %s", candidate, error)
                await asyncio.sleep(self._config.period_s)
            finally:
                self._of = {}

    async def _try(self, number: int) -> None:
        served, config = self._versions.served, self._config
        self._of = {served: [], number: []}
        self._tell("trial", served, number, "")
        ends = time.monotonic() + config.longest_s
        while True:
            outcome = Outcome("wait", "")
            for version, share in ((number, config.share), (served, 1.0 - config.share)):
                if not await self._versions.swap(version, served=served, trial=number):
                    self._tell("stopped", served, number, "pinned, or gone back meanwhile")
                    return
                outcome = await self._listen(served, number, share * config.period_s, ends)
                if outcome.say != "wait":
                    break
            if outcome.say == "wait":
                self._tell("trial", served, number, outcome.reason)
                continue
            if outcome.say == "promote":
                done = await self._versions.promote(number, served=served)
            else:
                done = await self._versions.send_back(number, served=served, reason=outcome.reason)
            said = {"promote": "promoted", "return": "returned"}[outcome.say] if done else "stopped"
            log.info("version %d is %s: %s", number, said, outcome.reason)
            self._tell(said, served, number, outcome.reason)
            return

    async def _listen(self, served: int, number: int, seconds: float, ends: float) -> Outcome:
        """Wait so long, or until the verdicts are enough."""
        until = time.monotonic() + seconds
        while True:
            self._news.clear()
            now = time.monotonic()
            outcome = decide(self._of[served], self._of[number], self._config, over=now >= ends)
            if outcome.say != "wait" or now >= until:
                return outcome
            try:
                await asyncio.wait_for(self._news.wait(), min(until, max(ends, now + 0.01)) - now)
            except TimeoutError:
                continue

    def _tell(self, state: str, served: int, number: int, reason: str) -> None:
        self._versions.trial = {"version": number, "against": served, "state": state, "reason": reason}
        self._on_change(self._versions.trial)
