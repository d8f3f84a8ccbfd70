"""A repository that adds wrongly: its sources, its row, and patches to it made by the host's git."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.swe_bench.instance import Instance, read_row

MARK = "FIXED_7f3a9c"
"""Stands in the fix and nowhere else: what must not be found in what the agent sees."""

FILES: dict[str, str | bytes] = {
    "calc/__init__.py": "from calc.core import add\n",
    "calc/core.py": "def add(a, b):\n    return a - b\n",
    "conftest.py": "import pytest\n\n\n@pytest.fixture\ndef one():\n    return 1\n",
    "setup.cfg": "[metadata]\nname = calc\n\n[tool:pytest]\naddopts = -p no:cacheprovider\n",
    ".gitignore": "*.log\n/build/\n",
    "tests/test_core.py": "from calc import add\n\n\ndef test_zero(one):\n    assert add(one, 0) == 1\n",
    "crlf.txt": b"one\r\ntwo\r\n",
    "tool.sh": "#!/bin/sh\necho tool\n",
    "data.bin": bytes(range(256)),
}
FIX = f"def add(a, b):\n    return a + b  # {MARK}\n"
TESTS = (
    FILES["tests/test_core.py"]  # type: ignore[operator]
    + """

import pytest


def test_add():
    assert add(2, 3) == 5


@pytest.mark.parametrize("text", ["a b", "[x]", "é - ü", "  two  "])
def test_text(text):
    assert add(text, "!") == text + "!"
"""
)
FAIL_TO_PASS = (
    "tests/test_core.py::test_add",
    "tests/test_core.py::test_text[a b]",
    "tests/test_core.py::test_text[[x]]",
    "tests/test_core.py::test_text[\\xe9 - \\xfc]",
    "tests/test_core.py::test_text[  two  ]",
)
PASS_TO_PASS = ("tests/test_core.py::test_zero",)

# What an image may hold of the future, apart from what a clone brings: reflogs, stashes, dangling commits and so on.
FUTURE = r"""
cd /testbed
git config user.name t; git config user.email t@example.org
base=$(git rev-parse HEAD~1)
git tag -a -m 'with the fix' v2.0 HEAD
git tag v1.0 "$base"
git notes add -m 'FIXED_7f3a9c' HEAD
git reset -q --hard "$base"
echo 'stashed FIXED_7f3a9c' >> calc/core.py; git stash -q
git checkout -q -b fix-it; echo '# FIXED_7f3a9c' >> calc/core.py; git commit -qam 'dangling'
git checkout -q main; git branch -q -D fix-it
git worktree add -q /opt/elsewhere v2.0
git clone -q --bare . /opt/store.git
mkdir -p .git/objects/info; echo /opt/store.git/objects > .git/objects/info/alternates
git clone -q . vendor/copy; printf '#!/bin/sh\n# FIXED_7f3a9c\n' > .git/hooks/post-commit
printf 'vendor/\n' >> .git/info/exclude
echo 'left by the environment' > made_before.txt
"""


@dataclass(frozen=True)
class Calc:
    """The repository at `folder` on the host (at its base commit) and its row."""

    folder: Path
    row: dict[str, Any]

    @property
    def instance(self) -> Instance:
        return read_row(self.row, "calc")

    def variant(self, **fields: Any) -> Instance:
        """The row with other fields, on the same image."""
        return read_row({**self.row, "image": f"sao-built:{self.row['instance_id']}", "build": None, **fields}, "calc")

    def patch(self, edits: Mapping[str, str | bytes | None]) -> bytes:
        """A git patch that writes these files (None deletes one) on the base commit."""
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch, "copy")
            shutil.copytree(self.folder, copy, symlinks=True)
            git(copy, "checkout", "-q", "-f", self.row["base_commit"])
            write(copy, edits)
            git(copy, "add", "-A", "-f")
            return git(copy, "diff", "--cached", "--binary", "--full-index", "--no-renames", self.row["base_commit"])


def git(folder: Path, *arguments: str) -> bytes:
    """Output of the host's git, without its user's settings."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    who = {
        f"GIT_{role}_{what}": value
        for role in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "t"), ("EMAIL", "t@example.org"), ("DATE", "2024-01-01T00:00:00Z"))
    }
    env = {**kept, **who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(["git", *arguments], cwd=folder, env=env, check=True, capture_output=True).stdout


def write(folder: Path, files: Mapping[str, str | bytes | None]) -> None:
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def make_calc(folder: Path, base_image: str, instance_id: str) -> Calc:
    """The repository with a commit before the bug's, the base commit, and one that fixes it."""
    git(folder, "init", "-q", "-b", "main")
    write(folder, {"README": "calc\n"})
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "Begin")
    write(folder, FILES)
    git(folder, "add", "-A", "-f")
    git(folder, "update-index", "--chmod=+x", "tool.sh")
    (folder / "tool.sh").chmod(0o755)
    git(folder, "commit", "-q", "-m", "Add")
    base = git(folder, "rev-parse", "HEAD").decode().strip()
    write(folder, {"calc/core.py": FIX, "tests/test_core.py": TESTS})
    diff = ("diff", "--binary", "--full-index", base, "--")
    patch, test_patch = git(folder, *diff, "calc").decode(), git(folder, *diff, "tests").decode()
    git(folder, "commit", "-q", "-a", "-m", f"Fix it {MARK}")
    row = {
        "instance_id": instance_id,
        "repo": "test/calc",
        "base_commit": base,
        "problem_statement": "add(2, 3) is -1",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": list(FAIL_TO_PASS),
        "PASS_TO_PASS": list(PASS_TO_PASS),
        "test_command": "python3 -m pytest -rA",
        "build": {"base": base_image, "repository": str(folder), "install": [FUTURE]},
    }
    return Calc(folder, row)
