# ruff: noqa: E501, RUF001
"""What every runner prints whose output swebench has a parser for: one renderer a runner, for any tests and outcomes.

The same renderer makes an honest run (all of a row's tests pass) and the failing run that code under test forges into, so
a format that nothing reads cannot look safe. `OWN` stands where code under test can print between two lines of the runner,
`INLINE` where the runner has written half of a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

OWN, INLINE = "\0", "\1"
PASS, FAIL, SKIP = "pass", "fail", "skip"


@dataclass(frozen=True)
class Case:
    """One test of a run. `suite` is what it lies in, `ms` how long it took (and its number, where a runner numbers)."""

    name: str
    outcome: str = PASS
    suite: str = "lexer"
    ms: int = 3


Cases = Sequence[Case]


@dataclass(frozen=True)
class Family:
    """How one runner prints. `line`: a test's own, of each outcome it has a word for, with the fields of `Case`.

    `ident`: the id that a data set has of it. `names`: which kind of names its tests have (`words`, `name`, `path`).
    `head`, `suite` and `foot` stand around; `row` are further fields of a row. `piped`: the exit status is another command's. `takes_inline`: a
    print in half of a line does no harm. `between`: code of a honest run can print between two tests. `suites`: more than
    one only where swebench's parser gives tests of the second one the right name.
    """

    line: Mapping[str, str]
    foot: Callable[[Cases], str] = lambda cases: ""
    ident: str = "{name}"
    names: str = "words"
    head: Callable[[Cases], str] = lambda cases: ""
    suite: Callable[[str, Cases], str] = lambda name, cases: ""
    suite_end: Callable[[Cases], str] = lambda cases: ""
    row: Mapping[str, str] = field(default_factory=dict)
    command: Callable[[Cases], str] = lambda cases: "run the tests"
    piped: bool = False
    takes_inline: bool = False
    whole: Callable[[Cases], str] | None = None
    between: bool = True
    suites: tuple[str, ...] = ("lexer", "parser")

    def ident_of(self, case: Case) -> str:
        """The id of `case` in a data set."""
        return self.ident.format(**vars(case))

    def line_of(self, case: Case) -> str:
        """The runner's own line on `case`."""
        return self.line[case.outcome].format(**vars(case))

    def render(self, cases: Cases, *, honest: bool = False) -> str:
        """The output of one run of `cases`, which are in order of their suites, with `OWN` and `INLINE` in it."""
        between = OWN if self.between or not honest else ""
        if self.whole is not None:
            return self.whole(cases)
        text = self.head(cases) + OWN
        for name, group in groupby(cases, key=lambda case: case.suite):
            tests = list(group)
            text += self.suite(name, tests) + "".join(f"{between}{self.line_of(case)}\n" for case in tests)
            text = text[:-1] + self.suite_end(tests) + "\n"
        return f"{text}{OWN}{self.foot(cases)}{OWN}"

    def status(self, cases: Cases) -> int:
        """The exit status of such a run."""
        return int(not self.piped and any(case.outcome == FAIL for case in cases))


def number(cases: Cases, *outcomes: str) -> int:
    """How many of `cases` ended so."""
    return sum(case.outcome in outcomes for case in cases)


def failed(cases: Cases) -> list[Case]:
    """Those that failed."""
    return [case for case in cases if case.outcome == FAIL]


def told(cases: Cases, words: Mapping[str, str], between: str = ", ") -> str:
    """Counts of those outcomes that there are, as `1 failed, 2 passed`; `words` is by outcome, in the runner's order."""
    return between.join(f"{number(cases, outcome)} {word}" for outcome, word in words.items() if number(cases, outcome))


# Python


def _pytest_foot(cases: Cases) -> str:
    bad = "".join(f"____ {case.name} ____\n{OWN}E   assert 0\n" for case in failed(cases))
    text = f"=== FAILURES ===\n{bad}" if bad else ""
    text += "=========================== short test summary info ============================\n"
    text += "".join(f"PASSED t.py::{case.name}\n" for case in cases if case.outcome == PASS)
    text += "".join("SKIPPED [1] t.py:3: no network\n" for case in cases if case.outcome == SKIP)
    text += "".join(f"FAILED t.py::{case.name} - assert 0\n" for case in failed(cases))
    return f"{text}========== {told(cases, {FAIL: 'failed', PASS: 'passed', SKIP: 'skipped'})} in 0.01s ==========\n"


