"""An instance's repository in a container of its own, and what has been changed in it.

    new ──start()──▶ open (work tree at the base commit, history ends there) ──manifest()*──▶ open ──close()──▶ closed

A patch is taken from two workspaces, the agent's and a fresh one of the same instance: whatever the agent did to its
`.git`, ignore rules, attributes or settings, the files themselves are compared, byte by byte, and the patch is made
where the agent never was.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from envs.core import EnvironmentFault
from envs.swe_bench.images import ensure_image
from envs.swe_bench.instance import Instance, InstanceError
from sandboxes.base import Limits, RunResult, SandboxFault
from sandboxes.docker import DockerSandbox, DockerSettings
from sandboxes.docker_engine import DockerEngine, to_the_end

PREPARE_S = 600.0
GIT_S = 300.0
CLOSE_S = 60.0
MAX_PATCH_BYTES = 32 * 2**20
MAX_CHANGED_FILES = 20_000
SCRATCH = "/var/tmp"
"""Where our own files go in a container: never the work tree."""

GENERATED = (
    "__pycache__/",
    "*.py[co]",
    ".pytest_cache/",
    ".mypy_cache/",
    ".ruff_cache/",
    ".hypothesis/",
    ".tox/",
    ".nox/",
    ".coverage",
)
"""What running tests leaves behind: ignored like the repository's own ignore rules say, unless it is tracked."""

_PREPARE_EXITS = {
    40: "there is no git repository at {workdir}: name its folder in the row's `workdir`",
    41: "the base commit {base} is not in the repository of image {image}: the image belongs to another row",
    42: "the base commit {base} could not be checked out: {stderr}",
    43: "the history could not be cut at {base}: objects of later commits are left",
}


class PatchRefusal(Exception):
    """What the agent left cannot be taken as a patch. `reason` is a word of `verdict.Reason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a work tree: git's mode (100644, 100755, 120000) and blob id."""

    mode: str
    blob: str


Manifest = dict[bytes, Entry]
"""Files by path, relative to the work tree; everything but what lies in a `.git`."""


