"""`python -m envs.python_tir check FILE`, run as a user runs it, on a set written for this test."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from envs.python_tir.__main__ import main
from envs.python_tir.grading.variants import RIGHT, WRONG, split_list

GOLDS = ["42", "-7", r"\frac{3}{8}", "1,2,3", r"x<3", r"2\sqrt{5}", "12,500", r"\text{east}", "(1,-2)", r"36^\circ"]


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "envs.python_tir", "check", *arguments, "--workers", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={"COLUMNS": "140", "PATH": ""})


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": gold}) + "\n" for i, gold in enumerate(GOLDS)))
    return path


def test_good_set_passes_in_every_form(problems: Path) -> None:
    done = check(str(problems))
    assert done.returncode == 0, done.stdout + done.stderr
    for form in (*RIGHT, *WRONG):
        assert form in done.stdout
    assert "100.00 %" in done.stdout


def test_misses_are_saved_and_make_the_status_one(tmp_path: Path) -> None:
    """A gold answer that is no answer: its brace never closes, so no box holds it."""
    path, saved = tmp_path / "set.csv", tmp_path / "misses.jsonl"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["Problem", "Short Answer"])
        writer.writerows([["q", "42"], ["q", r"\frac{"]])
    done = check(str(path), "--misses", str(saved))
    assert done.returncode == 1
    assert {json.loads(line)["index"] for line in saved.read_text().splitlines()} == {1}
    assert "refused, but right" in done.stdout


def test_final_number_of_a_worked_solution_is_found(tmp_path: Path) -> None:
    path = tmp_path / "worked.jsonl"
    path.write_text(
        "".join(json.dumps({"question": "q", "answer": f"3*{n}\n#### {3 * n}"}) + "\n" for n in range(2, 8))
    )
    assert check(str(path)).returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"question": "q", "result": "1"}\n', "--answer"),
        ("a.jsonl", '{"text": "q", "answer": "1"}\n', "--problem"),
        ("a.jsonl", "not json\n", "JSON"),
        ("a.jsonl", "", "no problems"),
        ("a.txt", '{"question": "q", "answer": "1"}\n', ".jsonl or .csv"),
    ],
)
def test_unusable_file_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert main(["check", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["check", "--help"])
    assert "example:" in capsys.readouterr().out


@pytest.mark.parametrize("gold", [*GOLDS, "0", "B", "no solutions", r"1 \pm \sqrt{2}", "$f(x)=x+1$", r"5\text{ cm}^2"])
def test_forms_differ_and_repeat(gold: str) -> None:
    for form, wrong in WRONG.items():
        first, second = (wrong(gold, random.Random(3), [gold, "99", "17"]) for _ in range(2))
        assert first == second, form
        assert first is None or first.strip("$") != gold.strip("$"), form
    assert RIGHT["boxed"](gold) == rf"\boxed{{{gold}}}"


def test_thousands_are_no_list() -> None:
    assert split_list("12,500") is None
    assert split_list("1,2,3") == ["1", "2", "3"]
    assert split_list("(1,2),(3,4)") == ["(1,2)", "(3,4)"]
