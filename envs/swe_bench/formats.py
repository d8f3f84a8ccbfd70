"""Rows of other sets in SWE-bench's columns. No column is passed over: it is read, known to say nothing, or refused.

A format is known by columns that only it has. What a set leaves to a program of its own (a test script or a log parser
that is not in the row) cannot be graded from the row, and is refused by the column's name.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.swe_bench.errors import RowError

START_MARKER, END_MARKER = ">>>>> Start Test Output", ">>>>> End Test Output"
"""What stands around the test command in an `eval_script`, as SWE-bench writes it."""

READ = frozenset(
    (
        "instance_id", "repo", "repo_name", "base_commit", "commit_hash", "problem_statement", "patch", "test_patch",
        "FAIL_TO_PASS", "fail_to_pass", "PASS_TO_PASS", "pass_to_pass", "image", "image_name", "docker_image",
        "version", "eval_script", "test_command", "test_cmd", "log_parser", "eval_type", "workdir", "build",
        "install_config",
    )
)  # fmt: skip
"""Columns that `instance.read_row` reads."""
SAYS_NOTHING = frozenset(
    (
        "hints_text", "created_at", "difficulty", "environment_setup_commit", "license_name", "license", "meta",
        "FAIL_TO_FAIL", "PASS_TO_FAIL", "language", "repo_language", "pull_number", "issue_numbers", "pr_url",
        "issue_url", "url", "title", "split", "dataset", "source", "text", "tags",
    )
)  # fmt: skip
"""Columns that say nothing on how an instance is set up or graded."""
NOTE = "x_"
"""What a column of one's own begins with that nobody shall read."""


@dataclass(frozen=True, slots=True)
class Format:
    """Rows of one set. `marks`: columns of which any tells it. `says_nothing`: further columns without a meaning here;
    `refused`: columns that can't be obeyed, with the reason; `convert` gives the row in SWE-bench's columns."""

    name: str
    marks: frozenset[str]
    says_nothing: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    convert: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None


