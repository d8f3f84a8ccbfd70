"""`rows.jsonl` from the sources: patches out of the history, test ids out of real runs of pytest.

The file is shipped, so none of this is needed to use the set; a test holds that it comes out the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from envs.swe_bench.demo.source import Demo, DemoError, demos, git, make_repository

TEST_COMMAND = "python3 -m pytest -rA -p no:cacheprovider"
_RUN_LIMIT_S = 300.0
# Ids and outcomes as pytest itself has them: its printed lines cannot be split where ids hold spaces.
_RECORDER = """
import json, os
outcomes = {}
def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed:
        outcomes[report.nodeid] = report.outcome == "passed" and outcomes.get(report.nodeid, True)
def pytest_sessionfinish():
    with open(os.environ["DEMO_OUTCOMES"], "w", encoding="utf-8") as file:
        json.dump(outcomes, file)
"""


def run_tests(folder: Path, files: Iterable[str]) -> dict[str, bool]:
    """Whether each test of `files` passes in the repository at `folder`, by pytest's node id; raises `DemoError`."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "demo_recorder.py").write_text(_RECORDER, encoding="utf-8")
        target = Path(scratch, "outcomes.json")
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "demo_recorder", *files]
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {
            "DEMO_OUTCOMES": str(target),
            "PYTHONPATH": scratch,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "LC_ALL": "C.UTF-8",
        }
        try:
            done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, timeout=_RUN_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the tests in {folder} did not end within {_RUN_LIMIT_S:g} s") from None
        try:
            outcomes: dict[str, bool] = json.loads(target.read_text(encoding="utf-8"))
        except FileNotFoundError:
            text = (done.stdout + done.stderr).decode(errors="replace")
            raise DemoError(f"pytest did not run in {folder} (pip install pytest): {text[-2000:]}") from None
    return outcomes


def make_row(entry: Demo) -> dict[str, Any]:
    """The row of one repository; runs its tests before and after the fix. Raises `DemoError`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, entry.name)
        commits = make_repository(entry, folder)
        fix, base = commits[entry.fix - 1], commits[entry.fix - 2]
        diff = ("diff", "--binary", "--full-index", "--no-renames", "--no-color", base, fix, "--")
        patch = git(folder, *diff, ".", ":(exclude)tests").decode()
        test_patch = git(folder, *diff, "tests").decode()
        files = git(folder, "diff", "--name-only", "-z", base, fix, "--", "tests").decode().strip("\0").split("\0")
        git(folder, "checkout", "-q", "--detach", base)
        apply_patch(folder, test_patch)
        before = run_tests(folder, files)
        apply_patch(folder, patch)
        after = run_tests(folder, files)
        created = git(folder, "log", "-1", "--date=format-local:%Y-%m-%dT%H:%M:%SZ", "--format=%ad", fix).decode()
    passing = sorted(test for test, passed in after.items() if passed)
    if len(passing) < len(after):
        raise DemoError(f"{entry.name}: tests fail with the fix: {sorted(set(after) - set(passing))}")
    return {
        "instance_id": f"sao-demo__{entry.name}-1",
        "repo": entry.repo,
        "base_commit": base,
        "problem_statement": entry.problem_statement,
        "hints_text": entry.hints_text,
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": [test for test in passing if not before.get(test, False)],
        "PASS_TO_PASS": [test for test in passing if before.get(test, False)],
        "version": entry.version,
        "environment_setup_commit": base,
        "created_at": created.strip(),
        "image": entry.image,
        "test_command": TEST_COMMAND,
        "workdir": "/testbed",
    }


def apply_patch(folder: Path, patch: str) -> None:
    """Apply a git patch to the files at `folder`; raises `DemoError`."""
    with tempfile.NamedTemporaryFile(suffix=".patch") as file:
        file.write(patch.encode())
        file.flush()
        git(folder, "apply", "--whitespace=nowarn", file.name)


def rows_text(names: Iterable[str] | None = None) -> str:
    """`rows.jsonl` as it follows from the sources: of every repository, or of those named."""
    chosen = demos() if names is None else names
    return "".join(json.dumps(make_row(demos()[name]), ensure_ascii=False) + "\n" for name in chosen)
