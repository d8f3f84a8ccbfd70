"""Case F1: the repository the agent sees holds no future."""

from __future__ import annotations

import pytest
from swe_tools import MARK, Calc

from envs.swe_bench.containers import Containers
from envs.swe_bench.instance import InstanceError, load_instances
from envs.swe_bench.workspace import Workspace
from sandboxes.base import Limits

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600), pytest.mark.xdist_group("swe_bench_history")]


async def said(workspace: Workspace, command: str) -> str:
    result = await workspace.sandbox.run(
        ["bash", "-c", command], cwd="/testbed", limits=Limits(wall_clock_s=60, output_bytes=2**20)
    )
    return result.stdout


EVERYTHING = (
    "git cat-file --batch-all-objects --batch --buffer; git log --all --reflog --format=%B; git stash list; "
    "git tag -n9; git for-each-ref; git reflog; git notes; git remote -v; git worktree list; cat .git/config"
)


async def test_image_holds_the_future_and_the_workspace_does_not(calc: Calc, containers: Containers) -> None:
    """Without the first half the second would show nothing."""
    sandbox = await containers.open(calc.instance)
    raw = await sandbox.run(["bash", "-c", EVERYTHING], cwd="/testbed", limits=Limits(output_bytes=2**20))
    assert raw.stdout.count(MARK) > 3
    places = "ls -d /opt/elsewhere /opt/store.git /testbed/vendor/copy/.git; cat .git/hooks/post-commit; git stash list"
    there = await sandbox.run(["bash", "-c", places], cwd="/testbed")
    assert MARK in there.stdout
    assert "stash@{0}" in there.stdout
    await sandbox.close()

    async with Workspace(calc.instance, containers) as workspace:
        assert MARK not in await said(workspace, EVERYTHING)
        assert await said(workspace, "git remote; git stash list; git reflog; git notes list; git branch -r") == ""
        assert await said(workspace, "git fsck --unreachable --dangling --no-progress 2>&1") == ""
        assert (
            await said(workspace, "ls .git/ORIG_HEAD .git/FETCH_HEAD .git/packed-refs .git/logs .git/hooks 2>/dev/null")
            == ""
        )
        # In files: neither as text nor in a git store elsewhere (their objects are compressed).
        assert await said(workspace, f"grep -rslF {MARK} /testbed /opt /root /home /tmp /var/tmp") == ""
        stores = await said(workspace, "find / -xdev -type d -name objects -path '*git*' 2>/dev/null")
        assert stores == "/testbed/.git/objects\n"
        assert await said(workspace, "find /opt -mindepth 1; ls -A /var/tmp") == ""


async def test_past_is_as_it_was(calc: Calc, containers: Containers) -> None:
    async with Workspace(calc.instance, containers) as workspace:
        assert await said(workspace, "git rev-parse HEAD") == calc.row["base_commit"] + "\n"
        assert await said(workspace, "git log --format=%s") == "Add\nBegin\n"
        assert await said(workspace, "git tag") == "v1.0\n"
        assert await said(workspace, "git symbolic-ref HEAD") == "refs/heads/main\n"
        assert "(t 2024-01-01" in await said(workspace, "git blame calc/core.py")
        # What the environment left untracked stays, and git sees nothing else.
        assert await said(workspace, "git status --porcelain") == "?? made_before.txt\n"
        commit = "git -c user.name=a -c user.email=b commit -q --allow-empty -m mine && git log --format=%s"
        assert await said(workspace, commit) == "mine\nAdd\nBegin\n"


@pytest.mark.parametrize("name", ["durations", "inikit", "pacer", "phrasebook", "tablet"])
async def test_demo_repositories_hold_no_future(containers: Containers, name: str) -> None:
    instance = load_instances("demo")[f"sao-demo__{name}-1"]
    async with Workspace(instance, containers) as workspace:
        objects = set((await said(workspace, "git cat-file --batch-all-objects --batch-check='%(objectname)'")).split())
        reachable = set((await said(workspace, "git rev-list --objects --no-object-names HEAD")).split())
        assert objects == reachable
        assert (
            await said(workspace, "git rev-parse HEAD; git log --all --format=%H | head -1")
            == f"{instance.base_commit}\n" * 2
        )
        assert await said(workspace, "git status --porcelain") == ""
        assert "git.invalid" not in await said(workspace, "cat .git/config")


async def test_base_commit_that_is_not_there_is_said(calc: Calc, containers: Containers) -> None:
    with pytest.raises(InstanceError, match=f"base commit {'0' * 40} is not in the repository"):
        await Workspace(calc.variant(base_commit="0" * 40), containers).start()


async def test_folder_without_a_repository_is_said(calc: Calc, containers: Containers) -> None:
    with pytest.raises(InstanceError, match="no git repository at /opt"):
        await Workspace(calc.variant(workdir="/opt"), containers).start()


async def test_work_tree_goes_back_to_the_base_commit(calc: Calc, containers: Containers) -> None:
    """An image whose HEAD is another commit: its first one here."""
    earlier = (await _first_commit(calc, containers)).strip()
    async with Workspace(calc.variant(base_commit=earlier), containers) as workspace:
        assert (
            await said(workspace, "git log --format=%s; git ls-files; ls calc tests 2>/dev/null") == "Begin\nREADME\n"
        )


async def _first_commit(calc: Calc, containers: Containers) -> str:
    async with Workspace(calc.instance, containers) as workspace:
        return await said(workspace, "git rev-list HEAD | tail -1")
