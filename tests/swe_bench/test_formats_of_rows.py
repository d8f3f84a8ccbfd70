# ruff: noqa: E501
"""Cases K4 and K5: rows of other sets are read by their format, or refused by the field's name; nothing is ignored."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from envs.swe_bench.grading.grade import assert_gradable
from envs.swe_bench.grading.protected import files_of_tests
from envs.swe_bench.grading.run_script import activation, command_of
from envs.swe_bench.images import image_name
from envs.swe_bench.instance import RowError, read_row

TEST_PATCH = (
    "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n"
)
ROW: dict[str, Any] = {
    "instance_id": "org__name-1", "repo": "org/name", "base_commit": "a" * 40, "patch": "", "test_patch": TEST_PATCH,
    "problem_statement": "It is broken", "FAIL_TO_PASS": ["tests/test_a.py::b"], "PASS_TO_PASS": ["tests/test_a.py::a"],
}  # fmt: skip
SCRIPT = ": '>>>>> Start Test Output'\nrun-tests\n: '>>>>> End Test Output'\n"


@pytest.mark.parametrize(
    "junk", ["[", "[100%]", "[100%]-----", "[  3%]", "[gw0]", "-----", "=====", "..", "[ 50%] ===="]
)
def test_pieces_of_pytests_progress_are_no_tests(junk: str) -> None:
    instance = read_row({**ROW, "PASS_TO_PASS": [junk, "tests/test_a.py::a", junk]}, "x")
    assert (instance.pass_to_pass, instance.junk) == (("tests/test_a.py::a",), (junk,))
    with pytest.raises(RowError, match="names no test"):
        read_row({**ROW, "FAIL_TO_PASS": [junk]}, "x")


@pytest.mark.parametrize("test", ["#15789", '"', "t.py::t[[100%]]", "t.py::t[", "é", "a", "test_x (m.T)", "1 + 1"])
def test_other_names_are_tests_however_they_look(test: str) -> None:
    assert read_row({**ROW, "PASS_TO_PASS": [test]}, "x").pass_to_pass == (test,)


@pytest.mark.parametrize("as_text", [False, True])
def test_rebench_rows_say_their_command_and_parser(as_text: bool) -> None:
    config: Any = {"python": "3.9", "install": "pip install -e .", "test_cmd": "pytest -rA -n0", "log_parser": "parse_log_pydicom"}  # fmt: skip
    instance = read_row(
        {**ROW, "docker_image": "x/y:z", "install_config": json.dumps(config) if as_text else config, "meta": {"a": 1}},
        "x",
    )
    assert (image_name(instance), instance.log_parser) == ("x/y:z", "parse_log_pydicom")
    assert command_of(instance).line == "pytest -rA -n0 tests/test_a.py"
    assert_gradable(instance)


PRO = {
    "fail_to_pass": "['tests/test_a.py::b', \"it's\"]", "pass_to_pass": "[]", "FAIL_TO_PASS": None, "PASS_TO_PASS": None,
    "before_repo_set_cmd": "git checkout x", "selected_test_files_to_run": '["tests/test_a.py"]', "dockerhub_tag": "org.name",
    "requirements": "It must be called b.", "interface": "b() -> int", "repo_language": "python", "issue_specificity": "['a']",
}  # fmt: skip


def test_pro_rows_are_read_with_a_script_and_refused_without() -> None:
    instance = read_row({**ROW, **PRO, "eval_script": SCRIPT, "log_parser": "parse_log_pytest"}, "x")
    assert instance.fail_to_pass == ("tests/test_a.py::b", "it's")
    assert (instance.image, instance.workdir) == ("jefzda/sweap-images:org.name", "/app")
    assert "It must be called b." in instance.problem_statement
    assert "b() -> int" in instance.problem_statement
    with pytest.raises(RowError) as error:
        read_row({**ROW, **PRO}, "x")
    assert error.value.field == "eval_script"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"f2p_script": "import pytest"}, "f2p_script"),
        ({"f2p_patch": "diff"}, "f2p_patch"),
        ({"repo": "swesmith/org__name.12345678", "patch": "diff"}, "patch"),
        ({"image_name": "jyangballin/swesmith.x86_64.a", "patch": "diff"}, "patch"),
        ({"image_assets": {"problem_statement": ["http://x"]}}, "image_assets"),
        ({"install_config": {"test_cmd": "pytest", "env_vars": {"A": "1"}}}, "install_config.env_vars"),
        ({"install_config": "{"}, "install_config"),
        ({"install_config": {"log_parser": 3}}, "install_config.log_parser"),
        ({"test_setup": "make"}, "test_setup"),
        ({"run_script": "x"}, "run_script"),
    ],
)
def test_a_field_that_would_be_ignored_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RowError) as error:
        read_row({**ROW, **fields}, "x")
    assert error.value.field == field


SCALE = {
    "instance_id": "org_name_pr1", "user": "org", "repo": "name", "language": "python", "workdir": "/workspace/name",
    "image_url": "aweaiteam/scaleswe:org_name_pr1", "parent_commit": "a" * 40, "pr_commit": "b" * 40, "patch": "diff",
    "github_url": "https://github.com/org/name", "problem_statement": "It is broken",
    "f2p_script": "def test_x():\n    assert name.x() == 1\n", "f2p_patch": "",
    "pre_commands": f"git checkout {'a' * 40} && git reset --hard 2>/dev/null || true; git clean -fd\ngit gc --prune=now --aggressive\\n",
    "FAIL_TO_PASS": '["test_fail_to_pass.py::test_x"]', "PASS_TO_PASS": '["tests/test_a.py::test_y[a b]"]',
}  # fmt: skip


def test_scale_rows_are_read(tmp_path: Path) -> None:
    instance = read_row(SCALE, "x")
    assert (instance.repo, instance.base_commit) == ("org/name", "a" * 40)
    assert (instance.image, instance.workdir) == ("aweaiteam/scaleswe:org_name_pr1", "/workspace/name")
    assert command_of(instance).line == "python -m pytest -rA test_fail_to_pass.py tests/test_a.py"
    assert command_of(instance).is_pytest
    assert_gradable(instance)
    base = {"tests/test_a.py", "name/a.py"}
    assert files_of_tests(instance, base) == {"test_fail_to_pass.py", "tests/test_a.py"}
    # Its tests arrive as the row has them, also beside a patch.
    other = "diff --git a/tests/b.py b/tests/b.py\nnew file mode 100644\n--- /dev/null\n+++ b/tests/b.py\n@@ -0,0 +1 @@\n+b = 1"
    for row in (SCALE, {**SCALE, "f2p_patch": other}, {**SCALE, "f2p_script": "x = '\\r'\n\n\ny = 2"}):
        folder = tmp_path / str(len(row["f2p_script"] + row["f2p_patch"]))
        folder.mkdir()
        patch = read_row(row, "x").test_patch
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=folder, input=patch.encode(), check=True)
        assert (folder / "test_fail_to_pass.py").read_text().rstrip("\n") == row["f2p_script"].rstrip("\n")
        assert (folder / "tests/b.py").exists() is bool(row["f2p_patch"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"pre_commands": "git checkout " + "c" * 40}, "pre_commands"),
        ({"pre_commands": "git checkout x && pip install -e ."}, "pre_commands"),
        ({"pre_commands": "git log > tests/a.py"}, "pre_commands"),
        ({"pre_commands": "git checkout $(cat x)"}, "pre_commands"),
        ({"pre_commands": "git checkout main"}, "pre_commands"),
        ({"pre_commands": "git apply /tmp/a.patch"}, "pre_commands"),
        ({"pre_commands": "git log | sh"}, "pre_commands"),
        ({"pre_commands": ["git status"]}, "pre_commands"),
        ({"parent_commit": None}, "f2p_script"),
        ({"image_url": ""}, "f2p_script"),
        ({"test_patch": "diff --git a/t.py b/t.py\n"}, "f2p_script"),
        ({"FAIL_TO_PASS": "[1"}, "FAIL_TO_PASS"),
        ({"run_script": "x"}, "run_script"),
    ],
)
def test_a_scale_row_that_asks_for_more_is_refused_by_the_fields_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RowError) as error:
        read_row({**SCALE, **fields}, "x")
    assert error.value.field == field


def test_what_is_empty_or_a_note_is_not_refused() -> None:
    plain = read_row(ROW, "x")
    assert (
        read_row({**ROW, "f2p_script": None, "run_script": "", "x_why": "a note", "hints_text": "a hint"}, "x") == plain
    )


def test_r2e_rows_are_read() -> None:
    row = {
        "repo_name": "pillow", "docker_image": "n/p:1", "commit_hash": "f" * 40, "problem_statement": "It is broken",
        "expected_output_json": json.dumps({"TestA.test_x": "PASSED"}), "prompt": "p", "num_non_test_files": 1,
    }  # fmt: skip
    instance = read_row(row, "x")
    assert (instance.fail_to_pass, instance.base_commit) == (("TestA.test_x",), "HEAD")
    base = {"r2e_tests/test_1.py", "run_tests.sh", "pillow/a.py"}
    assert files_of_tests(instance, base) == {"r2e_tests/test_1.py", "run_tests.sh"}
    with pytest.raises(RowError, match="is not known"):
        read_row({**row, "another": "x"}, "x")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"repo": "django/django"}, "eval_script"),
        ({"repo": "sympy/sympy"}, "eval_script"),
        ({"log_parser": "parse_log_gotest"}, "eval_script"),
        ({"eval_script": SCRIPT.replace("run-tests", "")}, "eval_script"),
        ({"eval_type": "fail_only"}, "eval_type"),
    ],
)
def test_a_row_whose_tests_could_not_be_graded_is_a_fault_of_the_row(fields: dict[str, Any], field: str) -> None:
    """Case K11."""
    with pytest.raises(RowError) as error:
        assert_gradable(read_row({**ROW, **fields}, "x"))
    assert error.value.field == field


def test_files_that_hold_the_rows_tests_are_known_by_their_ids_too() -> None:
    row = read_row({**ROW, "PASS_TO_PASS": ["tests/test_b.py::a[x::y]", "gone.py::a", "a name"]}, "x")
    assert files_of_tests(row, {"tests/test_b.py", "name/a.py", "run_tests.sh"}) == {
        "tests/test_a.py",
        "tests/test_b.py",
    }


def test_the_environment_is_that_of_the_rows_script() -> None:
    """Case K10: what activates, and nothing of the tests' patch."""
    script = (
        "#!/bin/bash\nset -uxo pipefail\nsource /opt/miniconda3/bin/activate\nconda activate testbed\ncd /testbed\n"
        "export LANG=C.UTF-8\ngit status\nPYTHONHASHSEED=0\nsource /opt/miniconda3/bin/activate\npip install -e .\n"
        f"git apply -v - <<'EOF'\nexport FROM_PATCH=1\nEOF\nexport LATE=1\n{SCRIPT}"
    )
    assert activation(read_row({**ROW, "eval_script": script}, "x")).split("\n") == [
        "source /opt/miniconda3/bin/activate", "conda activate testbed", "export LANG=C.UTF-8", "PYTHONHASHSEED=0",
    ]  # fmt: skip
    assert "conda activate testbed" in activation(read_row(ROW, "x"))
