"""The store's decisions, as pure functions: what is dealt, what follows a failure, what a claim takes.

A *unit* is what a claim takes whole: an episode, or a group for group methods. Units are numbered in the order
in which they were dealt; the number stays when a ticket is retried.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent.episode import StopReason
from agent.store.config import StoreConfig
from agent.store.shares import within_share


@dataclass(frozen=True, slots=True)
class Unit:
    """A whole unit that is ready. `completed` orders units by the completion of their last episode.

    `latency_s`: from lease to delivery, of the slowest member. `oldest_version`: of any token of any member. `judge`:
    whose verdict it is, "" for what an environment graded.
    """

    number: int
    completed: int
    latency_s: float
    oldest_version: int
    judge: str = ""


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, tasks: int) -> tuple[int, ...]:
    """The order in which task indices 0..tasks-1 are dealt in `epoch`; a function of its arguments only."""
    order = list(range(tasks))
    random.Random(f"order:{seed}:{epoch}").shuffle(order)
    return tuple(order)


def draw_environment(seed: int, draw: int, weights: Sequence[float]) -> int:
    """Which environment of a mixture the draw number `draw` takes; a function of its arguments only.

    Each index comes with probability weight / sum of weights, independent of all other draws.
    """
    return random.Random(f"environment:{seed}:{draw}").choices(range(len(weights)), weights)[0]


def ticket_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) that depends on all of `parts`, the same on every machine."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def units_to_deal(config: StoreConfig, *, outstanding: int, ready: int) -> int:
    """How many more units may be dealt.

    `outstanding`: training episodes that are waiting, leased, ready, claimed, or committed with their version not
    yet published. The sum is read from disk, so a restart does not reset it. `ready`: backpressure.
    """
    if not (config.tasks or config.environments) or (config.max_ready is not None and ready >= config.max_ready):
        return 0
    return max(0, config.capacity - outstanding) // config.group_size


def retries(config: StoreConfig, attempt: int, retry: bool) -> bool:
    """Whether a ticket whose attempt number `attempt` (from 0) failed is dealt again."""
    return retry and attempt + 1 < config.max_attempts


def unwanted(config: StoreConfig, stop: StopReason) -> str:
    """Why an episode that ended so is kept but never trained; "" if it is wanted."""
    return f"{stop.value}, and drop_truncated is set" if config.drop_truncated and stop.truncated else ""


def is_stale(config: StoreConfig, oldest_version: int, version: int) -> bool:
    """Whether a claim at `version` must not take a unit with a token of `oldest_version`."""
    return config.lag_limit is not None and version - oldest_version > config.lag_limit


def choose(
    config: StoreConfig,
    ready: Sequence[Unit],
    count: int,
    *,
    pending: Sequence[int] = (),
    ages_s: Sequence[float] = (),
    recent_s: Sequence[float] = (),
    active: int = 0,
    waited_s: float = 0.0,
) -> list[Unit] | None:
    """The `count` units that a claim takes, in order of completion; None while it should wait.

    `pending`: numbers of the units that are not whole yet. `ages_s`: how long each of them has run so far.
    `recent_s`: latencies of units that finished lately. The last two matter to order "quota" only.
    `active`, `waited_s`: see `agent.store.shares.within_share`; they matter with `max_share_per_user` only.
    """
    queue = takeable(config, ready, count, active=active, waited_s=waited_s)
    if len(queue) < count + config.kept_back:
        return None
    if config.order == "completion":
        return queue[:count]
    if config.order == "window":
        return _choose_window(queue, count, pending, config.window_units)
    return _choose_quota(queue, count, ages_s, recent_s, config.quota_strata)


def takeable(
    config: StoreConfig, ready: Sequence[Unit], count: int, *, active: int = 0, waited_s: float = 0.0
) -> list[Unit]:
    """Which of the ready units a claim of `count` may take, in order of completion: all, but for what one user has
    judged beyond `max_share_per_user`. Arguments as in `choose`."""
    queue = sorted(ready, key=lambda unit: unit.completed)
    if config.max_share_per_user is None:
        return queue
    allowed = within_share(
        [unit.judge for unit in queue],
        count,
        share=config.max_share_per_user,
        active=active,
        relaxed=waited_s >= config.user_window_s,
    )
    return [unit for unit, taken in zip(queue, allowed, strict=True) if taken]


def _choose_window(queue: list[Unit], count: int, pending: Sequence[int], window: int) -> list[Unit] | None:
    """Take one after the other, each among the `window` numbers from the oldest number not taken yet.

    So at most `window - 1` later units overtake any unit, however slow it is.
    """
    left = list(queue)
    numbers = sorted([unit.number for unit in left])
    oldest_pending = min(pending, default=None)
    taken: list[Unit] = []
    while len(taken) < count:
        head = numbers[0] if oldest_pending is None else min(numbers[0], oldest_pending)
        unit = next((u for u in left if u.number < head + window), None)
        if unit is None:
            return None
        left.remove(unit)
        numbers.remove(unit.number)
        taken.append(unit)
    return sorted(taken, key=lambda unit: unit.completed)


def _choose_quota(
    queue: list[Unit], count: int, ages_s: Sequence[float], recent_s: Sequence[float], strata: int
) -> list[Unit] | None:
    """Take at most an equal share of every latency class; wait for the slow classes while something runs.

    The classes are quantiles of what was issued: recent latencies, and the ages of what still runs (each will be at
    least that slow), so that the quick ones are known as quick before any slow one is finished.
    """
    reference = sorted([*recent_s, *ages_s]) or [unit.latency_s for unit in queue]
    share = math.ceil(count / strata)

    def stratum(unit: Unit) -> int:
        # The middle of its ties, so that equal latencies do not all fall into one end.
        rank = (bisect.bisect_left(reference, unit.latency_s) + bisect.bisect_right(reference, unit.latency_s)) / 2
        return min(strata - 1, int(rank * strata / len(reference)))

    filled: Counter[int] = Counter()
    taken: list[Unit] = []
    passed: list[Unit] = []
    for unit in queue:
        kind = stratum(unit)
        if filled[kind] < share and len(taken) < count:
            filled[kind] += 1
            taken.append(unit)
        else:
            passed.append(unit)
    short = count - len(taken)
    if short > len(passed) or 0 < short <= len(ages_s):
        return None  # what runs can still fill the gap
    return sorted(taken + passed[:short], key=lambda unit: unit.completed)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """count, mean, p10, p50, p90, p99 and max of `values` (nearest rank); only count when there are none."""
    if not values:
        return {"count": 0.0}
    ranked = sorted(values)

    def at(q: float) -> float:
        return ranked[min(len(ranked) - 1, math.ceil(q * len(ranked)) - 1)]

    return {
        "count": float(len(ranked)),
        "mean": math.fsum(ranked) / len(ranked),
        "p10": at(0.1),
        "p50": at(0.5),
        "p90": at(0.9),
        "p99": at(0.99),
        "max": ranked[-1],
    }
