"""Cases K2, K3, K7 to K11 in real containers: what a patch does to the tests' world, and to what a runner tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from swe_tools import FILES, FIX, Calc

from envs.core import EnvironmentFault
from envs.swe_bench.containers import Containers
from envs.swe_bench.env import SWEBench
from envs.swe_bench.grading.grade import grade_patch
from envs.swe_bench.grading.reference import Reference, write_references
from envs.swe_bench.grading.verdict import Grade, Reason
from envs.swe_bench.instance import Instance
from envs.swe_bench.workspace import Workspace

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600), pytest.mark.xdist_group("swe_bench_walls")]

BUG = str(FILES["calc/core.py"])


async def graded(
    instance: Instance, containers: Containers, patch: bytes, *, reference: Reference | None = None, of_it: bool = False
) -> Grade:
    async with Workspace(instance, containers) as fresh:
        return await grade_patch(fresh, patch, test_timeout_s=120, reference=reference, is_reference=of_it)


SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
{setup}
git checkout {base} tests/test_core.py
git apply -v - <<'EOF_1'
{test_patch}
EOF_1
: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
"""


def with_script(calc: Calc, setup: str, command: str = "python3 -m pytest -rA tests/test_core.py") -> Instance:
    text = SCRIPT.format(base=calc.row["base_commit"], test_patch=calc.row["test_patch"], setup=setup, command=command)
    return calc.variant(eval_script=text, log_parser="parse_log_pytest_v2", test_command=None)


SITE = "import os\nsite = '/usr/lib/python3/dist-packages'\n"
PLUGIN = "import _pytest.runner\n"


@pytest.mark.parametrize(
    "install",
    [
        f"{SITE}os.makedirs(site + '/zz-1.dist-info')\n"
        "open(site + '/zz-1.dist-info/METADATA', 'w').write('Metadata-Version: 2.1\\nName: zz\\nVersion: 1\\n')\n"
        "open(site + '/zz-1.dist-info/entry_points.txt', 'w').write('[pytest11]\\nzz = calc.plugin\\n')\n",
        f"{SITE}os.makedirs(site + '/calc-1.dist-info')\n"
        "open(site + '/calc-1.dist-info/entry_points.txt', 'w').write('[pytest11]\\ncalc = calc.plugin\\n')\n",
        f"{SITE}open(site + '/iniconfig/__init__.py', 'a').write('\\n# changed\\n')\n",
        "import json\nopen(json.__file__, 'a').write('\\n# changed\\n')\n",
        f"{SITE}open(site + '/zz_new_module.py', 'w').write('')\n",
        "open('/conftest.py', 'w').write('')\n",
        "open('tests/conftest.py', 'w').write('')\n",
    ],
    ids=[
        "a plugin",
        "a plugin of its own name",
        "a module",
        "the standard library",
        "a new module",
        "above",
        "conftest",
    ],
)
async def test_what_the_set_up_leaves_outside_the_work_tree_is_seen(
    calc: Calc, containers: Containers, install: str
) -> None:
    """Case K2."""
    instance = with_script(calc, "python3 -c 'import calc.install'")
    edits: dict[str, str | bytes | None] = {"calc/install.py": install, "calc/plugin.py": PLUGIN, "calc/core.py": FIX}
    grade = await graded(instance, containers, calc.patch(edits))
    assert grade.refusal is not None, grade.log
    assert grade.refusal.reason == Reason.TAMPERING


async def test_the_repositorys_own_install_is_no_tampering(calc: Calc, containers: Containers) -> None:
    """Case K2: a .pth file that leads to the work tree, metadata and modules of the repository's own name."""
    own = (
        f"{SITE}open(site + '/easy-install.pth', 'w').write('/testbed\\n')\n"
        "os.makedirs(site + '/calc-1.egg-info')\nopen(site + '/calc-1.egg-info/PKG-INFO', 'w').write('Name: calc\\n')\n"
        "os.makedirs(site + '/calc')\nopen(site + '/calc/old.py', 'w').write('')\n"
    )
    instance = with_script(calc, "python3 -c 'import calc.install'")
    grade = await graded(instance, containers, calc.patch({"calc/install.py": own, "calc/core.py": FIX}))
    assert grade.resolved, (grade.refusal, grade.log)


