"""`python -m envs.swe_bench validate ROWS`: is each row fit for training?

For every row the reference patch must resolve the instance and a patch that changes nothing must not: graded as an
agent's work is, in fresh containers. The table says which rows fail and why; the exit status is 1 if any does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from envs.swe_bench.containers import Containers
from envs.swe_bench.grading import TEST_S, grade_patch
from envs.swe_bench.instance import Instance, InstanceError, load_instances
from envs.swe_bench.patches import collect_changes, make_patch, read_baseline
from envs.swe_bench.verdict import Grade, Reason
from envs.swe_bench.workspace import Workspace
from sandboxes.base import SandboxFault
from sandboxes.docker import DockerSettings

EXAMPLE = """example:
  python -m envs.swe_bench validate demo
  python -m envs.swe_bench validate rows.jsonl --workers 4 --only pallets__flask-5014 --image flask:local
"""
# A file of no meaning: an empty patch is refused before the tests run, and it is their failing that is to be seen.
NOTHING = (
    b"diff --git a/.sao-nothing b/.sao-nothing\nnew file mode 100644\n--- /dev/null\n+++ b/.sao-nothing\n"
    b"@@ -0,0 +1 @@\n+nothing\n"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What validating one row gave. `gold`, `nothing`: how those patches fared; `problem` "" for a valid row."""

    instance_id: str
    valid: bool
    gold: str
    nothing: str
    problem: str
    seconds: float


async def validate_instance(
    instance: Instance, containers: Containers, *, image: str = "", test_timeout_s: float = TEST_S
) -> Verdict:
    """Grade the reference patch and a patch that changes nothing. Faults of row or container become the problem."""
    begun = time.monotonic()

    def verdict(valid: bool, gold: str, nothing: str, problem: str) -> Verdict:
        return Verdict(instance.instance_id, valid, gold, nothing, problem, round(time.monotonic() - begun, 2))

    gold = nothing = "-"
    try:
        async with Workspace(instance, containers, image=image) as fresh:
            grade = await grade_patch(fresh, NOTHING, test_timeout_s=test_timeout_s)
        nothing = _told(grade)
        if grade.resolved:
            return verdict(False, gold, nothing, "the tests pass without any fix")
        if grade.refusal is not None and grade.refusal.reason not in (Reason.TESTS_FAIL, Reason.TESTS_INCOMPLETE):
            return verdict(False, gold, nothing, f"{grade.refusal.reason}: {grade.refusal.detail}")
        grade = await _grade_gold(instance, containers, image, test_timeout_s)
        gold = _told(grade)
    except (SandboxFault, InstanceError) as error:
        return verdict(False, gold, nothing, str(error))
    problem = "" if grade.refusal is None else f"the reference patch: {grade.refusal.reason}: {grade.refusal.detail}"
    return verdict(grade.resolved, gold, nothing, problem)


async def _grade_gold(instance: Instance, containers: Containers, image: str, test_timeout_s: float) -> Grade:
    """The reference patch all the way of an agent's work: applied in one container, taken, graded in another."""
    async with Workspace(instance, containers, image=image) as worker:
        baseline = await read_baseline(worker)
        store, _ = await worker.pristine()
        gold = instance.patch.encode()
        applied = await worker.git(store, "apply", "--whitespace=nowarn", "-", stdin=gold)
        if applied.exit_code != 0:  # line ends as the repository's own settings have them
            argv = ["git", "-c", "safe.directory=*", "apply", "--whitespace=nowarn", "-"]
            applied = await worker.sandbox.run(argv, stdin=gold, cwd=instance.workdir, user="0")
        if applied.exit_code != 0:
            raise InstanceError(f"the reference patch does not apply: {applied.stderr.strip()[-300:]}")
        changes = await collect_changes(worker, baseline)
    async with Workspace(instance, containers, image=image) as fresh:
        return await grade_patch(fresh, await make_patch(fresh, changes), test_timeout_s=test_timeout_s)


def _told(grade: Grade) -> str:
    f2p, p2p = grade.fail_to_pass, grade.pass_to_pass
    return f"{f2p[0]}/{f2p[1]} + {p2p[0]}/{p2p[1]}"


