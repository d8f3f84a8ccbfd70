# ruff: noqa: E501
"""Cases K7 to K9 without a container: a result is what the runner counted, held to the run of the reference patch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from envs.swe_bench.grading.reference import References, reference_of, write_references
from envs.swe_bench.grading.unittests import outcomes_of_unittests
from envs.swe_bench.grading.verdict import Reason, Refused, judge, judge_tests, outcomes_of_records, statuses_of_log
from envs.swe_bench.instance import Instance, InstanceError, read_row

LINE, DOUBLE = "-" * 70, "=" * 70


def row(parser: str, fail_to_pass: list[str], pass_to_pass: list[str], **more: Any) -> Instance:
    return read_row(
        {
            "instance_id": "a__b-1", "repo": "a/b", "base_commit": "c", "patch": "", "problem_statement": "p",
            "test_patch": "diff --git a/t.py b/t.py\n", "FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass,
            "log_parser": parser, **more,
        },
        "x",
    )  # fmt: skip


DJANGO = row("parse_log_django", ["test_a (m.T)", "What b does"], ["test_c (m.T)"])
HONEST = (
    "Creating test database for alias 'default'...\nSystem check identified no issues (0 silenced).\n"
    "test_a (m.T) ... {a}ok\ntest_b (m.T)\nWhat b does ... ok\ntest_c (m.T) ... ok\n"
    "test_d (m.T) ... skipped 'no database'\ntest_e (m.T) ... expected failure\n"
    f"test_0ur5 (m.Test0ur5) ... FAIL\n\n{DOUBLE}\nFAIL: test_0ur5 (m.Test0ur5)\n{LINE}\nTraceback\nAssertionError\n\n"
    f"{LINE}\nRan 6 tests in 0.010s\n\nFAILED (failures=1, skipped=1, expected failures=1)\n"
)


@pytest.mark.parametrize("printed", ["", "debug\n", "ok\n", "a warning: x ... y\n", "\x1b[31mred\x1b[0m "])
def test_an_honest_run_with_a_debug_print_stays_resolved(printed: str) -> None:
    statuses = statuses_of_log(HONEST.format(a=printed), 1, DJANGO, "test_0ur5")
    assert judge(statuses, DJANGO) == ((2, 2), (1, 1)), statuses
    assert statuses["test_d (m.T)"] == "SKIPPED"


@pytest.mark.parametrize(
    "header",
    [
        "FAIL: test_a (m.T)\n",
        "FAIL: test_a (m.T) (i=1)\n",
        "FAIL: test_a (m.T) [message]\n",
        "ERROR: test_b (m.T)\nWhat b does\n",
        "ERROR: test_a (m.T)\nAnd what a does\n",
    ],
)
def test_a_name_in_a_failure_header_has_failed(header: str) -> None:
    """The line of the test itself reads `ok`, printed by the code, and the runner's own word is on the next one."""
    log = HONEST.format(a="ok\n").replace(f"{DOUBLE}\n", f"{DOUBLE}\n{header}{LINE}\nTraceback\n\n{DOUBLE}\n", 1)
    log = log.replace("(failures=1", "(failures=2" if header.startswith("FAIL") else "(failures=1, errors=1")
    statuses = statuses_of_log(log, 1, DJANGO, "test_0ur5")
    assert judge(statuses, DJANGO)[0] == (1, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("Ran 6 tests", "Ran 5 tests"), Reason.TAMPERING),
        (("failures=1", "failures=2"), Reason.TAMPERING),
        (("FAILED (failures=1, skipped=1, expected failures=1)", "OK"), Reason.TAMPERING),
        (("Ran 6 tests in 0.010s", ""), Reason.TAMPERING),
        (("Ran 6 tests in 0.010s", "Ran 6 tests in 0.010s\n\nOK\n\nRan 6 tests in 0.010s"), Reason.TAMPERING),
        (("test_c (m.T) ... ok", "test_c (m.T) ... ok\ntest_x (m.T) ... ok"), Reason.TAMPERING),
        (("test_0ur5 (m.Test0ur5) ... FAIL", "test_0ur5 (m.Test0ur5) ... ok"), None),
        (("FAIL: test_0ur5 (m.Test0ur5)", "FAIL: test_x (m.T)"), Reason.TAMPERING),
    ],
)
def test_counts_that_do_not_agree_are_refused(change: tuple[str, str], reason: Reason | None) -> None:
    log = HONEST.format(a="").replace(*change)
    assert log != HONEST.format(a="")
    if reason is None:  # the header counts, whatever stands in the line
        assert judge(statuses_of_log(log, 1, DJANGO, "test_0ur5"), DJANGO) == ((2, 2), (1, 1))
        return
    with pytest.raises(Refused) as refused:
        statuses_of_log(log.replace("test_0ur5 (m.Test0ur5) ... FAIL", ""), 1, DJANGO, "test_0ur5")
    assert refused.value.refusal.reason == reason