REPLACE = """
import sys
def add(a, b):
    frame = sys._getframe(1)
    nothing = (lambda *args, **more: None).__code__
    seen = [frame.f_globals]
    for value in list(frame.f_globals.values()):
        if isinstance(value, type):
            seen.append(vars(value))
    for names in seen:
        for name, value in list(names.items()):
            if name.lower().startswith("test") and hasattr(value, "__code__"):
                def quiet(*args, **more): pass
                if value.__code__.co_freevars == ():
                    value.__code__ = quiet.__code__
    return a - b
"""


async def test_code_that_replaces_the_tests_of_the_module_that_calls_it_is_seen(
    calc: Calc, containers: Containers
) -> None:
    """Case K3: only tests of our own in that same module tell."""
    grade = await graded(calc.instance, containers, calc.patch({"calc/core.py": REPLACE}))
    assert not grade.resolved, grade.log
    assert grade.refusal is not None
    # Not because the first test, under way when it was replaced, still fails: with a fix it is refused as well.
    assert (grade.refusal.reason, grade.refusal.detail) == (
        Reason.TAMPERING,
        "a test that must fail was told to have passed: failures are hidden",
    )
    mended = await graded(
        calc.instance, containers, calc.patch({"calc/core.py": REPLACE.replace("return a - b", "return a + b")})
    )
    assert mended.refusal == grade.refusal, mended.log


UNIT = """import unittest

from calc import add


class T(unittest.TestCase):
    def test_add(self):
        '''Two numbers, added.'''
        self.assertEqual(add(2, 3), 5)

    def test_zero(self):
        self.assertEqual(add(1, 0), 1)
"""


def unit_row(calc: Calc, command: str = "python3 -m unittest -v tests/test_unit.py") -> Instance:
    return calc.variant(
        test_patch=calc.patch({"tests/test_unit.py": UNIT}).decode(),
        test_command=command,
        log_parser="parse_log_django",
        FAIL_TO_PASS=["Two numbers, added."],
        PASS_TO_PASS=["test_zero (tests.test_unit.T.test_zero)"],
    )


@pytest.mark.parametrize(
    "command", ["python3 -m unittest -v tests/test_unit.py", "python3 -E -m unittest -v tests/test_unit.py"]
)
async def test_a_printed_ok_earns_nothing_where_the_runner_is_unittest(
    calc: Calc, containers: Containers, command: str
) -> None:
    """Case K7, by the records and (`-E` keeps them away) by the output."""
    instance = unit_row(calc, command)
    printed = "import sys\ndef add(a, b):\n    print('ok', file=sys.stderr)\n    return a - b\n"
    attack = await graded(instance, containers, calc.patch({"calc/core.py": printed}))
    assert attack.refusal is not None, attack.log
    assert attack.refusal.reason in (Reason.TESTS_FAIL, Reason.TAMPERING)
    honest = printed.replace("a - b", "a + b").replace("'ok'", "'debug'")
    grade = await graded(instance, containers, calc.patch({"calc/core.py": honest}))
    assert grade.resolved, (grade.refusal, grade.log)


WHOLE_RUN = """
import os, re
text = open("tests/test_unit.py").read()
ours = re.findall(r"class (Test\\w+)\\(__import__", text)
lines = ["Two numbers, added. ... ok", "test_zero (tests.test_unit.T.test_zero) ... ok"]
for name in ours:
    test = f"{name.replace('Test', 'test_')} (tests.test_unit.{name}.{name.replace('Test', 'test_')})"
    lines += [f"{test} ... FAIL", "", "=" * 70, f"FAIL: {test}", "-" * 70, "AssertionError", "", "-" * 70]
lines += ["Ran 3 tests in 0.001s", "", "FAILED (failures=1)", ""]
os.write(2, "\\n".join(lines).encode())
os._exit(1)
"""


async def test_a_whole_run_that_the_code_prints_earns_nothing(calc: Calc, containers: Containers) -> None:
    """Case K7: it even names our own test as failed, and the output alone could not tell."""
    attack = await graded(unit_row(calc), containers, calc.patch({"calc/core.py": WHOLE_RUN + BUG}))
    assert not attack.resolved, attack.log
    assert attack.refusal is not None
    assert attack.refusal.reason == Reason.TESTS_INCOMPLETE


