"""OpenHands' file editor on a container's files: none of this machine's is read or written, whatever the agent does."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.swe_bench.scaffolds.openhands.editor import ContainerEditor
from envs.swe_bench.scaffolds.openhands.scaffold import OpenHandsScaffold
from sandboxes.docker.sandbox import DockerSandbox

pytestmark = [pytest.mark.openhands, pytest.mark.docker, pytest.mark.timeout(300), pytest.mark.xdist_group("openhands")]

LIMIT_S = 60.0


async def editor(scaffold: OpenHandsScaffold, command: str, path: str, **more: Any) -> str:
    outcome = await scaffold.call("file_editor", {"command": command, "path": path, **more}, timeout_s=LIMIT_S)
    return outcome.text


async def shell(sandbox: DockerSandbox, script: str) -> str:
    result = await sandbox.run(["sh", "-c", script], background=True)
    assert result.exit_code == 0, result.stderr
    return result.stdout


async def test_a_link_to_a_file_outside_shows_the_containers_file(
    sandbox: DockerSandbox, scaffold: OpenHandsScaffold
) -> None:
    await shell(sandbox, "echo 'the container said so' > /etc/secret-of-both; ln -s /etc/secret-of-both /repo/link")
    await shell(sandbox, "echo container:x:0:0::/:/bin/sh >> /etc/passwd; ln -s /etc/passwd /repo/passwd")
    assert "the container said so" in await editor(scaffold, "view", "/repo/link")
    assert "container:x:0:0" in await editor(scaffold, "view", "/repo/passwd")
    assert "container:x:0:0" in await editor(scaffold, "view", "/repo/../etc/passwd")
    assert "container:x:0:0" in await editor(scaffold, "view", "/etc/passwd")


async def test_links_in_a_path_to_a_new_file_write_in_the_container_only(
    sandbox: DockerSandbox, scaffold: OpenHandsScaffold, tmp_path: Path
) -> None:
    # The folder exists on this machine and not in the container, and the other way round.
    await shell(sandbox, f"ln -s {tmp_path} /repo/here; mkdir /there; ln -s / /repo/root")
    assert "No such file or directory" in await editor(scaffold, "create", "/repo/here/a.txt", file_text="x")
    assert "No such file or directory" in await editor(scaffold, "create", f"{tmp_path}/a.txt", file_text="x")
    assert "created successfully" in await editor(scaffold, "create", "/repo/root/there/a.txt", file_text="x")
    assert not os.listdir(tmp_path)
    assert "there" not in os.listdir("/")
    assert await sandbox.get("/there/a.txt") == b"x"


async def test_files_of_this_machine_do_not_exist_for_the_editor(
    scaffold: OpenHandsScaffold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.txt").write_text("of this machine")
    (tmp_path / "~").mkdir()
    (tmp_path / "~" / "secret.txt").write_text("of this machine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    up = "../" * 30
    for path in (
        f"{tmp_path}/secret.txt",
        "secret.txt",
        "./secret.txt",
        "~/secret.txt",
        f" {tmp_path}/secret.txt",
        f"{up}{tmp_path}/secret.txt",
        f"/repo/{up}{tmp_path}/secret.txt",
        f"~/{up}{tmp_path}/secret.txt",
        "/proc/self/cwd/secret.txt",
    ):
        for command, more in (("view", {}), ("str_replace", {"old_str": "of", "new_str": "OF"}), ("undo_edit", {})):
            text = await editor(scaffold, command, path, **more)
            assert "An error occurred" in text, (path, text)
            assert "of this machine" not in text
            assert "Maybe you meant" not in text
        await editor(scaffold, "create", path + ".new", file_text="x")
    assert [names for _, *names in os.walk(tmp_path)] == [[["~"], ["secret.txt"]], [[], ["secret.txt"]]]
    assert (tmp_path / "secret.txt").read_text() == "of this machine"


async def test_nothing_of_this_machines_paths_is_shown(scaffold: OpenHandsScaffold) -> None:
    for command, path, more in (
        ("view", "/repo", {}),
        ("view", "/", {}),
        ("view", "pkg/a.py", {}),
        ("create", "/no/folder/a.py", {"file_text": "x"}),
        ("create", "/repo/pkg/a.py/b.py", {"file_text": "x"}),
        ("str_replace", "/repo/pkg/a.py", {"old_str": "one", "new_str": "eins"}),
        ("insert", "/repo/pkg/a.py", {"insert_line": 1, "new_str": "x"}),
        ("undo_edit", "/repo/pkg/a.py", {}),
        ("view", "/repo/pkg", {"view_range": [1, 2]}),
    ):
        text = await editor(scaffold, command, path, **more)
        assert os.environ["TMPDIR"] not in text
        assert "openhands-" not in text


async def test_paths_that_are_none_are_told_and_do_no_harm(scaffold: OpenHandsScaffold) -> None:
    for path in (
        "/repo/a\0b",
        "/repo/\ud800",
        "/" + "x" * 300,
        "/" + "y/" * 3000,
        "/repo/\n",
        "/repo/-rf",
        "",
        ".",
        "..",
    ):
        text = await editor(scaffold, "view", path)
        assert "An error occurred" in text, path
    assert "created successfully" in await editor(scaffold, "create", "/repo/-rf", file_text="x\n")
    assert "created successfully" in await editor(scaffold, "create", "/repo/line\nfeed", file_text="x\n")
    assert "\tx" in await editor(scaffold, "view", "/repo/line\nfeed")


async def test_what_is_no_regular_file_is_not_waited_for(sandbox: DockerSandbox, scaffold: OpenHandsScaffold) -> None:
    await shell(sandbox, "mkfifo /repo/pipe; ln -s /dev/zero /repo/zero; ln -s loop /repo/loop")
    assert "neither a regular file" in await editor(scaffold, "view", "/repo/pipe")
    assert "neither a regular file" in await editor(scaffold, "view", "/repo/zero")
    assert "does not exist" in await editor(scaffold, "view", "/repo/loop")


async def test_a_huge_file_is_refused_without_being_fetched(
    sandbox: DockerSandbox, scaffold: OpenHandsScaffold
) -> None:
    await shell(sandbox, "truncate -s 3T /repo/huge.txt; truncate -s 3T /repo/huge.png")
    assert "File is too large" in await editor(scaffold, "view", "/repo/huge.txt")
    assert "File is too large" in await editor(scaffold, "str_replace", "/repo/huge.png", old_str="a", new_str="b")
    assert "Displaying image" in await editor(scaffold, "view", "/repo/huge.png")


async def test_names_in_a_folder_are_shown_as_they_are(sandbox: DockerSandbox, scaffold: OpenHandsScaffold) -> None:
    await shell(
        sandbox, "cd /repo && mkdir 'a [b]' -- '-d' && touch 'a [b]/* ?' -- '-f' 'new\nline' && ln -s nowhere gone"
    )
    text = await editor(scaffold, "view", "/repo")
    for name in ("/repo/a [b]/", "/repo/a [b]/* ?", "/repo/-d/", "/repo/-f", "/repo/new\nline", "/repo/gone"):
        assert f"\n{name}\n" in text + "\n", name


async def test_modes_are_kept(sandbox: DockerSandbox, scaffold: OpenHandsScaffold) -> None:
    await shell(sandbox, "cd /repo && chmod 754 pkg/a.py")
    await editor(scaffold, "str_replace", "/repo/pkg/a.py", old_str="one", new_str="eins")
    assert await shell(sandbox, "stat -c '%a %u' /repo/pkg/a.py") == "754 0\n"


async def test_an_agent_that_breaks_its_tools_gets_an_error(
    sandbox: DockerSandbox, scaffold: OpenHandsScaffold
) -> None:
    await shell(sandbox, "printf '#!/bin/sh\\necho nonsense\\n' > /usr/bin/stat; chmod 755 /usr/bin/stat")
    assert "An error occurred" in await editor(scaffold, "view", "/repo/pkg/a.py")


def make_editor(folder: Path) -> ContainerEditor:
    history = SimpleNamespace(cache=SimpleNamespace(directory=folder / "history"))
    executor: Any = SimpleNamespace(editor=SimpleNamespace(_history_manager=history, _cwd=""))
    return ContainerEditor(None, "/repo", folder, executor, None)  # type: ignore[arg-type]


def test_a_staged_path_is_inside_the_staging_folder_whatever_the_agent_names(tmp_path: Path) -> None:
    made = make_editor(tmp_path)
    root = Path(made._root).resolve()
    anything = st.text(st.characters(codec=None), max_size=80)

    @given(path=anything | st.from_regex(r"(\.\.?|/|~|a|\.png| )*", fullmatch=True))
    @settings(max_examples=300, deadline=None)
    def check(path: str) -> None:
        staged = made._staged(PurePosixPath(path))
        assert staged.resolve().is_relative_to(root)
        assert len(staged.relative_to(root).parts) == 2
        assert len(staged.name) < 255
        assert staged == made._staged(PurePosixPath(path))

    check()
