"""Frames between the caller, the supervisor and the interpreter: a JSON head and a body of raw bytes."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

SIZES = struct.Struct("!II")
HEAD_MAX = 1 << 20
BODY_MAX = 1 << 30

Frame = tuple[dict[str, Any], bytes]


class BrokenFrame(ConnectionError):
    """The peer is gone or does not speak the protocol."""


def pack(head: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    text = json.dumps(head).encode()
    return SIZES.pack(len(text), len(body)) + text + body


READY = pack({"ready": True})
"""What a supervisor says first."""


def unpack_sizes(data: bytes) -> tuple[int, int]:
    """Return (head bytes, body bytes) from the first eight bytes of a frame; raises `BrokenFrame` on nonsense."""
    head, body = SIZES.unpack(data)
    if not 2 <= head <= HEAD_MAX or body > BODY_MAX:
        raise BrokenFrame("not a frame")
    return head, body


def unpack_head(data: bytes) -> dict[str, Any]:
    """Return the head of a frame; raises `BrokenFrame` if it is no JSON object."""
    try:
        head = json.loads(data)
    except ValueError as error:
        raise BrokenFrame("not a frame") from error
    if not isinstance(head, dict):
        raise BrokenFrame("not a frame")
    return head


def read_exactly(fd: int, size: int) -> bytes:
    """Read `size` bytes from a blocking descriptor; raises `BrokenFrame` at its end."""
    parts = bytearray()
    while len(parts) < size:
        chunk = os.read(fd, min(size - len(parts), 1 << 20))
        if not chunk:
            raise BrokenFrame("the peer is gone")
        parts += chunk
    return bytes(parts)


def read_frame(fd: int) -> Frame:
    """Read one frame from a blocking descriptor."""
    head, body = unpack_sizes(read_exactly(fd, SIZES.size))
    return unpack_head(read_exactly(fd, head)), read_exactly(fd, body)


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
