"""Case K7: whatever code under test prints, no failing test passes, and the honest run of every runner counts."""

from __future__ import annotations

import random

import pytest
from forged_output import PARSERS, earns, failing_run, forgeries, honest, refused, row_of
from more_runner_outputs import FAMILIES, NAMES_FAILURES_ONLY
from runner_outputs import FAIL, INLINE, JEST, OWN, SKIP, Case, Family

from envs.swe_bench.grading.grade import assert_gradable
from envs.swe_bench.grading.runners import RUNNERS
from envs.swe_bench.grading.verdict import judge, statuses_of_log
from envs.swe_bench.instance import RowError

swebench = pytest.importorskip("swebench.harness.log_parsers")
SAMPLE = 150
FORMATS = [
    pytest.param(name, one, id=f"{name}-{at}") for name in sorted(FAMILIES) for at, one in enumerate(FAMILIES[name])
]


def test_every_parser_of_swebench_is_attacked() -> None:
    assert set(swebench.PARSER_REGISTRY) == set(PARSERS)
    assert set(swebench.PARSER_REGISTRY) <= set(RUNNERS)


@pytest.mark.parametrize(("parser", "family"), FORMATS)
@pytest.mark.parametrize("seed", [0, 1])
def test_forged_output_earns_nothing(parser: str, family: Family, seed: int) -> None:
    logs = list(dict.fromkeys(forgeries(family, seed)))
    logs = random.Random(seed).sample(logs, min(SAMPLE, len(logs)))  # `python forged_output.py` plays all of them
    run = failing_run(family)
    row, status, command = row_of(parser, family, run[:1], run[1:]), family.status(run), family.command(run)
    earned = [log for log in logs if earns(log, parser, row, status, command)]
    assert not earned, f"{len(earned)} earn; the first:\n{earned[0]}"


@pytest.mark.parametrize(("parser", "family"), FORMATS)
def test_a_failing_run_is_read_as_it_is(parser: str, family: Family) -> None:
    """A format that nothing reads would earn nothing either."""
    run = failing_run(family)
    row = row_of(parser, family, run[:1], run[1:])
    log = family.render(run).replace(OWN, "").replace(INLINE, "")
    statuses = statuses_of_log(log, family.status(run), row, command=family.command(run))
    assert judge(statuses, row) == ((0, 1), (1, 1)), statuses


@pytest.mark.parametrize(("parser", "family"), FORMATS)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_honest_run_is_taken(parser: str, family: Family, seed: int) -> None:
    """With prints, with tests that are skipped, and with one that fails and is not the row's."""
    for log, row, status, command in honest(family, parser, seed):
        statuses = statuses_of_log(log, status, row, command=command)
        wanted = [*row.fail_to_pass, *row.pass_to_pass]
        assert [statuses.get(test) for test in wanted] == ["PASSED"] * len(wanted), f"{log}\n{statuses}"


@pytest.mark.parametrize("parser", NAMES_FAILURES_ONLY)
def test_a_parser_that_names_no_passing_test_is_refused_by_name(parser: str) -> None:
    assert refused(parser)
    with pytest.raises(RowError, match=f"log_parser.*{parser}, which names failing tests only"):
        assert_gradable(row_of(parser, JEST, [Case("a")]))


@pytest.mark.parametrize(
    ("parser", "fields"),
    [
        ("parse_log_lighthouse", {}),
        ("parse_log_immutable_js", {"instance_id": "a-1"}),
        ("parse_log_jekyll", {"instance_id": "j-1"}),
    ],
)
def test_a_row_whose_format_a_parser_cannot_tell_is_refused_before_anything_runs(
    parser: str, fields: dict[str, str]
) -> None:
    """By its version or its id; else every patch of it, the right one too, would get 0 for it."""
    with pytest.raises(RowError, match=f"log_parser.*{parser}, which cannot tell"):
        assert_gradable(row_of(parser, Family(JEST.line, row=fields), [Case("a")]))


def test_a_test_whose_name_ends_like_that_of_a_failed_one_has_not_failed() -> None:
    run = [Case("order"), Case("keeps the order", FAIL), Case("the order"), Case("of a \xd7 b")]
    row = row_of("parse_log_jest", JEST, [run[0]], [run[2]])
    log = JEST.render(run).replace(OWN, "")
    assert judge(statuses_of_log(log, 1, row), row) == ((1, 1), (1, 1))


@pytest.mark.parametrize("parser", ["parse_log_minitest", "parse_log_jekyll"])
def test_a_skipped_test_of_minitest_has_not_passed(parser: str) -> None:
    family = FAMILIES[parser][0]
    run = [Case("a"), Case("b", SKIP)]
    row = row_of(parser, family, [run[0]], [run[1]])
    statuses = statuses_of_log(family.render(run).replace(OWN, "").replace(INLINE, ""), 0, row)
    assert statuses == {family.ident_of(run[0]): "PASSED", family.ident_of(run[1]): "SKIPPED"}
