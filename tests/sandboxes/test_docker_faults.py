"""What fails outside the command is a `SandboxFault` that says what to do, and leaves nothing. Cases C and F5."""

from __future__ import annotations

import asyncio
import io
import os
import random
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import Limits, SandboxFault
from sandboxes.docker.engine import ContainerGone, DiskFull, DockerEngine, EngineGone, ImageMissing
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker")]

LONG = Limits(wall_clock_s=60)
ROOT = Path(__file__).parents[2]
TINY = "sao-test-tiny:latest"


async def test_an_engine_that_is_not_there_says_how_to_get_one(tmp_path: Path) -> None:
    for host in (f"unix://{tmp_path}/none.sock", "tcp://127.0.0.1:1", "nonsense://x", "tcp://:"):
        engine = DockerEngine(host)
        sandbox = DockerSandbox("sao-base:debian", engine=engine)
        with pytest.raises(EngineGone, match="make sandboxes"):
            await sandbox.start()
        await sandbox.close()
        await engine.close()


def test_a_missing_package_is_named() -> None:
    code = """if True:
        import asyncio, sys
        sys.modules["docker"] = None
        from sandboxes.docker.sandbox import DockerSandbox, SandboxFault
        try:
            asyncio.run(DockerSandbox("x").start())
        except SandboxFault as fault:
            print(fault)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "pip install 'sao-agents[docker]'" in done.stdout


async def test_an_engine_over_ssh_says_what_to_do_instead() -> None:
    with pytest.raises(SandboxFault, match=r"unix:///tmp/engine\.sock"):
        await DockerEngine("ssh://somewhere").ready("sao")


async def test_an_engine_that_hangs_is_a_fault_and_blocks_nobody(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "deaf.sock"))
        listener.listen()
        engine = DockerEngine(f"unix://{tmp_path}/deaf.sock")
        beats = 0
        call = asyncio.create_task(engine.call(lambda: engine.client.ping(), timeout_s=1))
        while not call.done():
            await asyncio.sleep(0.01)
            beats += 1
        with pytest.raises(EngineGone, match="did not answer"):
            await call
        assert beats > 10
        await engine.close()


async def test_a_missing_image_is_named_and_leaves_nothing(docker_engine: DockerEngine, small: DockerSettings) -> None:
    sandbox = DockerSandbox("sao-no-such-image:ever", settings=small, engine=docker_engine)
    with pytest.raises(ImageMissing, match=r"sao-no-such-image:ever.*docker pull"):
        await sandbox.start()
    await sandbox.close()


async def test_a_start_that_fails_leaves_no_created_container(
    docker_image: str, docker_engine: DockerEngine, small: DockerSettings
) -> None:
    """Case F5: the container can be created, and cannot start; the fixture `small` finds what is left."""
    for broken in (replace(small, workdir="/etc/passwd"), replace(small, user="nobody-here")):
        sandbox = DockerSandbox(docker_image, settings=broken, engine=docker_engine)
        with pytest.raises(SandboxFault):
            await sandbox.start()
        about = await asyncio.to_thread(
            docker_engine.client.api.containers, all=True, filters={"label": f"sao.project={small.project}"}
        )
        assert about == []


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.06, 0.1, 0.2])
async def test_a_cancelled_start_leaves_no_container(
    docker_image: str, docker_engine: DockerEngine, small: DockerSettings, delay_s: float
) -> None:
    """Case F5: cancelled before, in the middle of and after the creation."""
    await docker_engine.ready(small.project)
    sandbox = DockerSandbox(docker_image, settings=small, engine=docker_engine)
    starting = asyncio.create_task(sandbox.start())
    await asyncio.sleep(delay_s)
    if starting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await starting
        about = await asyncio.to_thread(
            docker_engine.client.api.containers, all=True, filters={"label": f"sao.project={small.project}"}
        )
        assert about == []
    await sandbox.close()


async def test_a_container_killed_from_outside_in_the_middle_of_a_run_is_a_fault(sandbox: DockerSandbox) -> None:
    """Case C: not a result, so it cannot become a reward; the next call says so too."""
    run = asyncio.create_task(sandbox.run(["sh", "-c", "touch /tmp/begun; sleep 500"], limits=LONG))
    async with asyncio.timeout(60):
        while True:
            try:
                await sandbox.get("/tmp/begun")
                break
            except FileNotFoundError:
                await asyncio.sleep(0.05)
    await asyncio.to_thread(sandbox.engine.client.api.kill, sandbox.id)
    with pytest.raises(ContainerGone, match="killed or removed from outside"):
        await run
    with pytest.raises(SandboxFault, match="not running"):
        await sandbox.run(["true"])
    with pytest.raises(SandboxFault, match="not running"):
        await sandbox.get("/etc/passwd")


async def test_a_container_killed_between_runs_is_a_fault(
    docker_image: str, docker_engine: DockerEngine, small: DockerSettings
) -> None:
    for use in ("run", "put", "get", "open"):
        async with DockerSandbox(docker_image, settings=small, engine=docker_engine) as sandbox:
            await asyncio.to_thread(docker_engine.client.api.kill, sandbox.id)
            assert not await sandbox.alive()
        async with DockerSandbox(docker_image, settings=small, engine=docker_engine) as sandbox:
            await asyncio.to_thread(docker_engine.client.api.remove_container, sandbox.id, force=True)
            with pytest.raises(ContainerGone):
                await {
                    "run": lambda box: box.run(["true"]),
                    "put": lambda box: box.put("/x", b""),
                    "get": lambda box: box.get("/etc/passwd"),
                    "open": lambda box: box.open(["sh"]),
                }[use](sandbox)


async def test_containers_killed_at_random_are_all_told_as_faults_and_none_is_left(
    docker_image: str, docker_engine: DockerEngine, small: DockerSettings
) -> None:
    """Case C: 24 episodes, 6 at once, half of them killed at some moment; the rest come to their end."""
    chance = random.Random(7)
    places = asyncio.Semaphore(6)

    async def episode(delay_s: float | None) -> str:
        sandbox = DockerSandbox(docker_image, settings=small, engine=docker_engine)

        async def kill(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            await docker_engine.call(lambda: docker_engine.client.api.kill(sandbox.id))

        async with places:
            killing = None
            try:
                await sandbox.start()
                killing = asyncio.create_task(kill(delay_s)) if delay_s is not None else None
                for turn in range(30 if killing else 3):
                    result = await sandbox.run(["sh", "-c", f"sleep 0.2; echo {turn}"], limits=LONG)
                    assert (result.exit_code, result.stdout) == (0, f"{turn}\n")
                    await sandbox.put("/code/file", b"x" * 1000)
                    assert await sandbox.get("/code/file") == b"x" * 1000
                return "ended"
            except SandboxFault:
                return "fault"
            finally:
                await sandbox.close()
                if killing is not None:
                    await killing

    delays = [chance.uniform(0.0, 2.0) if number % 2 else None for number in range(24)]
    endings = await asyncio.gather(*(episode(delay_s) for delay_s in delays))
    assert endings == ["ended" if delay_s is None else "fault" for delay_s in delays]


async def test_the_time_to_live_ends_and_removes_the_container(
    docker_image: str, docker_engine: DockerEngine, small: DockerSettings
) -> None:
    """Case F5: nobody closes it and nobody sweeps; its own first process ends it."""
    sandbox = DockerSandbox(docker_image, settings=replace(small, ttl_s=2), engine=docker_engine)
    await sandbox.start()
    with pytest.raises(ContainerGone):
        await sandbox.run(["sleep", "500"], limits=LONG)
    # The fixture `small` sees that it is removed without close().


async def test_a_command_that_removes_the_shell_harms_only_its_own_sandbox(sandbox: DockerSandbox) -> None:
    """Case C: what the policy does to itself is a result; it earns no retry."""
    assert (await sandbox.run(["rm", "-f", "/usr/bin/sh", "/usr/bin/dash"], limits=LONG)).exit_code == 0
    result = await sandbox.run(["true"], limits=LONG)
    assert result.exit_code == 127
    assert "not found" in result.stdout


# An engine of our own, which can be stopped and filled up


class OwnEngine:
    """A second dockerd, its data on a small disk in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    *("dockerd", "--host", self.host, "--data-root", str(self.folder / "data")),
                    *("--exec-root", f"{self.folder}-run", "--pidfile", str(self.folder / "pid")),
                    *("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"),
                    *("--ip-masq=false", "--log-level=warn"),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "--host", self.host, "version"], capture_output=True, check=False).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(60)


