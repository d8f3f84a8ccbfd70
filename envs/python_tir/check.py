r"""`python -m envs.python_tir check FILE`: how well the grader knows a set's own gold answers.

Every gold answer is written in eight right forms, which must be taken, and nine wrong variants, which must not
(`variants`). The rates by form are printed; a miss says what was written.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from envs.core import EnvironmentFault
from envs.python_tir.grading.grader import Grader
from envs.python_tir.grading.variants import RIGHT, WRONG
from envs.python_tir.problems.sets import ProblemSourceError
from envs.python_tir.problems.sources import load_problems

ANSWERS = ("answer", "Answer", "Short Answer", "short_answer", "final_answer", "expected_answer", "gold")
PROBLEMS = ("problem", "Problem", "question", "Question", "prompt")
EXAMPLE = """example:
  python -m envs.python_tir check problems.jsonl
  python -m envs.python_tir check imo.csv --problem Problem --answer "Short Answer" --misses misses.jsonl
"""


@dataclass(frozen=True)
class Case:
    """One text to grade: row `index` of the file, written in `form`; `right` is the verdict it must get."""

    index: int
    form: str
    right: bool
    gold: str
    written: str


def add_parser(subparsers: Any) -> None:
    """Register the command's arguments."""
    parser = subparsers.add_parser(
        "check",
        help="grade a set's gold answers against themselves",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="JSONL or CSV with a header, one problem a row")
    parser.add_argument("--problem", help=f"column of the problem (found by itself: {', '.join(PROBLEMS)})")
    parser.add_argument("--answer", help=f"column of the gold answer (found by itself: {', '.join(ANSWERS)})")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="grading processes (default: the CPUs)"
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="seconds an answer may take (default 5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random choices in the wrong variants (default 0)")
    parser.add_argument("--misses", type=Path, metavar="FILE", help="save every miss here, as JSONL")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command. Exit status: 0 without misses, 1 with, 2 when the file cannot be used."""
    console = Console()
    try:
        golds = load_golds(arguments.file, arguments.problem, arguments.answer)
    except ProblemSourceError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    cases = list(make_cases(golds, arguments.seed))
    try:
        verdicts = asyncio.run(grade_all(cases, arguments.workers, arguments.timeout, console))
    except EnvironmentFault as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    misses = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict != case.right]
    console.print(rates(arguments.file.name, len(golds), cases, misses))
    for case in misses[:20]:
        wish = "refused, but right" if case.right else "taken, but wrong"
        console.print(
            f"row {case.index}, {case.form}: {wish}: gold {case.gold!r}, written {case.written!r}", markup=False
        )
    if len(misses) > 20:
        console.print(f"... and {len(misses) - 20} more (--misses FILE saves them all)")
    if arguments.misses is not None:
        arguments.misses.write_text("".join(json.dumps(asdict(case), ensure_ascii=False) + "\n" for case in misses))
    return 1 if misses else 0


def load_golds(path: Path, problem: str | None, answer: str | None) -> list[str]:
    """Read the gold answers of a JSONL or CSV file. Raises `ProblemSourceError`, which says what to change."""
    columns, first = _first_row(path)
    problem = problem or next((name for name in PROBLEMS if name in columns), None)
    answer = answer or next((name for name in ANSWERS if name in columns), None)
    if problem is None or answer is None:
        kind = "problem" if problem is None else "answer"
        raise ProblemSourceError(
            f"{path} has no column of a usual name for the {kind}; name it with --{kind}. Columns: {', '.join(columns)}"
        )
    extract = "gsm8k" if "####" in str(first.get(answer, "")) else None
    spec = {"source": "file", "path": str(path), "problem": problem, "answer": answer, "extract": extract}
    problems = load_problems(spec)
    return [problems[index].answer for index in range(len(problems))]


def _first_row(path: Path) -> tuple[list[str], dict[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            if path.suffix.lower() == ".csv":
                row: Any = next(csv.DictReader(stream), {})
            else:
                row = json.loads(next((line for line in stream if line.strip()), "{}"))
    except OSError as error:
        raise ProblemSourceError(f"the problem file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ProblemSourceError(f"{path}: the first row is no JSON object: {error}") from error
    if not isinstance(row, dict) or not row:
        raise ProblemSourceError(f"{path} holds no problems (one JSON object a line, or CSV with a header)")
    return list(row), row


def make_cases(golds: list[str], seed: int) -> Iterator[Case]:
    """Write every gold answer in each right and wrong form that applies to it."""
    for index, gold in enumerate(golds):
        rng = random.Random(f"{seed}/{index}")
        for form, right in RIGHT.items():
            written = right(gold)
            if written is not None:
                yield Case(index, form, True, gold, written)
        for form, wrong in WRONG.items():
            written = wrong(gold, rng, golds)
            if written is not None:
                yield Case(index, form, False, gold, rf"\boxed{{{written}}}")


async def grade_all(cases: list[Case], workers: int, timeout_s: float, console: Console) -> list[bool]:
    """Grade all cases in `workers` processes, with a progress bar; verdicts in the order of the cases."""
    grader = Grader(workers=workers, timeout_s=timeout_s)
    columns = (TextColumn("grading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    verdicts = [False] * len(cases)
    queue = iter(enumerate(cases))
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(cases))

            async def drain() -> None:
                for position, case in queue:
                    verdicts[position] = await grader.grade(case.written, case.gold)
                    progress.advance(task)

            async with asyncio.TaskGroup() as group:
                for _ in range(2 * workers):
                    group.create_task(drain())
    except* EnvironmentFault as faults:
        raise faults.exceptions[0] from None
    finally:
        await grader.close()
    return verdicts


def rates(name: str, golds: int, cases: list[Case], misses: list[Case]) -> Table:
    """The table of right verdicts by form."""
    made, missed = Counter(case.form for case in cases), Counter(case.form for case in misses)
    table = Table(title=f"{name}: {golds} gold answers", title_justify="left")
    for heading in ("form", "must be", "cases", "right verdicts", "rate"):
        table.add_column(heading, justify="left" if heading in ("form", "must be") else "right")
    for forms, wish in ((RIGHT, "taken"), (WRONG, "refused")):
        for form in forms:
            good = made[form] - missed[form]
            rate = f"{100 * good / made[form]:.2f} %" if made[form] else "-"
            table.add_row(form, wish, str(made[form]), str(good), rate)
        table.add_section()
    for right, wish in ((True, "taken"), (False, "refused")):
        total = sum(case.right is right for case in cases)
        good = total - sum(case.right is right for case in misses)
        table.add_row("all", wish, str(total), str(good), f"{100 * good / total:.2f} %" if total else "-")
    return table
