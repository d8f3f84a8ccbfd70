"""The zygote: a Python process with its modules loaded that forks one supervisor for every sandbox asked for.

Control messages come on descriptor 0 as JSON datagrams (`SOCK_SEQPACKET`): `fork` carries the socket that the new
supervisor shall serve. At the end of that stream, or of the caller's process (`options["caller"]` is its pidfd), the
zygote kills everything below it, removes its folder and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from . import interpreter, namespaces, walls, wire
from .memory import MemoryRoom
from .parent_death import signal_at_parents_end
from .processes import DEFAULT, set_handler
from .supervisor import Supervisor

PRELOADED = ("collections", "fractions", "functools", "itertools", "json", "math", "random", "re", "string")
MESSAGE_MAX = 1 << 16


class Zygote:
    """See the module. `options`: isolate (namespaces or not), uid_base (None: keep the user), ..."""

    def __init__(self, control: socket.socket, options: dict[str, Any]) -> None:
        self.control = control
        self.isolate: bool = options["isolate"]
        self.uid_base: int | None = options["uid_base"]
        self.keep_reading: bool = options["keep_reading"]
        self.pids: dict[int, int] = {}  # sandbox id -> process id of its supervisor
        self.proc: str | None = options["proc"]
        self.caller: int = options["caller"]
        self.calls = walls.CallFilter(bytes.fromhex(options["filter"]))
        self.null = os.open(os.devnull, os.O_RDWR)
        self.folder = "" if self.isolate else _temporary().mkdtemp(prefix="sandbox-", dir=options["folder"])
        if self.folder:
            os.chmod(self.folder, 0o711)
            self._gather(options["packages"])
        self.wake_read, self.wake_write = os.pipe()

    def _gather(self, packages: list[str]) -> None:
        """Make a folder of links to the packages that may be imported: the folders they lie in hold others too."""
        folder = os.path.join(self.folder, "packages")
        os.mkdir(folder)
        os.chmod(folder, 0o755)
        for path in packages:
            link = os.path.join(folder, os.path.basename(path))
            if not os.path.lexists(link):  # the first in the caller's order counts
                os.symlink(path, link)
        sys.path.append(folder)

    # -- one sandbox ----------------------------------------------------------------------------------------

    def fork(self, message: dict[str, Any], fd: int, *room: int) -> None:
        """Fork the supervisor of sandbox `message["id"]`; it says "ready", or why not, on `fd` itself.

        `room`: the two files of a `MemoryRoom`, if the caller has made one.
        """
        number = message["id"]
        uid = None if self.uid_base is None else self.uid_base + number % 60000
        zygote = os.getpid()
        try:
            pid = namespaces.clone(self.proc, uid) if self.isolate else os.fork()
            if pid == 0:
                self._child(message, fd, room, uid)
            self.pids[number] = pid
        except OSError as error:
            report(fd, error)
        finally:
            if os.getpid() != zygote or pid == 0:
                os._exit(1)
            for each in (fd, *room):
                os.close(each)

    def _child(self, message: dict[str, Any], fd: int, room: tuple[int, ...], uid: int | None) -> NoReturn:
        signal.set_wakeup_fd(-1)
        set_handler(signal.SIGCHLD, DEFAULT)
        set_handler(signal.SIGTERM, DEFAULT)
        number, limits = message["id"], message["limits"]
        if self.isolate:
            namespaces.furnish(limits, self.proc)
            processes = limits["processes"] + 1
            os.chdir("/tmp")
        else:
            processes = self._settle(number, uid, limits)
        namespaces.prctl(namespaces.PR_SET_DUMPABLE, 0, "dumpable")
        os.setsid()
        walls.own_keyring()
        high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 64) for each in (fd, *room)]
        for target, each in enumerate(high, 3):
            os.dup2(each, target, inheritable=False)
        for target in (0, 1, 2):
            os.dup2(self.null, target)
        os.closerange(3 + len(high), 4096)
        supervisor = Supervisor(
            socket.socket(fileno=3),
            limits,
            init=self.isolate,
            processes=processes,
            room=MemoryRoom(*range(4, 4 + len(room))),
            calls=self.calls,
        )
        if message["python"]:
            supervisor.start_interpreter()
        supervisor.serve()

    def _settle(self, number: int, uid: int | None, limits: dict[str, Any]) -> int:
        """Without namespaces: a folder and, where we are root, a user of its own. Returns the process limit to set."""
        folder = os.path.join(self.folder, str(number))
        os.mkdir(folder, 0o700)
        namespaces.subreaper()
        if uid is None:
            # The limit counts all processes of the user, so it can only bound a disaster; the supervisor counts ours.
            processes = count_tasks(os.getuid()) + 4 * limits["processes"] + 256
        else:
            os.chown(folder, uid, uid)
            if self.keep_reading:
                namespaces.read_everything(uid)
            else:
                namespaces.become(uid)
            processes = limits["processes"] + 1
        namespaces.prctl(namespaces.PR_SET_NO_NEW_PRIVS, 1, "no new privileges")
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        _temporary().tempdir = None
        return processes

    # -- all of them ----------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Collect the supervisors that have ended, and what one that was killed has left behind."""
        ended = set()
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                ended.add(pid)
        for number in [number for number, pid in self.pids.items() if pid in ended]:
            del self.pids[number]
            if self.folder:
                self.kill_strays()
                _remove(os.path.join(self.folder, str(number)))

    def kill_strays(self) -> None:
        """Kill our children that are no supervisors: orphans of one that was killed. Their orphans come next."""
        supervisor = Supervisor(self.control, {}, init=False, processes=0)
        known = set(self.pids.values())
        for _ in range(1000):
            strays = [pid for pid in supervisor.children() if pid not in known]
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def kill(self, number: int) -> None:
        """Kill a supervisor that does not listen any more."""
        if number in self.pids:
            with contextlib.suppress(OSError):
                os.kill(self.pids[number], signal.SIGKILL)

    def serve(self) -> None:
        """Answer control messages until they end."""
        os.set_blocking(self.wake_write, False)
        os.set_blocking(self.wake_read, False)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        poll = select.poll()
        poll.register(self.wake_read, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        poll.register(self.caller, select.POLLIN)
        self.control.send(b"ready " + os.fsencode(self.folder))
        for target in (1, 2):  # until now errors were for the caller to read
            os.dup2(self.null, target)
        while not stop:
            for fd, _ in poll.poll():
                if fd == self.wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_read, 4096)
                elif fd == self.caller:
                    return
                else:
                    data, fds, _, _ = socket.recv_fds(self.control, MESSAGE_MAX, 3, socket.MSG_CMSG_CLOEXEC)
                    if not data:
                        return
                    message = json.loads(data)
                    if message["op"] == "fork":
                        self.fork(message, *fds)
                    else:
                        self.kill(message["id"])
            self.reap()

    def leave(self) -> NoReturn:
        """Kill everything below and end. In a PID namespace the kernel does the killing."""
        if not self.isolate:
            Supervisor(self.control, {}, init=False, processes=0).sweep()
            _remove(self.folder)
        os._exit(0)


