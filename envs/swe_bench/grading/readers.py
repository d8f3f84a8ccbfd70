"""Readers of runners whose output has a structure: unittest, SymPy's runner, pytest's closing lines, ... No I/O.

The code under test writes into the same output, so they go by how the runner writes and not by single lines. A reader
is given the output and what swebench's parser made of it, and raises `Uncounted` where the runner's own counts do not
agree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from xml.etree import ElementTree


class Uncounted(Exception):
    """The output and the runner's own counts do not agree; the text says how."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What a runner counted. `failed` includes errors; `passed` is None where it does not count what passed."""

    passed: int | None
    failed: int


# unittest, and Django's runner over it

_FAILURE = re.compile(r"(?:FAIL|ERROR): (\S.*)\n(?!-{20})?(.*)")
_RAN = re.compile(r"^Ran (\d+) tests? in [\d.]+s$", re.MULTILINE)
_END = re.compile(r"^(OK|FAILED)(?: \(([^)\n]*)\))?$", re.MULTILINE)


def read_unittest(log: str, read: Mapping[str, str]) -> dict[str, str]:
    """Results of unittest's verbose output: of each line `name ... result`, with what the tests printed in between.

    Raises `Uncounted` unless one closing block stands there, with as many failures as there are failure headers.
    """
    ran, ends = list(_RAN.finditer(log)), list(_END.finditer(log))
    if len(ran) != 1:
        raise Uncounted(f"the runner's closing line stands there {len(ran)} times")
    ends = [end for end in ends if end.start() > ran[0].end()]
    if len(ends) != 1:
        raise Uncounted(f"the runner's verdict stands there {len(ends)} times after its closing line")
    word, told = ends[0][1], dict.fromkeys(("failures", "errors", "skipped", "expected failures"), 0)
    for name, number in re.findall(r"([a-z ]+)=(\d+)", ends[0][2] or ""):
        told[name.strip()] = int(number)
    surprises = told.get("unexpected successes", 0)
    bad = told["failures"] + told["errors"]
    headers = list(_FAILURE.finditer(log, 0, ran[0].start()))
    if (word == "OK") != (bad + surprises == 0) or len(headers) != bad:
        raise Uncounted(f"the runner says {word} with {bad} failures, and names {len(headers)}")
    statuses: dict[str, str] = {}
    for line, following in pairwise([*log[: ran[0].start()].split("\n"), ""]):
        name, dots, rest = line.strip().partition(" ... ")
        if not dots:
            name, dots, rest = line.strip().removesuffix(" ...").partition("\0")[0], line.strip()[-4:], ""
            if dots != " ...":
                continue
        words = f"{rest}\n{following}" if not re.search(r"(ok|FAIL|ERROR|skipped.*|expected failure)$", rest) else rest
        outcome = _unittest_outcome(words)
        if outcome and (name not in statuses or statuses[name] == "PASSED"):
            statuses[name] = outcome
    failed = set()
    for header in headers:
        full, described = header[1].strip(), header[2].strip()
        # Behind an id stand the subtest's message and values.
        whole = re.match(r"\S+ \([\w.<>]+\)", full)
        if not re.match(r"(setUp|tearDown)(Class|Module) ", full):  # which are no tests that ran
            failed.add(whole[0] if whole else full)
        for name in {full, whole[0] if whole else full, full.split()[0], described}:
            if name and not re.fullmatch(r"-+", name):
                statuses[name] = "FAILED"
    passed = int(ran[0][1]) - len(failed) - surprises - told["skipped"] - told["expected failures"]
    good = sum(outcome == "PASSED" for outcome in statuses.values())
    if good > passed:
        raise Uncounted(f"{good} tests are told to have passed, but the runner counted {passed}")
    return statuses


def _unittest_outcome(words: str) -> str:
    for pattern, outcome in (
        (r"(^|\s)(FAIL|ERROR)\s*$", "FAILED"),
        (r"skipped\b", "SKIPPED"),
        (r"expected failure\s*$", "XFAIL"),
        (r"(ok|OK)\s*$", "PASSED"),
        (r"\nok\b", "PASSED"),
    ):
        if re.search(pattern, words):
            return outcome
    return ""


# SymPy's own runner

_SYMPY_END = re.compile(r"tests finished: (\d+) passed,((?:[^=]|\n)*?)in [\d.]+\s+seconds")
_SYMPY_HEADER = re.compile(r"^_+ (\S+\.py)(?:::?(\w+))? _+$", re.MULTILINE)
_SYMPY_RESULT = re.compile(r"(ok|[FEfXswTK])\s*(\[(?:OK|FAIL)\])?\s*$")
_SYMPY_LAST = re.compile(r"(ok|[FEfXswTK])\s*\[(?:OK|FAIL)\]\s*$", re.MULTILINE)
_SYMPY_WORDS = {"ok": "PASSED", "F": "FAILED", "E": "ERROR", "T": "ERROR", "f": "XFAIL", "X": "XPASS"}


