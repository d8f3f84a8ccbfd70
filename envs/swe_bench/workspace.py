"""An instance's repository in a container of its own.

new ──start()──▶ open (work tree at the base commit, history ends there) ──manifest()*──▶ open ──close()──▶ closed
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Protocol, Self

from envs.swe_bench.images import image_name
from envs.swe_bench.inside import source
from envs.swe_bench.instance import Instance, InstanceError
from sandboxes.base import ContainerSandbox, Limits, RunResult, SandboxFault
from sandboxes.cancellation import to_the_end

PREPARE_S = 600.0
GIT_S = 300.0
SCRATCH = "/var/tmp"
"""Where our own files go in a container: never the work tree."""

_PREPARE_EXITS = {
    40: "there is no git repository at {workdir}: name its folder in the row's `workdir`",
    41: "the base commit {base} is not in the repository of image {image}: the image belongs to another row",
    42: "the base commit {base} could not be checked out: {stderr}",
    43: "the history could not be cut at {base}: objects of later commits are left",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a work tree: git's mode (100644, 100755, 120000) and blob id."""

    mode: str
    blob: str


Manifest = dict[bytes, Entry]
"""Files by path, relative to the work tree; everything but what lies in a `.git`."""


class ContainerSource(Protocol):
    """Where workspaces have their containers from: `envs.swe_bench.containers.Containers`, or another backend's."""

    async def open(self, instance: Instance, image: str = "") -> ContainerSandbox:
        """A started container of the instance's image, or of `image`; raises `SandboxFault` and `InstanceError`."""
        ...


class WorkTreeUnreadable(Exception):
    """Git could not list the files of a work tree."""


class Workspace:
    """See the module's docstring. `image` overrides the instance's own.

    `start` raises `InstanceError` for an instance that cannot be set up; any method raises `SandboxFault` if container
    or engine fail.
    """

    def __init__(self, instance: Instance, containers: ContainerSource, *, image: str = "") -> None:
        self.instance = instance
        self._containers, self._image = containers, image
        self._sandbox: ContainerSandbox | None = None
        self._pristine: tuple[str, Manifest] | None = None

    @property
    def sandbox(self) -> ContainerSandbox:
        """The container; `RuntimeError` before `start` and after `close`."""
        if self._sandbox is None:
            raise RuntimeError("the workspace is not open")
        return self._sandbox

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the container, bring the work tree to the base commit, and cut the history there."""
        self._sandbox = await self._containers.open(self.instance, self._image)
        try:
            result = await self.script(
                "prepare.sh", {"WORKDIR": self.instance.workdir, "BASE": self.instance.base_commit}, PREPARE_S
            )
            if result.exit_code != 0:
                raise _not_prepared(self.instance, self._image or image_name(self.instance), result)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Remove the container. Any state, any number of times."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await to_the_end(sandbox.close())  # which has its own time limit, and logs what it could not remove

    async def script(self, name: str, env: dict[str, str], limit_s: float, *arguments: str) -> RunResult:
        """Run one of the scripts in `inside/` as root."""
        # By -c and not by stdin: commands of the script would read the rest of it.
        return await self.sandbox.run(
            ["sh", "-c", source(name), name, *arguments],
            env=env,
            limits=Limits(wall_clock_s=limit_s, output_bytes=16 * 2**10),
            user="0",
        )

    async def git(self, store: str, *arguments: str, stdin: bytes = b"", index: str = "") -> RunResult:
        """Run git on a `store` made by `manifest`, in the work tree."""
        env = {
            "GIT_DIR": store,
            "GIT_WORK_TREE": self.instance.workdir,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "LC_ALL": "C",
        }
        if index:
            env["GIT_INDEX_FILE"] = f"{store}/{index}"
        return await self.sandbox.run(
            ["git", *arguments],
            stdin=stdin,
            env=env,
            cwd=self.instance.workdir,
            user="0",
            limits=Limits(wall_clock_s=GIT_S, output_bytes=64 * 2**10),
        )

    async def manifest(self) -> tuple[str, Manifest]:
        """The files as they are now, and the git store (a new folder in the container) that can hold them.

        Raises `WorkTreeUnreadable`.
        """
        store = await self.snapshot()
        try:
            return store, parse_manifest(await self.sandbox.get(f"{store}/manifest"))
        except (OSError, ValueError) as error:
            raise WorkTreeUnreadable(str(error)) from error

    async def snapshot(self) -> str:
        """Write the manifest to a new git store, whose path this returns. Raises `WorkTreeUnreadable`."""
        store = f"{SCRATCH}/.sao-{secrets.token_hex(8)}"
        result = await self.script("snapshot.sh", {"WORKDIR": self.instance.workdir, "STORE": store}, GIT_S)
        if result.exit_code != 0:
            raise WorkTreeUnreadable(told(result))
        return store

    async def pristine(self) -> tuple[str, Manifest]:
        """`manifest` of a workspace that nobody has used yet, made at the first call and kept."""
        if self._pristine is None:
            try:
                self._pristine = await self.manifest()
            except WorkTreeUnreadable as error:
                raise SandboxFault(f"{self.instance.instance_id}: a fresh work tree cannot be read: {error}") from error
        return self._pristine


def parse_manifest(raw: bytes) -> Manifest:
    """The output of `git ls-files -s -z`; raises ValueError for anything else."""
    entries: Manifest = {}
    for line in raw.split(b"\0"):
        if not line:
            continue
        about, tab, path = line.partition(b"\t")
        mode, blob, _ = about.decode("ascii").split(" ")
        if not tab or not path or len(blob) not in (40, 64):
            raise ValueError(f"no line of a manifest: {line[:80]!r}")
        entries[path] = Entry(mode, blob)
    return entries


def told(result: RunResult) -> str:
    """Why a command failed, in its own last words."""
    if result.timed_out:
        return f"it did not end within {result.duration_s:.0f} s"
    return (result.stderr.strip() or result.stdout.strip() or f"exit code {result.exit_code}")[-500:]


def _not_prepared(instance: Instance, image: str, result: RunResult) -> Exception:
    if result.timed_out:
        return SandboxFault(f"{instance.instance_id}: the repository was not set up within {PREPARE_S:g} s")
    problem = _PREPARE_EXITS.get(result.exit_code or 0)
    if problem is None:
        if result.exit_code == 127:
            return InstanceError(f"{instance.instance_id}: image {image} lacks git or a shell tool: {told(result)}")
        return SandboxFault(f"{instance.instance_id}: the repository could not be set up: {told(result)}")
    values = {
        "workdir": instance.workdir,
        "base": instance.base_commit,
        "image": image,
        "stderr": result.stderr.strip()[-300:],
    }
    return InstanceError(f"{instance.instance_id}: {problem.format(**values)}")
