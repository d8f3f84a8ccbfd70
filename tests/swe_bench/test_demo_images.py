"""The demo set's images: made without a registry, once, and nothing left behind."""

from __future__ import annotations

import asyncio
import json

import pytest

from envs.swe_bench.demo.__main__ import main
from envs.swe_bench.demo.build import ensure_demo_image
from envs.swe_bench.demo.source import ROWS, demo
from sandboxes.docker.engine import DockerEngine
from sandboxes.docker.sandbox import DockerSandbox

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("demo-images"), pytest.mark.timeout(600)]


async def image_id(engine: DockerEngine, image: str) -> str:
    return str((await engine.call(lambda: engine.client.api.inspect_image(image)))["Id"])


async def test_an_image_is_built_once() -> None:
    engine = DockerEngine()
    try:
        image = await ensure_demo_image("tablet", engine=engine)
        first = await image_id(engine, image)
        assert image == "sao-demo:tablet"
        # At once too: builders wait for each other and find it made.
        await asyncio.gather(*(ensure_demo_image("tablet", engine=engine) for _ in range(3)))
        assert await image_id(engine, image) == first
    finally:
        await engine.close()


async def test_an_image_holds_the_repository_with_its_future() -> None:
    image = await ensure_demo_image("inikit")
    [base] = [row["base_commit"] for row in map(json.loads, ROWS.open(encoding="utf-8")) if row["image"] == image]
    async with DockerSandbox(image) as sandbox:
        said = await sandbox.run(["git", "log", "--all", "--format=%H %s"], cwd="/testbed")
        assert base in said.stdout
        assert "Start a comment only after a space" in said.stdout
        status = await sandbox.run(["git", "status", "--porcelain"], cwd="/testbed")
        assert (status.exit_code, status.stdout) == (0, "")
        assert b"\r\n" in await sandbox.get("/testbed/inikit/lines.py")
        tests = await sandbox.run(["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd="/testbed")
        assert tests.exit_code == 0, tests.stdout


async def test_a_build_leaves_no_container() -> None:
    engine = DockerEngine()
    try:
        image = await ensure_demo_image("tablet", engine=engine, force=True)
        layers = {await image_id(engine, image)}
        layers |= {step["Id"] for step in await engine.call(lambda: engine.client.api.history(image))}
        containers = await engine.call(lambda: engine.client.api.containers(all=True))
        # Of this image or of a step to it: a container that a sandbox runs has the project's label.
        assert not [one for one in containers if one["ImageID"] in layers and "sao.project" not in one["Labels"]]
    finally:
        await engine.close()


def test_the_command_builds_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--name", "tablet"]) == 0
    assert f"{demo('tablet').image}: ready" in capsys.readouterr().out


def test_no_engine_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    assert main(["build", "--name", "tablet"]) == 1
    assert "make sandboxes" in capsys.readouterr().err
