"""The base image holds the packages that were asked for and what they need, and nothing else of this machine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sandboxes.base import Limits, SandboxFault
from sandboxes.docker import host_image
from sandboxes.docker.sandbox import DockerSandbox

LONG = Limits(wall_clock_s=60)


def test_relations_are_read_to_names() -> None:
    assert host_image.names([" libc6 (>= 2.34)", "python3:any", "perl:any (>= 5)", "", " "]) == [
        "libc6",
        "python3",
        "perl",
    ]


def test_the_closure_follows_alternatives_virtual_names_and_cycles() -> None:
    known = {
        "tool": ("1", [["absent", "library"], ["awk"]], False),
        "library": ("2", [["tool"]], False),
        "awk": ("", [["mawk"]], False),
        "mawk": ("3", [["not-installed"]], False),
        "base": ("4", [], True),
        "other": ("5", [], False),
    }
    assert host_image.closure(["tool"], known) == {"tool": "1", "library": "2", "mawk": "3", "base": "4"}
    with pytest.raises(KeyError):
        host_image.closure(["absent"], known)


def test_what_cannot_be_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SandboxFault, match="apt-get install no-such-package"):
        host_image.install_missing(["no-such-package"])


def test_an_engine_that_is_away_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert host_image.main(["--host", f"unix://{tmp_path}/none.sock"]) == 1
    assert "make sandboxes" in capsys.readouterr().err


@pytest.mark.docker
@pytest.mark.xdist_group("docker")
async def test_the_image_is_built_once_works_and_holds_nothing_private(sandbox: DockerSandbox) -> None:
    assert await asyncio.to_thread(host_image.build) is False
    check = "git --version && python3 -m pytest --version && patch --version | head -n 1 && find . -maxdepth 0"
    assert (await sandbox.run(["bash", "-c", check], limits=LONG)).exit_code == 0
    listed = "ls -A /root /home /srv /mnt /opt; ls /etc/shadow /etc/ssh; wc -l < /etc/passwd; stat -c %a /tmp"
    result = await sandbox.run(["sh", "-c", listed], limits=LONG)
    assert result.stdout.split() == ["/home:", "/mnt:", "/opt:", "/root:", "/srv:", "18", "1777"]
    # Compiled files came along: a container does not compile its imports anew.
    fresh = "import pytest, sys, os; print(os.path.getmtime(pytest.__cached__) < os.stat('/proc/1').st_mtime - 1)"
    assert (await sandbox.run(["python3", "-c", fresh], limits=LONG)).stdout == "True\n"
