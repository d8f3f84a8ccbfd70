"""How episodes that grow are shown: a screen for a terminal, one line an event for everything else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent.live import LiveEpisode, LiveEvent, LiveReport

STAGE_STYLES = {"generate": "bold", "step": "cyan", "grade": "magenta", "reset": "dim", "waiting": "dim"}

_LEAST_TEXT = 24
_OTHER_COLUMNS = 78  # the width of all columns but the text


@dataclass(frozen=True, slots=True)
class Seen:
    """One runtime at a moment: its name, its report, and the tokens a second that it samples now."""

    name: str
    report: LiveReport
    tokens_per_s: float


def event_line(event: LiveEvent, name: str = "") -> str:
    """One event as one line; `name` tells several runtimes apart."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.at))
    where = f"{name} slot {event.slot}" if name else f"slot {event.slot}"
    head = f"{clock} {where} {event.episode} {event.what}"
    match event.what:
        case "prompt" | "action" | "observation":
            return f"{head} (turn {event.turn}, {event.tokens} tokens) {one_line(event.text)}"
        case "begins":
            return f"{head} task {one_line(event.text)}"
        case _:
            return f"{head} ({event.turn} turns, {event.tokens} action tokens) {one_line(event.text)}"


def summary_line(seen: Seen) -> str:
    """One runtime in one line."""
    report = seen.report
    slots = ", ".join(f"{count} {state}" for state, count in sorted(report.slots.items()))
    mean = report.reward / max(1, report.delivered)
    return (
        f"{seen.name}: {report.running} episodes run, {seen.tokens_per_s:.0f} tokens/s; slots: {slots}; "
        f"{report.delivered} delivered in {report.uptime_s:.0f} s, mean reward {mean:.3f}"
    )


def live_screen(runtimes: Sequence[Seen], events: Sequence[str], width: int) -> RenderableType:
    """The whole screen, `width` characters wide: a line and a table for each runtime, and the last events."""
    parts: list[RenderableType] = []
    for seen in runtimes:
        parts += [Text(summary_line(seen), style="bold"), _table(seen.report.episodes, width)]
    parts += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in events]
    return Group(*parts)


def _table(episodes: Sequence[LiveEpisode], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("slot", "age", "turn", "tokens", "tok/s"):
        table.add_column(name, justify="right")
    table.add_column("now")
    table.add_column("task", max_width=20, no_wrap=True, overflow="ellipsis")
    table.add_column("text", no_wrap=True, overflow="crop")
    room = max(_LEAST_TEXT, width - _OTHER_COLUMNS)
    for row in episodes:
        rate = f"{row.action_tokens / row.generate_s:.0f}" if row.generate_s > 0 else ""
        table.add_row(
            str(row.slot),
            f"{row.age_s:.0f} s",
            str(row.turn),
            str(row.tokens),
            rate,
            Text(f"{row.stage} {row.stage_s:.0f} s", style=STAGE_STYLES.get(row.stage, "")),
            Text(one_line(row.task)),
            Text(one_line(row.text)[-room:]),
        )
    return table


def one_line(text: str) -> str:
    """`text` without line breaks, and without what a terminal would obey: it is a policy's, or a tool's."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