def tiny_image() -> bytes:
    """A tar archive with a shell and little more: a few megabytes, for a disk that has few."""
    programs = ["/usr/bin/" + name for name in ("dash", "sleep", "cat", "dd", "mkdir", "env", "true", "rm")]
    libraries = set()
    for program in programs:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        libraries.update(word for word in listed.split() if word.startswith("/"))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for path in [*programs, *sorted(libraries)]:
            archive.add(path, arcname="bin/" + path.rsplit("/", 1)[1] if path in programs else path)
        archive.add("/usr/bin/dash", arcname="bin/sh")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def own_engine() -> Iterator[OwnEngine]:
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("starting a second engine needs root and dockerd on this machine")
    # Not below the tests' own folder: a socket's path is short.
    folder = Path(tempfile.mkdtemp(prefix="sao-engine-", dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "none", str(folder)], check=True)
    try:
        engine = OwnEngine(folder)
        engine.start()
        try:
            client = DockerEngine(engine.host).client
            client.api.import_image_from_data(tiny_image(), repository="sao-test-tiny", tag="latest")
            yield engine
        finally:
            engine.stop()
    finally:
        subprocess.run(["umount", "-R", "-l", str(folder)], check=True)
        folder.rmdir()
        shutil.rmtree(f"{folder}-run", ignore_errors=True)