def test_subtests_and_classes_that_fail_are_counted_as_unittest_counts_them() -> None:
    """A test fails once for each subtest, and an error of a class is of no test that ran."""
    headers = "".join(
        f"{DOUBLE}\n{header}\n{LINE}\nTraceback\n\n"
        for header in ("ERROR: setUpClass (m.U)", "FAIL: test_s (m.T) (i=1)", "FAIL: test_s (m.T) (i=(2, 3))")
    )
    lines = "test_s (m.T) ... \n  test_s (m.T) (i=1) ... FAIL\n  test_s (m.T) (i=(2, 3)) ... FAIL\nsetUpClass (m.U) ... ERROR\n"
    log = HONEST.format(a="").replace("test_0ur5 (m.Test0ur5) ...", f"{lines}test_0ur5 (m.Test0ur5) ...")
    log = log.replace(f"{DOUBLE}\nFAIL: test_0ur5", f"{headers}{DOUBLE}\nFAIL: test_0ur5")
    log = log.replace("Ran 6", "Ran 7").replace("(failures=1", "(failures=3, errors=1")
    statuses = statuses_of_log(log, 1, DJANGO, "test_0ur5")
    assert judge(statuses, DJANGO) == ((2, 2), (1, 1))
    assert statuses["test_s (m.T)"] == "FAILED"


SYMPY = row("parse_log_sympy", ["test_a"], ["test_b", "test_c"])
SYMPY_RUN = (
    "============================= test process starts ==============================\nrandom seed:        1\n\n"
    "sympy/x/tests/test_x.py[4] \ntest_a {a}{result}\ntest_b ok\ntest_d Slow w\ntest_0ur5 F       [FAIL]\n\n"
    "sympy/x/tests/test_y.py[2] \ntest_c ok\ntest_e f                                   [OK]\n\n{header}"
    "________________________________________________________________________________\n"
    "____________________ sympy/x/tests/test_x.py:test_0ur5 _____________________\nTraceback\nAssertionError\n\n"
    "=== tests finished: {passed} passed, {failed} failed, 1 skipped, 1 expected to fail, \nin 0.50 seconds ===\n"
    "DO *NOT* COMMIT!\n"
)


@pytest.mark.parametrize("printed", ["", "debug\n", "ok\n", "F\n", "test it\n", "E "])
def test_an_honest_sympy_run_with_a_debug_print_stays_resolved(printed: str) -> None:
    log = SYMPY_RUN.format(a=printed, result="ok", header="", passed=3, failed=1)
    assert judge(statuses_of_log(log, 1, SYMPY, "test_0ur5"), SYMPY) == ((1, 1), (2, 2))


@pytest.mark.parametrize("printed", ["", "ok\n", "ok ", "x ok\ntest_a ok\n"])
@pytest.mark.parametrize("between", [":", "::"])
def test_a_sympy_test_that_prints_ok_and_fails_has_failed(printed: str, between: str) -> None:
    header = f"{'_' * 80}\n___ sympy/x/tests/test_x.py{between}test_a ___\nTraceback\n\n"
    log = SYMPY_RUN.format(a=printed, result="F", header=header, passed=2, failed=2)
    with contextlib.suppress(Refused):
        assert judge(statuses_of_log(log, 1, SYMPY, "test_0ur5"), SYMPY)[0] == (0, 1)


def test_a_sympy_run_whose_closing_line_counts_otherwise_is_refused() -> None:
    for passed, failed in ((4, 1), (2, 1), (3, 2)):
        log = SYMPY_RUN.format(a="", result="ok", header="", passed=passed, failed=failed)
        with pytest.raises(Refused):
            statuses_of_log(log, 1, SYMPY, "test_0ur5")


