"""What the sealed records of `inside/unittest_results.py` say of a run of unittest, or Django's over it. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from envs.swe_bench.grading.verdict import BAD, ORDER, Reason, Refused


def outcomes_of_unittests(
    records: list[dict[str, Any]], names: Callable[[str, str], set[str]], must_fail: str
) -> dict[str, str] | None:
    """Each test's outcome by all its names; None where no unittest was run. Raises `Refused`.

    `names` gives the names that a data set may use of a test (its id, the first line of its docstring). `must_fail` is
    part of the name of our own test: only runs in which it failed are believed, and "" believes all that ended.
    """
    runs: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        runs.setdefault(record["run"], []).append(record)
    if not any(record["kind"] == "unit" for record in records):
        return None
    statuses: dict[str, str] = {}
    own: list[str] = []
    for told in runs.values():
        finish = [record for record in told if record["kind"] == "finish"]
        tests = _tests(told)
        ours = [outcome for (test, _), outcome in tests.items() if must_fail and must_fail in test]
        own += ours
        if must_fail and not ours:
            continue  # a run of the tests' own, or one that the code under test made up
        if not finish:
            raise Refused(Reason.TESTS_INCOMPLETE, "unittest did not come to its end")
        _assert_counted(told, finish[-1], tests)
        for (test, words), outcome in tests.items():
            if must_fail and must_fail in test:
                continue
            for name in names(test, words):
                known = statuses.get(name)
                statuses[name] = outcome if known is None else min(known, outcome, key=ORDER.index)
    if must_fail and any(outcome not in BAD for outcome in own):
        raise Refused(Reason.TAMPERING, "a test that must fail was told to have passed: failures are hidden")
    if must_fail and not own:
        raise Refused(Reason.TESTS_INCOMPLETE, "the test that checks the test run was not told")
    return statuses


def _tests(told: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """The worst that was told of each test; a test that only began did not pass."""
    seen: dict[tuple[str, str], set[str]] = {}
    for record in told:
        if record["kind"] == "unit":
            seen.setdefault((record["id"], record["words"]), set()).add(record["outcome"])
    return {test: min(outcomes - {"start"} or {"ERROR"}, key=ORDER.index) for test, outcomes in seen.items()}


def _assert_counted(told: list[dict[str, Any]], finish: Mapping[str, Any], tests: Mapping[Any, str]) -> None:
    if told[-1]["kind"] != "finish":
        raise Refused(Reason.TAMPERING, "results were told after the tests had ended")
    started = sum(record.get("outcome") == "start" for record in told)
    if finish["ran"] != started:
        raise Refused(Reason.TAMPERING, f"unittest counted {finish['ran']} tests, and {started} were seen to begin")
    bad = any(outcome in (*BAD, "XPASS") for outcome in tests.values())
    if bad != bool(finish["bad"]):
        raise Refused(Reason.TAMPERING, "unittest's own count of failures is not what was seen")