async def test_a_full_disk_is_a_fault_where_we_write_and_a_result_where_the_command_writes(
    own_engine: OwnEngine, small: DockerSettings
) -> None:
    engine = DockerEngine(own_engine.host)
    async with DockerSandbox(TINY, settings=small, engine=engine) as sandbox:
        result = await sandbox.run(["dd", "if=/dev/zero", "of=/big", "bs=1048576"], limits=LONG)
        assert result.exit_code == 1
        assert "No space left on device" in result.stderr
        with pytest.raises(DiskFull, match="docker system df"):
            await sandbox.put("/more", b"x" * 2**22)
        with pytest.raises(DiskFull, match="docker system df"):
            await sandbox.assert_disk()
        with pytest.raises(SandboxFault, match=r"full|space"):
            await DockerSandbox(TINY, settings=small, engine=engine).start()
        assert (await sandbox.run(["rm", "/big"], limits=LONG)).exit_code == 0
        await sandbox.put("/more", b"x" * 2**22)
        await sandbox.assert_disk()
    assert await asyncio.to_thread(engine.client.api.containers, all=True) == []
    await engine.close()


async def test_an_engine_that_restarts_in_the_middle_of_an_episode_is_a_fault(
    own_engine: OwnEngine, small: DockerSettings
) -> None:
    """Case C: the run in flight and the next one are faults; a new sandbox works once the engine is back."""
    engine = DockerEngine(own_engine.host)
    sandbox = DockerSandbox(TINY, settings=small, engine=engine)
    await sandbox.start()
    shell = await sandbox.open(["sh"])
    run = asyncio.create_task(sandbox.run(["sleep", "500"], limits=LONG))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(own_engine.stop)
    with pytest.raises(SandboxFault):
        await run
    await shell.stream.frames(lambda which, data: None)
    with pytest.raises(SandboxFault):
        await sandbox.run(["true"])
    await sandbox.close()
    with pytest.raises(EngineGone, match="make sandboxes"):
        await DockerSandbox(TINY, settings=small, engine=engine).start()
    await asyncio.to_thread(own_engine.start)
    async with DockerSandbox(TINY, settings=small, engine=engine) as fresh:
        assert (await fresh.run(["cat"], stdin=b"back", limits=LONG)).stdout == "back"
    assert await asyncio.to_thread(engine.client.api.containers, all=True) == []
    await engine.close()
