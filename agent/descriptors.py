"""File descriptors: a process that holds thousands of connections raises its own limit before it opens them."""

from __future__ import annotations

import contextlib
import resource

RESERVE = 128
"""Descriptors that a process has open besides its connections: files, libraries, pipes, a database."""


class TooFewDescriptors(RuntimeError):
    """The system does not allow as many open files as there will be; the message says how many, and what to do."""


def raise_limit(connections: int, what: str) -> int:
    """Raise this process's soft limit of open files to its hard one, and return it.

    Raises `TooFewDescriptors` if that is not enough for `connections` at once. `what` names the setting that asks for
    them, for the message.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS refuses its own "unlimited"
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    needed = connections + RESERVE
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise TooFewDescriptors(
            f"{what} needs {needed} open files, and the system allows {soft}: raise it (`ulimit -Hn {needed}` as root, "
            "or LimitNOFILE= of the service), or lower the setting"
        )
    return soft
