"""Grading a patch: in a fresh container, with the instance's own tests, read on the host.

    async with Workspace(instance, containers) as fresh:
        grade = await grade_patch(fresh, patch)

A patch earns the reward when all of FAIL_TO_PASS and PASS_TO_PASS pass; anything else has a typed reason. A failure of
container or engine raises `SandboxFault`, a row that cannot be graded `InstanceError`; neither is a grade.
"""

from __future__ import annotations

import asyncio
import time
from functools import cache
from pathlib import Path, PurePosixPath

from envs.swe_bench.instance import Instance, InstanceError, patch_paths
from envs.swe_bench.patches import PatchRefusal
from envs.swe_bench.protected import CONFIGURATION, changes_how_tests_run, split_patch
from envs.swe_bench.run_script import Command, TestRun, command_of, make_run
from envs.swe_bench.verdict import (
    Grade,
    Reason,
    Refused,
    between_markers,
    judge,
    log_parser,
    outcomes_of_records,
    read_records,
    statuses_of_log,
    statuses_of_outcomes,
    without_must_fail,
)
from envs.swe_bench.workspace import SCRATCH, Workspace
from sandboxes.base import Limits, RunResult, SandboxFault

TEST_S = 1800.0
OUTPUT_BYTES = 16 * 2**20
LOG_CHARS = 200_000
_STEP_S = 120.0
# Puts the tests there, tells their checksums, and takes them away again: all in one command, since each costs time.
_SUMS = """
patch=$(mktemp /var/tmp/.sao-XXXXXXXX) && cat > "$patch" && git apply --whitespace=nowarn "$patch" || exit 1
for file in "$@"; do if [ -f "$file" ]; then sha256sum -- "$file" || exit 1; fi; done
git apply --reverse --whitespace=nowarn "$patch" && rm -f "$patch"
"""


async def grade_patch(fresh: Workspace, patch: bytes, *, test_timeout_s: float = TEST_S) -> Grade:
    """Grade `patch` in `fresh`, a workspace of the instance that nobody has used; its container is spent afterwards."""
    begun = time.monotonic()
    instance = fresh.instance
    total = (0, len(instance.fail_to_pass)), (0, len(instance.pass_to_pass))
    left_out: tuple[str, ...] = ()
    log = ""

    def refused(error: Refused) -> Grade:
        return Grade(False, error.refusal, *total, left_out, log[-LOG_CHARS:], time.monotonic() - begun)

    # On a thread: swebench's import takes seconds. Before the tests: a parser that is not there is no agent's fault.
    await asyncio.to_thread(log_parser, instance)
    try:
        if not patch.strip():
            raise Refused(Reason.NO_PATCH, "nothing was changed")
        store, base = await fresh.pristine()
        base_files = {path.decode("utf-8", "surrogateescape") for path in base}
        command = command_of(instance)
        sums = await _test_sums(fresh)
        split = split_patch(
            patch,
            test_files=instance.test_files,
            runner_files={word.removeprefix("./") for word in command.words()} & base_files,
            base_files=base_files,
        )
        left_out = split.left_out
        left_out += await _apply(fresh, store, split.patch)
        if not command.restores_tests:
            await _apply_tests(fresh)
        run = make_run(instance, command, plugin=_plugin(), sums=sums, base_files=base_files, scratch=SCRATCH)
        result = await _run(fresh, run, test_timeout_s)
        log = result.stdout
        statuses = await _read(fresh, run, result, command)
        f2p, p2p = await asyncio.to_thread(judge, statuses, instance)
        total = f2p, p2p
        if f2p[0] < f2p[1] or p2p[0] < p2p[1]:
            raise Refused(
                Reason.TESTS_FAIL,
                f"{f2p[1] - f2p[0]} that should pass now and {p2p[1] - p2p[0]} that passed before fail",
            )
    except Refused as error:
        # A disk that is full fails tests too, and is nobody's wrong answer.
        await fresh.sandbox.assert_disk()
        return refused(error)
    return Grade(True, None, *total, left_out, log[-LOG_CHARS:], time.monotonic() - begun)


def refused_grade(instance: Instance, refusal: PatchRefusal) -> Grade:
    """The grade of an agent whose patch could not be taken."""
    reason = Refused(Reason(refusal.reason), refusal.detail).refusal
    return Grade(False, reason, (0, len(instance.fail_to_pass)), (0, len(instance.pass_to_pass)))


async def _git(fresh: Workspace, *arguments: str, stdin: bytes) -> RunResult:
    """The repository's own git, with its own settings of line ends."""
    return await fresh.sandbox.run(
        ["git", "-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", *arguments],
        stdin=stdin,
        cwd=fresh.instance.workdir,
        user="0",
        limits=Limits(wall_clock_s=_STEP_S),
    )


async def _test_sums(fresh: Workspace) -> str:
    """`sha256sum` lines of the test files as they must be when the tests start; "" where a row brings none."""
    instance = fresh.instance
    if not instance.test_patch:
        return ""
    sums = await fresh.sandbox.run(
        ["sh", "-c", _SUMS, "sh", *instance.test_files],
        stdin=instance.test_patch.encode(),
        env={"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"},
        cwd=instance.workdir,
        user="0",
        limits=Limits(wall_clock_s=_STEP_S, output_bytes=2**20),
    )
    if sums.exit_code != 0:
        raise _test_patch_error(instance, sums)
    return sums.stdout


