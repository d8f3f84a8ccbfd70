"""One ticket as it is watched: its entry on the board, and the spans of its episode. Who runs it tells what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

from agent.episode import Episode
from agent.runtime.watching.board import Board, Entry
from agent.runtime.watching.spans import SpanNotes, Spans
from agent.store.protocol import Ticket

Stage = Literal["reset", "generate", "step", "grade"]


def figures_of(episode: Episode) -> dict[str, str | float | int]:
    """What the span of an episode says of it at its end."""
    return {
        "sao.episode.stop_reason": episode.stop_reason.value,
        "sao.episode.reward": episode.reward,
        "sao.episode.turns": len(episode.actions),
        "gen_ai.usage.output_tokens": episode.action_tokens,
    }


class EpisodeWatch:
    """What `agent.runtime.rollout.rollout` tells of an episode; without `entry` and spans it is told in vain."""

    def __init__(self, entry: Entry | None = None, spans: Spans | None = None) -> None:
        self._entry, self._spans = entry, spans or Spans()
        self._engine: Callable[[], str] = str

    @property
    def engine(self) -> str:
        """The engine that it uses now, by name; "" before it has one."""
        return self._engine()

    def sits(self, engine: Callable[[], str]) -> None:
        """It has an engine, which `engine` names."""
        self._engine = engine

    @contextlib.contextmanager
    def episode(self, ticket: Ticket, task: str, env_id: str) -> Iterator[SpanNotes]:
        """Around the whole episode."""
        if self._entry is not None:
            self._entry.task(task)
        attributes: dict[str, str | int] = {
            "sao.episode.id": ticket.id,
            "sao.episode.kind": ticket.kind,
            "sao.episode.attempt": ticket.attempt,
            "sao.task.id": task,
            "sao.environment.id": env_id,
            "sao.environment.name": ticket.environment,
        }
        with self._spans.open("episode", attributes) as span:
            yield span

    def stage(self, name: Stage) -> contextlib.AbstractContextManager[SpanNotes]:
        """Around what is awaited."""
        span = self._spans.open(name)
        return span if self._entry is None else _staged(self._entry, name, span)

    def grew(self, kind: str, tokens: int, text: str) -> None:
        """A segment of `tokens` tokens was appended, which reads `text`."""
        if self._entry is not None:
            self._entry.grew(kind, tokens, text)

    def ended(self, episode: Episode) -> None:
        """This is its record."""
        if self._entry is not None:
            self._entry.ended(f"{episode.stop_reason.value}, reward {episode.reward:g}")

    def delivering(self) -> None:
        """The record waits for the store."""
        if self._entry is not None:
            self._entry.stage("deliver")

    def failed(self, why: str) -> None:
        """There is none, and why."""
        if self._entry is not None:
            self._entry.failed(why)


@contextlib.contextmanager
def _staged(entry: Entry, name: Stage, span: contextlib.AbstractContextManager[SpanNotes]) -> Iterator[SpanNotes]:
    entry.stage(name)
    try:
        with span as notes:
            yield notes
    finally:
        entry.stage("waiting")


class Watching:
    """Watches the episodes of a runtime: on `board`, if there is one, and with `spans`."""

    def __init__(self, board: Board | None = None, spans: Spans | None = None) -> None:
        self.board, self._spans = board, spans

    @contextlib.contextmanager
    def ticket(self, ticket: Ticket, slot: int) -> Iterator[EpisodeWatch]:
        """Around the time in which `slot` holds `ticket`."""
        if self.board is None:
            yield EpisodeWatch(spans=self._spans)
            return
        entry = self.board.enter(ticket, slot)
        watch = EpisodeWatch(entry, self._spans)
        entry.engine = lambda: watch.engine
        try:
            yield watch
        finally:
            entry.leave()
