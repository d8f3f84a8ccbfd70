"""Which parts of a patch are not carried out when it is graded, because they would change how tests run or are told.

They are left out and named in the grade; the rest of the patch is graded. An honest fix that touched a `conftest.py` on
the way keeps its chance, a patch that needs one to pass does not pass.
"""

from __future__ import annotations

import configparser
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from envs.swe_bench.instance import Instance, patch_paths

ALWAYS = frozenset(
    (
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "sitecustomize.py",
        "usercustomize.py",
        ".pdbrc",
        "entry_points.txt",
    )
)
"""Names of files that pytest or Python read by themselves, wherever they lie."""

CONFIGURATION = frozenset(["setup.cfg", "tox.ini", "pyproject.toml", "setup.py"])
"""Files that also hold a project's own settings: only a change of what concerns the tests is undone."""

TOOLS = frozenset(
    (
        "pytest",
        "_pytest",
        "py",
        "pluggy",
        "iniconfig",
        "packaging",
        "exceptiongroup",
        "tomli",
        "attr",
        "attrs",
        "xdist",
        "pytest_cov",
        "pytest_mock",
        "pytest_asyncio",
        "pytest_timeout",
        "hypothesis",
        "coverage",
        "tox",
        "nose",
        "unittest2",
        "mock",
        "pip",
        "setuptools",
        "pkg_resources",
    )
)
_SECTION = re.compile(r"^\s*\[(?:tool:)?pytest\]", re.MULTILINE)
_AFTER_HEADER = re.compile(r"^(\[[^\]\n]*\]).*$", re.MULTILINE)
_HEADER = re.compile(rb"^(?=diff --git )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Split:
    """A patch without its protected parts, and what was left out (paths)."""

    patch: bytes
    left_out: tuple[str, ...]


def split_patch(
    patch: bytes, *, test_files: Collection[str], runner_files: Collection[str], base_files: Collection[str]
) -> Split:
    """Leave out of `patch` what touches the instance's tests, how tests are run, or what stands in for a test tool.

    `test_files`: what the instance's test patch brings. `runner_files`: files that the test command starts.
    `base_files`: every file of the base commit; a module of a tool's name is only refused where it is new.
    """
    roots = import_roots(test_files, base_files)
    kept: list[bytes] = []
    left_out: dict[str, None] = {}
    for section in _HEADER.split(patch):
        paths = patch_paths(section.decode("utf-8", "surrogateescape"))
        refused = [
            path
            for path in paths
            if path in test_files
            or path in runner_files
            or is_protected(path, is_new=path not in base_files, roots=roots)
        ]
        if refused:
            left_out.update(dict.fromkeys(refused))
        else:
            kept.append(section)
    return Split(b"".join(kept), tuple(left_out))


def files_of_tests(instance: Instance, base_files: Collection[str]) -> frozenset[str]:
    """The files of the instance's tests: those its test patch brings, those that its ids name, and R2E-Gym's."""
    named = {test.split("::")[0] for test in (*instance.fail_to_pass, *instance.pass_to_pass) if "::" in test}
    in_image = {path for path in base_files if path.startswith("r2e_tests/") or path == "run_tests.sh"}
    return frozenset({*instance.test_files, *(named & set(base_files)), *(in_image if not instance.test_patch else ())})


def is_protected(path: str, *, is_new: bool, roots: Collection[str]) -> bool:
    """Whether a patch may not touch `path`. `roots` are the folders from which Python imports (see `import_roots`)."""
    pure = PurePosixPath(path)
    if pure.name in ALWAYS or pure.suffix in (".pth", ".pyc", ".pyo", ".egg-link"):
        return True
    if any(part == "__pycache__" or part.endswith((".dist-info", ".egg-info")) for part in pure.parts[:-1]):
        return True
    if not is_new:
        return False
    for root in roots:
        if root and not path.startswith(root + "/"):
            continue
        module = path[len(root) + 1 if root else 0 :].split("/")[0].split(".")[0]
        importable = "/" in path[len(root) + 1 if root else 0 :] or pure.suffix in (".py", ".so", ".pyd")
        if importable and (module in TOOLS or module in sys.stdlib_module_names):
            return True
    return False


def import_roots(test_files: Collection[str], base_files: Collection[str]) -> frozenset[str]:
    """Folders that are on `sys.path` when tests run: the top, `src`, `lib`, and those pytest adds for test files."""
    roots = {"", "src", "lib"}
    for file in test_files:
        folder = PurePosixPath(file).parent
        while str(folder) != "." and f"{folder}/__init__.py" in base_files:
            folder = folder.parent
        roots.add("" if str(folder) == "." else str(folder))
    return frozenset(roots)


def changes_how_tests_run(name: str, before: str | None, after: str | None) -> bool:
    """Whether a `CONFIGURATION` file differs in what pytest reads; True for one that cannot be read any more.

    None is a file that is not there. For `setup.py` only pytest plugins that it registers count.
    """
    if before == after:
        return False
    old, new = before or "", after or ""
    if new.count("pytest11") != old.count("pytest11"):
        return True
    if name == "setup.py":
        return False
    return any(_read(name, reading(old)) != _read(name, reading(new)) for reading in _READINGS)


# Readers of such files differ in what ends a line: configparser goes by "\n", a text file by "\r" as well, and pytest's
# iniconfig splits at whatever `str.splitlines` takes for an end. A setting that one of them sees is a setting.
_READINGS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: re.sub(r"\r\n?", "\n", text),
    lambda text: "\n".join(text.removeprefix("\ufeff").splitlines()),
)


def _read(name: str, text: str) -> Mapping[str, object]:
    """What concerns tests in one reading of a file; equal to no other where it cannot be read so."""
    try:
        return _settings(name, text)
    except (configparser.Error, tomllib.TOMLDecodeError):
        # Not equal to any other: what cannot be read may hold anything.
        return {"": object()}


def _settings(name: str, text: str) -> Mapping[str, object]:
    if name == "pyproject.toml":
        parsed = tomllib.loads(text)
        tools = parsed.get("tool", {})
        settings = {key: tools[key] for key in ("pytest", "coverage", "tox") if key in tools}
        # A folder's first file with pytest settings is the one that is read, so an empty section counts.
        return settings | {"entry-points": parsed.get("project", {}).get("entry-points", {}).get("pytest11")}
    if not _SECTION.search(text) and not re.search(r"^\s*\[(testenv|tox)", text, re.MULTILINE):
        return {}
    parser = configparser.RawConfigParser(strict=False)
    # pytest takes a header to end at its first bracket where a comment follows, configparser at the line's last one.
    parser.read_string(_AFTER_HEADER.sub(r"\1", text))
    return {
        section: dict(parser[section])
        for section in parser.sections()
        if section in ("pytest", "tool:pytest", "tox") or section.startswith("testenv")
    }
