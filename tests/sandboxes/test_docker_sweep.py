"""What a dead owner left is removed, and nothing else. Case F5: owner, time to live, sweeper."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandboxes.docker.engine import DockerEngine
from sandboxes.docker.labels import LABEL_EXPIRES, LABEL_OWNER, LABEL_PROJECT, machine, owner, owner_is_gone
from sandboxes.docker.leftovers import why_remove
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings

ROOT = Path(__file__).parents[2]


def test_only_a_process_that_is_known_to_have_ended_is_gone() -> None:
    assert not owner_is_gone(owner())
    assert not owner_is_gone(f"another-machine:{os.getpid()}:1.0")
    assert not owner_is_gone("")
    assert not owner_is_gone(f"{machine()}:not-a-number:1.0")
    # The same process id, started at another time, is somebody else.
    assert owner_is_gone(f"{machine()}:{os.getpid()}:1.0")
    child = subprocess.Popen(
        [sys.executable, "-c", "from sandboxes.docker.labels import owner; print(owner())"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    name = child.communicate(timeout=60)[0].strip()
    assert owner_is_gone(name)


def test_a_name_made_before_a_fork_is_not_the_childs() -> None:
    mine = owner()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, owner().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1000).decode() != mine


def test_reasons() -> None:
    alive = {LABEL_OWNER: owner(), LABEL_EXPIRES: "1000"}
    assert why_remove(alive, now_s=999) == ""
    assert why_remove(alive, now_s=1001) == "time to live over"
    assert why_remove(alive, now_s=999, age_s=10, state="created") == ""
    assert why_remove(alive, now_s=999, age_s=1000, state="created") == "never started"
    assert why_remove(alive, now_s=999, age_s=1000, state="running") == ""
    assert why_remove({LABEL_OWNER: owner(), LABEL_EXPIRES: "soon"}, now_s=0) == "unreadable time to live"
    assert why_remove({}, now_s=0) == ""


STARTER = """
import asyncio, sys
from sandboxes.base import Limits
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings
async def main():
    settings = DockerSettings(memory_bytes=2**28, project=sys.argv[1])
    sandbox = DockerSandbox(sys.argv[2], settings=settings)
    await sandbox.start()
    print(sandbox.id, flush=True)
    await sandbox.run(["sleep", "543"], limits=Limits(wall_clock_s=600))
asyncio.run(main())
"""


async def lines_of(engine: DockerEngine, container: str, line: str, *, there: bool) -> None:
    """Wait until a process with this command line is there, or is not."""
    async with asyncio.timeout(60):
        while True:
            top = await engine.call(lambda: engine.client.api.top(container, "-o pid,args"))
            if (line in [" ".join(row[1:]) for row in top["Processes"]]) == there:
                return
            await asyncio.sleep(0.1)


@pytest.mark.docker
@pytest.mark.xdist_group("docker")
async def test_the_sweeper_takes_what_a_killed_process_left_and_nothing_of_the_living(
    docker_image: str, docker_engine: DockerEngine, small: DockerSettings
) -> None:
    """Case F5: SIGKILL of the owner; the container stays, the sweep removes it, and one of ours lives on."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTER, small.project, docker_image, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert child.stdout is not None
    left = (await asyncio.wait_for(child.stdout.readline(), 60)).decode().strip()
    async with DockerSandbox(docker_image, settings=small, engine=docker_engine) as ours:
        assert await docker_engine.sweep(small.project) == []
        await lines_of(docker_engine, left, "sleep 543", there=True)
        child.kill()
        await child.communicate()
        # The command ends with its caller, at once; the container waits for the sweeper.
        await lines_of(docker_engine, left, "sleep 543", there=False)
        api = docker_engine.client.api
        labels = {LABEL_PROJECT: small.project, LABEL_OWNER: owner(), LABEL_EXPIRES: str(time.time() - 1)}
        created = (await asyncio.to_thread(api.create_container, docker_image, "true", labels=labels))["Id"]
        name = f"sao-test-{secrets.token_hex(4)}"
        await asyncio.to_thread(api.create_volume, name, labels=labels)
        another = DockerEngine()
        await another.ready(f"{small.project}-another")  # the first call of another project's run, here and now
        await another.close()
        seen = await docker_engine.sweep(small.project, dry_run=True)
        expected = [("container", left, "owner gone"), ("container", created, "time to live over")]
        expected.append(("volume", name, "time to live over"))
        assert sorted((thing.kind, thing.id, thing.reason) for thing in seen) == sorted(expected)
        command = [sys.executable, "-m", "sandboxes.docker.sweep", "--project", small.project]
        dry = await asyncio.to_thread(subprocess.run, [*command, "--dry-run"], capture_output=True, text=True, cwd=ROOT)
        assert dry.stdout.count("would remove") == 3
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stdout.count("removed container"), done.stdout.count("removed volume")) == (
            0,
            2,
            1,
        )
        assert await docker_engine.sweep(small.project) == []
        assert await ours.alive()


def test_the_sweeper_says_that_no_engine_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandboxes.docker.sweep", "--host", f"unix://{tmp_path}/none.sock"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "make sandboxes" in done.stderr
    assert "Traceback" not in done.stderr


def test_its_help_has_an_example() -> None:
    command = [sys.executable, "-m", "sandboxes.docker.sweep", "--help"]
    assert (
        "example: python -m sandboxes.docker.sweep"
        in subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    )
