"""What the learner's commands share: a recipe, overrides, one paragraph instead of a traceback."""

from __future__ import annotations

import argparse
import errno
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from safetensors import SafetensorError

from agent.chat.template import ChatTemplateError
from agent.doors.door import DoorFault
from agent.engines.base import EngineFault
from agent.store.protocol import StoreFault
from envs.core import EnvironmentFault
from envs.python_tir.problems.sets import ProblemSourceError
from envs.swe_bench.instance import InstanceError
from learner.config import Recipe, RecipeError, load_recipe
from learner.faults import LearnerFault
from learner.model.kinds import FreezingError
from learner.parallel.lifeline import describe, lifeline
from learner.run.checkpoint import CheckpointError
from learner.run.display import Display
from sandboxes.base import SandboxFault

_NEWS_S = 2.0

EXPECTED = (
    RecipeError,
    CheckpointError,
    FreezingError,
    LearnerFault,
    DoorFault,
    EngineFault,
    StoreFault,
    EnvironmentFault,
    ProblemSourceError,
    InstanceError,
    SandboxFault,
    ChatTemplateError,
)
"""Errors whose message is meant for the person at the terminal."""


def recipe_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that takes a recipe and dotted overrides; `doc` holds the description and an example."""
    description, _, example = (doc or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog="example:\n" + example, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="RECIPE|key=value", help="a recipe (YAML; none: the tiny one), then overrides"
    )
    return parser


def read_words(words: list[str]) -> Recipe:
    """The recipe that command-line words describe."""
    path = Path(words[0]) if words and "=" not in words[0] else None
    return load_recipe(path, words[1:] if path else words)


def guarded(run: Callable[[], int]) -> int:
    """Run a command: expected errors become one paragraph and exit code 1, Ctrl-C exit code 130.

    A rank that fails tells the others why and is gone: nothing that waits for them, no destructor either, is between.
    """
    line = lifeline()
    try:
        code = _guarded(run)
    except BaseException as error:
        if not line.tied:
            raise
        # Where another rank has failed, what a collective of this one says of it is no news.
        if isinstance(error, RuntimeError) and not line.told and line.reason_within(_NEWS_S):
            _complain(line.failure)
        else:
            traceback.print_exception(error)
        line.fail(describe(error))
        code = 1
    if code and line.tied:
        line.fail(f"exit code {code}")
        line.end(code)
    return code


def _guarded(run: Callable[[], int]) -> int:
    try:
        return run()
    except EXPECTED as error:
        lifeline().fail(str(error))
        _complain(str(error))
        return 1
    except (OSError, SafetensorError) as error:
        if not _disk_is_full(error):
            raise
        text = f"the disk is full: {error}. Free some space, or set runs_dir to another disk; the same command goes on"
        lifeline().fail(text)
        _complain(text)
        return 1
    except KeyboardInterrupt:
        lifeline().fail("stopped")
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


def _complain(message: str) -> None:
    Console(stderr=True).print(f"[bold red]error[/]: {escape(message)}", highlight=False, soft_wrap=True)


def _disk_is_full(error: OSError | SafetensorError) -> bool:
    code = re.search(r"os error (\d+)", str(error))  # safetensors has no errno, only a text
    number = error.errno if isinstance(error, OSError) else int(code.group(1)) if code else None
    return number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def command(doc: str | None, run: Callable[[Recipe, Display], dict[str, Any]], argv: list[str] | None) -> int:
    """A command of the form `RECIPE [key=value ...]` that prints the figures `run` returns."""
    arguments = recipe_parser(doc).parse_args(argv)

    def body() -> int:
        recipe = read_words(arguments.words)
        with Display(recipe.name) as display:
            figures = run(recipe, display)
        for name, value in figures.items():
            print(f"{name:<32} {value:.4f}" if isinstance(value, float) else f"{name:<32} {value}")
        return 0

    return guarded(body)
