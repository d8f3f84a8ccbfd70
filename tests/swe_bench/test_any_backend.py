"""SWE-bench works on anything that keeps the contract of `ContainerSandbox`, and knows no backend by name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from swe_tools import FIX, Calc

from envs.swe_bench.containers import Containers
from envs.swe_bench.grading.grade import grade_patch
from envs.swe_bench.grading.patches import collect_changes, make_patch, read_baseline
from envs.swe_bench.instance import Instance
from envs.swe_bench.scaffolds.bash import BashScaffold
from envs.swe_bench.workspace import Workspace
from sandboxes.base import ContainerSandbox, Promises, RunResult
from sandboxes.docker.sandbox import DockerSandbox

ROOT = Path(__file__).parents[2]
MAKERS = {"containers.py", "images.py", "demo/build.py", "demo/__main__.py"}
"""Modules that make containers and images."""
SETTINGS = "sandboxes.docker.settings"
"""What a container may use: those who ask for one say it."""


def imported(path: Path) -> set[str]:
    """Modules that a file imports, at its top or in a function."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {module for module in modules if module.startswith("sandboxes.docker")}


def test_only_those_that_make_containers_know_docker() -> None:
    folder = ROOT / "envs" / "swe_bench"
    knowing = {str(path.relative_to(folder)): imported(path) for path in folder.rglob("*.py")}
    assert {
        name for name, modules in knowing.items() if any(not module.startswith(SETTINGS) for module in modules)
    } <= MAKERS
    assert {name for name, modules in knowing.items() if modules} - MAKERS == {"env.py", "validate.py"}


class NothingButTheContract(ContainerSandbox):
    """A container of which no more can be used than `ContainerSandbox` promises."""

    def __init__(self, container: DockerSandbox) -> None:
        self._container = container

    @property
    def promises(self) -> Promises:
        return self._container.promises

    @property
    def image(self) -> str:
        return self._container.image

    @property
    def run_variable(self) -> str:
        return self._container.run_variable

    async def start(self) -> None:
        await self._container.start()

    async def run(self, argv: list[str], **more: Any) -> RunResult:
        return await self._container.run(argv, **more)

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._container.put(path, data, mode=mode)

    async def get(self, path: str) -> bytes:
        return await self._container.get(path)

    async def put_archive(self, folder: str, tar: bytes) -> None:
        await self._container.put_archive(folder, tar)

    async def get_archive(self, path: str) -> bytes:
        return await self._container.get_archive(path)

    async def assert_disk(self) -> None:
        await self._container.assert_disk()

    def terminal_command(self, argv: list[str], **more: Any) -> list[str]:
        return self._container.terminal_command(argv, **more)

    async def close(self) -> None:
        await self._container.close()


class AnotherSource:
    """Containers of another make."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers

    async def open(self, instance: Instance, image: str = "") -> ContainerSandbox:
        return NothingButTheContract(await self._containers.open(instance, image))


@pytest.mark.docker
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("swe_bench_attacks")
async def test_an_agent_works_and_is_graded_on_nothing_but_the_contract(calc: Calc, containers: Containers) -> None:
    source = AnotherSource(containers)
    scaffold = BashScaffold()
    async with Workspace(calc.instance, source) as workspace:
        baseline = await read_baseline(workspace)
        await scaffold.open(workspace.sandbox, calc.instance.workdir)
        edit = f"cat > calc/core.py <<'E'\n{FIX}E"
        assert "[exit 0]" in (await scaffold.call("bash", {"command": edit}, timeout_s=60)).text
        await scaffold.close()
        changes = await collect_changes(workspace, baseline)
    async with Workspace(calc.instance, source) as fresh:
        grade = await grade_patch(fresh, await make_patch(fresh, changes))
    assert grade.resolved, grade.refusal
