# ruff: noqa: E501
"""Outputs of the runners for C, Go, Java, PHP, Ruby and Rust, and `FAMILIES`: every parser of swebench with its runners."""

from __future__ import annotations

from dataclasses import replace

import runner_outputs as more
from runner_outputs import FAIL, INLINE, OWN, PASS, SKIP, Case, Cases, Family, failed, number, told

REDIS = Family(
    {PASS: "[ok]: {name} ({ms} ms)", FAIL: "[err]: {name} in tests/unit/a.tcl\nExpected 1", SKIP: "[skip]: {name}"},
    lambda cases: (
        "\n                   The End\n\nExecution time of different units:\n  0 seconds - unit/a\n\n"
        + ("!!! WARNING The following tests failed:\n\n" if failed(cases) else "\\o/ All tests passed without errors!\n\n")
        + "".join(f"*** [err]: {case.name} in tests/unit/a.tcl\n{OWN}Expected 1\n" for case in failed(cases))
    ),
)  # fmt: skip
AUTOMAKE = Family(
    {PASS: "PASS: {name}", FAIL: "FAIL: {name}", SKIP: "SKIP: {name}"},
    lambda cases: (
        f"{'=' * 40}\nTestsuite summary for jq 1.7\n{'=' * 40}\n# TOTAL: {len(cases)}\n# PASS:  {number(cases, PASS)}\n"
        f"# SKIP:  {number(cases, SKIP)}\n# XFAIL: 0\n# FAIL:  {number(cases, FAIL)}\n# XPASS: 0\n# ERROR: 0\n{'=' * 40}\n"
    ),
    names="path",
)  # fmt: skip


def _doctest_line(good: str) -> str:
    return (
        f'    <SubCase name="{{name}}" filename="a.cpp" line="3">\n      <Expression success="{good}" type="CHECK" filename="a.cpp" line="4">\n'
        f"        <Original>\n          a == b\n        </Original>\n{INLINE}      </Expression>\n    </SubCase>"
    )


def _doctest_foot(cases: Cases) -> str:
    asserts = f'<OverallResultsAsserts successes="{number(cases, PASS)}" failures="{number(cases, FAIL)}"/>'
    good = not failed(cases)
    return (
        f'    {asserts}\n    </TestCase>\n  </TestSuite>\n  {asserts}\n  <OverallResultsTestCases successes="{int(good)}" '
        f'failures="{int(not good)}"/>\n</doctest>\n'
    )


DOCTEST = Family(
    {PASS: _doctest_line("true"), FAIL: _doctest_line("false")}, _doctest_foot, "lexer > {name}",
    head=lambda cases: (
        '<?xml version="1.0" encoding="UTF-8"?>\n<doctest binary="a">\n  <Options rand_seed="0"/>\n  <TestSuite>\n'
        '    <TestCase name="lexer" filename="a.cpp" line="1">\n'
    ),
    takes_inline=True, suites=("lexer",),
)  # fmt: skip
MICROPYTHON = Family(
    {PASS: "pass  {name}", FAIL: "FAIL  {name}", SKIP: "skip  {name}"},
    lambda cases: (
        f"{number(cases, PASS, FAIL)} tests performed ({10 * len(cases)} individual testcases)\n{number(cases, PASS)} tests passed\n"
        + (f"{number(cases, SKIP)} tests skipped: a\n" if number(cases, SKIP) else "")
        + (f"{number(cases, FAIL)} tests failed: {' '.join(case.name for case in failed(cases))}\n" if failed(cases) else "")
    ),
    names="path",
)  # fmt: skip


