"""Where the shared key comes from: a file that is named, the environment, or a run's folder."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from agent.doors.door import KEY_VARIABLE, DoorFault, checked_key

KEY_FILE = "key"
"""The name of the file in a run's folder."""


def given_key(file: Path | None = None) -> str:
    """The key in `file`, or that of $SAO_KEY; "" where neither is given. Raises `DoorFault`."""
    if file is not None:
        return kept_key(file)
    value = os.environ.get(KEY_VARIABLE, "")
    return checked_key(value, KEY_VARIABLE) if value.strip() else ""


def found_key(folder: Path, file: Path | None = None) -> str:
    """The key that is given, or the one that the run in `folder` has made for itself; "" where there is none."""
    own = folder / KEY_FILE
    return given_key(file) or (kept_key(own) if own.exists() else "")


def run_key(folder: Path, file: Path | None = None) -> str:
    """As `found_key`; where there is none, one is made and kept in `folder`, readable by this user alone."""
    return found_key(folder, file) or made_key(folder / KEY_FILE)


def made_key(own: Path) -> str:
    """The key in the file `own`, which is made if it is not there, readable by this user alone. Raises `DoorFault`."""
    if own.exists():
        return kept_key(own)
    own.parent.mkdir(parents=True, exist_ok=True)
    part = own.with_name(f".{own.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as writing:
            writing.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):  # another process of the run was faster: its key counts
            os.link(part, own)
    finally:
        part.unlink()
    return kept_key(own)


def kept_key(file: Path) -> str:
    """The key in `file`. Raises `DoorFault`."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DoorFault(f"cannot read the shared key in {file}: {reason}") from error
    return checked_key(text, str(file))
