"""What an agent changed in a repository, as a git patch.

    baseline = await read_baseline(workspace)            # before the agent sees it
    changes = await collect_changes(workspace, baseline) # when the agent is done; its container is not needed any more
    patch = await make_patch(fresh, changes)             # in a container of the same instance where it never was

The files themselves are compared, byte by byte, and what git the agent left behind is never asked: it may have deleted
its `.git`, or changed settings, hooks, filters, attributes, the index or ignore rules.
"""

from __future__ import annotations

import io
import secrets
import tarfile
import zlib
from dataclasses import dataclass

from envs.swe_bench.workspace import GIT_S, SCRATCH, Entry, Workspace, WorkTreeUnreadable, parse_manifest, told
from sandboxes.base import Limits, RunResult, SandboxFault

MAX_PATCH_BYTES = 32 * 2**20
MAX_CHANGED_FILES = 20_000
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


class PatchRefusal(Exception):
    """What the agent left cannot be taken as a patch. `reason` is a word of `verdict.Reason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Baseline:
    """A work tree as the agent gets it. Packed: many episodes hold one each.

    `files`: its manifest; `tracked`: paths of the base commit, NUL-separated; `rules`: its ignore rules, as tar.
    """

    files: bytes
    tracked: bytes
    rules: bytes


@dataclass(frozen=True, slots=True)
class Changes:
    """Paths that differ, what stands there now (a path without entry is gone), and the new contents as a git pack."""

    paths: tuple[bytes, ...]
    entries: dict[bytes, Entry]
    pack: bytes


async def read_baseline(workspace: Workspace) -> Baseline:
    """What `collect_changes` compares with. Leaves nothing in the container. Raises `SandboxFault`."""
    try:
        store = await workspace.snapshot()
        result = await workspace.script("baseline.sh", {"WORKDIR": workspace.instance.workdir, "STORE": store}, GIT_S)
        if result.exit_code != 0:
            raise WorkTreeUnreadable(told(result))
        archive = await workspace.sandbox.get_archive(f"{store}/baseline")
    except (WorkTreeUnreadable, OSError) as error:
        raise SandboxFault(f"{workspace.instance.instance_id}: the work tree cannot be read: {error}") from error
    await workspace.sandbox.run(["rm", "-rf", store], user="0")
    parts = {"manifest": b"", "tracked": b""}
    rules = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as source, tarfile.open(fileobj=rules, mode="w") as target:
        for member in source:
            name = member.name.removeprefix("baseline/")
            held = source.extractfile(member) if member.isfile() else None
            if name in parts and held is not None:
                parts[name] = held.read()
            elif name.startswith("rules/"):
                member.name = name.removeprefix("rules/")
                target.addfile(member, held)
    return Baseline(
        zlib.compress(parts["manifest"], 1), zlib.compress(parts["tracked"], 1), zlib.compress(rules.getvalue(), 1)
    )


async def collect_changes(agent: Workspace, baseline: Baseline) -> Changes:
    """Everything the agent changed: untracked, staged or committed files, renames, binaries, modes, links, and the
    files of nested repositories. Not in it: what was there before, and untracked files that the base commit's ignore
    rules (or `GENERATED`) leave out.

    Raises `PatchRefusal` for what the agent made impossible and `SandboxFault` for what fails on our side.
    """
    base = parse_manifest(zlib.decompress(baseline.files))
    try:
        store, now = await agent.manifest()
        changed = sorted(path for path in base.keys() | now.keys() if base.get(path) != now.get(path))
        changed = await _not_ignored(agent, changed, baseline)
        if len(changed) > MAX_CHANGED_FILES:
            raise PatchRefusal("patch_too_large", f"{len(changed)} files were changed, more than {MAX_CHANGED_FILES}")
        pack = await _pack(agent, store, [path for path in changed if path in now])
    except (WorkTreeUnreadable, OSError) as error:
        await agent.sandbox.assert_disk()
        # The same commands worked before the agent came, so this is what it made of its container.
        raise PatchRefusal("patch_unreadable", f"the agent's work tree cannot be read: {error}") from error
    return Changes(tuple(changed), {path: now[path] for path in changed if path in now}, pack)


async def _not_ignored(agent: Workspace, paths: list[bytes], baseline: Baseline) -> list[bytes]:
    """`paths` without those that are untracked and ignored by the rules of the base commit."""
    tracked = set(zlib.decompress(baseline.tracked).split(b"\0"))
    asked = [path for path in paths if path not in tracked]
    if not asked:
        return paths
    rules = f"{SCRATCH}/.sao-{secrets.token_hex(8)}"
    await agent.sandbox.put(f"{rules}.generated", "".join(rule + "\n" for rule in GENERATED).encode())
    await agent.sandbox.put(f"{rules}.asked", b"\0".join(asked) + b"\0")
    await agent.sandbox.put(f"{rules}/.empty", b"")
    await agent.sandbox.put_archive(rules, zlib.decompress(baseline.rules))
    result = await agent.script("ignored.sh", {"RULES": rules}, GIT_S)
    if result.exit_code not in (0, 1):
        raise WorkTreeUnreadable(told(result))
    ignored = set((await agent.sandbox.get(f"{rules}.ignored")).split(b"\0"))
    return [path for path in paths if path in tracked or path not in ignored]


async def _pack(agent: Workspace, store: str, paths: list[bytes]) -> bytes:
    """The contents of `paths` as a git pack."""
    if not paths:
        return b""
    listed = b"\0".join(paths) + b"\0"
    added = await agent.git(store, "update-index", "--add", "--remove", "-z", "--stdin", stdin=listed, index="changed")
    if added.exit_code != 0:
        raise WorkTreeUnreadable(told(added))
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
        raise WorkTreeUnreadable(told(packed))
    return await agent.sandbox.get(f"{store}/pack")


async def make_patch(fresh: Workspace, changes: Changes) -> bytes:
    """`changes` as a git patch that applies to a fresh work tree; b"" for none. Made in `fresh`, which stays as it is.

    Raises `PatchRefusal` and `SandboxFault`.
    """
    if not changes.paths:
        return b""
    store, base = await fresh.pristine()
    if changes.pack:
        unpacked = await fresh.git(store, "unpack-objects", "-q", stdin=changes.pack)
        if unpacked.exit_code != 0:
            await _assert_agents(fresh, unpacked)
            raise PatchRefusal("patch_unreadable", f"the agent's files came out damaged: {told(unpacked)}")
    before = b"".join(path + b"\0" for path in changes.paths if path in base)
    after = b"".join(f"{entry.mode} {entry.blob}\t".encode() + path + b"\0" for path, entry in changes.entries.items())
    trees = []
    for index, data, arguments in (
        ("before", before, ("--add", "-z", "--stdin")),
        ("after", after, ("--add", "-z", "--index-info")),
    ):
        steps = [await fresh.git(store, "update-index", *arguments, stdin=data, index=index)] if data else []
        steps.append(await fresh.git(store, "write-tree", index=index))
        for step in steps:
            if step.exit_code != 0 and index == "after":
                await _assert_agents(fresh, step)
                raise PatchRefusal("patch_unreadable", f"the agent's files make no tree: {told(step)}")
            _expect(step)
        trees.append(steps[-1].stdout.strip())
    options = ("--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
    target = f"{store}/patch"
    prefixes = ("--src-prefix=a/", "--dst-prefix=b/", f"--output={target}")
    _expect(await fresh.git(store, "diff", *options, *prefixes, *trees))
    try:
        patch = await fresh.sandbox.get(target)
    except OSError as error:
        raise SandboxFault(f"the patch was not written: {error}") from error
    if len(patch) > MAX_PATCH_BYTES:
        raise PatchRefusal(
            "patch_too_large", f"the patch has {len(patch) >> 20} MiB, more than {MAX_PATCH_BYTES >> 20}"
        )
    return patch


async def _assert_agents(fresh: Workspace, result: RunResult) -> None:
    """Raise `SandboxFault` for a failure in a fresh container that is not of what the agent left."""
    if result.timed_out:
        _expect(result)
    await fresh.sandbox.assert_disk()


def _expect(result: RunResult) -> RunResult:
    if result.exit_code != 0:
        raise SandboxFault(f"git failed in a fresh container: {told(result)}")
    return result
