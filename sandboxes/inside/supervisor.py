"""The supervisor: first process of one sandbox. It starts commands and the interpreter, and enforces the limits.

One request at a time comes from the caller's socket; one answer goes back. When the socket ends, the supervisor
kills everything below it and leaves. In a PID namespace it is process 1: what runs below it cannot signal it, and
everything dies with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import stat
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from . import interpreter, walls, wire
from .line import Line
from .memory import MemoryRoom
from .output import CHUNK, CappedOutput
from .processes import DEFAULT, apply_rlimits, children_of, facts_of, kill_all_others, resident_bytes, set_handler

TICK_S = 0.02
TICK_MIN_S = 0.003
TICK_MAX_S = 0.1
IN_MEMORY = ("/tmp", "/dev/shm")
SWEEP_S = 2.0


class Capture:
    """A pipe's reading end, kept to `limit` bytes while it is read: the head and the tail stay."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)
        self.reset(limit)

    def reset(self, limit: int) -> None:
        """Forget what was read; from now on keep `limit` bytes."""
        self.output = CappedOutput(limit)

    def pump(self, budget: int = 1 << 20) -> bool:
        """Read what is there, at most `budget` bytes; False at the end of the pipe."""
        while budget > 0:
            try:
                chunk = os.read(self.fd, CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            budget -= len(chunk)
            self.output.feed(chunk)
        return True

    def text(self) -> tuple[bytes, int]:
        """Return (what is kept with the cut announced in it, bytes cut)."""
        return self.output.kept(), self.output.omitted_bytes


class Supervisor:
    """See the module. `init` says that this is process 1 of a PID namespace, where everything there is is ours."""

    def __init__(
        self,
        caller: socket.socket,
        limits: dict[str, Any],
        *,
        init: bool,
        processes: int,
        room: MemoryRoom | None = None,
        calls: walls.CallFilter | None = None,
    ) -> None:
        self.caller = caller
        self.limits = limits
        self.init = init
        self.processes = processes
        self.room = room or MemoryRoom()
        self.calls = calls or walls.CallFilter()
        self.worker = 0
        self.line: Line | None = None
        self.worker_pidfd = -1
        self.worker_resident = 0
        self.output: Capture | None = None

    # -- processes ------------------------------------------------------------------------------------------

    def below(self) -> list[int]:
        """Every process below this one."""
        if self.init:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        pids: list[int] = []
        queue = [os.getpid()]
        while queue:
            children = children_of(queue.pop())
            pids += children
            queue += children
        return pids

    def children(self) -> list[int]:
        """The direct children of this process, zombies too."""
        return children_of(os.getpid())

    def reap(self) -> None:
        """Collect ended children, except the one that is watched by its pidfd."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == self.worker:
                    return
                os.waitpid(ended.si_pid, 0)

    def strike(self) -> None:
        """Kill what is below now, without waiting: while one of many is waited for, the others would go on growing."""
        for pid in [-1] if self.init else self.below():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def sweep(self, keep: int = 0) -> bool:
        """Kill everything below, except process `keep` (stopped meanwhile); True if nothing is left."""
        if self.init and not keep:
            return kill_all_others(SWEEP_S)
        if keep:
            os.kill(keep, signal.SIGSTOP)
        deadline = time.monotonic() + SWEEP_S
        pause = 0.0002
        while True:
            alive = False
            for pid in self.below():
                if pid == keep:
                    continue
                facts = facts_of(pid)
                if facts is None or facts[0] in "ZX":
                    continue
                alive = True
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            if not alive:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def usage(self) -> tuple[int, float, int]:
        """Return (bytes held, CPU seconds, processes) of everything below; files that lie in memory are held too."""
        resident, cpu, count = self.file_bytes(), 0.0, 0
        for pid in self.below():
            facts = facts_of(pid)
            if facts is not None and facts[0] not in "ZX":
                # A forked copy of the interpreter shares what the interpreter had at its start.
                resident += max(0, facts[1] - self.worker_resident)
                cpu += facts[2]
                count += 1
        return resident, cpu, count

    def file_bytes(self) -> int:
        """Return how much of the sandbox's own /tmp and /dev/shm, which are memory, is used."""
        used = 0
        for folder in IN_MEMORY if self.init else ():
            facts = os.statvfs(folder)
            used += (facts.f_blocks - facts.f_bfree) * facts.f_frsize
        return used

    # -- waiting --------------------------------------------------------------------------------------------

    def watch(
        self, pid: int, pidfd: int, captures: Iterable[Capture], limits: dict[str, Any], line: Line | None = None
    ) -> str:
        """Pump output until something ends the run: a limit's name, "exit", or a `Line.verdict`.

        Leaves the supervisor altogether when the caller is gone.
        """
        open_captures = {capture.fd: capture for capture in captures}
        poll = select.poll()
        for fd in (pidfd, self.caller.fileno(), *open_captures):
            poll.register(fd, select.POLLIN)
        if line is not None:
            poll.register(line, select.POLLIN | select.POLLOUT)
        started = time.monotonic()
        deadline = started + limits["wall_clock_s"]
        cpu_max, cpu_before = limits["cpu_s"], None
        if cpu_max is not None:
            cpu_before = self.usage()[1]
        tick, next_tick = TICK_S, started + TICK_S
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= next_tick:
                self.reap()
                held, cpu, count = self.usage()
                # Where the kernel holds the limit it has ended one process of several; the run is over all the same.
                if held > limits["memory_bytes"] or self.room.was_full():
                    return "memory"
                if cpu_before is not None and cpu - cpu_before > cpu_max:
                    return "cpu"
                if count > 2 * limits["processes"]:
                    return "processes"
                # What is added between two looks goes beyond the limit; a process alone has one of its own.
                quickly = not self.room.limits and (count > 1 or 2 * held > limits["memory_bytes"])
                tick = TICK_MIN_S if quickly else min(1.3 * max(tick, TICK_S), TICK_MAX_S)
                next_tick = time.monotonic() + tick
            events = dict(poll.poll(max(0.0, min(deadline, next_tick) - time.monotonic()) * 1000 + 0.5))
            for fd in events.keys() & open_captures.keys():
                if not open_captures[fd].pump():
                    poll.unregister(fd)
                    del open_captures[fd]
            if self.caller.fileno() in events:  # one request at a time: this can only be its end
                self.leave()
            if line is not None and (event := events.get(line.fileno(), 0)):
                verdict = line.verdict() if event & ~select.POLLOUT else ""
                if verdict:
                    return verdict
                if event & (select.POLLHUP | select.POLLERR):  # its process may take a moment longer, or go on without
                    poll.unregister(line)
                elif event & select.POLLOUT:
                    self.speak(line, poll)
            if pidfd in events:
                return "exit"

    @staticmethod
    def speak(line: Line, poll: select.poll) -> None:
        """Send the interpreter what it has room for; once all is sent, only listen."""
        try:
            done = line.send()
        except OSError:  # it hung up, which `verdict` sees
            done = True
        if done:
            poll.modify(line, select.POLLIN)

    # -- the interpreter ------------------------------------------------------------------------------------

    def start_interpreter(self) -> None:
        """Fork the interpreter off this process; it waits for its first cell."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (write_end, 1), (write_end, 2)):
                os.dup2(source, target, inheritable=True)
            self.room.enter()
            keep = theirs.detach()
            os.closerange(3, keep)
            os.closerange(keep + 1, 4096)
            apply_rlimits(self.limits, self.processes)
            set_handler(signal.SIGINT, signal.default_int_handler)
            self.calls.load()
            interpreter.serve(keep)
        theirs.close()
        os.close(write_end)
        self.worker, self.line = pid, Line(ours)
        self.worker_pidfd = os.pidfd_open(pid)
        self.output = Capture(read_end, 0)
        self.worker_resident = resident_bytes(pid)

    def python(self, head: dict[str, Any], body: bytes) -> wire.Frame:
        """Run one cell."""
        assert self.output is not None
        assert self.line is not None
        limits = {**self.limits, **head["limits"]}
        self.output.reset(limits["output_bytes"])
        self.line.open_cell(body)
        os.kill(self.worker, signal.SIGCONT)
        outcome = self.watch(self.worker, self.worker_pidfd, [self.output], limits, self.line)
        answer: dict[str, Any] = {"status": outcome, "lost": outcome not in ("ok", "error")}
        if answer["lost"]:
            answer["exit_code"] = self.kill_worker(0.05 if outcome == "exit" else 0)
            self.sweep()
            if outcome == "exit" and self.room.was_full():
                answer["status"] = "memory"
        elif not self.sweep(keep=self.worker):
            answer = {"status": "processes", "lost": True, "exit_code": self.kill_worker(0)}
            self.sweep()
        self.output.pump()
        # Of a cell whose end was forged the rest would be taken for the next one's.
        text, answer["omitted"] = self.output.text() if outcome != "forged" else (b"", 0)
        return answer, text

    def kill_worker(self, wait_s: float) -> int | None:
        """End the interpreter and all below; returns how it had ended by itself (negative: a signal), or None."""
        # Its socket ends a moment before it does.
        ended = bool(select.select([self.worker_pidfd], [], [], wait_s)[0])
        self.strike()
        code = os.waitstatus_to_exitcode(os.waitpid(self.worker, 0)[1])
        self.worker = 0
        return code if ended else None

    # -- commands and files ---------------------------------------------------------------------------------

    def command(self, head: dict[str, Any], body: bytes) -> wire.Frame:
        """Run one command; the body is its standard input."""
        limits = {**self.limits, **head["limits"]}
        stdin = os.memfd_create("stdin", 0)
        wire.write_all(stdin, body)
        os.lseek(stdin, 0, os.SEEK_SET)
        (out_r, out_w), (err_r, err_w), (fail_r, fail_w) = os.pipe(), os.pipe(), os.pipe()
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                for source, target in ((stdin, 0), (out_w, 1), (err_w, 2)):
                    os.dup2(source, target, inheritable=True)
                apply_rlimits(limits, self.processes if limits == self.limits else limits["processes"])
                self.room.enter()
                self.calls.load()
                for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; a command expects the defaults
                    set_handler(number, DEFAULT)
                os.execvpe(head["argv"][0], head["argv"], {**os.environ, **head["env"]})
            except OSError as error:
                wire.write_all(fail_w, str(error.errno).encode())
            os._exit(127)
        for fd in (stdin, out_w, err_w, fail_w):
            os.close(fd)
        self.worker, pidfd = pid, os.pidfd_open(pid)
        captures = [Capture(fd, limits["output_bytes"]) for fd in (out_r, err_r)]
        try:
            outcome = self.watch(pid, pidfd, captures, limits)
            code = None
            if outcome != "exit":
                self.strike()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self.worker = 0
            self.sweep()
            for capture in captures:
                capture.pump()
            failed = os.read(fail_r, 16)
        finally:
            for fd in (pidfd, out_r, err_r, fail_r):
                os.close(fd)
        duration = time.monotonic() - started
        texts = [capture.text() for capture in captures]
        if failed:
            reason = os.strerror(int(failed))
            texts[1] = (f"{head['argv'][0]}: {reason}\n".encode(), 0)
        return {
            "outcome": outcome,
            "exit_code": code,
            "stdout_bytes": len(texts[0][0]),
            "omitted": texts[0][1] + texts[1][1],
            "duration_s": duration,
        }, texts[0][0] + texts[1][0]

    def put(self, head: dict[str, Any], body: bytes) -> wire.Frame:
        """Write a file; folders above it are made."""
        os.makedirs(os.path.dirname(os.path.abspath(head["path"])), exist_ok=True)
        fd = os.open(head["path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        try:
            wire.write_all(fd, body)
        finally:
            os.close(fd)
        return {}, b""

    def get(self, head: dict[str, Any], body: bytes) -> wire.Frame:
        """Read a regular file of at most `max_bytes`."""
        fd = os.open(head["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # never wait at a FIFO
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if facts.st_size > head["max_bytes"]:
                raise OSError(errno.EFBIG, f"larger than {head['max_bytes']} bytes")
            return {}, wire.read_exactly(fd, facts.st_size)
        finally:
            os.close(fd)

    # -- life -----------------------------------------------------------------------------------------------

    def leave(self) -> NoReturn:
        """Kill everything below and end."""
        self.worker = 0
        self.sweep()
        os._exit(0)

    def serve(self) -> NoReturn:
        """Answer requests until the caller is gone. Never returns."""
        fd = self.caller.fileno()
        # For `put`; what is started later has this limit and more.
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (self.limits["file_bytes"], resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
        handlers = {"python": self.python, "run": self.command, "put": self.put, "get": self.get}
        wire.write_all(fd, wire.READY)
        while True:
            try:
                head, body = wire.read_frame(fd)
                self.room.forget()
                try:
                    answer, payload = handlers[head["op"]](head, body)
                except OSError as error:
                    answer, payload = {"errno": error.errno or errno.EIO, "error": str(error)}, b""
                wire.write_all(fd, wire.pack(answer, payload))
                if answer.get("lost"):
                    self.leave()
            except OSError:
                self.leave()