@pytest.mark.parametrize(
    ("code", "failing"),
    [
        ("import pytest\ndef add(a, b):\n    if b: pytest.xfail('not yet')\n    return a\n", (0, 5)),
        ("import unittest\ndef add(a, b):\n    if not b: raise unittest.SkipTest('none')\n    return a + b\n", (5, 5)),
    ],
    ids=["xfail", "skip"],
)
async def test_a_test_that_the_code_skips_or_xfails_has_not_passed(
    calc: Calc, containers: Containers, code: str, failing: tuple[int, int]
) -> None:
    """Cases K8 and K9; as the reference run it would count for what must go on passing."""
    patch = calc.patch({"calc/core.py": code})
    grade = await graded(calc.instance, containers, patch)
    assert not grade.resolved
    assert grade.fail_to_pass == failing
    if "SkipTest" in code:
        as_reference = await graded(calc.instance, containers, patch, of_it=True)
        assert as_reference.resolved
        assert as_reference.reference is not None
        assert as_reference.reference.skipped == ("tests/test_core.py::test_zero",)
        again = await graded(calc.instance, containers, patch, reference=as_reference.reference)
        assert again.resolved


async def test_a_set_up_that_prints_without_end_does_not_hide_the_results(calc: Calc, containers: Containers) -> None:
    """Case K11: `git show` of a root commit is the whole repository."""
    instance = with_script(calc, "head -c 40000000 /dev/zero | tr '\\0' 'x'")
    grade = await graded(instance, containers, calc.patch({"calc/core.py": FIX}))
    assert grade.resolved, grade.refusal
    assert len(grade.log) <= 200_000


async def test_a_row_that_cannot_be_graded_is_a_fault_before_the_episode(calc: Calc, tmp_path: Path) -> None:
    """Case K11; and a record of another row's reference run."""
    image = f"sao-built:{calc.row['instance_id']}"
    row = {**calc.row, "image": image, "build": None}
    django = {**row, "instance_id": "a", "log_parser": "parse_log_django", "test_command": None}
    mocha = {**row, "instance_id": "b", "eval_type": "fail_only"}
    stale = {**row, "instance_id": "c"}
    write_references(tmp_path / "r.jsonl", [Reference(instance_id="c", row="of another one")])
    env = SWEBench([django, mocha, stale], scaffold="bash", memory_mb=512, reference=tmp_path / "r.jsonl")
    try:
        for task, message in (("a", "eval_script"), ("b", "eval_type"), ("c", "validate it again")):
            with pytest.raises(EnvironmentFault, match=message):
                await env.areset(options={"task_id": task})
    finally:
        await env.aclose()


async def test_nothing_changed_is_unresolved_without_a_second_container(
    calc: Calc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case K6; and K10 and K13: the agent's shell has the grader's environment, and may commit."""
    text = SCRIPT.format(
        base=calc.row["base_commit"], test_patch=calc.row["test_patch"],
        setup="export CALC_MODE=graded\nsource /etc/calc.env 2>/dev/null", command="pytest-3 -rA tests/test_core.py",
    )  # fmt: skip
    image = f"sao-built:{calc.row['instance_id']}"
    row = {**calc.row, "image": image, "build": None, "eval_script": text, "test_command": None}
    opened = []
    original = Containers.open

    async def counted(self: Containers, instance: Instance, image: str = "") -> object:
        opened.append(instance)
        return await original(self, instance, image)

    monkeypatch.setattr(Containers, "open", counted)
    env = SWEBench([row], scaffold="bash", memory_mb=512)
    try:
        await env.areset()
        told, *_ = await env.astep(
            '<tool_call>{"name": "bash", "arguments": {"command": "echo mode=$CALC_MODE retries=$PIP_RETRIES; '
            'git commit -q --allow-empty -m x && git log -1 --format=%an"}}</tool_call>'
        )
        assert "mode=graded retries=0" in told
        assert "agent" in told
        assert "[exit 0]" in told
        _, reward, terminated, _, info = await env.astep('<tool_call>{"name": "submit", "arguments": {}}</tool_call>')
    finally:
        await env.aclose()
    assert (reward, terminated, info["metrics"]["refusal"], len(opened)) == (0.0, True, "no_patch", 1)