class Workspace:
    """See the module's docstring. `engine` is shared by many workspaces. `image` overrides the instance's own.

    Raises `InstanceError` for an instance that cannot be set up and `SandboxFault` if container or engine fail.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        engine: DockerEngine,
        settings: DockerSettings | None = None,
        image: str = "",
    ) -> None:
        self.instance = instance
        self._engine, self._settings, self._image = engine, settings or DockerSettings(), image
        self._sandbox: DockerSandbox | None = None

    @property
    def sandbox(self) -> DockerSandbox:
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
        image = self._image or await ensure_image(self.instance, self._engine)
        self._sandbox = DockerSandbox(image, settings=self._settings, engine=self._engine)
        try:
            await self._sandbox.start()
            result = await self.script(
                "prepare.sh", {"WORKDIR": self.instance.workdir, "BASE": self.instance.base_commit}, PREPARE_S
            )
            if result.exit_code != 0:
                raise _not_prepared(self.instance, image, result)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Remove the container. Any state, any number of times."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            async with asyncio.timeout(CLOSE_S):
                await to_the_end(sandbox.close())

    async def script(self, name: str, env: dict[str, str], limit_s: float, *arguments: str) -> RunResult:
        """Run one of the scripts in `inside/` as root."""
        # By -c and not by stdin: commands of the script would read the rest of it.
        return await self.sandbox.run(
            ["sh", "-c", _inside(name), name, *arguments],
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
        """The files as they are now, and the git store (a new folder in the container) that can hold them."""
        store = f"{SCRATCH}/.sao-{secrets.token_hex(8)}"
        result = await self.script("snapshot.sh", {"WORKDIR": self.instance.workdir, "STORE": store}, GIT_S)
        if result.exit_code != 0:
            raise _WorkTreeUnreadable(_told(result))
        return store, parse_manifest(await self.sandbox.get(f"{store}/manifest"))


class _WorkTreeUnreadable(Exception):
    """Git could not list the files."""


async def take_patch(agent: Workspace, fresh: Workspace) -> bytes:
    """Everything the agent changed, as a git patch that applies to a fresh work tree of the instance; b"" for nothing.

    Untracked, staged and committed files, renames, binaries, modes, links and nested repositories are in it; not what
    the environment made, nor new files that the base commit's ignore rules (or `GENERATED`) leave out. Raises
    `PatchRefusal` for what the agent made impossible, `SandboxFault` and `EnvironmentFault` for what fails on our side.
    """
    try:
        base_store, base = await fresh.manifest()
    except (_WorkTreeUnreadable, OSError) as error:
        raise EnvironmentFault(f"the work tree of a fresh container cannot be read: {error}") from error
    try:
        store, now = await agent.manifest()
        changed = sorted(path for path in base.keys() | now.keys() if base.get(path) != now.get(path))
        changed = await _not_ignored(fresh, changed)
        if not changed:
            return b""
        if len(changed) > MAX_CHANGED_FILES:
            raise PatchRefusal("patch_too_large", f"{len(changed)} files were changed, more than {MAX_CHANGED_FILES}")
        pack = await _pack(agent, store, [path for path in changed if path in now])
    except (_WorkTreeUnreadable, OSError, ValueError) as error:
        # The same commands work in a fresh container, so this is what the agent made of its own.
        raise PatchRefusal("patch_unreadable", f"the agent's work tree cannot be read: {error}") from error
    return await _diff(fresh, base_store, base, now, changed, pack)


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


async def _not_ignored(fresh: Workspace, paths: list[bytes]) -> list[bytes]:
    """`paths` without those that are untracked and ignored by the rules of the base commit."""
    if not paths:
        return []
    rules = f"{SCRATCH}/.sao-{secrets.token_hex(8)}"
    await fresh.sandbox.put(f"{rules}/generated", "".join(rule + "\n" for rule in GENERATED).encode())
    command = 'git -c safe.directory="*" -c core.excludesFile="$1/generated" check-ignore -z --stdin > "$1/ignored"'
    result = await fresh.sandbox.run(
        ["sh", "-c", command, "sh", rules],
        stdin=b"\0".join(paths) + b"\0",
        cwd=fresh.instance.workdir,
        user="0",
        limits=Limits(wall_clock_s=GIT_S),
    )
    if result.exit_code not in (0, 1):  # 128: a path beyond a link of the base tree, say. Then nothing is left out.
        return paths
    ignored = set((await fresh.sandbox.get(f"{rules}/ignored")).split(b"\0"))
    return [path for path in paths if path not in ignored]


async def _pack(agent: Workspace, store: str, paths: list[bytes]) -> bytes:
    """The contents of `paths` as a git pack."""
    if not paths:
        return b""
    listed = b"\0".join(paths) + b"\0"
    added = await agent.git(store, "update-index", "--add", "--remove", "-z", "--stdin", stdin=listed, index="changed")
    if added.exit_code != 0:
        raise _WorkTreeUnreadable(_told(added))
    command = (
        f"git ls-files -s | cut -d' ' -f2 | sort -u | git pack-objects --quiet --stdout > {store}/pack"
        f" && [ $(stat -c %s {store}/pack) -le {MAX_PATCH_BYTES} ] || exit 9"
    )
    packed = await agent.sandbox.run(
        ["sh", "-c", command],
        env={"GIT_DIR": store, "GIT_INDEX_FILE": f"{store}/changed", "LC_ALL": "C"},
        user="0",
        limits=Limits(wall_clock_s=GIT_S),
    )
    if packed.exit_code == 9 and not packed.stderr:
        raise PatchRefusal("patch_too_large", f"the changed files take more than {MAX_PATCH_BYTES >> 20} MiB, packed")
    if packed.exit_code != 0:
        raise _WorkTreeUnreadable(_told(packed))
    return await agent.sandbox.get(f"{store}/pack")


async def _diff(fresh: Workspace, store: str, base: Manifest, now: Manifest, paths: list[bytes], pack: bytes) -> bytes:
    """The patch between the trees that hold `paths` in `base` and in `now`, made in the fresh container."""
    if pack:
        unpacked = await fresh.git(store, "unpack-objects", "-q", stdin=pack)
        if unpacked.exit_code != 0:
            raise PatchRefusal("patch_unreadable", f"the agent's files came out damaged: {_told(unpacked)}")
    before = b"".join(path + b"\0" for path in paths if path in base)
    after = b"".join(f"{now[path].mode} {now[path].blob}\t".encode() + path + b"\0" for path in paths if path in now)
    trees = []
    for index, data, arguments in (
        ("before", before, ("--add", "-z", "--stdin")),
        ("after", after, ("--add", "-z", "--index-info")),
    ):
        if data:
            _expect(await fresh.git(store, "update-index", *arguments, stdin=data, index=index))
        written = await fresh.git(store, "write-tree", index=index)
        if written.exit_code != 0 and index == "after":
            raise PatchRefusal("patch_unreadable", f"the agent's files make no tree: {_told(written)}")
        trees.append(_expect(written).stdout.strip())
    options = ("--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
    target = f"{store}/patch"
    _expect(
        await fresh.git(
            store, "diff", *options, "--src-prefix=a/", "--dst-prefix=b/", f"--output={target}", trees[0], trees[1]
        )
    )
    try:
        patch = await fresh.sandbox.get(target)
    except OSError as error:
        raise EnvironmentFault(f"the patch was not written: {error}") from error
    if len(patch) > MAX_PATCH_BYTES:
        raise PatchRefusal("patch_too_large", f"the patch has {len(patch) >> 20} MiB, more than 32")
    return patch


def _expect(result: RunResult) -> RunResult:
    if result.exit_code != 0:
        raise EnvironmentFault(f"git failed in a fresh container: {_told(result)}")
    return result


def _told(result: RunResult) -> str:
    if result.timed_out:
        return f"it did not end within {result.duration_s:.0f} s"
    return (result.stderr.strip() or result.stdout.strip() or f"exit code {result.exit_code}")[-500:]


def _not_prepared(instance: Instance, image: str, result: RunResult) -> Exception:
    if result.timed_out:
        return SandboxFault(f"{instance.instance_id}: the repository was not set up within {PREPARE_S:g} s")
    told = _PREPARE_EXITS.get(result.exit_code or 0)
    if told is None:
        if result.exit_code == 127:
            return InstanceError(f"{instance.instance_id}: image {image} lacks git or a shell tool: {_told(result)}")
        return SandboxFault(f"{instance.instance_id}: the repository could not be set up: {_told(result)}")
    values = {
        "workdir": instance.workdir,
        "base": instance.base_commit,
        "image": image,
        "stderr": result.stderr.strip()[-300:],
    }
    return InstanceError(f"{instance.instance_id}: {told.format(**values)}")


@cache
def _inside(name: str) -> str:
    return (Path(__file__).parent / "inside" / name).read_text(encoding="utf-8")
