"""Choosing a backend: "auto" never ends up without isolation, and says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from sandboxes.backends import choose_backend, try_backends
from sandboxes.base import SandboxFault
from sandboxes.pool import PythonPool

ROOT = Path(__file__).parents[2]


def test_both_backends_are_tried_and_auto_takes_the_isolating_one() -> None:
    assert [(status.name, status.available) for status in try_backends()] == [("bubblewrap", True), ("process", True)]
    assert "network" in try_backends()[0].isolation
    assert try_backends()[1].isolation == ()
    assert choose_backend() == "bubblewrap"
    assert choose_backend("process") == "process"


def test_an_unknown_backend_names_those_that_exist() -> None:
    with pytest.raises(SandboxFault, match="auto, bubblewrap, process"):
        choose_backend("firejail")


async def test_a_pool_of_an_unknown_backend_says_so() -> None:
    with pytest.raises(SandboxFault, match="firejail"):
        await PythonPool("firejail").session()


async def test_backends_can_be_tried_inside_a_running_loop() -> None:
    assert choose_backend() == "bubblewrap"


def without_bubblewrap(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "bin").mkdir()
    environment = {**os.environ, "PATH": str(tmp_path / "bin"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_auto_without_bubblewrap_says_how_to_get_it(tmp_path: Path) -> None:
    done = without_bubblewrap(tmp_path, "-m", "sandboxes.backends")
    assert done.returncode == 1
    assert "apt-get install bubblewrap" in done.stdout
    assert "'process' by name" in done.stdout


def test_process_by_name_works_without_bubblewrap(tmp_path: Path) -> None:
    done = without_bubblewrap(
        tmp_path, "-c", "from sandboxes.backends import choose_backend; print(choose_backend('process'))"
    )
    assert done.stdout == "process\n", done.stderr


def test_a_bubblewrap_that_may_not_make_namespaces_is_not_available(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "sandboxes.backends"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "No permissions to create new namespace" in done.stdout
    assert "sysctl" in done.stdout


def test_help_describes_and_gives_an_example() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sandboxes.backends", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "example: python -m sandboxes.backends" in done.stdout


def test_importing_the_package_needs_nothing_but_the_standard_library() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); "
    code += "import sandboxes.pool, sandboxes.backends; print('numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(ROOT)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "False\n", done.stderr


def test_a_python_that_lives_under_tmp_is_found_behind_the_private_tmp(tmp_path: Path) -> None:
    """A checkout in /tmp has its virtual environment there, where every sandbox has a folder of its own."""
    if not str(tmp_path).startswith("/tmp/"):
        pytest.skip("the temporary folder is not in /tmp here")
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True, with_pip=False)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "a_package_of_tmp.py").write_text("answer = 42")
    for path in [p for p in sys.path if p.endswith("-packages")] + [str(ROOT)]:
        with (packages / "others.pth").open("a") as file:
            file.write(path + "\n")
    cell = "import os, a_package_of_tmp; (a_package_of_tmp.answer, os.listdir('/tmp'))"
    code = f"""
import asyncio
from sandboxes.pool import PythonPool
async def main():
    async with PythonPool("bubblewrap", packages=["a_package_of_tmp"]) as pool:
        session = await pool.session()
        print((await session.run({cell!r})).output)
asyncio.run(main())
"""
    found = subprocess.run(
        [environment / "bin" / "python", "-c", code], capture_output=True, text=True, timeout=60, cwd="/", check=False
    )
    assert found.stdout.strip() == "(42, [])", found.stderr
