"""Look into a run's episodes: list and filter them, and read one token by token.

    python -m agent.inspect runs/tir_tiny                                  # the latest episodes
    python -m agent.inspect runs/tir_tiny --kind evaluate --reward 0       # held-out failures
    python -m agent.inspect runs/tir_tiny EPISODE_ID                       # every token with its figures
    python -m agent.inspect runs/tir_tiny EPISODE_ID --html episode.html   # one page, coloured by advantage

The run's files are opened read-only: it may be running.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.annotations import TokenAnnotations, read_annotations
from agent.episode import Episode, EpisodeError, StopReason, decode
from agent.inspect_html import episode_page
from agent.inspect_tokens import TokenView, find_tokenizer, token_views
from agent.store.protocol import EpisodeRow, StoreFault
from agent.store.reading import EpisodeFilter, EpisodeReader

SORTS: dict[str, Callable[[EpisodeRow], Any]] = {
    "finished": lambda row: row.finished_at,
    "reward": lambda row: row.reward,
    "tokens": lambda row: row.tokens,
    "turns": lambda row: row.turns,
    "latency": lambda row: row.finished_at - row.issued_at,
    "version": lambda row: row.oldest_version,
}
READ_AT_MOST = 10_000
ROLE_STYLES = {"prompt": "dim", "observation": "cyan", "action": "bold"}


def list_table(rows: Sequence[EpisodeRow]) -> Table:
    """A table with one line an episode."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("episode", "kind", "status", "task", "stop reason"):
        table.add_column(name, overflow="fold")
    for name in ("reward", "turns", "tokens", "seconds", "versions"):
        table.add_column(name, justify="right")
    for row in rows:
        versions = f"{row.oldest_version}-{row.newest_version}"
        table.add_row(
            *(Text(value) for value in (row.id, row.kind, row.status, row.task_id, row.stop_reason)),
            f"{row.reward:g}",
            str(row.turns),
            str(row.tokens),
            f"{row.finished_at - row.issued_at:.1f}",
            versions if row.oldest_version != row.newest_version else str(row.oldest_version),
        )
    return table


def episode_header(episode: Episode, annotations: TokenAnnotations | None) -> str:
    """What is known of the episode as a whole, in a few lines."""
    times, sampling = episode.timings, episode.sampling
    trained = "not trained" if annotations is None else f"trained from version {annotations.trained_version}"
    lines = [
        f"{episode.id}  {episode.env_id}  task {episode.task_id}",
        f"{episode.stop_reason.value}, reward {episode.reward:g}, rewards by turn "
        + (" ".join(f"{reward:g}" for reward in episode.turn_rewards) or "none"),
        f"{len(episode.actions)} turns, {episode.action_tokens} action tokens, temperature {sampling.temperature:g}, "
        f"top-p {sampling.top_p:g}; {times.finished_at - times.issued_at:.1f} s "
        f"(engine {times.generate_s:.1f}, environment {times.environment_s:.1f}); {trained}",
    ]
    figures = [f"{key}={value}" for key, value in sorted(episode.metrics.items()) if not isinstance(value, float)]
    if figures:
        lines.append(" ".join(figures))
    return "\n".join(lines)


def token_table(views: Sequence[TokenView]) -> Table:
    """A table with one line a token."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("#", justify="right", style="dim")
    table.add_column("role")
    table.add_column("id", justify="right", style="dim")
    table.add_column("token", overflow="fold")
    for name in ("log-prob", "version", "lag", "learner", "gate", "value", "advantage"):
        table.add_column(name, justify="right")
    for place, view in enumerate(views):
        table.add_row(
            str(place),
            view.role,
            str(view.token_id),
            Text(_visible(view.text)),
            _number(view.logprob),
            _number(view.version),
            _number(view.lag),
            _number(view.learner_logprob),
            view.gate or ("" if view.gate is None else "-"),
            _number(view.value),
            _advantage(view.advantage),
            style=ROLE_STYLES[view.role],
        )
    return table


def _visible(text: str) -> str:
    """A token on one line: control characters escaped, blanks kept visible at its ends."""
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return escaped.replace(" ", "\u00b7") if escaped.strip() != escaped else escaped


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _advantage(value: float | None) -> Text:
    # Sign by character as well as by colour: blue and orange differ for every eye, but not on every terminal.
    return Text("") if value is None else Text(f"{value:+.3f}", style="blue" if value >= 0 else "dark_orange")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agent.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the run's folder, or its episodes.sqlite")
    parser.add_argument("episode", nargs="?", help="the episode to read; without it, episodes are listed")
    parser.add_argument("--kind", choices=("train", "evaluate"))
    parser.add_argument("--status", help="ready, claimed, trained, stale, dropped or evaluation")
    parser.add_argument("--reward", type=float, help="only episodes of exactly this reward")
    parser.add_argument("--stop-reason", choices=[reason.value for reason in StopReason])
    parser.add_argument("--task", help="only this task id")
    parser.add_argument("--sort", choices=sorted(SORTS), default="finished")
    parser.add_argument("--ascending", action="store_true", help="the smallest first (default: the largest)")
    parser.add_argument("--limit", type=int, default=30, help="lines at most (default 30)")
    parser.add_argument("--model", type=Path, help="folder of the tokenizer (default: the one found in the run)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the episode as one self-contained page")
    return parser


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Command line; returns the exit status (0, or 2 with one line on what is wrong)."""
    arguments = _parser().parse_args(argv)
    console = console or Console()
    store = arguments.run if arguments.run.suffix == ".sqlite" else arguments.run / "episodes.sqlite"
    try:
        with EpisodeReader(store) as reader:
            if arguments.episode is None:
                if arguments.html is not None:
                    raise ValueError("--html needs an episode: python -m agent.inspect RUN EPISODE_ID --html FILE")
                _show_list(reader, arguments, console)
            else:
                _show_episode(reader, store.parent, arguments, console)
    except (StoreFault, EpisodeError, OSError, ValueError) as error:
        print(f"agent.inspect: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return 0


def _show_list(reader: EpisodeReader, arguments: argparse.Namespace, console: Console) -> None:
    wanted = EpisodeFilter(
        kind=arguments.kind,
        status=arguments.status,
        stop_reason=arguments.stop_reason,
        task_id=arguments.task,
        min_reward=arguments.reward,
        max_reward=arguments.reward,
        limit=READ_AT_MOST,
        newest_first=True,
    )
    found = reader.list(wanted)
    rows = sorted(found, key=SORTS[arguments.sort], reverse=not arguments.ascending)[: max(0, arguments.limit)]
    console.print(list_table(rows))
    many = f"{len(found)}{' (the latest)' if len(found) == READ_AT_MOST else ''}"
    mean = f", mean reward {sum(row.reward for row in found) / len(found):.3f}" if found else ""
    console.print(f"\n{len(rows)} of {many} episodes{mean}", highlight=False)


def _show_episode(reader: EpisodeReader, run: Path, arguments: argparse.Namespace, console: Console) -> None:
    episode = decode(reader.get(arguments.episode))
    annotations = read_annotations(run, episode.id)
    views = token_views(episode, annotations, find_tokenizer(run, arguments.model))
    header = episode_header(episode, annotations)
    if arguments.html is not None:
        arguments.html.write_text(episode_page(episode, views, header), encoding="utf-8")
        console.print(f"wrote {arguments.html}", highlight=False, markup=False)
        return
    console.print(header, highlight=False, markup=False)
    console.print()
    console.print(token_table(views))


if __name__ == "__main__":
    raise SystemExit(main())