def _googletest(before: str) -> Family:
    def foot(cases: Cases) -> str:
        good, bad = number(cases, PASS), failed(cases)
        text = f"\n{before}[----------] Global test environment tear-down\n{before}[==========] {len(cases)} tests from 1 test suite ran. (3 ms total)\n"
        text += f"{before}[  PASSED  ] {good} test{'' if good == 1 else 's'}.\n"
        if bad:
            text += f"{before}[  FAILED  ] {len(bad)} test{'' if len(bad) == 1 else 's'}, listed below:\n"
            text += "".join(f"{before}[  FAILED  ] Lexer.{case.name}\n" for case in bad)
            text += f"{before}\n{before} {len(bad)} FAILED TEST{'' if len(bad) == 1 else 'S'}\n"
        return text + (
            "1/1 Test #7: a-test ....   Passed    0.01 sec\n\n100% tests passed, 0 tests failed out of 1\n"
            if before and not bad
            else ""
        )

    return Family(
        {
            mark: f"{before}[ RUN      ] Lexer.{{name}}\n{OWN}{before}[{word}] Lexer.{{name}} ({{ms}} ms)"
            for mark, word in ((PASS, "       OK "), (FAIL, "  FAILED  "), (SKIP, "  SKIPPED "))
        },
        foot, "Lexer.{name}", "name", head=lambda cases: f"{before}[==========] Running {len(cases)} tests from 1 test suite.\n",
    )  # fmt: skip


GOTEST = Family(
    {mark: f"=== RUN   {{name}}\n{OWN}--- {word}: {{name}} (0.0{{ms}}s)" for mark, word in ((PASS, "PASS"), (FAIL, "FAIL"), (SKIP, "SKIP"))},
    lambda cases: "FAIL\nFAIL\tpkg/lexer\t0.1s\nFAIL\n" if failed(cases) else "PASS\nok  \tpkg/lexer\t0.1s\n", names="name",
)  # fmt: skip
MAVEN = Family(
    {
        mark: f"+ mvn test -B -Dtest={{name}}\n[INFO] Scanning for projects...\n{OWN}[INFO] Tests run: 1, Failures: 0\n[INFO] BUILD {word}"
        for mark, word in ((PASS, "SUCCESS"), (FAIL, "FAILURE"))
    },
    names="name", command=lambda cases: "\n".join(f"mvn test -B -Dtest={case.name}" for case in cases), piped=True,
)  # fmt: skip
ANT = Family(
    {PASS: "    [junit] [PASS] {name}", FAIL: "    [junit] [FAIL] {name}"},
    lambda cases: f"\nBUILD {'FAILED' if failed(cases) else 'SUCCESSFUL'}\nTotal time: 3 seconds\n",
    head=lambda cases: "Buildfile: /testbed/build.xml\n\ntest.instance:\n",
)  # fmt: skip


def _gradle_foot(cases: Cases) -> str:
    if not failed(cases):
        return "\nBUILD SUCCESSFUL in 3s\n4 actionable tasks: 4 executed\n"
    skipped = f", {number(cases, SKIP)} skipped" if number(cases, SKIP) else ""
    return (
        f"\n{len(cases)} tests completed, {number(cases, FAIL)} failed{skipped}\n\n> Task :test FAILED\n\nFAILURE: Build failed with an "
        "exception.\n\nBUILD FAILED in 3s\n"
    )


GRADLE = Family(
    {PASS: "a.{suite}Test > {name} PASSED", FAIL: f"a.{{suite}}Test > {{name}} FAILED\n    java.lang.AssertionError\n{OWN}", SKIP: "a.{suite}Test > {name} SKIPPED"},
    _gradle_foot, "a.{suite}Test > {name}", "name", head=lambda cases: "> Task :compileJava UP-TO-DATE\n\n> Task :test\n",
)  # fmt: skip


def _phpunit_foot(cases: Cases) -> str:
    bad, skipped = number(cases, FAIL), number(cases, SKIP)
    if not bad and not skipped:
        return f"\nOK ({len(cases)} test{'' if len(cases) == 1 else 's'}, 7 assertions)\n"
    rest = "".join(f", {word}: {count}" for word, count in (("Failures", bad), ("Skipped", skipped)) if count)
    return (
        f"\n{'FAILURES!' if bad else 'OK, but some tests were skipped!'}\nTests: {len(cases)}, Assertions: 7{rest}.\n"
    )


