"""What a test runner's own output says: which tests it names as failed, and how many it counted. No I/O.

The code under test writes to the same output as the runner, so a single line proves nothing. Here a name in a mark of
failure has failed, wherever on a line the mark stands, and the passing tests that were read may not be more than the
runner counted at its end. `check` does both for every parser of swebench's registry (`RUNNERS`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from envs.swe_bench.grading.readers import (
    Counted,
    Uncounted,
    count_pytest,
    read_doctest,
    read_minitest,
    read_sympy,
    read_unittest,
)

BAD = ("FAILED", "ERROR")


@dataclass(frozen=True, slots=True)
class Runner:
    """How a runner marks failures (regular expressions with the name as group 1, matched anywhere) and what it counts.

    In `marks` the name stands behind the mark, so all of it is the runner's; in `before` in front of it, behind what
    the code printed without an end of line. `counted` is given the output and how many commands were run; None for a
    runner that ends without counts. `read`, where given, takes the place of swebench's parser, or looks after what it
    has read: it goes by the structure of the runner's output. `each`, for a runner that is started once a test whose
    name stands in the command only: what is in each command, and in each end. `coloured`: swebench's parser reads the
    colours. `unreadable`: why no honest run can be taken, for a parser whose rows are refused.
    """

    marks: tuple[str, ...] = ()
    counted: Callable[[str, int], Counted | None] | None = None
    read: Callable[[str, Mapping[str, str]], dict[str, str]] | None = None
    each: tuple[str, str] | None = None
    before: tuple[str, ...] = ()
    coloured: bool = False
    unreadable: str = ""


def check(parser: str, log: str, statuses: Mapping[str, str], command: str = "") -> dict[str, str]:
    """`statuses` as swebench's `parser` read them in `log`, with every test that the runner marks as failed failed.

    `command` is what was run. Raises `Uncounted` where the runner's own counts say otherwise.
    """
    runner = runner_of(parser)
    if runner is None:
        raise Uncounted(f"nothing is known of how the runner behind {parser} counts")
    if runner.unreadable:
        raise Uncounted(f"{parser} {runner.unreadable}")
    result = dict(statuses) if runner.read is None else runner.read(log, statuses)
    if runner.each is not None:
        runs = [len(re.findall(runner.each[0], text)) for text in (command, log)]
        ends = len(re.findall(runner.each[1], log, re.MULTILINE))
        if runs[0] != runs[1] or ends != runs[0]:
            raise Uncounted(f"of {runs[0]} commands {runs[1]} are told, with {ends} ends")
    for patterns, has_print in ((runner.marks, False), (runner.before, True)):
        for name in {name.strip() for mark in patterns for name in re.findall(mark, log, re.MULTILINE)}:
            known = [test for test in result if _is_part(name, test) or (has_print and name.endswith(test))]
            result.update(dict.fromkeys(known or [name], "FAILED"))
    if runner.counted is not None:
        counted = runner.counted(log, max(1, len(re.findall(r"[^\n;&|]+", command))))
        if counted is None:
            raise Uncounted("the runner did not come to its closing counts")
        passed = sum(outcome == "PASSED" for outcome in result.values())
        if counted.passed is not None and passed > counted.passed:
            raise Uncounted(f"{passed} tests are told to have passed, but the runner counted {counted.passed}")
        if counted.failed and not any(outcome in BAD for outcome in result.values()):
            raise Uncounted(f"the runner counted {counted.failed} failures, but names none")
    return result


def _is_part(name: str, test: str) -> bool:
    """Whether a mark's name is the end of a test's: suites stand before it, durations and parameters behind it."""
    return re.search(rf"(^|[.:/]| - | > |: ){re.escape(name)}($|\s*[\[(])", test) is not None


def _total(log: str, pattern: str) -> int | None:
    found = re.findall(pattern, log, re.MULTILINE)
    return sum(int(number) for number in found) if found else None


def _closing(passed: str, failed: str) -> Callable[[str, int], Counted | None]:
    """Counts that stand in closing lines."""

    def counted(log: str, commands: int) -> Counted | None:
        good, bad = _total(log, passed), _total(log, failed)
        return None if good is None and bad is None else Counted(good or 0, bad or 0)

    return counted


def _of_all(every: str, *without: str) -> Callable[[str, int], Counted | None]:
    """Counts of runners that tell how many ran and, beside it, how many of these did not pass, once a command."""

    def counted(log: str, commands: int) -> Counted | None:
        if len(re.findall(every, log, re.MULTILINE)) > commands:
            raise Uncounted(f"the closing counts stand there more often than the {commands} commands that were run")
        ran = _total(log, every)
        if ran is None:
            return None
        rest = [_total(log, pattern) or 0 for pattern in without]
        return Counted(ran - sum(rest), sum(rest[:2]))

    return counted


def _count_gradle(log: str, commands: int) -> Counted | None:
    """Gradle counts where a test failed, and says only that the build succeeded where none did."""
    bad = _total(log, r"^\d+ tests? completed, (\d+) failed")
    if bad is None:
        return Counted(None, 0) if re.search(r"^BUILD SUCCESSFUL", log, re.MULTILINE) else None
    ran, skipped = (
        _total(log, rf"^{pattern}") or 0
        for pattern in (r"(\d+) tests? completed", r"\d+ tests? completed,.* (\d+) skipped")
    )
    return Counted(ran - bad - skipped, bad)


def _count_tap(log: str, commands: int) -> Counted | None:
    """TAP's counts; tests with a directive (`# SKIP`) are told as `ok`, and not counted."""
    counted = _closing(r"^# (?:pass|ok)\s+(\d+)", r"^# (?:fail|not ok)\s+(\d+)")(log, commands)
    directives = len(re.findall(r"^\s*ok \d+ .*# (?:SKIP|TODO)\b", log, re.MULTILINE | re.IGNORECASE))
    return counted and Counted((counted.passed or 0) + directives, counted.failed)


