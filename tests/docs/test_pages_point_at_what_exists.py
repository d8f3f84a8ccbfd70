"""What the pages name is there: linked files, paths, modules and what they define, commands and targets of make.

Fast and without a build. `make docs` builds the site, and holds the headings that links point at.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("learner", "agent", "envs", "sandboxes")
FOLDERS = (*PACKAGES, "docs", "tests", "benchmarks", "recipes", "examples", ".ci")
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
)

# The changelog also speaks of names that are gone.
TODAY = [page for page in PAGES if page != "CHANGELOG.md"]

# Files that the pages speak of and that lie elsewhere: in repositories that agents work in.
OTHERS = {"setup.py", "sitecustomize.py", "usercustomize.py"}

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(rf"(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*")
FILE_NAME = re.compile(r"[\w-]+\.(?:py|sh|md|toml|yaml)")
DEFINED = re.compile(r"(?P<path>[\w./-]+\.py): (?P<name>[\w.]+)")
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+(?![\w/*-])")
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)(?=[`\s,;.:)]|$)")


@functools.cache
def file_names() -> frozenset[str]:
    """The names of all files in the folders that are ours, and of those beside them."""
    below = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    return frozenset(path.name for path in (*below, *ROOT.iterdir()))


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """What a module defines at its top, and the members of its classes as `Class.member`."""
    return frozenset(_defined(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def _defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.ClassDef(name=name, body=members):
                yield prefix + name
                yield from _defined(members, f"{prefix}{name}.")
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name
            case ast.Assign(targets=targets):
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def is_defined(path: Path, name: str) -> bool:
    return path.is_file() and name in names_in(path)


def is_there(dotted: str) -> bool:
    """Whether a dotted name is a package, a module, or something that a module defines."""
    path, rest = ROOT, dotted.split(".")
    while rest:
        if (path / rest[0]).is_dir():
            path /= rest.pop(0)
        elif (path / f"{rest[0]}.py").is_file():
            path /= f"{rest.pop(0)}.py"
            return not rest or is_defined(path, ".".join(rest))
        else:
            return is_defined(path / "__init__.py", ".".join(rest))
    return True


@functools.cache
def recipe_keys() -> frozenset[str]:
    """Keys of a recipe also begin with `learner.`"""
    sections = (ROOT / "learner/config").glob("*.py")
    return frozenset(name.partition(".")[2] for path in sections for name in names_in(path) if "." in name)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/architecture.md", "benchmarks/README.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_linked_files_exist(page: str) -> None:
    targets = {target.partition("#")[0] for target in LINK.findall(text_of(page)) if "://" not in target}
    missing = sorted(target for target in targets if not ((ROOT / page).parent / target).exists())
    assert not missing, missing


@pytest.mark.parametrize("page", TODAY)
def test_paths_in_backticks_exist(page: str) -> None:
    """Paths from the top of the repository, which may hold a star, and bare names of files."""
    missing = []
    for span in CODE_SPAN.findall(text_of(page)):
        words = [word.rstrip(":,;") for word in span.split()]
        missing += [word for word in words if PATH.fullmatch(word) and not list(ROOT.glob(word.rstrip("/")))]
        missing += [word for word in words if FILE_NAME.fullmatch(word) and word not in file_names() | OTHERS]
    assert not missing, sorted(set(missing))


@pytest.mark.parametrize("page", TODAY)
def test_names_after_paths_are_defined_there(page: str) -> None:
    """`learner/losses.py: dis_policy_loss`"""
    pairs = [match for span in CODE_SPAN.findall(text_of(page)) if (match := DEFINED.fullmatch(span))]
    missing = [pair[0] for pair in pairs if not is_defined(ROOT / pair["path"], pair["name"])]
    assert not missing, missing


@pytest.mark.parametrize("page", TODAY)
def test_dotted_names_exist(page: str) -> None:
    """Modules and what they define, in text and in code."""
    names = {name for name in DOTTED.findall(text_of(page)) if Path(name).suffix not in (".py", ".md", ".sh")}
    keys = {name for name in names if name.removeprefix("learner.").split(".")[0] in recipe_keys()}
    missing = sorted(name for name in names - keys if not is_there(name))
    assert not missing, missing


@pytest.mark.parametrize("page", TODAY)
def test_targets_of_make_exist(page: str) -> None:
    known = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = [*CODE_SPAN.findall(text_of(page)), *re.findall(r"^(?: {4,}|)make .*$", text_of(page), re.MULTILINE)]
    missing = sorted({target for words in code for target in TARGET.findall(words)} - known)
    assert not missing, missing


def test_the_table_where_is_it_has_the_places_of_25_things() -> None:
    table = text_of("docs/architecture.md").partition("## Where is it?")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert sum(bool(DEFINED.search(row)) for row in rows) >= 25


def test_every_room_is_on_the_floor_plan() -> None:
    packages = [path.parent for floor in PACKAGES for path in (ROOT / floor).rglob("__init__.py")]
    rooms = {f"`{path.relative_to(ROOT).as_posix()}/`" for path in packages}
    assert not (missing := sorted(room for room in rooms if room not in text_of("docs/architecture.md"))), missing


def test_a_wrong_name_is_noticed() -> None:
    """The tests above can fail."""
    assert is_there("learner.losses.dis_policy_loss")
    assert is_there("agent.runtime")
    assert not is_there("learner.losses.no_such_loss")
    assert not is_there("learner.no_such_module")
    assert "no_such.py" not in file_names()