PHPUNIT = Family(
    {PASS: " ✔ {name}", FAIL: f" ✘ {{name}}\n   │\n   │ Failed asserting\n{OWN}   │", SKIP: " ↩ {name}"},
    _phpunit_foot, "Lexer > {name}", suite=lambda name, cases: "Lexer (Tests\\Lexer)\n", suites=("lexer",),
    head=lambda cases: f"PHPUnit 10.5.0 by Sebastian Bergmann and contributors.\n\n{'.' * len(cases)}   {len(cases)} / {len(cases)} (100%)\n\n",
)  # fmt: skip


def _minitest_foot(cases: Cases) -> str:
    text = "\nFinished in 0.1s, 20.0 runs/s, 20.0 assertions/s.\n\n"
    for place, case in enumerate(failed(cases), 1):
        text += f"  {place}) Failure:\nTestSite#test_: {case.name}.  [test/a.rb:3]:\n{OWN}Expected 1\n\n"
    return f"{text}{len(cases)} runs, 7 assertions, {number(cases, FAIL)} failures, 0 errors, {number(cases, SKIP)} skips\n"


MINITEST = Family(
    {mark: f"TestSite#test_: {{name}}.  = {INLINE}0.0{{ms}} s = {word}" for mark, word in ((PASS, "."), (FAIL, "F"), (SKIP, "S"))},
    _minitest_foot, "TestSite#test_: {name}", head=lambda cases: "Run options: -v --seed 1\n\n# Running:\n\n", takes_inline=True,
)  # fmt: skip
CUCUMBER = Family(
    {PASS: "{name} ....", FAIL: "{name} ..F-"},
    lambda cases: (
        f"\n{len(cases)} scenario{'' if len(cases) == 1 else 's'} ({told(cases, {FAIL: 'failed', PASS: 'passed'})})\n9 steps (9 passed)\n0m1.2s\n"
    ),
)  # fmt: skip


def _ruby_unit_foot(cases: Cases) -> str:
    return (
        f"\nFinished in 0.05 seconds.\n{'-' * 20}\n{len(cases)} tests, 7 assertions, {number(cases, FAIL)} failures, 0 errors, 0 pendings, "
        f"{number(cases, SKIP)} omissions, 0 notifications\n100% passed\n{'-' * 20}\n"
    )


RUBY_UNIT = Family(
    {
        PASS: f"  test: {{name}}:\t\t{INLINE}.: (0.00{{ms}})",
        FAIL: f"  test: {{name}}:\t\t{INLINE}F\n{'=' * 30}\nFailure: test: {{name}}(LexerTest)\n{OWN}{'=' * 30}\n: (0.00{{ms}})",
        SKIP: f"  test: {{name}}:\t\tO\n{'=' * 30}\nOmission: x\n{'=' * 30}\n: (0.000)",
    },
    _ruby_unit_foot, head=lambda cases: "Loaded suite test/a\nStarted\nLexerTest: \n",
)  # fmt: skip
RSPEC = Family({PASS: "{name} - passed", FAIL: "{name} - failed", SKIP: "{name} - pending"}, piped=True)


def _cargo_foot(cases: Cases) -> str:
    bad = failed(cases)
    text = "\n"
    if bad:
        text += "failures:\n\n" + "".join(f"---- {case.name} stdout ----\n{OWN}panicked\n\n" for case in bad)
        text += "\nfailures:\n" + "".join(f"    {case.name}\n" for case in bad) + "\n"
    return (
        f"{text}test result: {'FAILED' if bad else 'ok'}. {number(cases, PASS)} passed; {len(bad)} failed; {number(cases, SKIP)} ignored; "
        "0 measured; 0 filtered out; finished in 0.00s\n"
    )


