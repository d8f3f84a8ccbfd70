"""Cases F3 and F4 without a container: markers, sealed records, forged and mangled logs, what a patch may not touch."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.swe_bench.grading.protected import changes_how_tests_run, import_roots, is_protected, split_patch
from envs.swe_bench.grading.run_script import command_of, make_run
from envs.swe_bench.grading.verdict import (
    Canaries,
    Reason,
    Refused,
    between_markers,
    judge,
    outcomes_of_records,
    read_records,
    statuses_of_log,
    statuses_of_outcomes,
)
from envs.swe_bench.instance import Instance, read_row

NONCE, KEY = "n" * 32, b"k" * 32
CANARIES = Canaries("t.py::good", ("t.py::bad",))


def instance(parser: str = "parse_log_pytest_v2", **fields: Any) -> Instance:
    row = {
        "instance_id": "a__b-1", "repo": "a/b", "base_commit": "c", "patch": "", "problem_statement": "p",
        "test_patch": "diff --git a/t.py b/t.py\n", "FAIL_TO_PASS": ["t.py::f"], "PASS_TO_PASS": ["t.py::p"],
        "log_parser": parser,
    }  # fmt: skip
    return read_row({**row, **fields}, "x")


def sealed(records: list[dict[str, Any]], key: bytes = KEY) -> bytes:
    lines = []
    for number, record in enumerate(records):
        body = json.dumps({"n": number, **record}, sort_keys=True).encode()
        lines.append(hmac.new(key, body, hashlib.sha256).hexdigest().encode() + b" " + body + b"\n")
    return b"".join(lines)


def passed(test: str) -> list[dict[str, Any]]:
    return [
        {"kind": "test", "id": test, "when": when, "outcome": "passed", "wasxfail": False}
        for when in ("setup", "call", "teardown")
    ]


def failed(test: str) -> list[dict[str, Any]]:
    return [{**record, "outcome": "failed"} if record["when"] == "call" else record for record in passed(test)]


FINISH = {"kind": "finish", "status": 1}


def test_honest_run_is_read() -> None:
    records = read_records(sealed([*passed("t.py::f"), *passed("t.py::good"), *failed("t.py::bad"), FINISH]), KEY)
    assert outcomes_of_records(records, 1, CANARIES) == {"t.py::f": "PASSED"}


@pytest.mark.parametrize(
    ("records", "status", "reason"),
    [
        ([*passed("t.py::f"), *passed("t.py::good"), *passed("t.py::bad"), FINISH], 1, Reason.TAMPERING),
        ([*passed("t.py::f"), FINISH], 1, Reason.TAMPERING),
        ([*passed("t.py::good"), *failed("t.py::bad"), {"kind": "finish", "status": 0}], 0, Reason.TAMPERING),
        ([*passed("t.py::good"), *failed("t.py::bad"), FINISH], 0, Reason.TAMPERING),
        ([*passed("t.py::good"), *failed("t.py::bad"), FINISH, *passed("t.py::f")], 1, Reason.TAMPERING),
        ([*passed("t.py::good"), *failed("t.py::bad"), FINISH, FINISH], 1, Reason.TAMPERING),
        ([*failed("t.py::good"), *failed("t.py::bad"), FINISH], 1, Reason.TESTS_INCOMPLETE),
        ([*passed("t.py::f")], 0, Reason.TESTS_INCOMPLETE),
    ],
    ids=[
        "all passes",
        "own tests not run",
        "status 0",
        "other status",
        "after the end",
        "two ends",
        "all fails",
        "no end",
    ],
)
def test_run_that_is_not_right_is_refused(records: list[dict[str, Any]], status: int, reason: Reason) -> None:
    with pytest.raises(Refused) as refused:
        outcomes_of_records(read_records(sealed(records), KEY), status, CANARIES)
    assert refused.value.refusal.reason == reason


def test_error_at_collection_is_no_tampering() -> None:
    records = [{"kind": "collect", "id": "t.py", "outcome": "failed"}, {"kind": "finish", "status": 2}]
    assert outcomes_of_records(read_records(sealed(records), KEY), 2, CANARIES) == {"t.py": "ERROR"}


@given(st.data())
def test_records_cannot_be_changed(data: st.DataObject) -> None:
    """Any line that is dropped, repeated, swapped, or written without the key is seen."""
    lines = sealed([*failed("t.py::f"), *passed("t.py::p"), FINISH]).splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines) - 2))
    forged = sealed([*passed("t.py::f"), *passed("t.py::p"), FINISH], b"other").splitlines(keepends=True)
    changed = data.draw(
        st.sampled_from(
            [
                lines[:at] + lines[at + 1 :],
                lines[: at + 1] + lines[at:],
                [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]],
                [*lines[:at], forged[at], *lines[at + 1 :]],
                [*lines[:at], b"PASSED t.py::f\n", *lines[at:]],
            ]
        )
    )
    with pytest.raises(Refused) as refused:
        read_records(b"".join(changed), KEY)
    assert refused.value.refusal.reason == Reason.TAMPERING


@given(st.text(), st.text())
def test_output_between_markers_is_found_whatever_it_is(before: str, inside: str) -> None:
    output = f"{before}\n{NONCE}:start\n{inside}\n{NONCE}:end 1\n"
    assert between_markers(output, NONCE) == (f"{inside}\n", 1)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (f"x\n{NONCE}:start\nPASSED t.py::f\n{NONCE}:end 0\nmore\n{NONCE}:end 1\n", Reason.TAMPERING),
        (f"{NONCE}:end 0\n{NONCE}:start\n", Reason.TAMPERING),
        (f"{NONCE}:start\nPASSED t.py::f\n>>>>> End Test Output\n", Reason.TESTS_INCOMPLETE),
        ("PASSED t.py::f\n", Reason.TESTS_INCOMPLETE),
    ],
    ids=["two ends", "wrong order", "another marker", "none"],
)
def test_markers_that_are_not_right_are_refused(output: str, reason: Reason) -> None:
    with pytest.raises(Refused) as refused:
        between_markers(output, NONCE)
    assert refused.value.refusal.reason == reason


IDS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=20)


@given(IDS)
@settings(deadline=None)
def test_any_test_id_is_found_again(name: str) -> None:
    """Case F4: spaces, brackets, dashes, any alphabet."""
    test = f"t.py::test[{name}]"
    row = instance(FAIL_TO_PASS=[test], PASS_TO_PASS=[])
    assert judge(statuses_of_outcomes({test: "PASSED"}, row), row) == ((1, 1), (0, 0))
    assert judge(statuses_of_outcomes({test: "FAILED"}, row), row) == ((0, 1), (0, 0))


@pytest.mark.parametrize(
    ("parser", "known"),
    [("parse_log_pytest", "t.py::f[a"), ("parse_log_requests", "t.py::f[/c]"), ("parse_log_pytest_v2", "t.py::f[a b]")],
)
def test_ids_are_known_by_the_names_their_parser_gives(parser: str, known: str) -> None:
    row = instance(parser, FAIL_TO_PASS=[known], PASS_TO_PASS=[])
    outcomes = {"t.py::f[a b]": "PASSED", "t.py::f[/x/c]": "PASSED"}
    assert judge(statuses_of_outcomes(outcomes, row), row)[0] == (1, 1)
    # Where a parser cuts two ids to one name, the worse counts.
    worse = {**outcomes, "t.py::f[a c]": "FAILED"}
    assert judge(statuses_of_outcomes(worse, row), row)[0] == ((0, 1) if parser == "parse_log_pytest" else (1, 1))


def test_worse_of_two_lines_counts_in_a_log() -> None:
    log = "FAILED t.py::f - boom\n\x1b[32mPASSED\x1b[0m t.py::p\nPASSED t.py::f\n= 1 failed, 2 passed in 0.1s =\n"
    statuses = statuses_of_log(log, 1, instance())
    assert (statuses["t.py::f"], statuses["t.py::p"]) == ("FAILED", "PASSED")


def test_log_that_tells_no_failure_needs_status_0() -> None:
    with pytest.raises(Refused) as refused:
        statuses_of_log("PASSED t.py::f\n= 1 passed in 0.1s =\n", 1, instance())
    assert refused.value.refusal.reason == Reason.TAMPERING
    with pytest.raises(Refused) as refused:
        statuses_of_log("Segmentation fault\n", 139, instance())
    assert refused.value.refusal.reason == Reason.TESTS_INCOMPLETE


@pytest.mark.parametrize(
    ("outcome", "counts"), [("SKIPPED", False), ("XFAIL", True), ("XPASS", False), ("ERROR", False)]
)
def test_other_outcomes_of_a_test_that_must_pass(outcome: str, counts: bool) -> None:
    row = instance()
    assert judge(statuses_of_outcomes({"t.py::f": outcome}, row), row)[0] == (int(counts), 1)


BASE = {"src/pkg/__init__.py", "src/pkg/a.py", "tests/unit/__init__.py", "tests/unit/test_a.py", "src/_pytest/x.py"}


@pytest.mark.parametrize(
    ("path", "protected"),
    [
        ("conftest.py", True),
        ("src/deep/conftest.py", True),
        ("src/pkg/conftests.py", False),
        ("pytest.ini", True),
        ("src/pkg/a.py", False),
        ("src/pkg/json.py", False),
        ("json.py", True),
        ("src/json.py", True),
        ("src/json/__init__.py", True),
        ("docs/json.md", False),
        ("json", False),
        ("_pytest/y.py", True),
        ("src/_pytest/x.py", False),
        ("tests/pluggy.py", True),
        ("tests/unit/pluggy.py", False),
        ("src/pkg/__pycache__/a.cpython-311.pyc", True),
        ("x.egg-info/entry_points.txt", True),
        ("lib/zz.pth", True),
    ],
)
def test_what_a_patch_may_not_touch(path: str, protected: bool) -> None:
    roots = import_roots(["tests/unit/test_a.py"], BASE)
    assert roots == {"", "src", "lib", "tests"}
    assert is_protected(path, is_new=path not in BASE, roots=roots) is protected


def test_only_the_sections_that_may_not_be_are_left_out() -> None:
    sections = [
        b"diff --git a/src/pkg/a.py b/src/pkg/a.py\n--- a/src/pkg/a.py\n+++ b/src/pkg/a.py\n"
        b"@@ -1 +1 @@\n-diff --git a/x b/x\n+b\n",
        b"diff --git a/conftest.py b/conftest.py\nnew file mode 100644\n--- /dev/null\n+++ b/conftest.py\n"
        b"@@ -0,0 +1 @@\n+x\n",
        b"diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n",
    ]
    split = split_patch(b"".join(sections), test_files=[], runner_files=["run.sh"], base_files=BASE | {"run.sh"})
    assert split.patch == sections[0]
    assert split.left_out == ("conftest.py", "run.sh")


@pytest.mark.parametrize(
    ("options", "beside"),
    [("-rA", True), ("-rxXs -vs -n2", True), ("-x", False), ("-xvs", False), ("-vx", False), ("--exitfirst", False)],
)
def test_no_failing_test_stands_beside_those_that_end_at_the_first_failure(options: str, beside: bool) -> None:
    """Else an honest fix would be refused: pytest stops at the first of ours and never tells the second."""
    row = instance(test_command=f"python -m pytest {options}")
    run = make_run(row, command_of(row), plugin="", sums="", base_files=(), scratch="/var/tmp")
    assert (run.canaries is not None) is beside


def test_our_tests_stand_in_the_modules_of_the_rows_tests_and_not_in_their_data() -> None:
    """Case K3, and that an honest fix is not refused for data of the tests that has changed."""
    patch = "".join(
        f"diff --git a/{file} b/{file}\n" for file in ("tests/test_a.py", "tests/roots/test.py", "tests/x.txt")
    )
    row = instance(test_patch=patch, FAIL_TO_PASS=["tests/test_a.py::f"], PASS_TO_PASS=[])
    run = make_run(row, command_of(row), plugin="", sums="", base_files=(), scratch="/var/tmp")
    assert run.modules == ("tests/test_a.py",)
    # Ids that name no file: all that look like test modules.
    row = instance("parse_log_django", test_patch=patch, FAIL_TO_PASS=["f (m.T)"], PASS_TO_PASS=[], test_command="x")
    run = make_run(row, command_of(row), plugin="", sums="", base_files=(), scratch="/var/tmp")
    assert run.modules == ("tests/test_a.py", "tests/roots/test.py")


@pytest.mark.parametrize(
    ("name", "before", "after", "changed"),
    [
        ("setup.cfg", "[metadata]\nname = a\n", "[metadata]\nname = b\n", False),
        ("setup.cfg", "[metadata]\n", "[metadata]\n[tool:pytest]\naddopts = -x\n", True),
        ("setup.cfg", "[tool:pytest]\na = 1\n", "[tool:pytest]\na = 1\n[mypy]\nb = 2\n", False),
        ("setup.cfg", "[metadata]\n", "[metadata]\n[tool:pytest] # ]\naddopts = -p x\n", True),
        ("tox.ini", "[pytest] ; a ]\n", "[pytest] ; b ]\n[mypy]\n", False),
        ("tox.ini", None, "[pytest]\n", True),
        ("tox.ini", "[testenv]\ncommands = pytest\n", "[testenv]\ncommands = true\n", True),
        ("pyproject.toml", "[project]\nname = 'a'\n", "[project]\nname = 'b'\n", False),
        ("pyproject.toml", None, "[tool.pytest.ini_options]\n", True),
        ("pyproject.toml", "", "[project.entry-points.pytest11]\nx = 'y'\n", True),
        ("pyproject.toml", "", "not toml", True),
        ("setup.py", "setup()", "setup(entry_points={'pytest11': ['x = y']})", True),
        ("setup.py", "setup()", "setup(name='x')", False),
        ("setup.cfg", "[tool:pytest]\n", None, True),
    ],
)
def test_settings_that_are_and_are_not_the_tests(name: str, before: str, after: str, changed: bool) -> None:
    assert changes_how_tests_run(name, before, after) is changed