async def validate(
    instances: Sequence[Instance],
    containers: Containers,
    *,
    workers: int = 2,
    image: str = "",
    test_timeout_s: float = TEST_S,
    done: Callable[[Verdict], Awaitable[None] | None] | None = None,
) -> list[Verdict]:
    """Validate `instances`, `workers` at a time; `done` is called with each verdict as it comes."""
    turns = asyncio.Semaphore(workers)

    async def one(instance: Instance) -> Verdict:
        async with turns:
            found = await validate_instance(instance, containers, image=image, test_timeout_s=test_timeout_s)
        if done is not None and (waiting := done(found)) is not None:
            await waiting
        return found

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(instance)) for instance in instances]
    return [task.result() for task in tasks]


def add_parser(subparsers: Any) -> None:
    """Register the command's arguments."""
    parser = subparsers.add_parser(
        "validate",
        help="check that the reference patch resolves each row, and nothing else does",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", metavar="ROWS", help='"demo", a file or folder of rows, or a data set\'s id (org/name)')
    parser.add_argument("--workers", type=int, default=2, help="rows at a time (default: 2)")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="this row only; may be repeated")
    parser.add_argument("--image", default="", help="a local image to use instead of the row's own (with one --only)")
    parser.add_argument("--test-timeout", type=float, default=TEST_S, metavar="S", help="seconds a test run may take")
    parser.add_argument("--memory-mb", type=int, default=4096, help="memory of a container (default: 4096)")
    parser.add_argument("--host", action="append", default=[], help="DOCKER_HOST url; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts as JSON lines too")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    """Validate and report; 1 if a row is not valid, 2 if there is nothing to validate."""
    console = Console(stderr=True)
    try:
        instances = load_instances(arguments.rows)
        missing = [one for one in arguments.only if one not in instances]
        if missing:
            raise InstanceError(f"there is no row {missing[0]!r}; the first is {next(iter(instances))!r}")
    except InstanceError as error:
        console.print(f"validate: {error}", style="red", markup=False, highlight=False)
        return 2
    chosen = [instances[one] for one in arguments.only] or list(instances.values())
    if arguments.image and len(chosen) != 1:
        console.print("validate: --image is for one row: name it with --only", style="red")
        return 2
    if arguments.workers < 1:
        console.print("validate: --workers must be at least 1", style="red")
        return 2
    if arguments.json is not None and not (arguments.json.absolute().parent.is_dir() and not arguments.json.is_dir()):
        console.print(
            f"validate: --json {arguments.json} cannot be a file: is its folder there?", style="red", markup=False
        )
        return 2
    verdicts = asyncio.run(_validate_all(chosen, arguments, console))
    report(verdicts)
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(asdict(one)) + "\n" for one in verdicts), encoding="utf-8")
    return 0 if all(one.valid for one in verdicts) else 1


async def _validate_all(chosen: list[Instance], arguments: argparse.Namespace, console: Console) -> list[Verdict]:
    settings = DockerSettings(memory_bytes=arguments.memory_mb * 2**20, ttl_s=3 * arguments.test_timeout + 3600.0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("validating", total=len(chosen))

        def done(verdict: Verdict) -> None:
            progress.advance(task)
            progress.console.print(f"{'valid  ' if verdict.valid else 'INVALID'} {verdict.instance_id}", markup=False)

        async with Containers(settings, hosts=arguments.host) as containers:
            return await validate(
                chosen,
                containers,
                workers=arguments.workers,
                image=arguments.image,
                test_timeout_s=arguments.test_timeout,
                done=done,
            )


def report(verdicts: Sequence[Verdict]) -> None:
    """Print the table on standard output."""
    table = Table(title=f"{sum(one.valid for one in verdicts)} of {len(verdicts)} rows are valid")
    for name in ("row", "valid", "nothing", "reference", "seconds", "problem"):
        table.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for one in verdicts:
        told = ("yes" if one.valid else "NO", one.nothing, one.gold, f"{one.seconds:.1f}", one.problem)
        table.add_row(one.instance_id, *(text.replace("[", r"\[") for text in told))
    Console(file=sys.stdout).print(table)