CARGO = Family(
    {PASS: "test {name} ... ok", FAIL: f"test {{name}} ... {INLINE}FAILED", SKIP: "test {name} ... ignored"},
    _cargo_foot, names="name", head=lambda cases: f"   Compiling a v0.1.0\nrunning {len(cases)} tests\n",
)  # fmt: skip

_BY_PYTEST = (
    "parse_log_pytest", "parse_log_pytest_options", "parse_log_pytest_v2", "parse_log_seaborn", "parse_log_matplotlib",
    "parse_log_astroid", "parse_log_flask", "parse_log_marshmallow", "parse_log_pvlib", "parse_log_pyvista",
    "parse_log_sqlfluff", "parse_log_xarray", "parse_log_pydicom", "parse_log_requests", "parse_log_pylint",
    "parse_log_astropy", "parse_log_scikit", "parse_log_sphinx",
)  # fmt: skip
FAMILIES: dict[str, tuple[Family, ...]] = {
    **dict.fromkeys(_BY_PYTEST, (more.PYTEST,)),
    "parse_log_django": (more.UNITTEST,),
    "parse_log_sympy": (more.SYMPY,),
    "parse_log_jest": (more.JEST,),
    "parse_log_jest_json": (more.JEST_JSON,),
    "parse_log_immutable_js": (
        replace(more.JEST, row={"instance_id": "immutable-js__i-2006"}),
        replace(more.JEST_JSON, row={"instance_id": "immutable-js__i-2005"}),
    ),
    "parse_log_calypso": (more.CALYPSO,),
    **dict.fromkeys(
        ("parse_log_grommet", "parse_log_react_pdf", "parse_log_carbon"), (more.JEST_FILES, more.JEST_SLOW_FILES)
    ),
    "parse_log_lighthouse": (
        more.LIGHTHOUSE_MOCHA, replace(more.JEST_FILES, row={"version": "12.0"}), more.LIGHTHOUSE_JSON,
    ),
    "parse_log_vitest": (more.VITEST,),
    "parse_log_karma": (more.KARMA,),
    "parse_log_next": (more.SPEC_KARMA, more.CYPRESS),
    "parse_log_highlightjs": (more.MOCHA,),
    "parse_log_prismjs": (more.PRISM,),
    "parse_log_tap": (more.QUNIT, more.MOCHA_TAP),
    "parse_log_quarto_cli": (more.DENO,),
    "parse_log_redis": (REDIS,),
    "parse_log_jq": (AUTOMAKE,),
    "parse_log_doctest": (DOCTEST,),
    "parse_log_micropython_test": (MICROPYTHON,),
    "parse_log_googletest": (_googletest(""), _googletest("7: ")),
    "parse_log_gotest": (GOTEST,),
    "parse_log_maven": (MAVEN,),
    "parse_log_ant": (ANT,),
    "parse_log_gradle_custom": (GRADLE,),
    "parse_log_phpunit": (PHPUNIT,),
    "parse_log_minitest": (MINITEST,),
    "parse_log_cucumber": (CUCUMBER,),
    "parse_log_jekyll": (replace(MINITEST, row={"instance_id": "jekyll-9141"}), replace(CUCUMBER, row={"instance_id": "jekyll-8761"})),
    "parse_log_ruby_unit": (RUBY_UNIT,),
    "parse_log_rspec_transformed_json": (RSPEC,),
    "parse_log_cargo": (CARGO,),
}  # fmt: skip
"""By the name of swebench's parser: the outputs that it reads."""

NAMES_FAILURES_ONLY = (
    "parse_log_bpmn_js", "parse_log_chart_js", "parse_log_eslint", "parse_log_marked", "parse_log_openlayers", "parse_log_p5js",
)  # fmt: skip
"""Parsers that read no passing test at all: their rows are refused, and nothing can be forged."""

__all__ = ["FAMILIES", "NAMES_FAILURES_ONLY", "Case"]
