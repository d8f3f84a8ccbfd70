"""The key that a server makes for its user where none is given: an administrator's, kept in `runs/<name>/serve/key`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from agent.doors.door import checked_key
from agent.doors.keys import KEY_FILE, kept_key, made_key

OWN_KEY_NAME = "admin"
"""The caller that shows the made key. It may do everything, as whoever can read the file could anyway."""
CLIENT_VARIABLE = "SAO_API_KEY"
"""Where clients of ours take the key from that they show to a server."""


@dataclass(frozen=True)
class OwnKey:
    """The made key, its `file`, and whether it `is_new`: made at this start."""

    key: str
    file: Path
    is_new: bool

    def link(self, url: str) -> str:
        """The page's address with the key. A browser keeps what follows `#` to itself: no server or log gets it."""
        return f"{url}/#key={quote(self.key)}"


def own_key(folder: Path) -> OwnKey:
    """The key of the server whose own folder this is; made at its first start. Raises `DoorFault`."""
    file = folder / KEY_FILE
    is_new = not file.exists()
    return OwnKey(made_key(file), file, is_new)


def client_key(folder: Path | None = None, file: Path | None = None) -> str:
    """The key to show to a server: that in `file`, in $SAO_API_KEY, or the one that a server with `folder` has made.

    "" where there is none of them. Raises `DoorFault`.
    """
    if file is not None:
        return kept_key(file)
    if given := os.environ.get(CLIENT_VARIABLE, "").strip():
        return checked_key(given, CLIENT_VARIABLE)
    own = None if folder is None else folder / KEY_FILE
    return kept_key(own) if own is not None and own.exists() else ""
