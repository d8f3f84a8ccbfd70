"""Images of the demo set: `sao-base:debian` with one repository at /testbed, its whole future included.

No registry and no network: the base is made of this machine's own packages (`sandboxes.docker.host_image`), the
repository of the patches that ship with the project. Elsewhere than on Debian, any image with bash, git, python3 and
pytest will do under that name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from envs.swe_bench.demo.source import Demo, demo, make_repository
from sandboxes.docker import host_image
from sandboxes.docker.engine import DockerEngine

WORKDIR = "/testbed"
LABEL = "sao.demo"
BUILD_S = 1200.0
_DOCKERFILE = f"FROM {host_image.TAG}\nCOPY testbed {WORKDIR}\nWORKDIR {WORKDIR}\n"
_MTIME = 1_704_067_200  # 2024-01-01: nothing in an image tells when it was built


async def ensure_demo_image(name: str, *, engine: DockerEngine | None = None, force: bool = False) -> str:
    """The name of the image of repository `name` (see `demo.toml`), built unless it is there and up to date.

    Takes about a second, and a minute more where the base image has to be made first. Builders of one user wait for
    each other. Raises `DemoError` for an unknown name or without git, `SandboxFault` for what the engine refuses.
    """
    entry = demo(name)
    used = engine or DockerEngine()
    try:
        await used.call(_ensure, used, entry, force, timeout_s=BUILD_S)
    finally:
        if engine is None:
            await used.close()
    return entry.image


def _ensure(engine: DockerEngine, entry: Demo, force: bool) -> None:
    api = engine.client.api
    if (base := _inspect(api, host_image.TAG)) is None:
        host_image.build(host=engine.host)
        base = api.inspect_image(host_image.TAG)
    digest = _digest(entry, base["Id"])
    with host_image.one_at_a_time(entry.image):
        old = _inspect(api, entry.image)
        if old is not None and not force and (old["Config"]["Labels"] or {}).get(LABEL) == digest:
            return
        with tempfile.TemporaryDirectory() as scratch:
            make_repository(entry, Path(scratch, "testbed"))
            context = _context(Path(scratch, "testbed"))
        # rm and forcerm: otherwise the engine keeps a container for every step.
        engine.client.images.build(
            fileobj=io.BytesIO(context),
            custom_context=True,
            tag=entry.image,
            labels={LABEL: digest},
            rm=True,
            forcerm=True,
            pull=False,
            network_mode="none",
        )
        if old is not None:
            _remove_replaced(api, old["Id"], entry.image)


def _inspect(api: Any, image: str) -> dict[str, Any] | None:
    import docker

    try:
        about: dict[str, Any] = api.inspect_image(image)
    except docker.errors.ImageNotFound:
        return None
    return about


def _remove_replaced(api: Any, old: str, image: str) -> None:
    """Remove the image that lost its name to a new one; one that a container uses stays until that ends."""
    import docker

    if api.inspect_image(image)["Id"] != old:
        with contextlib.suppress(docker.errors.APIError):
            api.remove_image(old)


def _digest(entry: Demo, base: str) -> str:
    parts = [base, _DOCKERFILE, repr(entry.refs), str(entry.fix), *(path.read_text("utf-8") for path in entry.patches)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _context(folder: Path) -> bytes:
    """The build context as a tar archive, the same for the same repository but for what git itself dates."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mtime = _MTIME
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        file = tarfile.TarInfo("Dockerfile")
        file.size = len(_DOCKERFILE)
        archive.addfile(plain(file), io.BytesIO(_DOCKERFILE.encode()))
        archive.add(folder, "testbed", filter=plain)
    return buffer.getvalue()
