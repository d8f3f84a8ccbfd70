"""Output by every runner that swebench has a parser for: honest runs, and failing runs with what code under test adds.

The renderers (`runner_outputs.py`, `more_runner_outputs.py`) print `target` as failed and `other` as passed; the code
under test prints before, between and after, and inside of a line where the runner writes it in two steps.

    python tests/swe_bench/forged_output.py [SEED]        prints the table of docs/results.md
"""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from more_runner_outputs import FAMILIES, NAMES_FAILURES_ONLY
from runner_outputs import FAIL, INLINE, OWN, PASS, SKIP, Case, Family

from envs.swe_bench.grading.grade import assert_gradable
from envs.swe_bench.grading.runners import RUNNERS
from envs.swe_bench.grading.verdict import Refused, judge, statuses_of_log
from envs.swe_bench.instance import Instance, RowError, read_row

PARSERS = tuple(sorted((*FAMILIES, *NAMES_FAILURES_ONLY)))
HONEST_RUNS = 40
"""Honest runs of each format of a parser."""


def row_of(parser: str, family: Family, fail_to_pass: Sequence[Case], pass_to_pass: Sequence[Case] = ()) -> Instance:
    """A row of `parser` with these tests."""
    return read_row(
        {
            "instance_id": "a__b-1", "repo": "a/b", "base_commit": "c", "patch": "", "problem_statement": "p",
            "test_patch": "diff --git a/t.py b/t.py\n", "log_parser": parser,
            "FAIL_TO_PASS": [family.ident_of(case) for case in fail_to_pass],
            "PASS_TO_PASS": [family.ident_of(case) for case in pass_to_pass],
            "test_command": family.command([*fail_to_pass, *pass_to_pass]), **family.row,
        },
        "x",
    )  # fmt: skip


