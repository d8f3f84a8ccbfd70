r"""What a policy answered: the distinct final answers of a run's episodes, how often each came and what it earned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from agent.episode import decode
from agent.store.protocol import StoreFault
from agent.store.reading import EpisodeFilter, EpisodeReader
from envs.python_tir.grading.answers import extract_answer
from envs.said import said

SHOWN_CHARS = 120
"""An answer that is longer is cut in the table."""


@dataclass(frozen=True, slots=True)
class AnswerCount:
    r"""One answer, as it stands in the last `\boxed{...}` that the last action says; None: it boxes nothing."""

    answer: str | None
    episodes: int
    mean_reward: float


@dataclass(frozen=True, slots=True)
class Answers:
    """`rows` are the most frequent answers of `distinct` in `episodes`; `wiped` and `pruned` have no text left."""

    rows: list[AnswerCount]
    distinct: int
    episodes: int
    wiped: int
    pruned: int = 0

    @property
    def summary(self) -> str:
        """How many are shown of how many, in one line."""
        wiped = f", {self.wiped} wiped" if self.wiped else ""
        pruned = f", {self.pruned} pruned" if self.pruned else ""
        return f"{len(self.rows)} of {self.distinct} distinct answers in {self.episodes} episodes{wiped}{pruned}"


def count_answers(reader: EpisodeReader, wanted: EpisodeFilter, *, limit: int) -> Answers:
    """The answers of the episodes that fit `wanted`, the most frequent first, at most `limit`."""
    rewards: defaultdict[str | None, list[float]] = defaultdict(list)
    wiped = pruned = 0
    for row in reader.list(wanted):
        if row.gone == "pruned":
            pruned += 1
            continue
        try:
            actions = decode(reader.get(row.id)).actions
        except StoreFault:  # between the list and now, or with all that its user said
            wiped += 1
            continue
        rewards[extract_answer(said(actions[-1].text)) if actions else None].append(row.reward)
    counts = [AnswerCount(answer, len(got), sum(got) / len(got)) for answer, got in rewards.items()]
    counts.sort(key=lambda one: (-one.episodes, -one.mean_reward, one.answer or ""))
    return Answers(counts[: max(0, limit)], len(counts), sum(one.episodes for one in counts), wiped, pruned)


def answers_table(rows: Sequence[AnswerCount]) -> Table:
    """A table with one line an answer."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("answer", overflow="fold")
    table.add_column("episodes", justify="right")
    table.add_column("mean reward", justify="right")
    for row in rows:
        text = Text("(nothing boxed)", style="dim") if row.answer is None else Text(_cut(row.answer))
        table.add_row(text, str(row.episodes), f"{row.mean_reward:.3f}")
    return table


def _cut(answer: str) -> str:
    return answer if len(answer) <= SHOWN_CHARS else f"{answer[:SHOWN_CHARS]}…"
