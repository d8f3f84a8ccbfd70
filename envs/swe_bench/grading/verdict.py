"""What a test run says about an instance, decided on the host from what came out of the container. No I/O."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from xml.etree.ElementTree import ParseError

from envs.swe_bench.grading.readers import Uncounted
from envs.swe_bench.grading.reference import Reference
from envs.swe_bench.grading.runners import check, runner_of
from envs.swe_bench.instance import Instance, InstanceError

BAD = ("FAILED", "ERROR")
ORDER = ("ERROR", "FAILED", "XPASS", "SKIPPED", "XFAIL_IN_CODE", "XFAIL", "PASSED")
"""Outcomes, worst first: a test that is told twice counts as the worse of both.

XFAIL is of a test that is marked so; XFAIL_IN_CODE is one that said so while it ran, or of which no mark can be seen.
"""
PYTEST_PARSER = "parse_log_pytest_v2"


class Reason(StrEnum):
    """Why a patch does not get the reward."""

    NO_PATCH = "no_patch"
    PATCH_UNREADABLE = "patch_unreadable"
    PATCH_TOO_LARGE = "patch_too_large"
    PATCH_DOES_NOT_APPLY = "patch_does_not_apply"
    TESTS_NOT_RESTORED = "tests_not_restored"
    TIMEOUT = "timeout"
    TESTS_INCOMPLETE = "tests_incomplete"
    TAMPERING = "tampering"
    OUTPUT_TOO_LONG = "output_too_long"
    TESTS_FAIL = "tests_fail"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason, and a sentence on it that names no test of the instance."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one patch. Counts are of the instance's tests; they are 0 where the tests were not run.

    `left_out`: files of the patch that were not carried out (see `protected`). `log`: what the tests printed, and
    `failing`: the instance's tests that did not pass, for people; they name tests, so no agent is ever shown them.
    `reference`: what a run of the reference patch leaves for later ones, where it was graded as such.
    """

    resolved: bool
    refusal: Refusal | None
    fail_to_pass: tuple[int, int]
    pass_to_pass: tuple[int, int]
    left_out: tuple[str, ...] = ()
    log: str = ""
    duration_s: float = 0.0
    failing: tuple[str, ...] = ()
    reference: Reference | None = None


@dataclass(frozen=True, slots=True)
class Canaries:
    """Ids of tests of our own, run among the instance's: one must pass, the others must not."""

    passing: str
    failing: tuple[str, ...]


