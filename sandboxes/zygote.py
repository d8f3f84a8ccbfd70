"""The caller's side of a zygote: a parent process that forks sandboxes on request. See `sandboxes/inside/zygote.py`.

    new ──start()──▶ alive ──fork()*──▶ alive ──close() | it dies──▶ dead: all its sandboxes are gone

A zygote belongs to the event loop it was started in, and ends with the process it was started by.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import random
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sandboxes.base import Limits, SandboxFault
from sandboxes.inside import wire
from sandboxes.memory_groups import MISSING, MemoryGroup, hierarchy
from sandboxes.packages import shown_packages
from sandboxes.syscall_filter import syscall_filter

START_S = 30.0
CLOSE_S = 10.0

Launcher = Callable[[dict[str, Any]], list[str]]
"""Turns the zygote's options into the command line that starts it."""

INSIDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inside")
BOOT = "import sys; sys.path.insert(0, {root!r}); from inside.zygote import main; main(sys.argv[1:])"
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MPLBACKEND": "Agg",
    # There is none, but without the variable matplotlib's show() does nothing, silently; with it, it says why.
    "DISPLAY": "none",
    # Many interpreters share few cores, and each thread pool would cost address space.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    # Symbols resolved once by the zygote, not again in each of its children.
    "LD_BIND_NOW": "1",
}
# Far from users, from systemd's dynamic users and from the ranges that container managers give away.
UID_BASE = 1_900_000_000


def python_command(root: str, options: dict[str, Any], interpreter: str = sys.executable) -> list[str]:
    """Return the command that starts a zygote whose code lies in `root`/inside, with the Python at `interpreter`."""
    flags = ["-I", "-S", "-B", "-X", "utf8"]
    return [interpreter, *flags, "-c", BOOT.format(root=root), json.dumps({**options, "root": root})]


def uid_base() -> int | None:
    """Return the first user id for sandboxes: None unless we are root and may choose one."""
    return UID_BASE + random.SystemRandom().randrange(1000) * 60_000 if os.geteuid() == 0 else None


def missing_walls() -> list[str]:
    """Return what this machine lacks of the walls around a sandbox, each with what follows and what to do."""
    return [missing for missing in (syscall_filter().missing, hierarchy().missing) if missing]


_log = logging.getLogger(__name__)
_told: set[str] = set()


def _tell_once(missing: str) -> None:
    """Say in the log, once in a process, what this machine lacks."""
    if missing not in _told:
        _told.add(missing)
        _log.warning("sandboxes have %s", missing)


@functools.lru_cache(maxsize=64)
def _as_numbers(limits: Limits) -> dict[str, Any]:
    """The limits as they are sent inside; the same for most sandboxes of a process."""
    return dataclasses.asdict(limits)


