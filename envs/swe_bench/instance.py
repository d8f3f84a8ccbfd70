"""One repository with an issue to fix, and where such instances come from.

A source is one of

    "demo"                                   the repositories that ship with this project
    "rows.jsonl", "rows.json", "x.parquet"   a local file of rows, or a folder of such files
    "SWE-bench/SWE-bench_Verified[:split]"   a Hugging Face data set (SWE-bench, Lite, Verified, SWE-Gym, R2E-Gym)
    [{"instance_id": ...}, ...]              rows, inline

in SWE-bench's row format; `formats.py` has what other sets call the same things.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from envs.swe_bench.errors import InstanceError, RowError
from envs.swe_bench.formats import END_MARKER, START_MARKER, test_list, to_swe_bench

Source = str | Path | Sequence[Mapping[str, Any]]
DEMO_ROWS = Path(__file__).parent / "demo" / "rows.jsonl"
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """A repository at a commit, an issue, and the tests that say whether it is fixed. One row of SWE-bench.

    `junk` are ids of the row's lists that are no tests, but pieces of pytest's progress ("[", "[100%]-----"): left out.
    `patch` is the reference fix, `test_patch` brings the tests. `image` is the name the row gives ("" for none) and
    `build` a recipe to build it locally (see `images.py`). `eval_script` holds the test command between SWE-bench's
    markers; without one, `test_command` is run on the files of `test_patch`. `log_parser` is a name of swebench's
    registry. `workdir` is where the repository lies in the image.
    """

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    junk: tuple[str, ...] = ()
    version: str = ""
    eval_script: str = ""
    test_command: str = ""
    log_parser: str = ""
    eval_type: str = "pass_and_fail"
    image: str = ""
    build: dict[str, Any] | None = None
    workdir: str = "/testbed"

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files that `test_patch` touches, relative to the repository."""
        return patch_paths(self.test_patch)


_ALIASES: Mapping[str, tuple[str, ...]] = {
    "instance_id": ("instance_id",),
    "repo": ("repo", "repo_name"),
    "base_commit": ("base_commit", "commit_hash"),
    "problem_statement": ("problem_statement",),
    "patch": ("patch",),
    "test_patch": ("test_patch",),
    "FAIL_TO_PASS": ("FAIL_TO_PASS", "fail_to_pass"),
    "PASS_TO_PASS": ("PASS_TO_PASS", "pass_to_pass"),
    "image": ("image", "image_name", "docker_image"),
    "test_command": ("test_command", "test_cmd"),
}


