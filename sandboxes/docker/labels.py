"""What a container says of itself: whose it is, and until when. The engine keeps it when nobody else can be asked.

Docker does not notice when the process that made a container is killed. So each one carries the name of that process,
which means something on this machine until it boots again, and the end of its time to live.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time

import psutil

PROJECT = "sao"
LABEL_PROJECT = "sao.project"
LABEL_OWNER = "sao.owner"
LABEL_EXPIRES = "sao.expires"


def labels(project: str, ttl_s: float) -> dict[str, str]:
    """Return the labels of a container that this process makes now and that lives for `ttl_s` seconds at most."""
    return {LABEL_PROJECT: project, LABEL_OWNER: owner(), LABEL_EXPIRES: str(int(time.time() + ttl_s))}


def machine() -> str:
    """Name this machine, boot and PID namespace: where a process id means something."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()[:8]
        return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


@functools.cache
def _owner_of(pid: int) -> str:
    return f"{machine()}:{pid}:{psutil.Process(pid).create_time():.2f}"


def owner() -> str:
    """Name this process so that no other one, earlier or later, has the same name: machine, pid, start time."""
    return _owner_of(os.getpid())


def owner_is_gone(name: str) -> bool:
    """Whether the process that `owner()` named has ended; False where that cannot be known (another machine)."""
    place, _, rest = name.partition(":")
    pid, _, begun = rest.partition(":")
    if place != machine() or not pid.isdigit():
        return False
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(begun)) > 1.0
    except psutil.NoSuchProcess:
        return True
    except (psutil.AccessDenied, ValueError):
        return False