class Refused(Exception):
    """Carries a `Refusal` to where a grade is made of it."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


def between_markers(output: str, nonce: str) -> tuple[str, int]:
    """What was printed between the two markers of `nonce`, and the exit code that the second one tells.

    Raises `Refused` unless each stands there exactly once, on a line of its own and in order.
    """
    start = list(re.finditer(rf"^{nonce}:start\n", output, re.MULTILINE))
    end = list(re.finditer(rf"^{nonce}:end (\d+)$", output, re.MULTILINE))
    if len(start) > 1 or len(end) > 1:
        raise Refused(Reason.TAMPERING, "a marker around the tests' output was printed more than once")
    if not start:
        raise Refused(Reason.TESTS_INCOMPLETE, "the tests did not start: setting them up ended early")
    if not end:
        raise Refused(Reason.TESTS_INCOMPLETE, "the shell that ran the tests was ended before they were over")
    if end[0].start() < start[0].end():
        raise Refused(Reason.TAMPERING, "the markers around the tests' output are out of order")
    return output[start[0].end() : end[0].start()], int(end[0][1])


def read_records(raw: bytes, key: bytes) -> list[dict[str, Any]]:
    """The sealed records of `inside/results.py`, in order. Raises `Refused` for anything that it did not write."""
    records: list[dict[str, Any]] = []
    for line in raw.split(b"\n"):
        if not line:
            continue
        seal, _, body = line.partition(b" ")
        if not hmac.compare_digest(seal, hmac.new(key, body, hashlib.sha256).hexdigest().encode()):
            raise Refused(Reason.TAMPERING, "a record of the tests' results is not sealed as it should be")
        record = json.loads(body)
        if record.get("n") != len(records):
            raise Refused(Reason.TAMPERING, "records of the tests' results are missing or repeated")
        records.append(record)
    return records


def outcomes_of_records(records: list[dict[str, Any]], status: int | None, canaries: Canaries | None) -> dict[str, str]:
    """Each test's outcome (pytest's words in capitals) by node id, canaries taken out. Raises `Refused`."""
    finishes = [record for record in records if record["kind"] == "finish"]
    if not finishes:
        raise Refused(Reason.TESTS_INCOMPLETE, "pytest did not come to its end")
    if len(finishes) > 1 or records[-1]["kind"] != "finish":
        raise Refused(Reason.TAMPERING, "results were told after the tests had ended")
    if status is not None and finishes[0]["status"] != status:
        raise Refused(Reason.TAMPERING, f"pytest ended with status {finishes[0]['status']}, its process with {status}")
    seen: dict[str, set[str]] = {}
    for record in records:
        if record["kind"] == "collect":
            seen.setdefault(record["id"], set()).add("ERROR" if record["outcome"] == "failed" else "SKIPPED")
        elif record["kind"] == "test":
            seen.setdefault(record["id"], set()).add(_phase_outcome(record))
    outcomes = {test: _whole(phases) for test, phases in seen.items()}
    # "" is the outcome of a test of which only some phases were told, all of them well.
    outcomes = {test: outcome or "ERROR" for test, outcome in outcomes.items()}
    if canaries is not None:
        told = [outcomes.pop(test, None) for test in (canaries.passing, *canaries.failing)]
        if None in told:
            # An error at collection stops pytest before the first test; then there is nothing to distrust.
            if any(outcome in ("PASSED", "XFAIL", "XFAIL_IN_CODE", "XPASS") for outcome in outcomes.values()):
                raise Refused(Reason.TAMPERING, "the tests that check the test run were not run")
            return outcomes
        if any(outcome not in BAD for outcome in told[1:]):
            raise Refused(Reason.TAMPERING, "a test that must fail was told to have passed: failures are hidden")
        if told[0] != "PASSED":
            raise Refused(Reason.TESTS_INCOMPLETE, "a test that must pass failed: the test run is broken as a whole")
        if status == 0:
            raise Refused(Reason.TAMPERING, "pytest ended with status 0 although a test failed")
    return outcomes


def _phase_outcome(record: Mapping[str, Any]) -> str:
    outcome, when, expected = record["outcome"], record["when"], record["wasxfail"]
    if outcome == "passed":
        return "XPASS" if expected and when == "call" else f"passed:{when}"
    if outcome == "failed":
        return "FAILED" if when == "call" else "ERROR"
    if outcome == "skipped":
        if expected:
            return "XFAIL" if record.get("marked") else "XFAIL_IN_CODE"
        return "SKIPPED"
    return "passed:again" if outcome == "rerun" else "ERROR"


def _whole(phases: Collection[str]) -> str:
    for outcome in ORDER[:-1]:
        if outcome in phases:
            return outcome
    return "PASSED" if {"passed:setup", "passed:call", "passed:teardown"} <= set(phases) else ""


def log_parser(instance: Instance) -> Any:
    """The row's parser of swebench's registry, or the one it has for the repository, else pytest's."""
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
        from swebench.harness.log_parsers.python import MAP_REPO_TO_PARSER_PY
    except ImportError as error:
        raise InstanceError(f"grading needs swebench ({error}): pip install 'sao-agents[swe-bench]'") from error
    if not instance.log_parser:
        return MAP_REPO_TO_PARSER_PY.get(instance.repo, PARSER_REGISTRY[PYTEST_PARSER])
    try:
        return PARSER_REGISTRY[instance.log_parser]
    except KeyError:
        raise InstanceError(
            f"row {instance.instance_id}: field 'log_parser': swebench has no parser {instance.log_parser!r}"
        ) from None


def statuses_of_outcomes(outcomes: Mapping[str, str], instance: Instance) -> dict[str, str]:
    """The outcomes under the names that the data set uses: pytest's node ids, and what its log parser makes of them."""
    parser = log_parser(instance)
    statuses: dict[str, str] = {}
    for test, outcome in outcomes.items():
        # A passing line, whatever the outcome is: the parser is asked for the test's name only.
        for name in {test, *parser(f"PASSED {test}\n", instance)}:
            known = statuses.get(name)
            statuses[name] = outcome if known is None else min(known, outcome, key=ORDER.index)
    return statuses


def names_of(instance: Instance) -> Callable[[str, str], set[str]]:
    """What a data set may call a test of unittest: its id, its description, and what the row's parser makes of both."""
    parser = log_parser(instance)

    def names(test: str, words: str) -> set[str]:
        printed = f"{test}\n{words}" if words else test
        return {test, words or test, *parser(f"{printed} ... ok\n", instance)}

    return names


def without_must_fail(outcomes: Mapping[str, str], must_fail: str, modules: Collection[str] = ()) -> dict[str, str]:
    """`outcomes` without those of our own tests, whose names hold `must_fail`. Raises `Refused` unless they failed.

    `modules`: the test modules that hold them, where ids begin with a module; then it is asked of each of them.
    """
    told = {test: outcome for test, outcome in outcomes.items() if must_fail in test}
    rest = {test: outcome for test, outcome in outcomes.items() if must_fail not in test}
    if any(outcome not in BAD for outcome in told.values()):
        raise Refused(Reason.TAMPERING, "a test that must fail was told to have passed: failures are hidden")
    for start in [f"{module}::" for module in modules] or [""]:
        ran = any(outcome not in BAD for test, outcome in rest.items() if test.startswith(start))
        if ran and not any(test.startswith(start) for test in told):
            raise Refused(Reason.TAMPERING, "the test that checks the test run was not told")
    return rest