def read_row(row: Mapping[str, Any], place: str) -> Instance:
    """The instance of one row. `place` names a row that has no id. Raises `RowError`."""
    if not isinstance(row, Mapping):
        raise RowError(place, "", "cannot be read: the row is not an object")
    row = to_swe_bench(row, place)
    name = str(_first(row, "instance_id") or place)

    def text(key: str, *, empty: bool = False) -> str:
        value = _first(row, key)
        if value is None:
            raise RowError(name, key, "is missing")
        if not isinstance(value, str):
            raise RowError(name, key, f"must be a string, not {type(value).__name__}")
        if not value.strip() and not empty:
            raise RowError(name, key, "is empty")
        return value

    def optional(key: str, default: str = "") -> str:
        value = _first(row, key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise RowError(name, key, f"must be a string, not {type(value).__name__}")
        return value

    test_patch = text("test_patch", empty=bool(optional("eval_script")))
    (fail_to_pass, junk), (pass_to_pass, more) = _tests(row, "FAIL_TO_PASS", name), _tests(row, "PASS_TO_PASS", name)
    if not fail_to_pass:
        raise RowError(name, "FAIL_TO_PASS", "names no test: nothing would show that the issue is fixed")
    workdir = optional("workdir", "/testbed")
    if not PurePosixPath(workdir).is_absolute() or workdir == "/":
        raise RowError(name, "workdir", f"must be an absolute path below /, not {workdir!r}")
    build = row.get("build")
    if build is not None and not isinstance(build, Mapping):
        raise RowError(name, "build", f"must be an object, not {type(build).__name__}")
    version = _first(row, "version")
    eval_type = optional("eval_type") or "pass_and_fail"
    if eval_type not in ("pass_and_fail", "fail_only"):
        raise RowError(name, "eval_type", f"must be pass_and_fail or fail_only, not {eval_type!r}")
    return Instance(
        instance_id=text("instance_id"),
        repo=text("repo"),
        base_commit=text("base_commit"),
        problem_statement=text("problem_statement"),
        patch=text("patch", empty=True),
        test_patch=test_patch,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        junk=(*junk, *more),
        version="" if version is None else str(version),
        eval_script=optional("eval_script"),
        test_command=optional("test_command"),
        log_parser=optional("log_parser"),
        eval_type=eval_type,
        image=optional("image"),
        build=dict(build) if build is not None else None,
        workdir=workdir,
    )


def load_instances(source: Source) -> dict[str, Instance]:
    """The instances of `source` by id, in the order of the source. Raises `InstanceError`."""
    instances: dict[str, Instance] = {}
    for place, row in _rows(source):
        instance = read_row(row, place)
        if instance.instance_id in instances:
            raise RowError(instance.instance_id, "instance_id", f"is there twice (again in {place})")
        instances[instance.instance_id] = instance
    if not instances:
        raise InstanceError(f"the source {source!r} holds no instance")
    return instances


def patch_paths(patch: str) -> tuple[str, ...]:
    """The files that a git patch touches (both names of a rename), in order, without `a/` and `b/`."""
    found: dict[str, None] = {}
    is_git = in_header = False
    for line in patch.split("\n"):
        if line.startswith("diff --git "):
            is_git = in_header = True
            both = line[len("diff --git ") :].rstrip("\r")
            # Without quotes and with equal names the line splits in the middle; otherwise the lines below name them.
            half = len(both) // 2
            if both[:2] == "a/" and both[half + 1 : half + 3] == "b/" and both[2:half] == both[half + 3 :]:
                found[both[2:half]] = None
        elif line.startswith("@@"):
            in_header = False
        elif in_header or (not is_git and line.startswith(("--- ", "+++ "))):
            for prefix, skip in (("--- ", 2), ("+++ ", 2), ("rename from ", 0), ("rename to ", 0)):
                if line.startswith(prefix):
                    path = _unquote(line[len(prefix) :].rstrip("\r").removesuffix("\t"))
                    if path != "/dev/null":
                        found[path[skip:]] = None
    return tuple(found)


def _unquote(path: str) -> str:
    """Git's quoted form of a path (C escapes, bytes in octal) as text."""
    if not (len(path) > 1 and path[0] == path[-1] == '"'):
        return path
    raw = path[1:-1].encode("utf-8", "surrogateescape").decode("unicode_escape")
    return raw.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


def _first(row: Mapping[str, Any], key: str) -> Any:
    for name in _ALIASES.get(key, (key,)):
        if row.get(name) is not None:
            return row[name]
    return None


# Pieces of what pytest prints between results: of its progress marks, of its rules, of an xdist worker's name.
_JUNK = re.compile(r"(\[(gw\d+|[\s\d%.]*)\]?)?[\s\-=_.%]*")


def _tests(row: Mapping[str, Any], key: str, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tests of a list, and what in it is no test."""
    value = _first(row, key)
    if value is None:
        raise RowError(name, key, "is missing")
    if isinstance(value, str):
        try:
            value = test_list(value) if value.strip() else []
        except json.JSONDecodeError as error:
            raise RowError(name, key, f"is no JSON list ({error.msg} at character {error.pos})") from None
    if hasattr(value, "tolist"):  # a column of a parquet file
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(test, str) for test in value):
        raise RowError(name, key, "must be a list of test ids")
    tests = tuple(dict.fromkeys(value))
    junk = tuple(test for test in tests if _JUNK.fullmatch(test))
    return tuple(test for test in tests if test not in junk), junk


def _rows(source: Source) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(source, str | Path):
        yield from ((str(index), row) for index, row in enumerate(source))
        return
    if source == "demo":
        yield from _rows(DEMO_ROWS)
        return
    path = Path(source)
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.suffix in FILE_SUFFIXES)
        if not files:
            raise InstanceError(f"the folder {str(path)!r} holds no file of rows ({', '.join(FILE_SUFFIXES)})")
        for file in files:
            yield from _file_rows(file)
    elif path.suffix in FILE_SUFFIXES or path.exists():
        yield from _file_rows(path)
    else:
        yield from _hub_rows(str(source))


def _file_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        if path.suffix == ".parquet":
            yield from ((f"{path.name}:{index}", row) for index, row in enumerate(_parquet(path)))
            return
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InstanceError(f"the rows at {str(path)!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InstanceError(f"the rows at {str(path)!r} are not UTF-8 text: {error.reason}") from error
    if path.suffix == ".json":
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise InstanceError(f"{path}: not valid JSON ({error.msg} at line {error.lineno})") from None
        rows = content if isinstance(content, list) else [content]
        yield from ((f"{path.name}:{index}", row) for index, row in enumerate(rows))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"{path.name}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise InstanceError(f"{path}, line {number}: not valid JSON ({error.msg})") from None


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise InstanceError(_needs_datasets(str(path), error)) from error
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.lib.ArrowInvalid as error:
        raise InstanceError(f"{str(path)!r} is no parquet file: {error}") from error
    return rows


def _hub_rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    dataset, _, split = name.partition(":")
    if "/" not in dataset:
        raise InstanceError(
            f'there is no source {name!r}: give "demo", a file or folder of rows, or a data set\'s id (org/name)'
        )
    try:
        import datasets
    except ImportError as error:
        raise InstanceError(_needs_datasets(name, error)) from error
    try:
        rows = datasets.load_dataset(dataset, split=split or "test")
    except (OSError, ValueError) as error:  # ConnectionError and the hub's own errors are OSErrors
        raise InstanceError(
            f"the data set {dataset!r} (split {split or 'test'!r}) could not be loaded: {error}; "
            'another split is written "org/name:split"'
        ) from error
    yield from ((f"{name}:{index}", row) for index, row in enumerate(rows))


def _needs_datasets(source: str, error: ImportError) -> str:
    return f"{source} needs data set libraries that are not installed ({error}): pip install 'sao-agents[swe-bench]'"


__all__ = [
    "END_MARKER",
    "START_MARKER",
    "Instance",
    "InstanceError",
    "RowError",
    "load_instances",
    "patch_paths",
    "read_row",
]