def earns(log: str, parser: str, row: Instance, status: int, command: str) -> bool:
    """Whether a run with this output would be rewarded."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # parsers print warnings, and the names of what failed
            statuses = statuses_of_log(log, status, row, command=command)
    except Refused:
        return False
    f2p, p2p = judge(statuses, row)
    return f2p[0] == f2p[1] and p2p[0] == p2p[1]


# Runs with forged output

_FORMS = {"words": "{}", "name": "test_{}", "path": "src/{}.js"}


def failing_run(family: Family) -> tuple[Case, Case]:
    """The target, which fails, and another test, which passes."""
    form = _FORMS[family.names]
    return Case(form.format("target"), FAIL), Case(form.format("other"))


def forgeries(family: Family, seed: int = 0) -> Iterator[str]:
    """The failing run with every forged text at every place, alone and in pairs, and in random mixtures."""
    target, other_test = failing_run(family)
    pieces = re.split(f"[{OWN}{INLINE}]", family.render((target, other_test)))
    passed = replace(target, outcome=PASS)
    plain = re.compile(f"[{OWN}{INLINE}]")
    closing = plain.sub("", family.foot([passed, other_test])).strip("\n")
    line = plain.sub("", family.line_of(passed))
    fails = [
        plain.sub("", family.line_of(Case(_FORMS[family.names].format(name), FAIL))) for name in ("other", "another")
    ]
    ident = family.ident_of(passed)
    texts = [
        "ok", "ok\n", "OK\n", "PASSED", "PASSED\n", ".\n", "debug ok\n",
        f"{closing}\n", f"\n{closing}\n",
        *(f"{end}{text}\n" for text in (line, line.replace(passed.name, ident)) for end in ("", "\n")),
        *(f"\n{text}\n" for text in fails),
        f"\n{line}\n{fails[1]}\n", f"\n{line}\n{closing}\n", f"\n{line}\n{fails[1]}\n{closing}\n",
    ]  # fmt: skip
    places = range(len(pieces) - 1)

    def put(own: dict[int, str]) -> str:
        return "".join(piece + own.get(number, "") for number, piece in enumerate(pieces))

    for place, text in itertools.product(places, texts):
        yield put({place: text})
    for (one, two), text, other in itertools.product(itertools.combinations(places, 2), texts[:9], texts[7:]):
        yield put({one: text, two: other})
    chance = random.Random(f"{ident}{seed}")
    for _ in range(200):
        yield put({place: "".join(chance.choices(texts, k=chance.randint(0, 3))) for place in places})


def forged(parser: str, seed: int = 0) -> Iterator[tuple[str, bool]]:
    """(output, whether it earns) of every forged run of every format of `parser`."""
    for family in FAMILIES[parser]:
        run = failing_run(family)
        row, status, command = row_of(parser, family, run[:1], run[1:]), family.status(run), family.command(run)
        for log in dict.fromkeys(forgeries(family, seed)):
            yield log, earns(log, parser, row, status, command)


# Honest runs

_VERBS = ("keeps", "reads", "returns", "merges", "splits", "renders", "skips", "allows", "rejects", "escapes")
_THINGS = (
    "order",
    "comments",
    "empty input",
    "a + b",
    "unicode ä",
    "null for 'a'",
    "nested keys (deep)",
    "#12",
    "x: y",
)
_PRINTED = (
    "debug: value 3\n",
    "connecting to port 80\n",
    "warning: slow path, 1 of 2 done\n",
    "\x1b[33mnote\x1b[0m\n",
    "\n",
)


def _name(kind: str, number: int, chance: random.Random) -> str:
    verb, thing = chance.choice(_VERBS), chance.choice(_THINGS)
    if kind == "words":
        return f"{verb} {thing} {number}"
    word = re.sub(r"\W+", "_", thing.encode("ascii", "ignore").decode()).strip("_") or "all"
    return f"test_{verb}_{word}_{number}" if kind == "name" else f"src/{verb}/{word}-{number}.test.js"


def honest(family: Family, parser: str, seed: int = 0) -> Iterator[tuple[str, Instance, int, str]]:
    """(output, row, exit status, command) of runs in which all of the row's tests pass.

    Beside them some are skipped, and one that is not the row's fails, as it did before. The code prints something.
    """
    chance = random.Random(f"{parser}{family.row}{seed}")
    for _ in range(HONEST_RUNS):
        suites = sorted(chance.choice(family.suites) for _ in range(chance.randint(1, 6)))
        rows_own = [
            Case(_name(family.names, number, chance), PASS, suite, chance.randint(1, 9))
            for number, suite in enumerate(suites)
        ]
        run = list(rows_own)
        for outcome in (SKIP, FAIL):
            if outcome in family.line and not chance.randrange(3):
                place = chance.randint(0, len(run))
                suite = run[min(place, len(run) - 1)].suite
                run.insert(place, Case(_name(family.names, len(run), chance), outcome, suite))
        log = family.render(run, honest=True).replace(INLINE, "\0" if family.takes_inline else "")
        log = re.sub(OWN, lambda _: chance.choice(_PRINTED) if not chance.randrange(4) else "", log)
        cut = chance.randint(1, len(rows_own))
        row = row_of(parser, family, rows_own[:cut], rows_own[cut:])
        yield log, row, family.status(run), family.command(run)


def taken(parser: str, seed: int = 0) -> tuple[int, int]:
    """(taken, all) of the honest runs of all formats of `parser`."""
    results = [earns(run[0], parser, *run[1:]) for family in FAMILIES[parser] for run in honest(family, parser, seed)]
    return sum(results), len(results)


def held_to(parser: str) -> str:
    """What passing lines are held to, beside marks of failure and the exit status."""
    runner = RUNNERS[parser]
    return "counts" if runner.counted or runner.read else "one end a command" if runner.each else "none"


def refused(parser: str) -> bool:
    """Whether rows of `parser` are refused by its name, before anything is run."""
    try:
        assert_gradable(row_of(parser, FAMILIES["parse_log_jest"][0], [Case("a")]))
    except RowError as error:
        return error.field == "log_parser"
    return False


def table(seed: int = 0) -> list[tuple[str, str, int, int, int, int]]:
    """(parser, what it is held to, attempts, earned, honest runs taken, honest runs) of every parser."""
    rows = []
    for parser in PARSERS:
        if parser in NAMES_FAILURES_ONLY:
            rows.append(
                (parser, "refused by name" if refused(parser) else "NOT REFUSED", 0, int(not refused(parser)), 0, 0)
            )
            continue
        results = [result for _, result in forged(parser, seed)]
        rows.append((parser, held_to(parser), len(results), sum(results), *taken(parser, seed)))
    return rows


if __name__ == "__main__":
    found = table(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    print("| parser | held to | attempts | earned | honest, taken |\n|---|---|---|---|---|")
    for name, held, attempts, earned, took, runs in found:
        tried = f"{attempts} | {earned} | {took} of {runs}" if runs else " | | none"
        print(f"| `{name}` | {held} | {tried} |")
    sums = [sum(row[column] for row in found) for column in (2, 3, 4, 5)]
    print(f"| all {len(found)} | | {sums[0]} | {sums[1]} | {sums[2]} of {sums[3]} |")
    sys.exit(sums[1] > 0 or sums[2] < sums[3])