PYTEST = Family(
    {PASS: f"t.py::{{name}} {INLINE}PASSED", FAIL: f"t.py::{{name}} {INLINE}FAILED", SKIP: "t.py::{name} SKIPPED"},
    _pytest_foot, "t.py::{name}", "name", lambda cases: f"=== test session starts ===\ncollected {len(cases)} items\n\n",
    takes_inline=True,
)  # fmt: skip

_DOUBLE, _LINE = "=" * 70, "-" * 70


def _unittest_foot(cases: Cases) -> str:
    text = "\n" + "".join(
        f"{_DOUBLE}\nFAIL: {case.name} (m.T)\n{_LINE}\nTraceback:\n{OWN}AssertionError\n\n" for case in failed(cases)
    )
    bad, skipped = number(cases, FAIL), number(cases, SKIP)
    rest = ", ".join(word for word, one in ((f"failures={bad}", bad), (f"skipped={skipped}", skipped)) if one)
    end = f"{'FAILED' if bad else 'OK'}{f' ({rest})' if rest else ''}"
    return f"{text}{_LINE}\nRan {len(cases)} test{'' if len(cases) == 1 else 's'} in 0.001s\n\n{end}\n"


UNITTEST = Family(
    {PASS: f"{{name}} (m.T) ... {INLINE}ok", FAIL: f"{{name}} (m.T) ... {INLINE}FAIL", SKIP: "{name} (m.T) ... skipped 'x'"},
    _unittest_foot, "{name} (m.T)", "name", takes_inline=True,
)  # fmt: skip


def _sympy_foot(cases: Cases) -> str:
    text = "\n" + "".join(
        f"{'_' * 80}\n_____ sympy/{case.suite}/tests/test_a.py:{case.name} _____\nTraceback\n{OWN}AssertionError\n\n"
        for case in failed(cases)
    )
    words = {FAIL: "failed", SKIP: "skipped"}
    rest = "".join(f"{number(cases, outcome)} {word}, " for outcome, word in words.items() if number(cases, outcome))
    text += f"========= tests finished: {number(cases, PASS)} passed, {rest}in 0.50 seconds =========\n"
    return text + ("DO *NOT* COMMIT!\n" if failed(cases) else "")


SYMPY = Family(
    {PASS: f"{{name}} {INLINE}ok", FAIL: f"{{name}} {INLINE}F", SKIP: "{name} s"},
    _sympy_foot, names="name", head=lambda cases: "===== test process starts =====\nrandom seed:        1\n\n",
    suite=lambda name, cases: f"sympy/{name}/tests/test_a.py[{len(cases)}] \n",
    suite_end=lambda cases: f" [{'FAIL' if failed(cases) else 'OK'}]", takes_inline=True, between=False,
)  # fmt: skip

# JavaScript

_JEST_WORDS = {FAIL: "failed", SKIP: "skipped", PASS: "passed"}


def jest_counts(cases: Cases) -> str:
    """The closing lines of Jest."""
    bad = int(bool(failed(cases)))
    return (
        f"Test Suites: {'1 failed' if bad else '1 passed'}, 1 total\n"
        f"Tests:       {told(cases, _JEST_WORDS)}, {len(cases)} total\nSnapshots:   0 total\nTime:        1.2 s\n"
    )


def _jest_foot(cases: Cases) -> str:
    return (
        "\n"
        + "".join(f"  ● {case.suite} › {case.name}\n\n    {OWN}expected 1\n\n" for case in failed(cases))
        + jest_counts(cases)
    )


def _jest_head(cases: Cases) -> str:
    return f"{'FAIL' if failed(cases) else 'PASS'} src/a.test.js\n"


_JEST_LINES = {PASS: "    ✓ {name} ({ms} ms)", FAIL: "    ✕ {name} ({ms} ms)", SKIP: "    ○ skipped {name}"}
JEST = Family(_JEST_LINES, _jest_foot, head=_jest_head, suite=lambda name, cases: f"  {name}\n")
JEST_JSON = Family(
    {PASS: "[PASSED] {suite} > {name}", FAIL: "[FAILED] {suite} > {name}", SKIP: "[PENDING] {suite} > {name}"},
    ident="{suite} > {name}", head=lambda cases: _jest_head(cases) + _jest_foot(cases), piped=True,
)  # fmt: skip
CALYPSO = Family(
    {PASS: "    ✓ {name} ({ms}ms)", FAIL: "    ✕ {name} ({ms}ms)"}, _jest_foot, "{suite} - {name}", suite=lambda name, cases: f"  {name}\n",
    head=lambda cases: "> cross-env NODE_ENV=test ./node_modules/.bin/jest -c=jest.json\n\n" + _jest_head(cases),
)  # fmt: skip