# Where sandboxes have no folder, neither of these two is loaded: with their libraries each fork would take longer.


def _temporary() -> Any:
    import tempfile

    return tempfile


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def report(fd: int, error: OSError) -> None:
    """Tell the caller on `fd` why a sandbox could not be made."""
    with contextlib.suppress(OSError):
        wire.write_all(fd, wire.pack({"ready": False, "error": str(error)}))


def count_tasks(uid: int) -> int:
    """Return how many threads the user runs now."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def main(arguments: list[str]) -> NoReturn:
    """Be a zygote until descriptor 0 ends; `arguments` is one JSON text of options."""
    options = json.loads(arguments[0])
    sys.path[:] = [path for path in sys.path if path != options["root"]] + options["site"]
    if options["preload"]:
        for name in PRELOADED:
            importlib.import_module(name)
        interpreter.warm_up()
    os.environ.pop("LD_BIND_NOW", None)
    os.set_inheritable(options["caller"], False)
    if options["isolate"]:
        signal_at_parents_end()  # that is bubblewrap, which waits outside
    else:
        namespaces.subreaper()
        os.setsid()
    if options["uid_base"] is not None:
        os.setgroups([])
    zygote = Zygote(socket.socket(fileno=0), options)
    # What is alive now is shared by all children for good: keep the collector from touching, and so copying, it.
    gc.collect()
    gc.freeze()
    try:
        zygote.serve()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        zygote.leave()
