"""The demo set is what it says: the same everywhere, with each trap in its place, and rows that follow from it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from envs.swe_bench.demo.rows import apply_patch, make_row, run_tests
from envs.swe_bench.demo.source import ROWS, DemoError, demo, demos, git, make_repository
from envs.swe_bench.instance import load_instances

NAMES = ["durations", "inikit", "pacer", "phrasebook", "tablet"]


def shipped(name: str) -> str:
    [line] = [line for line in ROWS.read_text(encoding="utf-8").splitlines() if f'"sao-demo__{name}-1"' in line]
    return line


def test_there_are_five() -> None:
    assert list(demos()) == NAMES
    assert list(load_instances("demo")) == [f"sao-demo__{name}-1" for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_drift_from_their_sources(name: str) -> None:
    """Each row again from patches and real test runs: so FAIL_TO_PASS fails before and passes after the fix, and
    PASS_TO_PASS passes both times."""
    row = make_row(demo(name))
    assert row["FAIL_TO_PASS"]
    assert row["PASS_TO_PASS"]
    assert json.dumps(row, ensure_ascii=False) == shipped(name)


def test_a_wrong_fix_is_seen(tmp_path: Path) -> None:
    """Half of the phrasebook's fix, the source without its compiled catalogue, leaves the failing tests failing and
    breaks one that passed."""
    row = json.loads(shipped("phrasebook"))
    make_repository(demo("phrasebook"), tmp_path)
    git(tmp_path, "checkout", "-q", "--detach", row["base_commit"])
    apply_patch(tmp_path, row["test_patch"])
    source = tmp_path / "phrasebook" / "de" / "messages.po"
    source.write_text(source.read_text(encoding="utf-8").replace("n > 1", "n != 1"), encoding="utf-8")
    outcomes = run_tests(tmp_path, ["tests"])
    assert not any(outcomes[test] for test in row["FAIL_TO_PASS"])
    assert not outcomes["tests/test_build.py::test_compiled_catalogue_is_up_to_date[de]"]


def test_commit_ids_do_not_depend_on_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has git rewrite line ends, sign commits and date them otherwise gets the same repository."""
    plain = make_repository(demo("inikit"), tmp_path / "plain")
    config = tmp_path / "gitconfig"
    config.write_text("[core]\nautocrlf = true\n[commit]\ngpgsign = true\n[user]\nname = X\nemail = x@example.org\n")
    for key, value in {
        "GIT_CONFIG_GLOBAL": str(config),
        "GIT_AUTHOR_DATE": "2001-01-01T00:00:00",
        "TZ": "Asia/Tokyo",
    }.items():
        monkeypatch.setenv(key, value)
    assert make_repository(demo("inikit"), tmp_path / "other") == plain


@pytest.mark.parametrize("name", NAMES)
def test_the_future_is_there_to_be_scrubbed(name: str, tmp_path: Path) -> None:
    """Case F1 needs something to hide: commits, tags, branches, a remote and an unreachable commit with the fix."""
    entry = demo(name)
    commits = make_repository(entry, tmp_path)
    base, fix = json.loads(shipped(name))["base_commit"], commits[entry.fix - 1]
    assert commits.index(base) == entry.fix - 2
    assert len(commits) > entry.fix
    assert git(tmp_path, "tag", "--contains", fix).strip()
    assert len(git(tmp_path, "branch", "--all", "--contains", fix).split()) > 2
    orphan = (tmp_path / ".git" / "ORIG_HEAD").read_text().strip()
    assert orphan in git(tmp_path, "fsck", "--no-reflogs", "--unreachable").decode()
    assert not git(tmp_path, "diff", orphan, fix)
    assert git(tmp_path, "status", "--porcelain") == b""


def test_ids_with_spaces_brackets_and_other_alphabets() -> None:
    """Case F4's instance."""
    row = json.loads(shipped("durations"))
    for tests in (row["FAIL_TO_PASS"], row["PASS_TO_PASS"]):
        for pattern in (r"\[.* .*\]", r"\[.*\[.*\]", r"[^\x00-\x7f]"):
            assert any(re.search(pattern, test) for test in tests), pattern
    assert any("  " in test for test in row["PASS_TO_PASS"])


def test_files_with_crlf(tmp_path: Path) -> None:
    """Case F2's instance with CRLF line ends: in every file of every commit, and in the patch."""
    for commit in make_repository(demo("inikit"), tmp_path):
        for path in git(tmp_path, "ls-tree", "-r", "--name-only", commit).decode().split():
            text = git(tmp_path, "show", f"{commit}:{path}")
            assert text.count(b"\r\n") == text.count(b"\n") > 0, path
    added = [line for line in json.loads(shipped("inikit"))["patch"].split("\n") if re.match(r"[+-][^+-]", line)]
    assert added
    assert all(line.endswith("\r") for line in added)


def test_compiled_file_and_new_file() -> None:
    """Case F2's instances whose fix is binary, and a file that was not there."""
    assert "GIT binary patch" in json.loads(shipped("phrasebook"))["patch"]
    assert "new file mode" in json.loads(shipped("tablet"))["patch"]


def test_issues_do_not_name_tests() -> None:
    for instance in load_instances("demo").values():
        assert "test" not in instance.problem_statement.lower()


def test_unknown_repository_is_named() -> None:
    with pytest.raises(DemoError, match="durations, inikit"):
        demo("nothing")


def test_git_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="not a git repository"):
        git(tmp_path, "log")


def test_series_are_shipped_byte_for_byte() -> None:
    """A checkout with autocrlf must not change the patches: CRLF in them is content."""
    here = ROWS.parent
    paths = [str(path.relative_to(here)) for path in sorted(here.glob("series/*/*.patch"))]
    assert len(paths) == 25
    found = subprocess.run(
        ["git", "check-attr", "text", "--", *paths, ROWS.name], cwd=here, capture_output=True, text=True, check=True
    ).stdout
    assert found.count("text: unset") == len(paths) + 1