async def _apply_tests(fresh: Workspace) -> None:
    instance = fresh.instance
    done = await _git(fresh, "apply", "--whitespace=nowarn", "-", stdin=instance.test_patch.encode())
    if done.timed_out:
        raise SandboxFault(f"{instance.instance_id}: the tests were not put in place within {_STEP_S:g} s")
    if done.exit_code != 0:  # on the base commit they could be (`_test_sums`), so it is what the patch put in their way
        raise Refused(Reason.TESTS_NOT_RESTORED, "the instance's tests cannot be put in place over the patch")


def _test_patch_error(instance: Instance, result: RunResult) -> InstanceError:
    return InstanceError(
        f"{instance.instance_id}: the row's test_patch does not apply to its base commit: {result.stderr[-300:]}"
    )


async def _apply(fresh: Workspace, store: str, patch: bytes) -> tuple[str, ...]:
    """Apply `patch`, then undo changes of how tests run in files that hold other settings too; returns the undone."""
    if not patch.strip():
        return ()
    touched = patch_paths(patch.decode("utf-8", "surrogateescape"))
    settings = [path for path in touched if PurePosixPath(path).name in CONFIGURATION]
    before = {path: await _text(fresh, path) for path in settings}
    applied = await fresh.git(store, "apply", "--whitespace=nowarn", "-", stdin=patch)
    if applied.exit_code != 0:
        # A patch made by somebody else may speak of the repository's own line ends.
        applied = await _git(fresh, "apply", "--whitespace=nowarn", "-", stdin=patch)
    if applied.timed_out:
        raise SandboxFault(f"{fresh.instance.instance_id}: the patch was not applied within {_STEP_S:g} s")
    if applied.exit_code != 0:
        raise Refused(Reason.PATCH_DOES_NOT_APPLY, applied.stderr.strip()[-500:])
    undone = []
    for path in settings:
        old, new = before[path], await _text(fresh, path)
        if changes_how_tests_run(PurePosixPath(path).name, _decoded(old), _decoded(new)):
            undone.append(path)
            # First away with it: the patch may have made it a link.
            await fresh.sandbox.run(["rm", "-rf", "--", path], cwd=fresh.instance.workdir, user="0")
            if old is not None:
                await fresh.sandbox.put(f"{fresh.instance.workdir}/{path}", old)
    return tuple(undone)


async def _text(fresh: Workspace, path: str) -> bytes | None:
    try:
        return await fresh.sandbox.get(f"{fresh.instance.workdir}/{path}")
    except OSError:
        return None


def _decoded(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "replace")


async def _run(fresh: Workspace, run: TestRun, limit_s: float) -> RunResult:
    for path, data in run.files.items():
        await fresh.sandbox.put(path, data)
    # By stdin, so that neither a file nor a command line shows the nonce to what is tested.
    result = await fresh.sandbox.run(
        ["bash", "-s"],
        stdin=run.script.encode(),
        env={"PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=fresh.instance.workdir,
        limits=Limits(wall_clock_s=limit_s, output_bytes=OUTPUT_BYTES),
    )
    if result.timed_out:
        raise Refused(Reason.TIMEOUT, f"the tests did not end within {limit_s:g} s")
    if result.exit_code == 127 and "bash" in result.stderr:
        raise InstanceError(f"{fresh.instance.instance_id}: the image has no bash, which runs the tests")
    return result


async def _read(fresh: Workspace, run: TestRun, result: RunResult, command: Command) -> dict[str, str]:
    """Each test's status, by the names of the data set. Raises `Refused`."""
    output = result.stdout.replace("\r\n", "\n")
    if f"\n{run.nonce}:tools\n" in f"\n{output}":
        raise Refused(Reason.TAMPERING, "setting up the repository changed pytest or what Python starts with")
    if f"\n{run.nonce}:tests\n" in f"\n{output}":
        raise Refused(Reason.TESTS_NOT_RESTORED, "the instance's test files are not as they should be")
    log, status = between_markers(output, run.nonce)
    try:
        raw = await fresh.sandbox.get(f"{run.folder}/records")
    except OSError:
        if command.is_pytest:
            raise Refused(Reason.TESTS_INCOMPLETE, "pytest told nothing: it did not start") from None
    else:
        # Behind another command (a script, tox) the process's status is that command's.
        known = status if command.is_pytest else None
        outcomes = outcomes_of_records(read_records(raw, run.key), known, run.canaries)
        if run.must_fail:
            outcomes = without_must_fail(outcomes, run.must_fail)
        return await asyncio.to_thread(statuses_of_outcomes, outcomes, fresh.instance)
    if result.omitted_bytes:
        raise Refused(Reason.OUTPUT_TOO_LONG, f"the tests printed more than {OUTPUT_BYTES >> 20} MiB")
    return await asyncio.to_thread(statuses_of_log, log, status, fresh.instance, run.must_fail)


@cache
def _plugin() -> str:
    return (Path(__file__).parent / "inside" / "results.py").read_text(encoding="utf-8")


__all__ = ["Grade", "Reason", "grade_patch", "refused_grade"]