def to_swe_bench(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """`row` in SWE-bench's columns. Raises `RowError` for a column that is neither read nor known to say nothing."""
    name = str(row.get("instance_id") or place)
    given = {key: value for key, value in row.items() if not _is_empty(value) and not str(key).startswith(NOTE)}
    found = next((one for one in FORMATS if one.marks & given.keys() or _is_smith(one, given)), None)
    for key in given:
        if found is not None and key in found.refused:
            raise RowError(name, key, f"{found.refused[key]} ({found.name})")
    if found is not None and found.convert is not None:
        given = found.convert(given, name)
    known = READ | SAYS_NOTHING | (found.says_nothing if found is not None else frozenset())
    for key in given:
        if key not in known:
            raise RowError(
                name,
                key,
                f"is not known: take it out, or call it {NOTE}{key} if it says nothing on how to grade",
            )
    # What is empty may still be a field that must not be.
    return {**{key: row[key] for key in READ & row.keys()}, **given}


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def _is_smith(one: Format, given: Mapping[str, Any]) -> bool:
    names = (str(given.get("repo", "")), str(given.get("image_name", "")))
    return one.name == "SWE-smith" and any(name.startswith(("swesmith/", "jyangballin/swesmith")) for name in names)


def test_list(value: str) -> Any:
    """A list that is written as JSON, or as Python writes one; raises ValueError."""
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        try:
            return ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise error from None


_INSTALL_READ = ("test_cmd", "log_parser")
# How the image was made, which is there already.
_INSTALL_SAYS_NOTHING = frozenset(
    (
        "python", "packages", "pip_packages", "install", "pre_install", "post_install", "reqs_path", "env_yml_path",
        "no_use_env", "execute_test_as_nonroot", "arch_specific_packages", "docker_specs", "base_image_name",
        "language", "nodejs", "go", "rust", "java", "build",
    )
)  # fmt: skip


def _from_rebench(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    config = row["install_config"]
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            raise RowError(name, "install_config", f"is no JSON object ({error.msg})") from None
    if not isinstance(config, Mapping):
        raise RowError(name, "install_config", f"must be an object, not {type(config).__name__}")
    for key, value in config.items():
        if key not in (*_INSTALL_READ, *_INSTALL_SAYS_NOTHING) and not _is_empty(value) and value is not False:
            raise RowError(name, f"install_config.{key}", "is not known: what it asks for would not be done")
    result = {key: value for key, value in row.items() if key != "install_config"}
    commands = config.get("test_cmd")
    if isinstance(commands, list):
        commands = "\n".join(map(str, commands))
    for key, value in (("test_cmd", commands), ("log_parser", config.get("log_parser"))):
        if not _is_empty(value) and not isinstance(value, str):
            raise RowError(name, f"install_config.{key}", f"must be a string, not {type(value).__name__}")
        if value and _is_empty(result.get(key)) and not (key == "test_cmd" and result.get("test_command")):
            result[key] = value
    return result


def _from_pro(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """How tests are run and read stands in SWE-bench-Pro's own repository: the row has to be given both."""
    for key in ("eval_script", "log_parser"):
        if not row.get(key):
            raise RowError(
                name, key, "is missing: SWE-bench-Pro keeps how tests are run and read out of its rows "
                "(run_script.sh, parser.py), so rows of it need an eval_script and a log_parser of swebench's"
            )  # fmt: skip
    result = dict(row)
    tag = result.pop("dockerhub_tag", "")
    if tag and not result.get("image"):
        result["image"] = f"jefzda/sweap-images:{tag}"
    result.setdefault("workdir", "/app")
    # Its task is all three texts: tests ask for names that only the other two tell.
    for key, title in (("requirements", "Requirements"), ("interface", "Interface")):
        if text := result.pop(key, ""):
            result["problem_statement"] = f"{result.get('problem_statement', '')}\n\n{title}:\n{text}"
    for key in ("before_repo_set_cmd", "selected_test_files_to_run"):
        result.pop(key, None)  # the eval_script has both
    return result


def _from_r2e(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """R2E-Gym's tests lie in the image already and start with `run_tests.sh`.

    It does not say which tests failed before, so every test that must pass counts as FAIL_TO_PASS.
    """
    name = f"{row.get('repo_name', name)}-{str(row.get('commit_hash', ''))[:12]}"
    try:
        expected = json.loads(row["expected_output_json"])
        passing = [test for test, status in expected.items() if status == "PASSED"]
    except (ValueError, TypeError, AttributeError):
        raise RowError(name, "expected_output_json", "is no JSON object of test names and outcomes") from None
    return {
        "instance_id": name,
        # The image is made at the commit before the fix, whatever the row calls it.
        **{key: value for key, value in row.items() if key != "expected_output_json"},
        "base_commit": "HEAD",
        "patch": row.get("patch") or "",
        "test_patch": "",
        "FAIL_TO_PASS": passing,
        "PASS_TO_PASS": [],
        "eval_script": f"#!/bin/bash\ncd /testbed\n: '{START_MARKER}'\nbash run_tests.sh\n: '{END_MARKER}'\n",
        "log_parser": "parse_log_pytest_v2",
    }


_SCALE_TESTS = "test_fail_to_pass.py"
_TIDY = frozenset(("clean", "gc", "reflog", "prune", "repack", "remote", "branch", "tag", "config", "status", "log"))
"""What git does without another work tree than before, untracked files aside."""


def _only_goes_to(commit: str, commands: str) -> str:
    """The first of shell `commands` that does more than go to `commit` and tidy git's store; "" where none does."""
    for command in re.split(r"&&|\|\||;|\n|\\n", commands):  # some texts end with a backslash and an n
        words = re.sub(r"\d?>\s*/dev/null|2>&1", "", command).split()
        if not words or words == ["true"]:
            continue
        goes = words[1:2] in (["checkout"], ["reset"]) and all(
            word.startswith("-") or word in (".", "HEAD") or (len(word) >= 7 and commit.startswith(word))
            for word in words[2:]
        )
        tidies = words[1:2] and words[1] in _TIDY
        if words[0] != "git" or not (goes or tidies) or set("".join(words)) & set("$`<>|"):
            return command.strip()
    return ""


def _from_scale(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Scale-SWE brings its tests as a patch, as a file that lies in the work tree's root, or as both."""
    brings = "f2p_script" if row.get("f2p_script") else "f2p_patch"
    for key in ("parent_commit", "image_url"):
        if not isinstance(row.get(key), str):
            raise RowError(
                name, brings, f"is of a row of Scale-SWE, and this one has no {key}: bring tests in as a test_patch"
            )
    if row.get("test_patch"):
        raise RowError(name, brings, "brings tests beside those of test_patch: put all of them there")
    for key in ("f2p_script", "f2p_patch", "pre_commands"):
        if not isinstance(row.get(key) or "", str):
            raise RowError(name, key, f"must be a string, not {type(row[key]).__name__}")
    parent = row["parent_commit"]
    if command := _only_goes_to(parent, row.get("pre_commands") or ""):  # going there is done here
        raise RowError(name, "pre_commands", f"does more than go to parent_commit: {command!r}")
    tests = row.get("f2p_patch") or ""
    if script := row.get("f2p_script"):
        lines = script.removesuffix("\n").split("\n")
        tests = f"{tests.rstrip()}\n" if tests.strip() else ""
        tests += (
            f"diff --git a/{_SCALE_TESTS} b/{_SCALE_TESTS}\nnew file mode 100644\n--- /dev/null\n+++ b/{_SCALE_TESTS}\n"
        )
        tests += f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
    files: dict[str, None] = {}
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        value = row.get(key) or []
        try:
            ids = test_list(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            raise RowError(name, key, f"is no JSON list ({error.msg})") from None
        files.update(dict.fromkeys(str(test).split("::")[0] for test in ids))
    owner, repo = row.get("user"), str(row.get("repo", ""))
    gone = ("f2p_script", "f2p_patch", "pre_commands", "parent_commit", "image_url")
    return {
        **{key: value for key, value in row.items() if key not in gone},
        "repo": f"{owner}/{repo}" if owner and "/" not in repo else repo,
        "base_commit": parent,
        "image": row["image_url"],
        "test_patch": tests,
        "test_command": f"python -m pytest -rA {shlex.join(files)}",
        "log_parser": "parse_log_pytest_v2",
    }


FORMATS: tuple[Format, ...] = (
    Format(
        "R2E-Gym",
        frozenset(["expected_output_json"]),
        frozenset(
            (
                "parsed_commit_content",
                "execution_result_content",
                "modified_files",
                "modified_entity_summaries",
                "relevant_files",
                "num_non_test_files",
                "num_non_test_func_methods",
                "num_non_test_lines",
                "prompt",
            )
        ),
        convert=_from_r2e,
    ),
    Format(
        "Scale-SWE",
        frozenset(["f2p_script", "f2p_patch"]),
        frozenset(["user", "pr_commit", "github_url"]),
        convert=_from_scale,
    ),
    Format(
        "SWE-bench-Pro",
        frozenset(["before_repo_set_cmd", "selected_test_files_to_run", "dockerhub_tag"]),
        frozenset(["issue_specificity", "issue_categories"]),
        convert=_from_pro,
    ),
    Format(
        "SWE-rebench",
        frozenset(["install_config"]),
        frozenset(["requirements", "environment", "dockerfile", "pr_description", "interface", "task_id", "license"]),
        convert=_from_rebench,
    ),
    Format(
        "SWE-smith",
        frozenset(["strategy", "bug_type"]),
        refused={
            "patch": "brings the bug in instead of taking it out, and how tests are run and read stands in the set's "
            "own program: give rows whose base_commit holds the bug, whose patch mends it, and whose test_patch brings "
            "the tests"
        },
    ),
    Format(
        "SWE-bench Multimodal",
        frozenset(["image_assets"]),
        refused={"image_assets": "names pictures, which are not shown to a model"},
    ),
)
"""Sets whose rows differ from SWE-bench's. SWE-bench, Lite, Verified, Multilingual and SWE-Gym need no entry."""
