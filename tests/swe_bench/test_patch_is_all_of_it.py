"""Case F2: the patch is everything the agent changed, and nothing the environment itself made."""

from __future__ import annotations

import pytest
from swe_tools import FIX, Calc

from envs.swe_bench.containers import Containers
from envs.swe_bench.grading.grade import grade_patch
from envs.swe_bench.grading.patches import (
    MAX_PATCH_BYTES,
    Changes,
    PatchRefusal,
    collect_changes,
    make_patch,
    read_baseline,
)
from envs.swe_bench.instance import patch_paths
from envs.swe_bench.workspace import Entry, Workspace
from sandboxes.base import Limits

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600), pytest.mark.xdist_group("swe_bench_patches")]

# Each line: what an agent does. After it the work tree, without .git folders, must come out of the patch again.
CHANGES = {
    "modified": "echo 'x = 1' >> calc/core.py",
    "untracked": "mkdir -p 'new folder/deep'; echo a > 'new folder/deep/file é.txt'; printf 'b' > '\"quoted\"'",
    "staged": "echo s > staged.py; git add staged.py; echo more >> calc/core.py; git add -u",
    "committed": "echo c > c.py; git add -A; git commit -qm mine",
    "committed and branched": "git checkout -qb other; echo c > c.py; git add -A; git commit -qm b; "
    "git checkout -q --orphan alone; git commit -qm c",
    "reset to the past": "git reset -q --hard HEAD~1",
    "renamed": "git mv calc/core.py calc/sum.py; mv tests/test_core.py tests/test_sum.py",
    "deleted": "rm -r calc; git rm -q README",
    "binary": "head -c 5000 /dev/urandom > data.bin; head -c 3000 /dev/urandom > new.bin; printf '\\0' > nul",
    "mode": "chmod -x tool.sh; chmod +x calc/core.py",
    "no final newline": "printf 'def add(a, b):\\n    return a + b' > calc/core.py; printf x > one",
    "crlf": "printf 'one\\r\\n2\\r\\nthree' > crlf.txt; printf 'n\\r\\n' > new.txt; sed -i 's/$/\\r/' calc/core.py",
    "empty file": ": > empty; : > calc/core.py",
    "link": "ln -s core.py calc/link.py; rm README; ln -s /etc/passwd README; ln -s nowhere broken",
    "file becomes folder": "rm README; mkdir README; echo x > README/x",
    "folder becomes link": "rm -r tests; ln -s calc tests",
    "nested repository": "git init -q sub/inner; echo in > sub/inner/file; cd sub/inner; git add -A; "
    "git commit -qm in; echo out > untracked; cd ../..; git add sub 2>/dev/null",
    "git deleted": "echo y >> calc/core.py; rm -rf .git",
    "git replaced": "echo y >> calc/core.py; rm -rf .git; git init -q; git add -A; git commit -qm all",
    "settings": "echo y >> calc/core.py; printf 'w\\r\\n' > w.txt; git config core.fileMode false; "
    "git config core.autocrlf true; "
    "git config core.worktree /tmp; git config core.excludesFile /dev/stdin; git config core.bare true; "
    "chmod +x calc/core.py",
    "attributes and filters": "printf '* text=auto eol=crlf filter=f ident "
    "working-tree-encoding=UTF-16\\n' > .gitattributes; "
    "git config filter.f.clean 'sed s/./z/g'; git config filter.f.required true; echo '$Id$' >> calc/core.py; "
    "printf 'q\\r\\n' > q",
    "index tricks": "git update-index --assume-unchanged calc/core.py; git update-index --skip-worktree README; "
    "echo y >> calc/core.py; echo y >> README; echo broken > .git/index",
    "hooks and locks": "echo y >> calc/core.py; mkdir -p .git/hooks; "
    "printf '#!/bin/sh\\nexit 1\\n' > .git/hooks/pre-commit; "
    "chmod +x .git/hooks/pre-commit; touch .git/index.lock",
    "ignore rules": "echo y > kept.py; echo '*' > .gitignore; echo 'kept.py' >> .git/info/exclude",
    "changed before": "echo changed >> made_before.txt",
    "git's settings of the user": "git config --global core.excludesFile /tmp/all; echo '*' > /tmp/all; "
    "echo z > z.py; "
    "git config --global core.autocrlf true; printf 'k\\r\\n' > k.txt",
}
AGENT = {f"GIT_{role}_{what}": "a@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
LISTING = (
    "find . -name .git -prune -o \\( -type f -o -type l \\) -printf '%y %m %l ' -a \\( -type l -printf '%p\\n' -o "
    "-exec sha256sum {} \\; \\) | grep -v -e '\\.pyc' | sort -k3"
)


async def shell(workspace: Workspace, command: str) -> str:
    result = await workspace.sandbox.run(
        ["bash", "-c", command], cwd="/testbed", env=AGENT, limits=Limits(wall_clock_s=60, output_bytes=2**20)
    )
    assert result.exit_code == 0, result.stderr
    return result.stdout


async def listing(workspace: Workspace) -> list[str]:
    """Every file with its kind, whether it is executable, and its content."""
    lines = (await shell(workspace, LISTING)).splitlines()
    return sorted(
        f"{line[0]} {'x' if line[0] == 'f' and int(line[2:5], 8) & 0o100 else ''} {line[5:]}" for line in lines
    )


@pytest.mark.parametrize("command", CHANGES.values(), ids=CHANGES.keys())
async def test_change_comes_out_of_the_patch(calc: Calc, containers: Containers, command: str) -> None:
    async with Workspace(calc.instance, containers) as agent:
        baseline = await read_baseline(agent)
        assert (await collect_changes(agent, baseline)).paths == ()
        before = await listing(agent)
        await shell(agent, command + "; true")
        wanted = await listing(agent)
        assert wanted != before
        changes = await collect_changes(agent, baseline)
    async with Workspace(calc.instance, containers) as fresh:
        patch = await make_patch(fresh, changes)
        store, _ = await fresh.pristine()
        applied = await fresh.git(store, "apply", "--whitespace=nowarn", "-", stdin=patch)
        assert applied.exit_code == 0, applied.stderr
        assert await listing(fresh) == wanted


async def test_nothing_of_the_environments_own_is_in_it(calc: Calc, containers: Containers) -> None:
    """What was there before, what the repository ignores, and what running tests leaves."""
    async with Workspace(calc.instance, containers) as agent:
        baseline = await read_baseline(agent)
        await shell(
            agent,
            "python3 -m pytest -q; python3 -c 'import calc'; mkdir -p build .pytest_cache/v; echo o > build/out; "
            "echo l > run.log; touch made_before.txt README; git status; git gc -q; git stash list; echo x > vendor/y; "
            f"cat > calc/core.py <<'E'\n{FIX}E\n",
        )
        assert "__pycache__" in await shell(agent, "find calc")
        changes = await collect_changes(agent, baseline)
    assert changes.paths == (b"calc/core.py",)
    async with Workspace(calc.instance, containers) as fresh:
        patch = await make_patch(fresh, changes)
        assert patch_paths(patch.decode()) == ("calc/core.py",)
        assert (await grade_patch(fresh, patch)).resolved


async def test_ignored_file_that_is_tracked_is_in_it(calc: Calc, containers: Containers) -> None:
    async with Workspace(calc.instance, containers) as agent:
        await shell(agent, "echo t > t.log; git add -f t.log; git commit -qm log")
        baseline = await read_baseline(agent)
        await shell(agent, "echo u > t.log; echo v > v.log")
        assert (await collect_changes(agent, baseline)).paths == (b"t.log",)


async def test_too_much_is_refused(calc: Calc, containers: Containers) -> None:
    async with Workspace(calc.instance, containers) as agent:
        baseline = await read_baseline(agent)
        await shell(agent, f"head -c {MAX_PATCH_BYTES + 1000} /dev/urandom > big")
        with pytest.raises(PatchRefusal) as refusal:
            await collect_changes(agent, baseline)
        assert refusal.value.reason == "patch_too_large"


async def test_files_that_a_broken_git_made_up_are_refused(calc: Calc, containers: Containers) -> None:
    """What `git` in the agent's container says is the agent's word: nonsense is a refusal, never a fault of ours."""
    for mode in ("abc", "100644"):
        entry = Entry(mode, "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391")
        async with Workspace(calc.instance, containers) as fresh:
            with pytest.raises(PatchRefusal) as refusal:
                await make_patch(fresh, Changes((b"x",), {b"x": entry}, b""))
            assert refusal.value.reason == "patch_unreadable"


async def test_work_tree_that_is_gone_is_refused(calc: Calc, containers: Containers) -> None:
    """The agent's doing, so no fault: it is graded as an agent that left nothing."""
    async with Workspace(calc.instance, containers) as agent:
        baseline = await read_baseline(agent)
        await agent.sandbox.run(["sh", "-c", "rm -rf /testbed; echo > /testbed; rm -f /usr/bin/git"])
        with pytest.raises(PatchRefusal) as refusal:
            await collect_changes(agent, baseline)
        assert refusal.value.reason == "patch_unreadable"
