"""`python -m envs.swe_bench validate`: rows that are fit for training pass, others are named with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swe_tools import Calc

from envs.swe_bench.__main__ import main
from envs.swe_bench.grading.reference import References
from envs.swe_bench.instance import read_row
from envs.swe_bench.validate import wants_network

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600), pytest.mark.xdist_group("swe_bench_validate")]


def test_rows_are_told_apart(calc: Calc, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = f"sao-built:{calc.row['instance_id']}"
    good = {**calc.row, "image": image, "build": None}
    rows = [
        {**good, "instance_id": "good"},
        {**good, "instance_id": "no-fix", "patch": calc.patch({"README": "x\n"}).decode()},
        {**good, "instance_id": "no-bug", "FAIL_TO_PASS": good["PASS_TO_PASS"]},
        {**good, "instance_id": "no-image", "image": "sao-test:missing"},
        {**good, "instance_id": "other-base", "patch": good["patch"].replace("return a - b", "return a * b")},
        {**good, "instance_id": "no-test-base", "test_patch": good["test_patch"].replace("test_zero", "test_nil")},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    files = ["--json", str(out), "--log-dir", str(tmp_path / "logs"), "--reference", str(tmp_path / "reference.jsonl")]
    assert main(["validate", str(file), "--workers", "2", "--memory-mb", "512", *files]) == 1
    found = {one["instance_id"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert [one for one in found if found[one]["valid"]] == ["good"]
    assert (found["good"]["nothing"], found["good"]["gold"]) == ("0/5 + 1/1", "5/5 + 1/1")
    assert "reference patch: tests_fail" in found["no-fix"]["problem"]
    assert "without any fix" in found["no-bug"]["problem"]
    assert "docker pull sao-test:missing" in found["no-image"]["problem"]
    assert "reference patch does not apply" in found["other-base"]["problem"]
    assert "test_patch does not apply" in found["no-test-base"]["problem"]
    # Case K12: what fails is named, and what was printed is kept.
    assert found["no-fix"]["failing"] == good["FAIL_TO_PASS"]
    assert found["good"]["failing"] == []
    printed = capsys.readouterr().out
    assert "1 of 6 rows are valid" in printed
    assert "no-fix: failing: tests/test_core.py::test_add" in printed
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert "test_add" in logs["no-fix.reference.log"]
    assert {"good.nothing.log", "good.reference.log", "no-bug.nothing.log"} <= logs.keys()
    # The record of the reference run: of the valid row alone, and the environment takes it.
    references = References(tmp_path / "reference.jsonl")
    assert references.of(read_row(rows[0], "x")) is not None
    assert len((tmp_path / "reference.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>",
        "requests.exceptions.ConnectionError: HTTPConnectionPool: Max retries exceeded with url: /",
        "OSError: [Errno 101] Network is unreachable",
        "Error: getaddrinfo EAI_AGAIN registry.example.org",
    ],
)
def test_tests_that_want_a_network_are_known_by_what_they_print(line: str) -> None:
    """Case K13."""
    assert wants_network(f"FAILED t.py::a\n{line}\n")
    assert not wants_network("FAILED t.py::network - assert 0\n")


def test_what_is_left_out_of_a_rows_lists_is_said(
    calc: Calc, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case K4."""
    row = {**calc.row, "image": f"sao-built:{calc.row['instance_id']}", "build": None}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{**row, "PASS_TO_PASS": [*row["PASS_TO_PASS"], "[100%]-----", "["]}]))
    assert main(["validate", str(file), "--memory-mb", "512"]) == 0
    assert "no test: '[100%]-----'" in capsys.readouterr().out


def test_one_row_on_a_local_image(calc: Calc, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{**calc.row, "image": "sao-test:missing", "build": None}]))
    image = f"sao-built:{calc.row['instance_id']}"
    command = ["validate", str(file), "--only", calc.row["instance_id"], "--memory-mb", "512"]
    assert main([*command, "--image", image]) == 0
    assert main(command) == 1


@pytest.mark.slow
def test_demo_set_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "demo", "--workers", "2", "--memory-mb", "512"]) == 0
    assert "5 of 5 rows are valid" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.jsonl"],
        ["demo", "--only", "x"],
        ["demo", "--image", "x"],
        ["demo", "--workers", "0"],
        ["demo", "--json", "/no/such/folder/out.jsonl"],
        ["demo", "--json", "/tmp"],
        ["demo", "--reference", "/no/such/folder/r.jsonl"],
        ["demo", "--log-dir", "/dev/null/logs"],
    ],
    ids=[
        "no file",
        "no row",
        "image for many",
        "no worker",
        "no folder",
        "a folder",
        "no folder for records",
        "no folder for logs",
    ],
)
def test_command_that_cannot_be_done_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *arguments]) == 2
    assert "validate:" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["validate", "--help"])
    assert ended.value.code == 0
    assert "python -m envs.swe_bench validate demo" in capsys.readouterr().out
