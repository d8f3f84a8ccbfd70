"""Grading a patch: in a fresh container, with the instance's own tests, read on the host.

    async with Workspace(instance, containers) as fresh:
        grade = await grade_patch(fresh, patch)

A patch earns the reward when all of FAIL_TO_PASS and PASS_TO_PASS pass; anything else has a typed reason. A failure of
container or engine raises `SandboxFault`, a row that cannot be graded `InstanceError`; neither is a grade.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Any

from envs.swe_bench.grading.loaded import foreign, own_names
from envs.swe_bench.grading.patches import PatchRefusal
from envs.swe_bench.grading.protected import CONFIGURATION, changes_how_tests_run, files_of_tests, split_patch
from envs.swe_bench.grading.reference import Reference, reference_of
from envs.swe_bench.grading.run_script import Command, TestRun, command_of, make_run
from envs.swe_bench.grading.runners import is_pytest_parser, is_unittest_parser, unreadable
from envs.swe_bench.grading.unittests import outcomes_of_unittests
from envs.swe_bench.grading.verdict import (
    Grade,
    Reason,
    Refused,
    between_markers,
    judge_tests,
    log_parser,
    names_of,
    outcomes_of_records,
    read_records,
    statuses_of_log,
    statuses_of_outcomes,
    without_must_fail,
)
from envs.swe_bench.inside import source
from envs.swe_bench.instance import Instance, InstanceError, RowError, patch_paths
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


async def grade_patch(
    fresh: Workspace,
    patch: bytes,
    *,
    test_timeout_s: float = TEST_S,
    reference: Reference | None = None,
    is_reference: bool = False,
) -> Grade:
    """Grade `patch` in `fresh`, a workspace of the instance that nobody has used; its container is spent afterwards.

    `reference` is what the run of the reference patch has left. With `is_reference` this is that run: it is held to its
    own record, which the grade carries.
    """
    begun = time.monotonic()
    instance = fresh.instance
    total = (0, len(instance.fail_to_pass)), (0, len(instance.pass_to_pass))
    left_out: tuple[str, ...] = ()
    log, failing = "", (*instance.fail_to_pass, *instance.pass_to_pass)

    def refused(error: Refused) -> Grade:
        seconds = time.monotonic() - begun
        return Grade(False, error.refusal, *total, left_out, log[-LOG_CHARS:], seconds, failing, reference)

    # On a thread: swebench's import takes seconds. Before the tests: a row that can't be graded is no agent's fault.
    await asyncio.to_thread(assert_gradable, instance)
    try:
        if not patch.strip():
            raise Refused(Reason.NO_PATCH, "nothing was changed")
        store, base = await fresh.pristine()
        base_files = {path.decode("utf-8", "surrogateescape") for path in base}
        command = command_of(instance)
        sums = await _test_sums(fresh)
        split = split_patch(
            patch,
            test_files=files_of_tests(instance, base_files),
            runner_files={word.removeprefix("./") for word in command.words()} & base_files,
            base_files=base_files,
        )
        left_out = split.left_out
        left_out += await _apply(fresh, store, split.patch)
        if not command.restores_tests:
            await _apply_tests(fresh)
        run = make_run(
            instance,
            command,
            plugin=source("seal.py") + source("results.py"),
            recorder=source("seal.py") + source("unittest_results.py"),
            sums=sums,
            base_files=base_files,
            scratch=SCRATCH,
        )
        result = await _run(fresh, run, test_timeout_s)
        log = result.stdout
        if f"\n{run.nonce}:start\n" not in log.replace(
            "\r\n", "\n"
        ):  # the set-up ended the shell: its own output says why
            log += (await _text(fresh, f"{run.folder}/setup") or b"")[-LOG_CHARS:].decode("utf-8", "replace")
        statuses = await _read(fresh, run, result, command, own_names(instance.repo, base_files))
        if is_reference:
            reference = reference_of(instance, statuses)
        judged = await asyncio.to_thread(judge_tests, statuses, instance, reference)
        f2p, p2p = total = judged.fail_to_pass, judged.pass_to_pass
        failing = judged.failing
        if f2p[0] < f2p[1] or p2p[0] < p2p[1]:
            raise Refused(
                Reason.TESTS_FAIL,
                f"{f2p[1] - f2p[0]} that should pass now and {p2p[1] - p2p[0]} that passed before fail",
            )
    except Refused as error:
        # A disk that is full fails tests too, and is nobody's wrong answer.
        await fresh.sandbox.assert_disk()
        return refused(error)
    return Grade(True, None, *total, left_out, log[-LOG_CHARS:], time.monotonic() - begun, (), reference)


def assert_complete(instance: Instance) -> None:
    """Raises `RowError` for a row that lacks what its grading needs. Imports swebench, and passes where it is not."""
    if instance.eval_type == "fail_only":
        raise RowError(
            instance.instance_id,
            "eval_type",
            "is fail_only: a test that is not told would count as passed, and a run that ends early would pay",
        )
    if not command_of(instance).line.strip():
        raise RowError(instance.instance_id, "eval_script", "holds no test command between its markers")
    try:
        parser = log_parser(instance)
    except RowError:
        raise
    except InstanceError:  # of this machine's swebench: grading says it
        return
    if reason := unreadable(parser.__name__):
        raise RowError(instance.instance_id, "log_parser", f"is {parser.__name__}, which {reason}")
    try:  # some choose among formats by the row's id or version
        parser("", instance)
    except ValueError as error:
        raise RowError(
            instance.instance_id, "log_parser", f"is {parser.__name__}, which cannot tell how to read this row: {error}"
        ) from error
    if instance.eval_script or instance.test_command:
        return
    if not is_pytest_parser(parser.__name__):
        raise RowError(
            instance.instance_id,
            "eval_script",
            f"is missing: {parser.__name__} reads the output of another runner than pytest, so the row has to say how "
            "tests are run (`eval_script` or `test_command`)",
        )


def assert_gradable(instance: Instance) -> None:
    """Raises `InstanceError` for a row whose tests could not be graded, whatever an agent does. Imports swebench."""
    log_parser(instance)  # without swebench nothing can be graded
    assert_complete(instance)


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
        return await fresh.sandbox.get(str(PurePosixPath(fresh.instance.workdir, path)))
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


async def _read(
    fresh: Workspace, run: TestRun, result: RunResult, command: Command, own: Collection[str]
) -> dict[str, str]:
    """Each test's status, by the names of the data set. Raises `Refused`."""
    instance = fresh.instance
    output = "\n" + result.stdout.replace("\r\n", "\n")
    if f"\n{run.nonce}:nofind\n" in output:
        raise InstanceError(f"{instance.instance_id}: the image has no GNU find, which lists what Python may load")
    changed = re.findall(rf"^{run.nonce}:loaded (.*)$", output, re.MULTILINE)
    if strange := foreign(changed, workdir=instance.workdir, own=own, test_files=instance.test_files):
        raise Refused(Reason.TAMPERING, f"setting up the repository changed what Python may load: {strange[0]}")
    if f"\n{run.nonce}:tests\n" in output:
        raise Refused(Reason.TESTS_NOT_RESTORED, "the instance's test files are not as they should be")
    if result.omitted_bytes and f"\n{run.nonce}:start\n" not in output:
        raise SandboxFault(f"{instance.instance_id}: the beginning of the tests' output was not kept")
    log, status = between_markers(output, run.nonce)
    # Behind another command (a script, tox) the process's status is that command's.
    known = status if command.is_pytest else None
    records = await _records(fresh, run, "pytest")
    if records or command.is_pytest:
        if not records:
            raise Refused(Reason.TESTS_INCOMPLETE, "pytest told nothing: it did not start")
        outcomes = outcomes_of_records(records, known, run.canaries)
        if run.must_fail:
            outcomes = without_must_fail(outcomes, run.must_fail, run.modules)
        return await asyncio.to_thread(statuses_of_outcomes, outcomes, instance)
    if run.must_fail and status == 0 and command.words():
        raise Refused(Reason.TAMPERING, "the test command ended with status 0 although a test failed")
    records = await _records(fresh, run, "unittest")
    told = await asyncio.to_thread(outcomes_of_unittests, records or [], names_of(instance), run.must_fail)
    if told is not None:
        return told
    if records is not None and is_unittest_parser(log_parser(instance).__name__):
        # The watcher was there, so what the output tells of tests did not come from unittest.
        raise Refused(Reason.TESTS_INCOMPLETE, "no test was begun")
    if result.omitted_bytes:
        raise Refused(Reason.OUTPUT_TOO_LONG, f"the tests printed more than {OUTPUT_BYTES >> 20} MiB")
    return await asyncio.to_thread(statuses_of_log, log, status, instance, run.must_fail, command.line)


async def _records(fresh: Workspace, run: TestRun, kind: str) -> list[dict[str, Any]] | None:
    """The sealed records that the watcher of `kind` has left; None where it was not loaded."""
    try:
        raw = await fresh.sandbox.get(f"{run.folder}/{kind}-records")
    except OSError:
        return None
    return read_records(raw, run.key)


__all__ = ["Grade", "Reason", "assert_complete", "assert_gradable", "grade_patch", "refused_grade"]