class Channel:
    """The connection to one sandbox's supervisor: one request at a time."""

    def __init__(
        self,
        zygote: Zygote,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        group: MemoryGroup | None,
    ) -> None:
        self._zygote = zygote
        self._number = number
        self._reader = reader
        self._writer = writer
        self._group = group

    async def read(self) -> wire.Frame:
        """Read one frame; raises `ConnectionError` or `IncompleteReadError` at the end."""
        head, body = wire.unpack_sizes(await self._reader.readexactly(wire.SIZES.size))
        return wire.unpack_head(await self._reader.readexactly(head)), await self._reader.readexactly(body)

    async def request(self, head: dict[str, Any], body: bytes, timeout_s: float) -> wire.Frame:
        """Send one request and return its answer.

        Raises `TimeoutError`, or `ConnectionError` if the sandbox is gone; after either, or after cancellation, the
        sandbox must be closed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(wire.pack(head, body))
                await self._writer.drain()
                return await self.read()
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the sandbox is gone") from error

    async def close(self) -> None:
        """End the sandbox; returns when everything in it is dead."""
        try:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write_eof()
            try:
                async with asyncio.timeout(CLOSE_S / 2):
                    while await self._reader.read(1 << 16):
                        pass
            except TimeoutError:
                await self._zygote.kill(self._number)
            except OSError:
                pass
        finally:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
            self._zygote.release(self._group)

    async def kill(self) -> None:
        """End a sandbox whose supervisor does not answer."""
        await self._zygote.kill(self._number)
        await self.close()

    def abandon(self) -> None:
        """End the sandbox without waiting."""
        self._writer.close()
        self._zygote.release(self._group)


class Zygote:
    """See the module. `launcher` is the backend's, `packages` are shown beside `sandboxes.packages.MATHEMATICS`."""

    def __init__(self, launcher: Launcher, *, preload: bool, packages: Sequence[str] = ()) -> None:
        self._launcher = launcher
        self._packages = tuple(packages)
        self._preload = preload
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._send_lock = asyncio.Lock()
        self._broken = False
        self._folder = ""
        self._groups: set[MemoryGroup] = set()
        self._ended: set[MemoryGroup] = set()

    @property
    def alive(self) -> bool:
        """Whether it can fork."""
        if self._process is None or self._control is None or self._broken:
            return False
        try:  # its exit status may take a moment longer to arrive than the end of its socket
            self._broken = self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            pass
        except OSError:
            self._broken = True
        return not self._broken

    async def start(self) -> None:
        """Start the process and wait until it is ready; raises `SandboxFault` with its own words if it is not."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        # The zygote watches this process, not only its socket, of which a fork of this process may hold a copy.
        caller = os.pidfd_open(os.getpid())
        calls = syscall_filter()
        for missing in missing_walls():
            _tell_once(missing)
        options = {
            "preload": self._preload,
            "packages": list(shown_packages(self._packages)),
            "caller": caller,
            "filter": calls.program.hex(),
        }
        command = self._launcher(options)
        spawning = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *command,
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(caller,),
                env=ENVIRONMENT,
            )
        )
        try:
            # Cancelled, asyncio would kill a half-started bubblewrap, whose other half then waits for ever.
            self._process = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            ours.close()
            self._process = await spawning
            await self.close()
            raise
        except OSError as error:
            ours.close()
            raise SandboxFault(f"cannot start {command[0]}: {error}") from error
        finally:
            theirs.close()
            os.close(caller)
        self._control = ours
        try:
            async with asyncio.timeout(START_S):
                answer = await asyncio.get_running_loop().sock_recv(ours, 4096)
            if answer.startswith(b"ready "):
                self._folder = os.fsdecode(answer[6:])
                return
            assert self._process.stderr is not None
            async with asyncio.timeout(CLOSE_S):
                words = (await self._process.stderr.read(4096)).decode(errors="replace").strip()
        except (OSError, TimeoutError) as error:
            await self.close()
            raise SandboxFault(f"{command[0]} did not come up within {START_S:.0f} s") from error
        except BaseException:
            await self.close()
            raise
        await self.close()
        raise SandboxFault(f"{command[0]} could not make a sandbox: {words or 'no reason given'}")

    async def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        data = json.dumps(message).encode()
        async with self._send_lock, asyncio.timeout(START_S):
            while self._control is not None:
                try:
                    socket.send_fds(self._control, [data], fds)
                    return
                except BlockingIOError:
                    await asyncio.sleep(0.002)
                except OSError:
                    self._broken = True
                    raise
        raise ConnectionError("the zygote is closed")

    async def fork(self, limits: Limits, *, python: bool) -> Channel:
        """Make one sandbox, with a Python interpreter waiting in it or without; raises `SandboxFault`."""
        if not self.alive:
            raise SandboxFault("the parent process of the sandboxes is not running")
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        channel: Channel | None = None
        group = self._make_group(limits)
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            channel = Channel(self, number, reader, writer, group)
            message = {"op": "fork", "id": number, "python": python, "limits": _as_numbers(limits)}
            room = () if group is None else (group.members, group.events)
            await self._send(message, (theirs.fileno(), *room))
            theirs.close()
            async with asyncio.timeout(START_S):
                head, _ = await channel.read()
            if not head.get("ready"):
                raise SandboxFault(f"a sandbox could not be set up: {head.get('error')}")
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            if channel:
                channel.abandon()
            raise SandboxFault(f"a sandbox did not come up: {error!r}") from error
        except BaseException:
            if channel:
                channel.abandon()
            raise
        finally:
            theirs.close()
            if group is not None:
                group.hand_over()
        return channel

    def _make_group(self, limits: Limits) -> MemoryGroup | None:
        """Make the next sandbox's group, where groups may be made."""
        place = hierarchy()
        if not place.folder:
            return None
        try:
            group = MemoryGroup(place, limits.memory_bytes)
        except OSError as error:
            _tell_once(MISSING.format(reason=f"none could be made ({error.strerror})"))
            return None
        self._groups.add(group)
        return group

    def release(self, group: MemoryGroup | None) -> None:
        """Take back the group of a sandbox that has ended, or will in a moment: it goes when it is empty."""
        if group is not None:
            self._ended.add(group)
        removed = {each for each in self._ended if each.close()}
        self._ended -= removed
        self._groups -= removed

    async def kill(self, number: int) -> None:
        """Have a sandbox killed whose supervisor does not listen."""
        with contextlib.suppress(OSError, TimeoutError):
            await self._send({"op": "kill", "id": number})

    async def close(self) -> None:
        """Kill all sandboxes and the zygote; returns when they are gone."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            async with asyncio.timeout(CLOSE_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        finally:
            self._ended |= self._groups
            self.release(None)
            if self._folder:  # the zygote removes it, unless it was killed
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
