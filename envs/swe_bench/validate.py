"""`python -m envs.swe_bench validate ROWS`: is each row fit for training?

For every row the reference patch must resolve the instance and a patch that changes nothing must not: graded as an
agent's work is, in fresh containers. The table says which rows fail and why; the exit status is 1 if any does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
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
from envs.swe_bench.grading.grade import TEST_S, grade_patch
from envs.swe_bench.grading.patches import collect_changes, make_patch, read_baseline
from envs.swe_bench.grading.reference import Reference, write_references
from envs.swe_bench.grading.verdict import Grade, Reason
from envs.swe_bench.instance import Instance, InstanceError, load_instances
from envs.swe_bench.workspace import ContainerSource, Workspace
from sandboxes.base import SandboxFault
from sandboxes.docker.settings import DockerSettings

SHOWN_TESTS = 20
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
    """What validating one row gave. `gold`, `nothing`: how those patches fared; `problem` "" for a valid row.

    `failing`: tests that the reference patch does not make pass. `notes`: what is worth knowing of a valid row too.
    `nothing_log`, `gold_log`: what the tests printed. `reference`: the record for grading, of a valid row.
    """

    instance_id: str
    valid: bool
    gold: str
    nothing: str
    problem: str
    seconds: float
    failing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    nothing_log: str = ""
    gold_log: str = ""
    reference: Reference | None = None

    def told(self) -> dict[str, Any]:
        """The fields of the report as JSON has them: without logs and record, which have files of their own."""
        left_out = ("nothing_log", "gold_log", "reference")
        return {key: value for key, value in asdict(self).items() if key not in left_out}


async def validate_instance(
    instance: Instance, containers: ContainerSource, *, image: str = "", test_timeout_s: float = TEST_S
) -> Verdict:
    """Grade the reference patch and a patch that changes nothing. Faults of row or container become the problem."""
    begun = time.monotonic()

    grades: list[Grade] = []  # of nothing, of the reference patch
    notes = [f"left out of its lists, no test: {test!r}" for test in instance.junk]

    def verdict(valid: bool, problem: str) -> Verdict:
        of_nothing, gold = grades[0] if grades else None, grades[1] if len(grades) > 1 else None
        if gold is not None and (wanted := wants_network(gold.log)) and not valid:
            notes.append(f"its tests seem to want a network, which containers do not have: {wanted}")
        return Verdict(
            instance.instance_id,
            valid,
            "-" if gold is None else _told(gold),
            "-" if of_nothing is None else _told(of_nothing),
            problem,
            round(time.monotonic() - begun, 2),
            () if gold is None else gold.failing,
            tuple(notes),
            "" if of_nothing is None else of_nothing.log,
            "" if gold is None else gold.log,
            gold.reference if valid and gold is not None else None,
        )

    try:
        async with Workspace(instance, containers, image=image) as fresh:
            grade = await grade_patch(fresh, NOTHING, test_timeout_s=test_timeout_s)
        grades.append(grade)
        if grade.resolved:
            return verdict(False, "the tests pass without any fix")
        if grade.refusal is not None and grade.refusal.reason not in (Reason.TESTS_FAIL, Reason.TESTS_INCOMPLETE):
            return verdict(False, f"{grade.refusal.reason}: {grade.refusal.detail}")
        grade = await _grade_gold(instance, containers, image, test_timeout_s)
        grades.append(grade)
    except (SandboxFault, InstanceError) as error:
        return verdict(False, str(error))
    record = grade.reference
    if grade.resolved and record is not None and (record.skipped or record.xfailed):
        kept = f"{len(record.skipped)} skipped and {len(record.xfailed)} xfailed under the reference patch"
        notes.append(f"{kept}: keep the record (--reference) if they are among its tests")
    problem = "" if grade.refusal is None else f"the reference patch: {grade.refusal.reason}: {grade.refusal.detail}"
    return verdict(grade.resolved, problem)


_NETWORK = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable|Could not resolve host"
    r"|getaddrinfo failed|nodename nor servname|Failed to establish a new connection|Max retries exceeded"
    r"|urlopen error \[Errno|socket\.gaierror|ENOTFOUND|EAI_AGAIN|dial tcp: lookup \S+"
)


def wants_network(log: str) -> str:
    """The words in a log that tell of a missing network; "" for none."""
    found = _NETWORK.search(log)
    return found[0] if found else ""


async def _grade_gold(instance: Instance, containers: ContainerSource, image: str, test_timeout_s: float) -> Grade:
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
        patch = await make_patch(fresh, changes)
        return await grade_patch(fresh, patch, test_timeout_s=test_timeout_s, is_reference=True)


def _told(grade: Grade) -> str:
    f2p, p2p = grade.fail_to_pass, grade.pass_to_pass
    return f"{f2p[0]}/{f2p[1]} + {p2p[0]}/{p2p[1]}"


async def validate(
    instances: Sequence[Instance],
    containers: ContainerSource,
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
            verdict = await validate_instance(instance, containers, image=image, test_timeout_s=test_timeout_s)
        if done is not None and (waiting := done(verdict)) is not None:
            await waiting
        return verdict

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
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="write there what the tests of each row printed")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="write the record of each valid row's reference run, for the environment's `reference` argument",
    )
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
    for option, file in (("--json", arguments.json), ("--reference", arguments.reference)):
        if file is not None and not (file.absolute().parent.is_dir() and not file.is_dir()):
            console.print(
                f"validate: {option} {file} cannot be a file: is its folder there?", style="red", markup=False
            )
            return 2
    if arguments.log_dir is not None:
        try:
            arguments.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            told = f"validate: --log-dir {arguments.log_dir} cannot be a folder: {error.strerror}"
            console.print(told, style="red", markup=False)
            return 2
    verdicts = asyncio.run(_validate_all(chosen, arguments, console))
    report(verdicts)
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(one.told()) + "\n" for one in verdicts), encoding="utf-8")
    if arguments.reference is not None:
        write_references(arguments.reference, [one.reference for one in verdicts if one.reference is not None])
    if arguments.log_dir is not None:
        write_logs(arguments.log_dir, verdicts)
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


def write_logs(folder: Path, verdicts: Sequence[Verdict]) -> None:
    """`ID.nothing.log` and `ID.reference.log` of each row whose tests ran."""
    for one in verdicts:
        # An id is whatever a row says.
        name = re.sub(r"[^\w.+-]", "_", one.instance_id)[:150]
        for kind, log in (("nothing", one.nothing_log), ("reference", one.gold_log)):
            if log:
                (folder / f"{name}.{kind}.log").write_text(log, encoding="utf-8", errors="replace")


def report(verdicts: Sequence[Verdict]) -> None:
    """Print the table on standard output."""
    table = Table(title=f"{sum(one.valid for one in verdicts)} of {len(verdicts)} rows are valid")
    for name in ("row", "valid", "nothing", "reference", "seconds", "problem"):
        table.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for one in verdicts:
        told = ("yes" if one.valid else "NO", one.nothing, one.gold, f"{one.seconds:.1f}", one.problem)
        table.add_row(one.instance_id, *(text.replace("[", r"\[") for text in told))
    console = Console(file=sys.stdout)
    console.print(table)
    for one in verdicts:
        shown = [f"failing: {test}" for test in one.failing[:SHOWN_TESTS]]
        if len(one.failing) > SHOWN_TESTS:
            shown.append(f"failing: and {len(one.failing) - SHOWN_TESTS} more (--json has them all)")
        for line in (*one.notes, *shown):
            console.print(f"{one.instance_id}: {line}", markup=False, highlight=False, soft_wrap=True)
