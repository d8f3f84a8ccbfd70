"""The `bubblewrap` backend: namespaces for everything, a read-only system, private /tmp and /dev/shm, no network."""

from __future__ import annotations

import glob
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from sandboxes.base import Promises
from sandboxes.zygote import ENVIRONMENT, INSIDE, python_command, uid_base
from sandboxes.zygote_sandbox import LIMITED, REFUSED, ZygoteSandbox

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
LIBRARIES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
CONVENIENCES = ("/etc/fonts", "/etc/nsswitch.conf", "/etc/mime.types")
ROOT = "/opt/sandbox"
PROC = f"{ROOT}/proc"
HOST = f"{ROOT}/host"
HIDDEN = ("/tmp", "/dev")
"""Folders that a sandbox has for itself. What the caller's Python keeps in them is shown under `HOST` instead."""


def shown(path: str) -> str:
    """Return where a path of the caller's Python is found inside: at its own place, unless that place is hidden."""
    return HOST + path if path.startswith(tuple(f"{hidden}/" for hidden in HIDDEN)) else path


def interpreter() -> str:
    """Return the path of the caller's Python inside. A link that would lead to a hidden place is followed first."""
    real = os.path.realpath(sys.executable)
    return shown(sys.executable if shown(real) == real else real)


def site_folders(prefix: str) -> list[str]:
    """Return the folders below `prefix` in which some Python has its packages."""
    return sorted(glob.glob(f"{glob.escape(prefix)}/lib*/python*/*-packages"))


def below(path: str, folders: Iterable[str]) -> bool:
    """Whether `path` is one of the folders or lies in one."""
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def binds(packages: list[str]) -> list[str]:
    """Return the arguments that show the system, the caller's Python, and of its packages these; all read-only.

    Whatever the caller imports from elsewhere, its own code for one, is covered where it lies in what is shown.
    """
    arguments: list[str] = []
    for path in SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    for path in (*LIBRARIES, *CONVENIENCES):
        arguments += ["--ro-bind-try", path, path]
    seen, covered, made = ["/usr"], list[str](), set[str]()

    def show(path: str) -> None:
        for above in reversed(pathlib.PurePath(shown(path)).parents[:-1]):
            # Made by bubblewrap itself they would have the mode of their originals, such as 0700 of /root.
            if str(above) not in made and not (below(str(above), seen) and not below(str(above), covered)):
                made.add(str(above))
                arguments.extend(["--perms", "0755", "--dir", str(above)])
        arguments.extend(["--ro-bind", path, shown(path)])

    def cover(path: str) -> None:
        if below(path, seen) and not below(path, covered) and os.path.isdir(path):
            covered.append(path)
            arguments.extend(["--perms", "0755", "--tmpfs", shown(path)])

    library = os.path.dirname(os.path.realpath(os.__file__))
    here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for path in sorted({here, *map(os.path.realpath, filter(os.path.isdir, sys.path))}, key=len):
        if not below(path, [library]) and path not in ("/", "/usr") and not below(library, [path]):
            cover(path)
    executable = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    bases = sorted({sys.base_prefix, executable}, key=len)
    for path in bases:
        if not below(path, seen):
            show(path)
            seen.append(path)
    for prefix in ("/usr", "/usr/local", *bases):
        for path in site_folders(prefix):
            cover(path)
    for path in (os.path.join(sys.prefix, "bin"), os.path.join(sys.prefix, "pyvenv.cfg")):
        if os.path.exists(path) and (not below(path, seen) or below(path, covered)):
            show(path)
    for path in packages:
        show(path)
    return arguments + [word for path in covered for word in ("--remount-ro", shown(path))]


def launch(options: dict[str, Any]) -> list[str]:
    """Return the command that starts a zygote in bubblewrap."""
    base = uid_base()
    # Not --die-with-parent: killed while it starts, bubblewrap leaves its inner half waiting for ever. The zygote
    # watches for the caller's end itself.
    command = [shutil.which("bwrap") or "bwrap", "--as-pid-1", "--new-session"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if base is None:
        command += ["--unshare-user", "--uid", "1000", "--gid", "1000", "--proc", "/proc"]
    else:
        # A zygote that is root gives each sandbox a user of its own. bubblewrap covers parts of a /proc that root
        # could write to, and over a covered /proc no sandbox may mount its own; so this one is the caller's, seen by
        # the zygote alone, as is the zygote's own beside it.
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
            command += ["--cap-add", capability]
        command += ["--bind", "/proc", "/proc"]
        command += ["--perms", "0755", "--dir", "/opt", "--perms", "0755", "--dir", ROOT, "--proc", PROC]
    command += ["--clearenv"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += binds(options["packages"])
    command += ["--dev", "/dev", "--remount-ro", "/dev", "--tmpfs", "/tmp"]
    command += ["--ro-bind", INSIDE, f"{ROOT}/inside"]
    command += ["--remount-ro", "/", "--chdir", "/", "--hostname", "sandbox"]
    options = {
        **options,
        "site": list(dict.fromkeys(shown(os.path.dirname(path)) for path in options["packages"])),
        "isolate": True,
        "uid_base": base,
        "keep_reading": False,
        "folder": None,
    }
    options["proc"] = None if base is None else PROC
    return [*command, "--", *python_command(ROOT, options, interpreter())]


class BubblewrapSandbox(ZygoteSandbox):
    """Commands in a bubblewrap sandbox of their own."""

    promises = Promises(
        isolates=("network", "files", "processes", "ipc", "user"), limits=LIMITED, refuses=(*REFUSED, "packages")
    )
    launcher = staticmethod(launch)
    interpreter = staticmethod(interpreter)
