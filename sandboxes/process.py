"""The `process` backend: own sessions, users (where we are root), folders and resource limits; no isolation claims.

Code inside imports only the packages that are shown, as in any sandbox; nothing keeps it from reading other files.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from sandboxes.base import Promises
from sandboxes.zygote import INSIDE, python_command, uid_base
from sandboxes.zygote_sandbox import LIMITED, REFUSED, ZygoteSandbox


def readable_by_all(path: str) -> bool:
    """Whether any user may enter `path`."""
    path = os.path.realpath(path)
    while True:
        if os.stat(path).st_mode & 0o005 != 0o005 and path != "/":
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)


def launch(options: dict[str, Any]) -> list[str]:
    """Return the command that starts a zygote as an ordinary process."""
    base = uid_base()
    folders = [
        os.path.dirname(os.path.realpath(sys.executable)),
        sys.base_prefix,
        *map(os.path.dirname, options["packages"]),
    ]
    keep_reading = base is not None and not all(map(readable_by_all, folders))
    return python_command(
        os.path.dirname(INSIDE),
        {
            **options,
            "site": [],
            "isolate": False,
            "uid_base": base,
            "keep_reading": keep_reading,
            "proc": None,
            "folder": None,
        },
    )


class ProcessSandbox(ZygoteSandbox):
    """Commands as ordinary processes with limits, in a private folder; no isolation claims."""

    promises = Promises(isolates=(), limits=LIMITED, refuses=REFUSED)
    launcher = staticmethod(launch)