def _count_redis(log: str, commands: int) -> Counted | None:
    """Redis' closing words: it has no counts."""
    if re.search(r"^!!! WARNING The following tests failed", log, re.MULTILINE):
        return Counted(None, 1)
    return Counted(None, 0) if "All tests passed without errors!" in log else None


_PYTEST = Runner((r"(?:FAILED|ERROR) (\S+::\S+)",), count_pytest)
_UNITTEST = Runner(read=read_unittest)
_TIME = r"(?: \(?[\d.]+ ?m?s\)?)?$"
_TICKS = (rf"[✕✗✘\xd7✖]\s+(\S.*?){_TIME}", rf"FAIL\s+(\S.*?){_TIME}")
# Mocha indents; in front may stand what the code printed without an end of line.
_NUMBERED = (rf"(?:^|\s\s)\s*\d+\)\s*(\S.*?){_TIME}",)
_JEST = _closing(r"^Tests:.*?(\d+) passed", r"^Tests:.*?(\d+) failed")
_JEST_FILES = Runner(_TICKS, _closing(r"^Test Suites:.*?(\d+) passed", r"^Test Suites:.*?(\d+) failed"))
_FAILURES_ONLY = Runner(unreadable="names failing tests only: one that is not told would have to count as passed")
_MINITEST = _of_all(r"^(\d+) (?:runs|tests),", r"(\d+) failures,", r"(\d+) errors,", r"(\d+) skips")
_CUCUMBER = _closing(r"^\d+ scenarios? \(.*?(\d+) passed", r"^\d+ scenarios? \(.*?(\d+) failed")


def _count_jekyll(log: str, commands: int) -> Counted | None:
    return _MINITEST(log, commands) or _CUCUMBER(log, commands)


