"""Output that is cut while it is read: by the supervisor inside, and by whoever reads a container's streams outside.

Standard library only, and nothing from above `inside`: this file is shown in every sandbox as it is.
"""

from __future__ import annotations

import codecs

CHUNK = 1 << 16
"""How much a reader takes at once, in bytes."""


class CappedOutput:
    """The first and last bytes of a stream; what lies between is counted and announced.

    `feed` takes chunks as they come; never more than `limit_bytes` plus one chunk are held. A character split between
    chunks is whole again, one split by the cut is dropped with it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._head_limit = (limit_bytes + 1) // 2
        self._tail_limit = limit_bytes - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self._total += len(data)
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > self._tail_limit + CHUNK:
            del self._tail[: len(self._tail) - self._tail_limit]

    def _parts(self) -> tuple[bytes, bytes]:
        if self._total <= self._head_limit + self._tail_limit:
            return bytes(self._head) + bytes(self._tail), b""
        head = bytes(self._head)
        tail = bytes(self._tail[len(self._tail) - self._tail_limit :] if self._tail_limit else b"")
        # Characters that the cut divides belong to what is left out.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(head)
        pending = len(decoder.getstate()[0])
        head = head[: len(head) - pending]
        skip = 0
        while skip < min(3, len(tail)) and tail[skip] & 0xC0 == 0x80:
            skip += 1
        return head, tail[skip:]

    @property
    def omitted_bytes(self) -> int:
        """How many bytes of the stream are not in what is kept."""
        return self._total - sum(map(len, self._parts()))

    def kept(self) -> bytes:
        """What is kept of the stream, with the cut announced where it is."""
        head, tail = self._parts()
        omitted = self._total - len(head) - len(tail)
        if not omitted:
            return head
        return head + f"\n[... {omitted} bytes of output cut here ...]\n".encode() + tail

    def text(self) -> str:
        """`kept` as text: UTF-8, with replacement."""
        return self.kept().decode("utf-8", "replace")