def _files_foot(cases: Cases) -> str:
    return (
        f"\nTest Suites: {told(cases, {FAIL: 'failed', PASS: 'passed'})}, {len(cases)} total\n"
        f"Tests:       {len(cases) + 2} passed, {len(cases) + 2} total\nSnapshots:   0 total\nTime:        1.2 s\n"
    )


JEST_FILES = Family({PASS: "PASS {name}", FAIL: "FAIL {name}"}, _files_foot, names="path")
JEST_SLOW_FILES = Family({PASS: "PASS {name} (5.{ms} s)", FAIL: "FAIL {name} (5.{ms} s)"}, _files_foot, names="path")


def _vitest_foot(cases: Cases) -> str:
    words = told(cases, {FAIL: "failed", PASS: "passed", SKIP: "skipped"}, " | ")
    bad = "".join(
        f" FAIL  src/a.spec.ts > {case.suite} > {case.name}\nAssertionError\n{OWN}\n" for case in failed(cases)
    )
    return f"\n{bad} Test Files  1 {'failed' if bad else 'passed'} (1)\n      Tests  {words} ({len(cases)})\n   Duration  1.1s\n"


VITEST = Family(
    {mark: f" {sign} src/a.spec.ts > {{suite}} > {{name}}{time}" for mark, sign, time in ((PASS, "✓", " {ms}ms"), (FAIL, "\xd7", " {ms}ms"), (SKIP, "↓", " [skipped]"))},
    _vitest_foot, "src/a.spec.ts > {suite} > {name}",
)  # fmt: skip


def _karma_foot(cases: Cases) -> str:
    text = f"\nFinished in 0.1 secs / 0.05 secs\n\nSUMMARY:\n✔ {number(cases, PASS)} tests completed\n"
    text += f"ℹ {number(cases, SKIP)} test skipped\n" if number(cases, SKIP) else ""
    text += f"✖ {number(cases, FAIL)} test failed\n\nFAILED TESTS:\n" if failed(cases) else ""
    return text + "".join(f"  {case.suite}\n    ✖ {case.name}\n      Error\n" for case in failed(cases))


KARMA = Family(
    {PASS: "    ✔ {name}", FAIL: "    ✖ {name}"}, _karma_foot, "{suite} > {name}",
    head=lambda cases: "INFO [launcher]: Starting browser ChromeHeadless\n\nSTART:\n", suite=lambda name, cases: f"  {name}\n", suites=("lexer",),
)  # fmt: skip
SPEC_KARMA = Family(
    {PASS: "    ✓ {name}", FAIL: "    ✗ {name}"},
    lambda cases: (
        f"\nExecuted {len(cases)} of {len(cases)}{f' ({number(cases, FAIL)} FAILED)' if failed(cases) else ' SUCCESS'} (0.1 secs)\n"
        f"TOTAL: {f'{number(cases, FAIL)} FAILED, ' if failed(cases) else ''}{number(cases, PASS)} SUCCESS\n"
    ),
    "{suite} - {name}", suite=lambda name, cases: f"  {name}\n",
    head=lambda cases: "+ npx xvfb-run karma start\nINFO [launcher]: Starting browser Chrome\n",
)  # fmt: skip


def mocha_foot(cases: Cases) -> str:
    """The closing lines of Mocha's spec reporter, and its list of failures."""
    text = f"\n  {number(cases, PASS)} passing (12ms)\n"
    text += f"  {number(cases, FAIL)} failing\n\n" if failed(cases) else ""
    for place, case in enumerate(failed(cases), 1):
        text += f"  {place}) {case.suite}\n       {case.name}:\n     Error: no\n{OWN}\n"
    return text