RUNNERS: Mapping[str, Runner] = {
    "parse_log_django": _UNITTEST,
    "parse_log_sympy": Runner(read=read_sympy),
    **dict.fromkeys(
        (
            "parse_log_pytest",
            "parse_log_pytest_options",
            "parse_log_pytest_v2",
            "parse_log_seaborn",
            "parse_log_matplotlib",
            "parse_log_astroid",
            "parse_log_flask",
            "parse_log_marshmallow",
            "parse_log_pvlib",
            "parse_log_pyvista",
            "parse_log_sqlfluff",
            "parse_log_xarray",
            "parse_log_pydicom",
            "parse_log_requests",
            "parse_log_pylint",
            "parse_log_astropy",
            "parse_log_scikit",
            "parse_log_sphinx",
        ),
        _PYTEST,
    ),
    **dict.fromkeys(
        (
            "parse_log_bpmn_js",
            "parse_log_eslint",
            "parse_log_openlayers",
            "parse_log_chart_js",
            "parse_log_marked",
            "parse_log_p5js",
        ),
        _FAILURES_ONLY,
    ),
    **dict.fromkeys(("parse_log_carbon", "parse_log_grommet", "parse_log_react_pdf"), _JEST_FILES),
    "parse_log_jest": Runner(_TICKS, _JEST),
    "parse_log_calypso": Runner(_TICKS, _JEST),
    "parse_log_jest_json": Runner((r"\[FAILED\]\s(.+)$",), _JEST),
    "parse_log_immutable_js": Runner((*_TICKS, r"\[FAILED\]\s(.+)$"), _JEST),
    "parse_log_vitest": Runner(_TICKS, _closing(r"^\s*Tests\s.*?(\d+) passed", r"^\s*Tests\s.*?(\d+) failed")),
    "parse_log_highlightjs": Runner(_NUMBERED, _closing(r"^\s*(\d+) passing\b", r"^\s*(\d+) failing\b")),
    "parse_log_lighthouse": Runner(
        (*_TICKS, *_NUMBERED),
        _closing(
            r"^(?:Test Suites:.*?(?=\d+ passed)|\s*(?=\d+ passing)|\s*\"passes\": )(\d+)",
            r"^(?:Test Suites:.*?(?=\d+ failed)|\s*(?=\d+ failing)|\s*\"failures\": )(\d+)",
        ),
    ),
    "parse_log_prismjs": Runner(counted=_closing(r'^\s*"passes": (\d+),$', r'^\s*"failures": (\d+),$')),
    "parse_log_next": Runner(
        (*_TICKS, *_NUMBERED),
        _closing(r"^(?:TOTAL: .*?|\s*)(\d+) (?:SUCCESS|passing)\b", r"^(?:TOTAL: |\s*)(\d+) (?:FAILED|failing)\b"),
    ),
    "parse_log_karma": Runner(_TICKS, _closing(r"^✔ (\d+) tests? completed", r"^✖ (\d+) tests? failed")),
    "parse_log_quarto_cli": Runner(
        (r"^(\[(?:smoke|unit)\].*?) => ",),
        _closing(r"^(?:\w+ \||test result: \w+\.) (\d+) passed", r"^(?:\w+ \||test result: \w+\.).*?(\d+) failed"),
        before=(r"(\[(?:smoke|unit)\].*?) \.\.\. (?:.*)FAILED\b",),
        coloured=True,
    ),
    "parse_log_tap": Runner((r"not ok \d+ (.+)$",), _count_tap),
    "parse_log_redis": Runner((r"\[err\]:\s(.+?)(?:\s+in\s+\S+)?$",), _count_redis),
    "parse_log_jq": Runner((r"FAIL:\s(.+)$",), _closing(r"^# PASS:\s+(\d+)", r"^# (?:FAIL|ERROR):\s+(\d+)")),
    "parse_log_doctest": Runner(read=read_doctest),
    "parse_log_micropython_test": Runner(
        (r"FAIL\s+(\S+)",), _closing(r"^(\d+) tests? passed", r"^(\d+) tests? failed")
    ),
    "parse_log_googletest": Runner(
        (r"\[\s*FAILED\s*\]\s+([\w./]+)",),
        # `ctest -V` writes its test's number in front.
        _closing(r"^(?:\d+: )?\[\s*PASSED\s*\]\s+(\d+) tests?", r"^(?:\d+: )?\s*(\d+) FAILED TESTS?"),
    ),
    "parse_log_gotest": Runner((r"--- FAIL: (\S+)",)),
    "parse_log_maven": Runner(
        (r"-Dtest=(\S+)[^\n]*\n(?:(?![^\n]*-Dtest=)[^\n]*\n)*?(?![^\n]*-Dtest=)[^\n]*BUILD FAILURE",),
        each=(r"-Dtest=\S", r"BUILD (?:SUCCESS|FAILURE)"),
    ),
    "parse_log_ant": Runner((r"\[(?:FAIL|ERR)\]\s+(.*)$",)),
    "parse_log_gradle_custom": Runner(
        counted=_count_gradle,
        before=(r"(\S.*?)\s+FAILED$", r"^(\S+ > \S+)\n(?:(?! > )[^\n]*\n)*?\s*FAILED$"),
    ),
    "parse_log_phpunit": Runner(
        (r"✘\s*(.*)$",),
        _of_all(r"^(?:OK \(|Tests: )(\d+)", r"Failures: (\d+)", r"Errors: (\d+)", r"Skipped: (\d+)"),
    ),
    "parse_log_minitest": Runner(counted=_MINITEST, read=read_minitest, before=(r"^(.+)\. .*=.*[FE]\s*$",)),
    "parse_log_cucumber": Runner(counted=_CUCUMBER, before=(r"^(.*) \.+.*F",)),
    "parse_log_jekyll": Runner(
        counted=_count_jekyll, read=read_minitest, before=(r"^(.+)\. .*=.*[FE]\s*$", r"^(.*) \.+.*F")
    ),
    "parse_log_ruby_unit": Runner(
        counted=_of_all(
            r"^(\d+) tests,", r"(\d+) failures,", r"(\d+) errors,", r"(\d+) pendings,", r"(\d+) omissions,"
        ),
        before=(r"^\s*(?:test: )?(.+):\s.*\b[EF]\b",),
    ),
    "parse_log_rspec_transformed_json": Runner(before=(r"(\S.*?) - failed",)),
    "parse_log_cargo": Runner(
        (r"^test\s+(\S+)\s+\.\.\.(?:.*)FAILED$", r"^---- (\S+) stdout ----$"),
        _closing(r"^test result: \w+\. (\d+) passed", r"^test result: \w+\. \d+ passed; (\d+) failed"),
    ),
}
"""By the name of swebench's parser. One that is not here is refused, and not read on trust."""


def runner_of(parser: str) -> Runner | None:
    """What is known of the runner behind swebench's `parser` of that name."""
    return RUNNERS.get(parser)


def unreadable(parser: str) -> str:
    """Why no honest run can be taken by swebench's `parser` of that name, as words behind it; "" where one can."""
    runner = runner_of(parser)
    return "is not known here: nothing is known of how its runner counts" if runner is None else runner.unreadable


def is_pytest_parser(parser: str) -> bool:
    """Whether swebench's `parser` of that name reads pytest's output."""
    return runner_of(parser) is _PYTEST


def is_unittest_parser(parser: str) -> bool:
    """Whether swebench's `parser` of that name reads unittest's output."""
    return runner_of(parser) is _UNITTEST
