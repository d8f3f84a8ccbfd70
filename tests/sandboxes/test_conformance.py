"""Every backend there is keeps every promise of its contract, and the suite sees the one that does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandboxes.backends import BACKENDS
from sandboxes.base import ContainerSandbox, Limits, Promises, RunResult, Sandbox, SandboxFault
from sandboxes.bubblewrap import BubblewrapSandbox
from sandboxes.conformance.__main__ import main
from sandboxes.conformance.check import Check
from sandboxes.conformance.container_checks import CONTAINER_CHECKS
from sandboxes.conformance.kernel_checks import KERNEL_CHECKS
from sandboxes.conformance.report import Outcome, broken, check_sandbox, checks_of, perform_check
from sandboxes.conformance.sandbox_checks import SANDBOX_CHECKS
from sandboxes.docker.engine import DockerEngine
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings
from sandboxes.process import ProcessSandbox

ROOT = Path(__file__).parents[2]
UNPROMISED: dict[str, set[str]] = {
    "bubblewrap": set(),
    "process": {
        "there_is_no_network",
        "files_of_the_machine_and_of_others_are_not_there",
        "processes_of_the_machine_are_not_seen",
        "shared_memory_is_its_own",
        "no_rights_can_be_gained",
        "packages_of_the_caller_are_not_there",
    },
    "docker": {"files_are_limited", *(check.name for check in KERNEL_CHECKS if check.needs.startswith("refuses"))},
}
"""What each backend does not promise: nothing else may be left out."""


def name_of(check: Check[Any]) -> str:
    return check.name


async def assert_kept(backend: str, check: Check[Any], make: Callable[[Limits], Sandbox]) -> None:
    result = await perform_check(check, make)
    expected = Outcome.NOT_PROMISED if check.name in UNPROMISED[backend] else Outcome.KEPT
    assert result.outcome is expected, result.problem


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", [*SANDBOX_CHECKS, *KERNEL_CHECKS], ids=name_of)
async def test_a_backend_of_this_machine_keeps_its_promise(backend: str, check: Check[Any]) -> None:
    await assert_kept(backend, check, BACKENDS[backend])


@pytest.mark.docker
@pytest.mark.xdist_group("docker")
@pytest.mark.parametrize("check", [*SANDBOX_CHECKS, *KERNEL_CHECKS, *CONTAINER_CHECKS], ids=name_of)
async def test_docker_keeps_its_promise(
    docker_image: str, docker_engine: DockerEngine, small: DockerSettings, check: Check[Any]
) -> None:
    def make(limits: Limits) -> DockerSandbox:
        settings = replace(
            small, memory_bytes=limits.memory_bytes, pids=limits.processes, limits=limits, workdir="/tmp"
        )
        return DockerSandbox(docker_image, settings=settings, engine=docker_engine)

    await assert_kept("docker", check, make)


def test_each_kind_of_sandbox_is_held_to_its_own_contract() -> None:
    assert checks_of(ProcessSandbox()) == [*SANDBOX_CHECKS, *KERNEL_CHECKS]
    container = DockerSandbox("any")
    assert isinstance(container, ContainerSandbox)
    assert checks_of(container) == [*SANDBOX_CHECKS, *KERNEL_CHECKS, *CONTAINER_CHECKS]
    names = [check.name for check in checks_of(container)]
    assert len(set(names)) == len(names)
    assert all(check.promise.endswith(".") for check in checks_of(container))


class Forgetful(ProcessSandbox):
    """Says that all went well, whatever did, and that it isolates the network."""

    promises = Promises(isolates=("network",), limits=())

    async def run(self, *args: Any, **kwargs: Any) -> RunResult:
        return replace(await super().run(*args, **kwargs), exit_code=0)


class Absent(ProcessSandbox):
    """Promises everything, and cannot be started."""

    promises = BubblewrapSandbox.promises

    async def start(self) -> None:
        raise SandboxFault("there is no machine")


async def test_a_backend_that_breaks_a_promise_is_found_out() -> None:
    expected = {
        "output_and_exit_code_come_back": Outcome.BROKEN,
        "a_signal_is_told": Outcome.BROKEN,
        "there_is_no_network": Outcome.BROKEN,
        "no_input_is_an_empty_one": Outcome.KEPT,
        "memory_is_limited": Outcome.NOT_PROMISED,
    }
    report = [await perform_check(check, Forgetful) for check in SANDBOX_CHECKS if check.name in expected]
    assert {result.check.name: result.outcome for result in report} == expected
    told = broken(report)
    assert len(told) == 3
    assert any(line.startswith("a_signal_is_told: BrokenPromise: RunResult(exit_code=0") for line in told)


async def test_whatever_a_backend_raises_is_in_its_report() -> None:
    report = await check_sandbox(Absent)
    assert [result.check for result in report] == [*SANDBOX_CHECKS, *KERNEL_CHECKS]
    assert {result.outcome for result in report} == {Outcome.BROKEN}
    assert report[0].problem == "SandboxFault: there is no machine"


def test_a_backend_that_does_not_work_here_is_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert main(["docker"]) == 2
    assert "make sandboxes" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["firejail"])
    assert "bubblewrap, process, docker" in capsys.readouterr().err


def test_help_has_an_example() -> None:
    command = [sys.executable, "-m", "sandboxes.conformance", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "example: python -m sandboxes.conformance" in done.stdout
