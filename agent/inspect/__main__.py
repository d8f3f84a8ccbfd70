"""Look into a run's episodes: list and filter them, read one token by token, follow those that run.

    python -m agent.inspect runs/tir_tiny                                  # the latest episodes
    python -m agent.inspect runs/tir_tiny --kind evaluate --reward 0       # held-out failures
    python -m agent.inspect runs/tir_tiny --answers                        # what was boxed, how often, and its reward
    python -m agent.inspect runs/tir_tiny EPISODE_ID                       # every token with its figures
    python -m agent.inspect runs/tir_tiny EPISODE_ID --html episode.html   # one page, coloured by advantage
    python -m agent.inspect runs/tir_tiny --live                           # episodes as they grow, until the run ends
    python -m agent.inspect http://127.0.0.1:9100 --live                   # of one runtime (its metrics_port)

The run's files are opened read-only: it may be running. --live writes one line an event where it is not on a terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from agent.doors.door import DoorFault
from agent.episode import EpisodeError, StopReason, decode
from agent.inspect.annotations import read_annotations
from agent.inspect.answers import answers_table, count_answers
from agent.inspect.following import follow
from agent.inspect.html import episode_page
from agent.inspect.listing import READ_AT_MOST, SORTS, list_episodes, list_table
from agent.inspect.terminal import episode_header, token_table
from agent.inspect.tokens import find_tokenizer, token_views
from agent.store.protocol import StoreFault
from agent.store.reading import EpisodeFilter, EpisodeReader


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agent.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="the run's folder, or its episodes.sqlite; with --live also a runtime's address")
    parser.add_argument("episode", nargs="?", help="the episode to read; without it, episodes are listed")
    parser.add_argument("--live", action="store_true", help="follow the episodes that run, until the run ends")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="with --live: the run's key, if it is elsewhere")
    parser.add_argument("--kind", choices=("train", "evaluate"))
    parser.add_argument("--status", help="ready, claimed, trained, stale, dropped or evaluation")
    parser.add_argument("--reward", type=float, help="only episodes of exactly this reward")
    parser.add_argument("--stop-reason", choices=[reason.value for reason in StopReason])
    parser.add_argument("--task", help="only this task id")
    parser.add_argument("--answers", action="store_true", help="the distinct final answers, the most frequent first")
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
    run = Path(arguments.run)
    store = run if run.suffix == ".sqlite" else run / "episodes.sqlite"
    try:
        if arguments.live:
            if arguments.episode is not None:
                raise ValueError("--live follows all episodes: leave the episode out")
            asyncio.run(follow(arguments.run, console, limit=arguments.limit, key_file=arguments.key_file))
            return 0
        with EpisodeReader(store) as reader:
            if arguments.episode is not None and arguments.answers:
                raise ValueError("--answers is about all episodes: leave the episode out")
            if arguments.episode is None:
                if arguments.html is not None:
                    raise ValueError("--html needs an episode: python -m agent.inspect RUN EPISODE_ID --html FILE")
                _show_list(reader, arguments, console)
            else:
                _show_episode(reader, store.parent, arguments, console)
    except (StoreFault, DoorFault, EpisodeError, OSError, ValueError) as error:
        print(f"agent.inspect: {error}", file=sys.stderr)
        return 2
    except (BrokenPipeError, KeyboardInterrupt):
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
    if arguments.answers:
        answers = count_answers(reader, wanted, limit=arguments.limit)
        console.print(answers_table(answers.rows))
        console.print(f"\n{answers.summary}", highlight=False)
        return
    listing = list_episodes(reader, wanted, sort=arguments.sort, ascending=arguments.ascending, limit=arguments.limit)
    console.print(list_table(listing.rows))
    console.print(f"\n{listing.summary}", highlight=False)


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