def statuses_of_log(
    log: str, status: int, instance: Instance, must_fail: str = "", command: str = ""
) -> dict[str, str]:
    """What swebench's parser reads in a log, held to what the runner itself says and counts. Raises `Refused`.

    `must_fail`: part of the names of tests of our own, which the log must tell to have failed. `command`: what was run.
    """
    raw, log = log.replace("\r\n", "\n"), _ANSI.sub("", log).replace("\r\n", "\n")
    parser = log_parser(instance)
    runner = runner_of(parser.__name__)
    try:
        statuses = _known(parser(raw if runner is not None and runner.coloured else log, instance))
    except (ValueError, KeyError, LookupError, TypeError, ParseError) as error:  # of JSON or XML that the code broke
        raise Refused(Reason.TESTS_INCOMPLETE, f"the output of the tests cannot be read: {error}") from error
    if parser.__module__.endswith(".python"):
        for line in log.split("\n"):
            for test, outcome in _known(parser(line + "\n", instance)).items():
                statuses[test] = min(statuses.get(test, outcome), outcome, key=ORDER.index)
    if not statuses and (runner is None or runner.read is None):
        raise Refused(Reason.TESTS_INCOMPLETE, "no test's result can be read in the output")
    try:
        statuses = check(parser.__name__, log, statuses, command)
    except Uncounted as error:
        raise Refused(
            Reason.TESTS_INCOMPLETE if "did not come" in str(error) else Reason.TAMPERING, str(error)
        ) from error
    # A line cannot show whether the test was marked so.
    statuses = {test: "XFAIL_IN_CODE" if outcome == "XFAIL" else outcome for test, outcome in statuses.items()}
    if status != 0 and not any(outcome in BAD for outcome in statuses.values()):
        raise Refused(Reason.TAMPERING, f"no failure was printed, but the test command ended with status {status}")
    return without_must_fail(statuses, must_fail) if must_fail else statuses


def _known(statuses: Mapping[str, str]) -> dict[str, str]:
    """A first word that only begins like an outcome ("PASSEDx") is none: no test has passed so."""
    return {test: outcome if outcome in ORDER else "ERROR" for test, outcome in statuses.items()}


_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def counted(statuses: Mapping[str, str], reference: Reference | None) -> dict[str, str]:
    """`statuses` with skipped and unmarked xfailed tests as what the reference run has them for, else as failures."""
    skipped = frozenset(reference.skipped if reference else ())
    xfailed = frozenset(reference.xfailed if reference else ())
    known = {"SKIPPED": ("SKIPPED", skipped), "XFAIL_IN_CODE": ("XFAIL", xfailed)}
    result = {}
    for test, outcome in statuses.items():
        as_reference, tests = known.get(outcome, (outcome, None))
        result[test] = as_reference if tests is None or test in tests else "FAILED"
    return result


@dataclass(frozen=True, slots=True)
class Judged:
    """(passed, all) of FAIL_TO_PASS and of PASS_TO_PASS, and the ids that did not pass."""

    fail_to_pass: tuple[int, int]
    pass_to_pass: tuple[int, int]
    failing: tuple[str, ...]


def judge_tests(statuses: Mapping[str, str], instance: Instance, reference: Reference | None = None) -> Judged:
    """Which of the instance's tests pass, by swebench's own rules and the reference run."""
    try:
        from swebench.harness.constants import EvalType
        from swebench.harness.grading import get_eval_tests_report
    except ImportError as error:
        raise InstanceError(f"grading needs swebench ({error}): pip install 'sao-agents[swe-bench]'") from error
    wanted = {"FAIL_TO_PASS": list(instance.fail_to_pass), "PASS_TO_PASS": list(instance.pass_to_pass)}
    report = get_eval_tests_report(counted(statuses, reference), wanted, eval_type=EvalType.PASS_AND_FAIL)
    passed = {kind: set(report[kind]["success"]) for kind in wanted}
    failing = tuple(test for kind, tests in wanted.items() for test in tests if test not in passed[kind])
    f2p, p2p = ((len(passed[kind]), len(wanted[kind])) for kind in wanted)
    return Judged(f2p, p2p, failing)


def judge(
    statuses: Mapping[str, str], instance: Instance, reference: Reference | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(passed, all) of FAIL_TO_PASS and of PASS_TO_PASS; see `judge_tests`."""
    judged = judge_tests(statuses, instance, reference)
    return judged.fail_to_pass, judged.pass_to_pass