CYPRESS = Family(
    {PASS: "    ✓ {name} ({ms}ms)", FAIL: "    1) {name}"}, mocha_foot, "lexer: {name}",
    head=lambda cases: "  Running:  a.cy.js   (1 of 1)\n\n\n  lexer\n", row={"version": "1.27"}, suites=("lexer",),
)  # fmt: skip
MOCHA = Family(
    {PASS: "    ✓ {name}", FAIL: "    1) {name}"}, mocha_foot, "{suite}.{name}", suite=lambda name, cases: f"  {name}\n"
)
LIGHTHOUSE_MOCHA = Family(
    {PASS: "    ✔ {name} ({ms}ms)", FAIL: "    1) {name}"}, mocha_foot, "{suite} - {name}", suite=lambda name, cases: f"  {name}\n",
    head=lambda cases: "running 3 test files\nseed 1\n\n", row={"version": "10.2"},
)  # fmt: skip


def _mocha_json(command: str) -> Callable[[Cases], str]:
    def render(cases: Cases) -> str:
        def listed(*outcomes: str) -> list[dict[str, object]]:
            return [
                {"title": case.name, "fullTitle": f"{case.suite} {case.name}", "duration": case.ms, "currentRetry": 0}
                for case in cases if case.outcome in outcomes
            ]  # fmt: skip

        counts = {
            "tests": len(cases),
            "passes": number(cases, PASS),
            "pending": number(cases, SKIP),
            "failures": number(cases, FAIL),
        }
        whole = {
            "stats": {"suites": 1, **counts, "duration": 9}, "tests": listed(PASS, FAIL, SKIP), "pending": listed(SKIP),
            "failures": listed(FAIL), "passes": listed(PASS),
        }  # fmt: skip
        return f"+ {command}\n{OWN}{json.dumps(whole, indent=2, ensure_ascii=False)}\n{OWN}"

    return render


_AS_JSON = {
    PASS: '"passes": [\n{{"fullTitle": "{suite} {name}",\n}}]',
    FAIL: '"failures": [\n{{"fullTitle": "{suite} {name}",\n}}],',
}
PRISM = Family(
    _AS_JSON, ident="{suite} {name}", whole=_mocha_json("./node_modules/.bin/mocha tests/run.js --reporter json")
)
LIGHTHOUSE_JSON = Family(
    _AS_JSON,
    ident="{suite} {name}",
    whole=_mocha_json("./node_modules/.bin/mocha --reporter json"),
    row={"version": "2.9"},
)


def _tap_foot(cases: Cases) -> str:
    counts = (("pass", number(cases, PASS)), ("skip", number(cases, SKIP)), ("todo", 0), ("fail", number(cases, FAIL)))
    return f"1..{len(cases)}\n" + "".join(f"# {word} {count}\n" for word, count in counts)


QUNIT = Family(
    {PASS: "ok {ms} {suite} > {name}", FAIL: "not ok {ms} {suite} > {name}\n  ---\n  message: no\n  ...", SKIP: "ok {ms} # SKIP {suite} > {name}"},
    _tap_foot, "{suite} > {name}", head=lambda cases: "TAP version 13\n",
)  # fmt: skip
MOCHA_TAP = Family(
    {PASS: "ok {ms} {suite} {name}", FAIL: "not ok {ms} {suite} {name}\n  Error: no", SKIP: "ok {ms} {suite} {name} # SKIP -"},
    lambda cases: f"# tests {number(cases, PASS, FAIL)}\n# pass {number(cases, PASS)}\n# fail {number(cases, FAIL)}\n",
    "{suite} {name}", head=lambda cases: f"1..{len(cases)}\n",
)  # fmt: skip
_GREEN, _RED, _OFF = "\x1b[0m\x1b[32m", "\x1b[0m\x1b[31m", "\x1b[0m"


def _deno_foot(cases: Cases) -> str:
    word = f"{_RED}FAILED{_OFF}" if failed(cases) else f"{_GREEN}ok{_OFF}"
    bad = "".join(f"[unit] > {case.name} => ./a.test.ts:3:1\n{OWN}error: no\n\n" for case in failed(cases))
    return f"\n{f' ERRORS {chr(10) * 2}{bad}' if bad else ''}{word} | {number(cases, PASS)} passed | {number(cases, FAIL)} failed (3s)\n"


DENO = Family(
    {PASS: f"[unit] > {{name}} ... {_GREEN}ok{_OFF} ({{ms}}ms)", FAIL: f"[unit] > {{name}} ... {_RED}FAILED{_OFF} ({{ms}}ms)"},
    _deno_foot, "[unit] > {name}", head=lambda cases: f"running {len(cases)} tests from ./a.test.ts\n",
)  # fmt: skip