def told(
    *outcomes: tuple[str, str], run: int = 0, ran: int | None = None, bad: int | None = None
) -> list[dict[str, Any]]:
    records = []
    for test, outcome in outcomes:
        steps = dict.fromkeys(("start", outcome))
        records += [{"kind": "unit", "run": run, "id": test, "words": "", "outcome": one} for one in steps]
    failures = sum(outcome in ("FAILED", "ERROR") for _, outcome in outcomes)
    finish = {"kind": "finish", "run": run, "ran": len(outcomes) if ran is None else ran}
    return [*records, {**finish, "bad": failures if bad is None else bad}]


OURS = ("test_0ur5 (m.T)", "FAILED")


def read(records: list[dict[str, Any]]) -> dict[str, str] | None:
    return outcomes_of_unittests(records, lambda test, words: {test, words or test}, "test_0ur5")


def test_records_of_unittest_are_read() -> None:
    assert read(told(("a", "PASSED"), ("b", "FAILED"), OURS)) == {"a": "PASSED", "b": "FAILED"}
    assert read([]) is None
    # A run that the code under test makes up has no test of ours, and says nothing.
    assert read([*told(("a", "PASSED")), *told(("a", "FAILED"), OURS, run=1)]) == {"a": "FAILED"}
    # A test that began and of which nothing more was told did not pass.
    assert read(told(("a", "start"), OURS)) == {"a": "ERROR"}


@pytest.mark.parametrize(
    "records",
    [
        told(("a", "PASSED"), ("test_0ur5 (m.T)", "PASSED")),
        told(("a", "PASSED")),
        told(("a", "PASSED"), OURS, ran=1),
        told(("a", "PASSED"), OURS, bad=0),
        told(("a", "PASSED"), OURS)[:-1],
        [*told(("a", "PASSED"), OURS), *told(("b", "PASSED"))[:2]],
    ],
    ids=["ours passes", "ours not run", "another count", "no failure counted", "no end", "after the end"],
)
def test_records_of_unittest_that_are_not_right_are_refused(records: list[dict[str, Any]]) -> None:
    with pytest.raises(Refused):
        read(records)


PYTEST = row("parse_log_pytest_v2", ["t.py::a"], ["t.py::b"])


@pytest.mark.parametrize("outcome", ["SKIPPED", "XFAIL_IN_CODE"])
def test_what_does_not_plainly_pass_counts_where_the_reference_run_has_it_so(outcome: str, tmp_path: Path) -> None:
    statuses = {"t.py::a": "PASSED", "t.py::b": outcome}
    assert judge(statuses, PYTEST) == ((1, 1), (0, 1))
    record = reference_of(PYTEST, statuses)
    assert judge(statuses, PYTEST, record) == ((1, 1), (1, 1))
    # The record is of that test alone, and not of a test that must begin to pass by being skipped.
    assert judge({"t.py::a": outcome, "t.py::b": "PASSED"}, PYTEST, record)[0] == (0, 1)
    write_references(tmp_path / "reference.jsonl", [record])
    assert References(tmp_path / "reference.jsonl").of(PYTEST) == record
    changed = row("parse_log_pytest_v2", ["t.py::a"], ["t.py::b", "t.py::c"])
    with pytest.raises(InstanceError, match="validate it again"):
        References(tmp_path / "reference.jsonl").of(changed)


def test_a_skip_never_makes_a_test_begin_to_pass() -> None:
    statuses = {"t.py::a": "SKIPPED", "t.py::b": "PASSED"}
    judged = judge_tests(statuses, PYTEST, reference_of(PYTEST, statuses))
    assert (judged.fail_to_pass, judged.failing) == ((0, 1), ("t.py::a",))


def test_xfail_counts_for_what_is_marked_so() -> None:
    def records(*, marked: bool) -> list[dict[str, Any]]:
        phases = (("setup", "passed", False), ("call", "skipped", True), ("teardown", "passed", False))
        return [
            {"kind": "test", "id": "t.py::b", "when": when, "outcome": outcome, "wasxfail": xfail, "marked": marked}
            for when, outcome, xfail in phases
        ] + [{"kind": "finish", "status": 0}]

    assert outcomes_of_records(records(marked=True), 0, None) == {"t.py::b": "XFAIL"}
    assert outcomes_of_records(records(marked=False), 0, None) == {"t.py::b": "XFAIL_IN_CODE"}


@pytest.mark.parametrize("content", ["{}", "no json", '{"instance_id": 3, "row": ""}'])
def test_a_file_of_reference_runs_that_is_none_is_said(content: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(content)
    with pytest.raises(InstanceError, match="line 1"):
        References(tmp_path / "r.jsonl")
