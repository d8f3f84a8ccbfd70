"""The image that holds an instance's repository: named by the row, by SWE-bench's convention, or built here.

A row's `build` is a recipe for a local image:

    {"base": "sao-base:debian", "repository": "/path/of/a/clone", "install": ["python3 -m pip install -e ."]}

`repository` is a folder or a git bundle on this machine; it is copied to the row's `workdir`, where the `install`
commands run, without network unless the recipe says `"network": "host"`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from envs.swe_bench.instance import Instance, RowError
from sandboxes.base import SandboxFault
from sandboxes.docker.engine import DockerEngine, ImageMissing

BUILD_S = 1800.0
DEMO_PREFIX = "sao-demo:"
_building: dict[str, asyncio.Lock] = {}


def image_name(instance: Instance) -> str:
    """The row's own name, else the one under which SWE-bench publishes the instance's image."""
    if instance.image:
        return instance.image
    if instance.build is not None:
        return f"sao-built:{instance.instance_id.lower()}"
    # As swebench.image_builder.image_spec.ImageSpec.name has it (its import takes seconds).
    return f"swebench/sweb.eval.x86_64.{instance.instance_id}:latest".replace("__", "_1776_").lower()


async def ensure_image(instance: Instance, engine: DockerEngine) -> str:
    """The name of the instance's image, which is there on return: built if the row has a recipe or is of the demo set.

    Raises `ImageMissing` for an image that is neither there nor to be built (nothing is pulled: images of real
    instances have gigabytes, `docker pull` is for whoever pays for them), `RowError` for a recipe that is wrong.
    """
    name = image_name(instance)
    if await _is_there(engine, name):
        return name
    # One build at a time of each image: episodes start together.
    async with _building.setdefault(f"{id(asyncio.get_running_loop())} {engine.url} {name}", asyncio.Lock()):
        if await _is_there(engine, name):
            return name
        if instance.build is not None:
            await _build(instance, engine, name)
        elif name.startswith(DEMO_PREFIX):
            await _build_demo(name, engine)
        else:
            raise ImageMissing(
                f"{instance.instance_id}: there is no image {name} at {engine.url}: docker pull {name}, or give the "
                "row an `image` that is there, or a `build` recipe"
            )
    return name


async def _is_there(engine: DockerEngine, name: str) -> bool:
    try:
        await engine.call(lambda: engine.client.api.inspect_image(name))
    except ImageMissing:
        return False
    return True


async def _build_demo(name: str, engine: DockerEngine) -> None:
    from envs.swe_bench.demo.build import ensure_demo_image
    from envs.swe_bench.demo.source import DemoError

    try:
        await ensure_demo_image(name.removeprefix(DEMO_PREFIX), engine=engine)
    except DemoError as error:
        raise SandboxFault(f"the demo image {name} cannot be built: {error}") from error


async def _build(instance: Instance, engine: DockerEngine, name: str) -> None:
    recipe = instance.build or {}
    for field in ("base", "repository"):
        if not isinstance(recipe.get(field), str):
            raise RowError(
                instance.instance_id, f"build.{field}", "is missing: a recipe needs a base image and a repository"
            )
    install = recipe.get("install", [])
    if not isinstance(install, list) or not all(isinstance(line, str) for line in install):
        raise RowError(instance.instance_id, "build.install", "must be a list of commands")
    await engine.call(lambda: _build_now(instance, engine, name, recipe, install), timeout_s=BUILD_S)


def _build_now(instance: Instance, engine: DockerEngine, name: str, recipe: dict[str, Any], install: list[str]) -> None:
    """Blocking: clone the repository to a build context, and build."""
    import docker

    source = Path(recipe["repository"]).expanduser()
    if not source.exists():
        raise RowError(instance.instance_id, "build.repository", f"names {str(source)!r}, which is not there")
    with tempfile.TemporaryDirectory() as context:
        try:
            subprocess.run(
                ["git", "clone", "--quiet", "--no-local", str(source), f"{context}/repository"],
                check=True,
                capture_output=True,
                timeout=BUILD_S,
            )
        except subprocess.CalledProcessError as error:
            told = error.stderr.decode(errors="replace").strip()[-300:]
            raise RowError(instance.instance_id, "build.repository", f"cannot be cloned: {told}") from error
        except (OSError, subprocess.TimeoutExpired) as error:  # no git on this machine, or a clone without end
            raise SandboxFault(f"{instance.instance_id}: {source} cannot be cloned: {error}") from error
        lines = [f"FROM {recipe['base']}", f"COPY repository {instance.workdir}", f"WORKDIR {instance.workdir}"]
        lines += [f"RUN {json.dumps(['/bin/sh', '-ec', command])}" for command in install]
        Path(context, "Dockerfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
        try:
            engine.client.images.build(
                path=context,
                tag=name,
                rm=True,
                forcerm=True,
                network_mode=recipe.get("network", "none"),
                labels={"sao.instance": instance.instance_id},
            )
        except docker.errors.BuildError as error:
            raise SandboxFault(f"{instance.instance_id}: image {name} could not be built: {error}") from error
