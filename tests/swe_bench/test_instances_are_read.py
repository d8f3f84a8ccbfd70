"""Rows in SWE-bench's format and its relatives; a row that cannot be used says which field is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envs.swe_bench.grading.run_script import Command, command_of
from envs.swe_bench.images import image_name
from envs.swe_bench.instance import (
    END_MARKER,
    START_MARKER,
    InstanceError,
    RowError,
    load_instances,
    patch_paths,
    read_row,
)

TEST_PATCH = (
    "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/tests/test_a.py\n+++ b/tests/test_a.py\n"
    "@@ -1 +1,2 @@\n a\n+b\n"
)
ROW: dict[str, Any] = {
    "instance_id": "org__name-1",
    "repo": "org/name",
    "base_commit": "a" * 40,
    "patch": "",
    "test_patch": TEST_PATCH,
    "problem_statement": "It is broken",
    "FAIL_TO_PASS": '["tests/test_a.py::test_b[x y]"]',
    "PASS_TO_PASS": ["tests/test_a.py::test_a"],
}


def test_tests_are_lists_or_json() -> None:
    instance = read_row(ROW, "row 1")
    assert instance.fail_to_pass == ("tests/test_a.py::test_b[x y]",)
    assert instance.pass_to_pass == ("tests/test_a.py::test_a",)
    assert instance.test_files == ("tests/test_a.py",)
    assert instance.workdir == "/testbed"


@pytest.mark.parametrize(
    "field",
    ["instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS"],
)
def test_missing_field_is_named_with_its_row(field: str) -> None:
    row = {key: value for key, value in ROW.items() if key != field}
    with pytest.raises(RowError) as error:
        read_row(row, "rows.jsonl:7")
    assert error.value.field == field
    assert error.value.row == ("rows.jsonl:7" if field == "instance_id" else "org__name-1")
    assert f"field {field!r} is missing" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"FAIL_TO_PASS": "[]"}, "names no test"),
        ({"FAIL_TO_PASS": '["a"'}, "no JSON list"),
        ({"PASS_TO_PASS": [1]}, "list of test ids"),
        ({"repo": 3}, "must be a string, not int"),
        ({"base_commit": " "}, "is empty"),
        ({"workdir": "relative"}, "absolute path"),
        ({"build": "recipe"}, "must be an object"),
        ({"eval_type": "sometimes"}, "pass_and_fail or fail_only"),
    ],
)
def test_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        read_row({**ROW, **changes}, "x")


def test_sources_of_all_kinds_give_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    second = {**ROW, "instance_id": "org__name-2"}
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n\n")
    (tmp_path / "b.json").write_text(json.dumps([second]))
    assert list(load_instances([ROW, second])) == ["org__name-1", "org__name-2"]
    assert load_instances(str(tmp_path)) == load_instances([ROW, second])
    table = pyarrow.Table.from_pylist([{**ROW, "FAIL_TO_PASS": ["tests/test_a.py::test_b[x y]"]}])
    parquet.write_table(table, tmp_path / "c.parquet")
    assert load_instances(tmp_path / "c.parquet") == load_instances([ROW])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: not valid JSON"),
        ("[1]\n", "not an object"),
        ("", "holds no instance"),
        (json.dumps(ROW) + "\n" + json.dumps(ROW), "is there twice"),
    ],
)
def test_broken_file_is_said(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(InstanceError, match=message):
        load_instances(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("source", ["nothing", "missing.jsonl", "missing.parquet"])
def test_source_that_is_not_there_is_said(source: str) -> None:
    with pytest.raises(InstanceError, match=source):
        load_instances(source)


def test_names_of_other_sets_are_understood() -> None:
    """SWE-Gym (image_name), SWE-rebench (docker_image, install_config) and R2E-Gym rows."""
    rebench = read_row({**ROW, "docker_image": "x/y:z", "install_config": {"test_cmd": "pytest -rA -n0"}}, "x")
    assert image_name(rebench) == "x/y:z"
    assert command_of(rebench).line == "pytest -rA -n0 tests/test_a.py"
    r2e = read_row(
        {
            "repo_name": "pillow",
            "docker_image": "namanjain12/pillow_final:1",
            "commit_hash": "f" * 40,
            "problem_statement": "It is broken",
            "expected_output_json": json.dumps({"TestA.test_x": "PASSED", "TestA.test_y": "FAILED"}),
        },
        "x",
    )
    assert (r2e.instance_id, r2e.base_commit) == ("pillow-" + "f" * 12, "HEAD")
    assert r2e.fail_to_pass == ("TestA.test_x",)
    assert command_of(r2e).line == "bash run_tests.sh"


def test_image_is_named_as_swe_bench_does() -> None:
    assert image_name(read_row(ROW, "x")) == "swebench/sweb.eval.x86_64.org_1776_name-1:latest"
    assert image_name(read_row({**ROW, "build": {}}, "x")) == "sao-built:org__name-1"


def test_demo_rows_are_read() -> None:
    assert len(load_instances("demo")) == 5


def test_eval_script_is_split_at_its_markers() -> None:
    script = f"#!/bin/bash\ncd /testbed\n: '{START_MARKER}'\npytest -rA tests/test_a.py\n: '{END_MARKER}'\ngit status\n"
    command = command_of(read_row({**ROW, "eval_script": script}, "x"))
    assert command == Command("#!/bin/bash\ncd /testbed", "pytest -rA tests/test_a.py", restores_tests=True)
    with pytest.raises(RowError, match="eval_script"):
        command_of(read_row({**ROW, "eval_script": "pytest"}, "x"))


@pytest.mark.parametrize(
    ("line", "is_pytest"),
    [
        ("pytest -rA tests/a.py", True),
        ("python -m pytest -rA", True),
        ("python3.9 -X dev -m pytest a.py", True),
        ("PYTHONWARNINGS=ignore ./bin/pytest a", True),
        ("py.test a.py", True),
        ("tox --current-env -epy39 -v -- tests/a.py", False),
        ("./tests/runtests.py --verbosity 2 app", False),
        ("pytest a.py | tee log", False),
        ("pytest a.py; pytest b.py", False),
        ("pytest-benchmark run", False),
    ],
)
def test_plain_calls_of_pytest_are_known(line: str, is_pytest: bool) -> None:
    assert Command("", line, restores_tests=False).is_pytest is is_pytest


@pytest.mark.parametrize(
    ("patch", "paths"),
    [
        (TEST_PATCH, ("tests/test_a.py",)),
        (
            'diff --git "a/\\303\\251 x" "b/\\303\\251 x"\n--- "a/\\303\\251 x"\n+++ "b/\\303\\251 x"\n@@ -1 +1 @@\n',
            ("é x",),
        ),
        ("diff --git a/old b/new\nsimilarity index 100%\nrename from old\nrename to new\n", ("old", "new")),
        ("diff --git a/a b/c b/a b/c\nold mode 100644\nnew mode 100755\n", ("a b/c",)),
        ("--- a/x y.py\t\n+++ b/x y.py\t\n@@ -1 +1 @@\n", ("x y.py",)),
        (
            "diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1,2 @@\n+--- a/no\n++++ b/no\n",
            ("n",),
        ),
        ("diff --git a/b.bin b/b.bin\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZPo000310RR91\n", ("b.bin",)),
    ],
    ids=["plain", "quoted", "renamed", "mode", "without git's header", "lines like headers", "binary"],
)
def test_paths_of_a_patch(patch: str, paths: tuple[str, ...]) -> None:
    assert patch_paths(patch) == paths