def read_sympy(log: str, read: Mapping[str, str]) -> dict[str, str]:
    """Results of `bin/test --verbose`: a test's own are the last word before the next name, whatever it printed.

    Raises `Uncounted` unless passed and failed tests are exactly as many as the closing line counts.
    """
    ends = list(_SYMPY_END.finditer(log))
    if len(ends) != 1:
        raise Uncounted(f"the runner's closing line stands there {len(ends)} times")
    headers = list(_SYMPY_HEADER.finditer(log, 0, ends[0].start()))
    body = log[: min([header.start() for header in headers] + [ends[0].start()])]
    body = re.split(
        r"^_{3,}(?: (?:slowest|unexpectedly fast|xpassed) tests _{3,}| *_{20,})$", body, flags=re.MULTILINE
    )[0]
    names = list(re.finditer(r"^(test\w*) ", body, re.MULTILINE))
    statuses: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for name, after in pairwise([*names, None]):
        assert name is not None
        segment = body[name.end() : after.start() if after else len(body)]
        # Between two files stands the next one's name.
        segment = re.split(r"^\S+\.py\[\d+\] ", segment, maxsplit=1, flags=re.MULTILINE)[0]
        # Behind a file's last result may stand what the next file printed while it was read.
        result = _SYMPY_RESULT.search(segment) or next(iter(_SYMPY_LAST.finditer(segment)), None)
        outcome = _SYMPY_WORDS.get(result[1], "SKIPPED") if result else "ERROR"
        counts[outcome] += 1
        if statuses.get(name[1], "PASSED") == "PASSED":
            statuses[name[1]] = outcome
    told = {what: int(number) for number, what in re.findall(r"(\d+)\s+([a-z ]+?),", ends[0][2].replace("\n", " "))}
    bad = told.get("failed", 0) + told.get("exceptions", 0)
    if counts["PASSED"] != int(ends[0][1]):
        raise Uncounted(f"{counts['PASSED']} tests are told to have passed, but the runner counted {ends[0][1]}")
    if len(headers) != bad:
        raise Uncounted(f"{len(headers)} failures are named, but the runner counted {bad}")
    for header in headers:
        statuses[f"{header[1]}:{header[2]}" if header[2] else header[1]] = "FAILED"
        if header[2]:
            statuses[header[2]] = "FAILED"
    return statuses


# pytest, where its plugin could not be asked

_SUMMARY = re.compile(r"^=+ short test summary info =+$", re.MULTILINE)
_PYTEST_END = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+ ?s(?:econds)?\b.*$", re.MULTILINE)


def count_pytest(log: str, commands: int) -> Counted | None:
    """The sum of all closing lines. Raises `Uncounted` where the summary before one lists another number of tests."""
    passed = failed = 0
    summaries = list(_SUMMARY.finditer(log))
    ends = list(_PYTEST_END.finditer(log))
    if not ends:
        return None
    for end in ends:
        told = {what.rstrip("s"): int(number) for number, what in re.findall(r"(\d+) ([a-z]+)", end[1])}
        passed += told.get("passed", 0)
        failed += told.get("failed", 0) + told.get("error", 0)
        before = [summary for summary in summaries if summary.end() < end.start()]
        if before and not any(before[-1].end() < other.start() < end.start() for other in ends):
            listed = Counter(re.findall(r"^([A-Z]+) ", log[before[-1].end() : end.start()], re.MULTILINE))
            if listed["FAILED"] > told.get("failed", 0) or listed["PASSED"] > told.get("passed", 0):
                raise Uncounted("pytest's summary lists other numbers than its closing line counts")
    return Counted(passed, failed)


# minitest

_MINITEST_NAME = re.compile(r"^(.+)\. [^=\n]*= ")
_MINITEST_RESULT = re.compile(r"\d+\.\d+ s = ([.FES])\s*$")
_MINITEST_WORDS = {".": "PASSED", "F": "FAILED", "E": "ERROR", "S": "SKIPPED"}


def read_minitest(log: str, read: Mapping[str, str]) -> dict[str, str]:
    """Results of minitest's verbose output, which writes `name = `, runs the test, and then `0.01 s = .`.

    Results that swebench's parser has of such names are not taken: it reads a skipped test as passed.
    """
    statuses = dict(read)
    told: dict[str, list[str]] = {}
    last = ""
    for line in log.split("\n"):
        name, result = _MINITEST_NAME.match(line), _MINITEST_RESULT.search(line)
        if name is not None:
            last = name[1]
            told.setdefault(last, [])
        # A second result behind one name is the runner's, and the first one was printed by the test.
        if result is not None and last:
            told[last].append(_MINITEST_WORDS[result[1]])
    for test, outcomes in told.items():
        bad = [outcome for outcome in outcomes if outcome != "PASSED"]
        statuses[test] = bad[0] if bad else "PASSED" if outcomes else "ERROR"
    return statuses


# doctest (of C++)


def read_doctest(log: str, read: Mapping[str, str]) -> dict[str, str]:
    """Results of doctest's XML: a subcase that is told twice has failed if it did once.

    Raises `Uncounted` where more assertions are told to hold than doctest counted.
    """
    if log.count("<doctest") != 1 or log.count("</doctest>") != 1:
        raise Uncounted("doctest's report does not stand there once")
    try:
        root = ElementTree.fromstring(log[log.index("<doctest") : log.index("</doctest>") + len("</doctest>")])
    except ElementTree.ParseError as error:
        raise Uncounted(f"doctest's report is no XML: {error}") from None
    ends = root.findall("OverallResultsAsserts")
    if len(ends) != 1:
        raise Uncounted(f"doctest's closing counts stand there {len(ends)} times")
    counts = Counter(one.get("success") == "true" for one in root.iter("Expression"))
    try:
        good, bad = (int(ends[0].get(key, "")) for key in ("successes", "failures"))
    except ValueError:
        raise Uncounted("doctest's closing counts are no numbers") from None
    if counts[True] > good or counts[False] != bad:
        raise Uncounted(
            f"{counts[True]} assertions are told to hold and {counts[False]} not, but doctest counted {good} and {bad}"
        )
    statuses = dict(read)
    for case in root.iter("TestCase"):
        for part in case.iter("SubCase"):
            if any(one.get("success") != "true" for one in part.iter("Expression")):
                statuses[f"{case.get('name')} > {part.get('name')}"] = "FAILED"
    return statuses
