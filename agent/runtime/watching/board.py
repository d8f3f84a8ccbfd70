"""Which episodes run now, how far each has come, and what has happened last."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

from agent.live import LiveEpisode, LiveEvent
from agent.store.protocol import Ticket

TEXT = 2000
"""Characters that are kept of the end of an episode's transcript."""

EVENT_TEXT = 300
EVENTS = 2000
"""How many events are kept for readers that are late."""


class Entry:
    """One running episode on a board, kept by whoever runs it. `engine` names its engine when it is asked."""

    def __init__(self, board: Board, ticket: Ticket, slot: int) -> None:
        self._board = board
        self.engine: Callable[[], str] = str
        self._row = LiveEpisode(ticket.id, slot, ticket.kind, ticket.attempt, ticket.environment)
        self.began = self._stage_began = time.monotonic()

    @property
    def row(self) -> LiveEpisode:
        """What is known now."""
        row, now = self._row, time.monotonic()
        row.engine = self.engine()
        row.age_s, row.stage_s = now - self.began, now - self._stage_began
        return row

    def task(self, name: str) -> None:
        """Its task is known."""
        self._row.task = name
        self._board.event(self._row, "begins", 0, name)

    def stage(self, name: str) -> None:
        """What is awaited from now on."""
        now, row = time.monotonic(), self._row
        if row.stage == "generate":
            row.generate_s += now - self._stage_began
        row.turn += name == "generate"
        row.stage, self._stage_began = name, now

    def grew(self, kind: str, tokens: int, text: str) -> None:
        """A segment was appended."""
        row = self._row
        row.tokens += tokens
        row.text = (row.text + text[-TEXT:])[-TEXT:]
        if kind == "action":
            row.action_tokens += tokens
            self._board.sampled_tokens += tokens
        self._board.event(row, kind, tokens, text)

    def ended(self, how: str) -> None:
        """It is an episode now; how it ended."""
        self._board.event(self._row, "ends", self._row.action_tokens, how)

    def failed(self, why: str) -> None:
        """There is no episode of it."""
        self._board.event(self._row, "fails", self._row.action_tokens, why)

    def leave(self) -> None:
        """Its slot is free."""
        self._board.entries.pop(self._row.slot, None)


class Board:
    """The episodes that run, by slot, and the last events.

    entry = board.enter(ticket, slot)
    ...
    entry.leave()
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.events: deque[LiveEvent] = deque(maxlen=EVENTS)
        self.sampled_tokens = 0
        self._numbers = itertools.count(1)

    def enter(self, ticket: Ticket, slot: int) -> Entry:
        """`slot` runs `ticket` from now on."""
        entry = self.entries[slot] = Entry(self, ticket, slot)
        return entry

    def event(self, row: LiveEpisode, what: str, tokens: int, text: str) -> None:
        """Note something that happened to the episode of `row`."""
        number, short = next(self._numbers), text[:EVENT_TEXT]
        self.events.append(LiveEvent(number, time.time(), row.id, row.slot, what, row.turn, tokens, short))

    def rows(self, most: int) -> list[LiveEpisode]:
        """The oldest `most` episodes that run."""
        oldest = sorted(self.entries.values(), key=lambda entry: entry.began)[:most]
        return [entry.row for entry in oldest]

    def since(self, number: int) -> tuple[list[LiveEvent], int]:
        """The events after `number`, and how many of those are forgotten."""
        found = [event for event in self.events if event.number > number]
        return found, max(0, found[0].number - number - 1) if found else 0
