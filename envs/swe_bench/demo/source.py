"""The sources of the demo set: what `demo.toml` and `series/` say, and the repository that follows from them."""

from __future__ import annotations

import os
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROWS = HERE / "rows.jsonl"
_GIT_LIMIT_S = 60.0
_COMMITTER = ("sao-demo", "demo@example.org")


class DemoError(RuntimeError):
    """The demo set cannot be made here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Demo:
    """One repository of the set. `fix` counts the commits from 1; `refs` maps names to such numbers."""

    name: str
    trap: str
    fix: int
    version: str
    problem_statement: str
    hints_text: str
    refs: dict[str, int]

    @property
    def repo(self) -> str:
        return f"sao-demo/{self.name}"

    @property
    def image(self) -> str:
        return f"sao-demo:{self.name}"

    @property
    def patches(self) -> list[Path]:
        """The commits as patches, oldest first."""
        return sorted((HERE / "series" / self.name).glob("*.patch"))


@cache
def demos() -> dict[str, Demo]:
    """Every repository of the set by its name, in a fixed order."""
    entries = tomllib.loads((HERE / "demo.toml").read_text(encoding="utf-8"))
    by_name = {}
    for name, entry in sorted(entries.items()):
        statement = entry.pop("problem_statement").strip() + "\n"
        by_name[name] = Demo(name=name, problem_statement=statement, **entry)
    return by_name


def demo(name: str) -> Demo:
    """The repository of that name; `DemoError` lists the names if there is none."""
    try:
        return demos()[name]
    except KeyError:
        raise DemoError(f"there is no demo repository {name!r}; there are {', '.join(demos())}") from None


def git(folder: Path, *arguments: str, date: str | None = None) -> bytes:
    """Output of a git command in `folder`, untouched by the user's own settings; raises `DemoError`.

    `date` (ISO 8601) is the author's and committer's date of what the command commits.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    name, email = _COMMITTER
    identity = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": name,
        "GIT_AUTHOR_EMAIL": email,
        "GIT_COMMITTER_NAME": name,
        "GIT_COMMITTER_EMAIL": email,
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    if date is not None:
        identity |= {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    argv = ["git", "-c", "core.autocrlf=false", "-c", "core.filemode=true", *arguments]
    try:
        done = subprocess.run(
            argv, cwd=folder, env=kept | identity, capture_output=True, timeout=_GIT_LIMIT_S, check=False
        )
    except FileNotFoundError:
        raise DemoError("the demo set is made with git, which is not installed here") from None
    except subprocess.TimeoutExpired:
        raise DemoError(f"git {arguments[0]} did not end within {_GIT_LIMIT_S:g} s in {folder}") from None
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip() or done.stdout.decode(errors="replace").strip()
        raise DemoError(f"git {arguments[0]} failed: {message}")
    return done.stdout


def make_repository(entry: Demo, folder: Path) -> list[str]:
    """Make the repository in `folder` (new or empty), its last commit checked out; returns the commit ids in order.

    Everything an instance's image may carry of the future is there: later commits on `main`, `entry.refs`, a remote's
    branch, reflogs, and a commit that only ORIG_HEAD leads to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    # --keep-cr: a repository with CRLF files is one of the set.
    patches = [str(path) for path in entry.patches]
    git(folder, "am", "-q", "--keep-cr", "--committer-date-is-author-date", *patches)
    commits = git(folder, "rev-list", "--reverse", "main").decode().split()
    for name, number in entry.refs.items():
        git(folder, "update-ref", name, commits[number - 1])
    git(folder, "remote", "add", "origin", f"https://git.invalid/{entry.repo}.git")
    git(folder, "update-ref", "refs/remotes/origin/main", commits[-1])
    # The fix once more, on the base and nowhere else: what an abandoned branch leaves behind.
    tree = git(folder, "rev-parse", f"{commits[entry.fix - 1]}^{{tree}}").decode().strip()
    date = git(folder, "log", "-1", "--format=%aI", commits[entry.fix - 1]).decode().strip()
    message = "Try the fix elsewhere"
    orphan = git(folder, "commit-tree", tree, "-p", commits[entry.fix - 2], "-m", message, date=date).decode().strip()
    (folder / ".git" / "ORIG_HEAD").write_text(orphan + "\n", encoding="ascii")
    return commits
