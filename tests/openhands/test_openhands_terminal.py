"""OpenHands' terminal in a container: what goes wrong there, and what is left afterwards."""

from __future__ import annotations

import asyncio
import os
import time

import psutil
import pytest

from envs.swe_bench.scaffolds.openhands.scaffold import OpenHandsScaffold
from sandboxes.base import SandboxFault
from sandboxes.docker.sandbox import DockerSandbox

pytestmark = [pytest.mark.openhands, pytest.mark.docker, pytest.mark.timeout(300), pytest.mark.xdist_group("openhands")]

LIMIT_S = 60.0


async def terminal(scaffold: OpenHandsScaffold, command: str, *, limit_s: float = LIMIT_S, **more: object) -> str:
    return (await scaffold.call("terminal", {"command": command, **more}, timeout_s=limit_s)).text


def clients(sandbox: DockerSandbox) -> list[psutil.Process]:
    """The docker clients of this process that are attached to the container."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if sandbox.id in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


async def processes(sandbox: DockerSandbox) -> set[str]:
    """What runs in the container beside its first process and what is looking."""
    script = 'for p in /proc/[0-9]*; do [ -r $p/comm ] && read -r c <$p/comm && echo "$c"; done'
    said = await sandbox.run(["sh", "-c", script], background=True)
    return set(said.stdout.split()) - {"sh", "docker-init", "tini"}


async def test_a_container_killed_from_outside_is_a_fault_and_not_an_observation(
    sandbox: DockerSandbox, scaffold: OpenHandsScaffold
) -> None:
    waiting = asyncio.create_task(terminal(scaffold, "echo begun; sleep 100", timeout=90))
    await asyncio.sleep(0.5)
    await sandbox.engine.call(lambda: sandbox.engine.client.api.kill(sandbox.id))
    begun = time.monotonic()
    with pytest.raises(SandboxFault):
        await waiting
    assert time.monotonic() - begun < 30
    with pytest.raises(SandboxFault):
        await terminal(scaffold, "echo again")
    with pytest.raises(SandboxFault):
        await scaffold.call("file_editor", {"command": "view", "path": "/repo"}, timeout_s=LIMIT_S)


async def test_ten_megabytes_of_output_are_cut_and_the_shell_goes_on(scaffold: OpenHandsScaffold) -> None:
    for command in ("head -c 10000000 /dev/zero | tr '\\0' x", "yes 0123456789 | head -c 10000000"):
        text = await terminal(scaffold, command, timeout=50)
        assert 20_000 < len(text) <= 31_000, len(text)
        assert "<response clipped>" in text
        assert "exit code 0" in text
    assert (await terminal(scaffold, "echo still here")).startswith("still here\n")


async def test_output_without_end_is_told_at_the_limit_and_can_be_interrupted(scaffold: OpenHandsScaffold) -> None:
    # Lines that differ: with the same one for ever, the screen may look as if nothing came.
    text = await terminal(scaffold, "seq 1000000000", limit_s=3)
    assert "The command timed out after 3 seconds" in text
    assert len(text) < 32_000
    assert "NOT executed" in await terminal(scaffold, "echo next", limit_s=5)
    assert "CTRL+C was sent" in await terminal(scaffold, "C-c", is_input=True, limit_s=30)
    assert (await terminal(scaffold, "echo next")).startswith("next\n")


async def test_a_command_that_never_returns_holds_no_call_beyond_its_limit(scaffold: OpenHandsScaffold) -> None:
    begun = time.monotonic()
    text = await terminal(
        scaffold, "trap '' INT TERM HUP; while true; do sleep 1 & wait; done", limit_s=3, timeout=9999
    )
    assert "The command timed out after 3" in text
    assert time.monotonic() - begun < 30
    # It ignores Ctrl-C; what is left is a new shell.
    assert "NOT executed" in await terminal(scaffold, "echo next", limit_s=5)
    text = await terminal(scaffold, "echo next; jobs", reset=True)
    assert "has been reset" in text
    assert "next\n[The command completed with exit code 0.]" in text


async def test_input_that_nothing_reads_holds_no_call_beyond_its_limit(scaffold: OpenHandsScaffold) -> None:
    await terminal(scaffold, "sleep 100", timeout=1)
    begun = time.monotonic()
    text = await terminal(scaffold, "x" * 1_000_000, is_input=True, limit_s=5, timeout=5)
    assert "timed out after 5" in text
    assert time.monotonic() - begun < 60


async def test_two_episodes_side_by_side_share_nothing(sandbox: DockerSandbox, scaffold: OpenHandsScaffold) -> None:
    async with DockerSandbox(sandbox.image) as other_sandbox:
        await other_sandbox.put("/repo/pkg/a.py", b"other = 1\n")
        other = OpenHandsScaffold(no_change_timeout_s=2)
        await other.open(other_sandbox, "/repo")
        try:
            both = (scaffold, other)
            await asyncio.gather(*(terminal(each, f"cd /tmp && mine={n}") for n, each in enumerate(both)))
            said = await asyncio.gather(*(terminal(each, 'echo "[$mine]"; hostname') for each in both))
            assert [text.partition("\n")[0] for text in said] == ["[0]", "[1]"]
            assert sandbox.id[:12] in said[0]
            assert other_sandbox.id[:12] in said[1]
            plan = {"command": "plan", "task_list": [{"title": "only mine"}]}
            await scaffold.call("task_tracker", plan, timeout_s=LIMIT_S)
            seen = await other.call("task_tracker", {"command": "view"}, timeout_s=LIMIT_S)
            assert "No task list found" in seen.text
            edit = {"command": "str_replace", "path": "/repo/pkg/a.py", "old_str": "two", "new_str": "zwei"}
            assert "has been edited" in (await scaffold.call("file_editor", edit, timeout_s=LIMIT_S)).text
            undo = {"command": "undo_edit", "path": "/repo/pkg/a.py"}
            assert "No edit history" in (await other.call("file_editor", undo, timeout_s=LIMIT_S)).text
            assert await other_sandbox.get("/repo/pkg/a.py") == b"other = 1\n"
        finally:
            await other.close()


async def test_close_leaves_no_process_here_nor_there(sandbox: DockerSandbox) -> None:
    before = set(os.listdir(os.environ["TMPDIR"]))
    scaffold = OpenHandsScaffold(no_change_timeout_s=2)
    await scaffold.open(sandbox, "/repo")
    await terminal(scaffold, "sleep 1000 & (setsid env -i sleep 1001 &) ; nohup sleep 1002 >/dev/null 2>&1 &")
    await terminal(scaffold, "cat", timeout=1)
    edit = {"command": "str_replace", "path": "/repo/pkg/a.py", "old_str": "two", "new_str": "zwei"}
    await scaffold.call("file_editor", edit, timeout_s=LIMIT_S)
    assert {"bash", "cat", "sleep"} <= await processes(sandbox)
    left = clients(sandbox)
    assert left
    await scaffold.close()
    await scaffold.close()
    assert await processes(sandbox) <= {"sleep"}
    sleeping = await sandbox.run(["sh", "-c", "grep -lsa 100[012] /proc/[0-9]*/cmdline; true"], background=True)
    assert sleeping.stdout.count("/proc/") <= 1, sleeping.stdout  # grep itself
    assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not clients(sandbox)
    assert set(os.listdir(os.environ["TMPDIR"])) <= before
    with pytest.raises(RuntimeError, match="open the scaffold"):
        await terminal(scaffold, "ls")


async def test_a_shell_that_is_told_to_end_is_replaced_and_the_model_is_told(scaffold: OpenHandsScaffold) -> None:
    await terminal(scaffold, "cd /tmp; here=1")
    text = await terminal(scaffold, "echo last words; exit 3")
    assert text.startswith("last words")
    assert "ended with exit code 3" in text
    assert (await terminal(scaffold, 'echo "[$here]"; pwd')).startswith("[]\n/repo\n")
    assert "ended with exit code" in await terminal(scaffold, "kill -9 $$")
    assert "ended with exit code" in await terminal(scaffold, "exec true")
    assert (await terminal(scaffold, "pwd")).startswith("/repo\n")


async def test_a_cancelled_call_ends_soon_and_its_command_can_be_interrupted(scaffold: OpenHandsScaffold) -> None:
    call = asyncio.create_task(terminal(scaffold, "echo begun; sleep 100", timeout=90))
    await asyncio.sleep(1)
    begun = time.monotonic()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert time.monotonic() - begun < 20
    assert "NOT executed" in await terminal(scaffold, "echo next")
    assert "CTRL+C was sent" in await terminal(scaffold, "C-c", is_input=True)


async def test_the_event_loop_is_free_while_a_command_runs(scaffold: OpenHandsScaffold) -> None:
    call = asyncio.create_task(terminal(scaffold, "sleep 2; echo done"))
    ticks = 0
    while not call.done():
        await asyncio.sleep(0.05)
        ticks += 1
    assert ticks >= 8  # of some forty
    assert (await call).startswith("done")


async def test_the_shell_runs_as_the_images_user_and_sees_nothing_of_this_machine(
    sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THIS_MACHINE", "do-not-tell")
    scaffold = OpenHandsScaffold()
    await scaffold.open(sandbox, "/repo")
    try:
        text = await terminal(scaffold, "id -u; env; cat /proc/*/environ | tr '\\0' '\\n'")
    finally:
        await scaffold.close()
    assert text.startswith("0\n")
    assert "PAGER=cat" in text
    assert "A_SECRET_OF_THIS_MACHINE" not in text
    assert "do-not-tell" not in text


async def test_the_shell_begins_with_the_environment_of_grading(sandbox: DockerSandbox) -> None:
    """Case K10; what activating prints is not shown."""
    scaffold = OpenHandsScaffold()
    await scaffold.open(sandbox, "/repo", activate="echo noise\nexport CALC_MODE=graded\nfalse")
    try:
        text = await terminal(scaffold, "echo mode=$CALC_MODE retries=$PIP_RETRIES; pwd")
    finally:
        await scaffold.close()
    assert text.startswith("mode=graded retries=0\n/repo\n")


async def test_an_image_without_the_folder_is_a_fault(sandbox: DockerSandbox) -> None:
    scaffold = OpenHandsScaffold()
    with pytest.raises(SandboxFault, match="no folder /nowhere"):
        await scaffold.open(sandbox, "/nowhere")
    await scaffold.close()
    with pytest.raises(RuntimeError, match="open the scaffold"):
        _ = scaffold.tools


async def test_keys_that_detach_a_docker_client_reach_the_shell(scaffold: OpenHandsScaffold) -> None:
    await terminal(scaffold, "cat -v", timeout=1)
    await terminal(scaffold, "C-v", is_input=True, timeout=1)
    await terminal(scaffold, "C-p", is_input=True, timeout=1)
    await terminal(scaffold, "C-v", is_input=True, timeout=1)
    await terminal(scaffold, "C-q", is_input=True, timeout=1)
    await terminal(scaffold, "ENTER", is_input=True, timeout=1)
    assert "CTRL+C was sent" in await terminal(scaffold, "C-c", is_input=True)
    assert (await terminal(scaffold, "echo attached")).startswith("attached\n")
