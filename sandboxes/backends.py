"""The sandbox backends of this machine: which of them work here, and which one "auto" takes."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import threading
from dataclasses import dataclass

from sandboxes import bubblewrap, process
from sandboxes.base import Limits, SandboxFault
from sandboxes.zygote import Launcher, missing_walls
from sandboxes.zygote_sandbox import ZygoteSandbox

BACKENDS: dict[str, type[ZygoteSandbox]] = {
    "bubblewrap": bubblewrap.BubblewrapSandbox,
    "process": process.ProcessSandbox,
}
"""Best first. Only those that isolate are ever chosen by "auto"."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Whether a backend works here, and if not, what to do about it; `isolation` is what it isolates where it works."""

    name: str
    available: bool
    reason: str = ""
    isolation: tuple[str, ...] = ()


INSTALL = (
    "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap; "
    "Arch: pacman -S bubblewrap)"
)
ALLOW = (
    "bubblewrap is installed, but this system does not let it make namespaces. As root on Debian: "
    "sysctl kernel.unprivileged_userns_clone=1; on Ubuntu 24.04 and later: "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0; in Docker: run the container with --privileged, or with "
    "--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)
TRIAL_S = 30.0


def launcher_of(name: str) -> Launcher:
    """Return how backend `name` starts a zygote; raises `SandboxFault` for an unknown name."""
    if name not in BACKENDS:
        raise SandboxFault(f"no sandbox backend is called {name!r}; there are: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name].launcher


async def _try(backend: type[ZygoteSandbox]) -> str:
    """Run one command in a sandbox; returns what is wrong, or nothing."""
    # The import shows that the sandbox's user can read the interpreter's folder.
    command = [backend.interpreter(), "-c", "import wave; print('works')"]
    try:
        async with asyncio.timeout(TRIAL_S), backend(Limits(wall_clock_s=TRIAL_S / 2)) as sandbox:
            result = await sandbox.run(command)
    except (SandboxFault, TimeoutError) as error:
        return str(error) or "no answer"
    if result.stdout.strip() == "works":
        return ""
    return f"{sys.executable} does not run inside (are its folders readable for all users?): {result.stderr[-500:]}"


_working: dict[str, BackendStatus] = {}


def _status(name: str) -> BackendStatus:
    """Try one backend; only success is remembered, for a busy machine may fail once."""
    status = _working.get(name) or _trial(name)
    if status.available:
        _working[name] = status
    return status


def _trial(name: str) -> BackendStatus:
    if sys.platform != "linux":
        return BackendStatus(name, False, "sandboxes need Linux")
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        return BackendStatus(name, False, INSTALL)
    # A loop in a thread of its own, so that this can be called with and without a running loop.
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(_try(BACKENDS[name]))))
    thread.start()
    thread.join()
    if answers == [""]:
        return BackendStatus(name, True, isolation=BACKENDS[name].promises.isolates)
    reason = answers[0] if answers else "trying it failed"
    return BackendStatus(name, False, f"{reason} ({ALLOW})" if name == "bubblewrap" else reason)


def try_backends() -> list[BackendStatus]:
    """Return all backends, best first, and whether each works here. Blocks; the first call starts sandboxes."""
    return [_status(name) for name in BACKENDS]


def choose_backend(name: str = "auto") -> str:
    """Return the name of the backend to use. Blocks at the first call.

    "auto" is the best that isolates; if there is none, or the one asked for by name does not work here, `SandboxFault`
    says what to do. `process` isolates nothing, so it must be asked for by name.
    """
    if name != "auto":
        launcher_of(name)
        status = _status(name)
        if not status.available:
            raise SandboxFault(f"the sandbox backend {name!r} does not work here: {status.reason}")
        return name
    for status in try_backends():
        if status.available and status.isolation:
            return status.name
    reasons = "; ".join(f"{status.name}: {status.reason}" for status in try_backends() if not status.available)
    raise SandboxFault(
        f"no backend here isolates the code it runs ({reasons}). Either {INSTALL}, or ask for the backend "
        "'process' by name if you trust the code: it limits resources and isolates nothing."
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the backends and which one "auto" takes; the exit status is 1 if it takes none."""
    parser = argparse.ArgumentParser(
        prog="python -m sandboxes.backends",
        description=f"{__doc__} Exit status 1: none that isolates.",
        epilog="example: python -m sandboxes.backends && python -m learner.train",
    )
    parser.parse_args(arguments)
    for status in try_backends():
        print(f"{status.name:12}{'works' if status.available else 'does not work'}")
        print(f"{'':12}isolates: {', '.join(status.isolation) or 'nothing; it only limits resources'}")
        if status.reason:
            print(f"{'':12}{status.reason}")
    for missing in missing_walls():
        print(f"all backends have {missing}")
    try:
        print(f"auto takes {choose_backend()}")
    except SandboxFault as error:
        print(f"auto takes none: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
