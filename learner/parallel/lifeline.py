"""What tells every rank at once that another one has failed or is gone, whatever it waits for.

Every rank is connected to the main one. Who fails says why; who is killed says nothing, and the kernel closes its end.
A collective alone would say so after `collective_timeout_s`, or never.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable

from accelerate import Accelerator

from learner.parallel.collectives import share

_BYE = b"bye"
_END = b"\0"  # of what a rank has to say; after it only the end of its process follows
_TIE_LIMIT_S = 20.0
_PARTING_S = 10.0  # the main rank takes its services down; launchers end all ranks once one has ended
_LAST_RESORT_S = 60.0


class Lifeline:
    """This process's connections to the other ranks. `failure`: what ended another rank; "" while nothing did. `told`:
    whether the others know already how this one ends.

    On a rank that is not the main one, a failure elsewhere ends the process. The main one is told by `on_failure`, so
    that it can end what it has started, and is ended itself where it is still there `_LAST_RESORT_S` later.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.failure = ""
        self.on_failure: Callable[[], object] | None = None
        self._peers: dict[int, socket.socket] = {}
        self.told = False
        self._lock = threading.Lock()

    @property
    def tied(self) -> bool:
        """Whether there are other ranks that would be told."""
        return bool(self._peers)

    def tie(self, accelerator: Accelerator) -> None:
        """Connect; a collective. A rank that cannot be reached (a firewall between nodes) is warned of and left out."""
        self.rank = accelerator.process_index
        single = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        main = "127.0.0.1" if single else os.environ.get("MASTER_ADDR", "127.0.0.1")
        local = main in ("127.0.0.1", "localhost")
        if accelerator.is_main_process:
            with socket.create_server(("127.0.0.1" if local else "", 0)) as server:
                token = secrets.token_hex(16)
                share(accelerator, (server.getsockname()[1], token))
                self._accept(server, token, accelerator.num_processes - 1)
        else:
            port, token = share(accelerator, (0, ""))
            with _warned(f"rank {self.rank} cannot reach the main rank at {main}:{port}"):
                peer = socket.create_connection((main, port), timeout=_TIE_LIMIT_S)
                peer.sendall(f"{token} {self.rank:8d}".encode())
                self._peers[0] = peer
        for rank, peer in self._peers.items():
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            threading.Thread(target=self._listen, args=(rank, peer), name=f"lifeline {rank}", daemon=True).start()

    def _accept(self, server: socket.socket, token: str, count: int) -> None:
        until = time.monotonic() + _TIE_LIMIT_S
        with _warned("some ranks have not connected to the main one"):
            while len(self._peers) < count:
                server.settimeout(max(until - time.monotonic(), 0.01))
                peer, _ = server.accept()
                peer.settimeout(_TIE_LIMIT_S)
                said, _, rank = peer.recv(len(token) + 9, socket.MSG_WAITALL).decode().partition(" ")
                if secrets.compare_digest(said, token):
                    self._peers[int(rank)] = peer
                else:
                    peer.close()

    def fail(self, reason: str) -> None:
        """Tell the others that this rank ends, and why; only the first word counts."""
        self._say(f"rank {self.rank} failed: {reason}".encode())

    def leave(self) -> None:
        """Tell the others that this rank ends as it should."""
        self._say(_BYE)

    def reason_within(self, seconds: float) -> str:
        """`failure`, which may take a moment longer to arrive than the broken collective."""
        until = time.monotonic() + seconds
        while not self.failure and time.monotonic() < until:
            time.sleep(0.02)
        return self.failure

    def end(self, code: int) -> None:
        """End this process without destructors, some of which would wait for ranks that are gone."""
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def _say(self, words: bytes, *, but: int = -1) -> None:
        with self._lock:
            if self.told:
                return
            self.told = True
        for rank, peer in self._peers.items():
            with contextlib.suppress(OSError):
                if rank != but:
                    peer.sendall(words + _END)

    def _listen(self, rank: int, peer: socket.socket) -> None:
        words = b""
        with contextlib.suppress(OSError):
            while not words.endswith(_END) and (piece := peer.recv(65536)):
                words += piece
        words = words.removesuffix(_END)
        if words == _BYE or self.failure or self.told:
            return
        self.failure = words.decode(errors="replace") or f"rank {rank} is gone: killed, out of memory, or its machine"
        if self.rank == 0:
            self._say(self.failure.encode(), but=rank)
            if self.on_failure is not None:
                self.on_failure()
            time.sleep(_LAST_RESORT_S)
        elif words:  # the main rank goes first, where it can
            with contextlib.suppress(OSError):
                peer.settimeout(_PARTING_S)
                peer.recv(1)
        print(f"error: {self.failure}; rank {self.rank} ends too", file=sys.stderr)
        self.end(1)


_LINE = Lifeline()


def lifeline() -> Lifeline:
    """This process's own; it has no peers before `tie_ranks`, and none in a single process."""
    return _LINE


def tie_ranks(accelerator: Accelerator) -> Lifeline:
    """Connect all ranks, once a process; a collective. Of a single process: nothing."""
    if accelerator.num_processes > 1 and not _LINE.tied:
        _LINE.tie(accelerator)
        atexit.register(_last_words)
    return _LINE


def _last_words() -> None:
    """What the interpreter's own end says: that of an exception nobody caught, or a good bye."""
    error = getattr(sys, "last_value", None)
    if error is None:
        _LINE.leave()
    else:
        _LINE.fail(describe(error))


def describe(error: BaseException) -> str:
    """An error in a line or a paragraph: its text, and its kind where that is not of ours."""
    kind, text = type(error), str(error)
    ours = kind.__module__.partition(".")[0] in ("learner", "agent", "envs", "sandboxes")
    return text if ours and text else f"{kind.__name__}: {text}".removesuffix(": ")


@contextlib.contextmanager
def _warned(what: str):  # type: ignore[no-untyped-def]
    try:
        yield
    except (OSError, ValueError) as error:
        print(f"warning: {what} ({error}); that one fails is noticed late", file=sys.stderr)
