"""What the slots of a runtime have done and do now: counters, and one line for the log."""

from __future__ import annotations

import time
from collections import Counter

from agent.episode import Episode, StopReason

FAULTS = ("engine", "environment", "rejected")
"""The kinds of failed tickets: an engine or environment that failed, an episode that nobody may train on."""


NOT_KEPT = ("retry", "given_up", "superseded")
"""The store's answers (`agent.store.protocol.Ending`) to a finished episode that it does not keep."""


class Progress:
    """Kept by the slots as they go.

    `counters`: "episodes", "turns" and "action_tokens" of the episodes that the store keeps, their stop reasons by
    value, failed tickets by kind (`FAULTS`), finished episodes that the store did not keep by its answer (`NOT_KEPT`),
    "tickets" and "store_retries". `generate_s`, `environment_s` and `reward` are sums over the same episodes.
    """

    def __init__(self, slots: int) -> None:
        self.counters: Counter[str] = Counter()
        self._states = ["idle"] * slots
        self._busy_s = 0.0
        self._busy_since: dict[int, float] = {}
        self.generate_s = self.environment_s = 0.0
        self.reward = 0.0
        self._started = time.monotonic()

    def start(self) -> None:
        """Count time from now."""
        self._started = time.monotonic()

    def state(self, slot: int, state: str) -> None:
        """What `slot` does from now on: "idle", "running", "delivering", "backing off" or "closed"."""
        self._states[slot] = state

    def ticket_begins(self, slot: int) -> None:
        """`slot` holds a ticket from now on."""
        self.counters["tickets"] += 1
        self._busy_since[slot] = time.monotonic()

    def ticket_ends(self, slot: int) -> None:
        """`slot` holds no ticket any more."""
        self._busy_s += time.monotonic() - self._busy_since.pop(slot)

    def delivered(self, episode: Episode, outcome: str) -> None:
        """The store has answered `outcome` to `episode`. One that was aborted counts as that only: its ticket is dealt
        again."""
        if outcome in NOT_KEPT:
            self.counters[outcome] += 1
            return
        self.counters[episode.stop_reason.value] += 1
        if episode.stop_reason is StopReason.ABORTED:
            return
        self.counters["episodes"] += 1
        self.counters["turns"] += len(episode.turn_rewards)
        self.counters["action_tokens"] += episode.action_tokens
        self.generate_s += episode.timings.generate_s
        self.environment_s += episode.timings.environment_s
        self.reward += episode.reward

    def states(self) -> dict[str, int]:
        """How many slots do what."""
        return dict(Counter(self._states))

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def busy_share(self) -> float:
        """The share of all slots' time since the start in which they held a ticket."""
        now = time.monotonic()
        busy = self._busy_s + sum(now - since for since in self._busy_since.values())
        return busy / max(1e-9, (now - self._started) * len(self._states))

    def line(self) -> str:
        """What was done since the start, and what the slots do now."""
        elapsed = max(1e-9, self.uptime_s)
        episodes = self.counters["episodes"]
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states().items()))
        ends = ", ".join(f"{self.counters[r.value]} {r.value}" for r in StopReason if self.counters[r.value])
        faults = ", ".join(f"{self.counters[kind]} {kind}" for kind in FAULTS if self.counters[kind])
        lost = ", ".join(f"{self.counters[answer]} {answer}" for answer in NOT_KEPT if self.counters[answer])
        rate = self.counters["action_tokens"] / elapsed
        return (
            f"{episodes} episodes in {elapsed:.0f} s ({ends or 'none ended'}); faults: {faults or 'none'}; "
            f"{f'not kept by the store: {lost}; ' if lost else ''}"
            f"mean reward {self.reward / max(1, episodes):.3f}; {rate:.0f} tokens/s; "
            f"an episode spends {self.generate_s / max(1, episodes):.2f} s in the engine and "
            f"{self.environment_s / max(1, episodes):.2f} s in the environment; busy {self.busy_share():.0%}; "
            f"slots: {states}"
        )
