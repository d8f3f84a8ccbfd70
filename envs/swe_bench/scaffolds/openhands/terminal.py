"""OpenHands' terminal with its shell inside a container.

The session logic (prompt parsing, time-outs, interaction with a running command) is OpenHands' own. What differs is
what stands at the other end of the pseudo-terminal: `docker exec -it ... bash -i` in place of a bash of this machine.

    docker exec client ──pty── ContainerTerminal ── OpenHands' TerminalSession ── ContainerTerminalExecutor

Imports `openhands`: reach this module through `library.load`.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import select
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path

from openhands.tools.terminal.constants import CMD_OUTPUT_PS1_END
from openhands.tools.terminal.definition import TerminalAction, TerminalObservation
from openhands.tools.terminal.impl import TerminalExecutor
from openhands.tools.terminal.metadata import CmdOutputMetadata
from openhands.tools.terminal.terminal.subprocess_terminal import SubprocessTerminal
from openhands.tools.terminal.terminal.terminal_session import TerminalSession

# OpenHands' reset makes a shell of this machine. Should a later version do that elsewhere than in what is overridden
# below, the agent would get that shell: better no scaffold.
if not {"_reset_single_session", "_execute_single_session"} <= vars(TerminalExecutor).keys():
    raise ImportError("this version of openhands-tools resets terminals in a way that is not known here; take 1.34")

START_S = 60.0
SETTLE_S = 2.0
WRITE_CHUNK = 1024
LINE_PIECE = 4096
"""Characters of one line kept as one item: with OpenHands' limit of some 10,000 items, memory has an upper bound."""
OVERDUE_GRACE_S = 1.0


class ShellEnded(Exception):
    """The client of the shell has ended: the shell has, or its container; `code` is the client's exit code."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the shell has ended with exit code {code}")
        self.code = code


class CallOverdue(Exception):
    """The call has used up its time; what it runs goes on."""


class CallStopped(Exception):
    """The call was given up by its caller; what it runs goes on."""


class ContainerTerminal(SubprocessTerminal):
    """A pseudo-terminal whose shell is `command`; `folder`, on this machine, is for its launcher.

    Every wait of OpenHands' session reads the screen, so that is where a call ends early: see `read_screen`.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        launcher = folder / "shell"
        launcher.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        launcher.chmod(0o700)
        super().__init__(str(folder), shell_path=str(launcher))
        self.deadline = math.inf
        self.stopped = threading.Event()
        self.shell_pid = 0

    def initialize(self) -> None:
        """Start the shell and wait until it answers; raises `ShellEnded` or `CallOverdue` if it does not."""
        if self._initialized:
            return
        self.deadline = time.monotonic() + START_S
        super().initialize()
        # The token is written in two halves: only the shell's answer has it whole, not the echo of this line.
        # Bracketed paste would put escape sequences behind every prompt.
        first, second = secrets.token_hex(8), secrets.token_hex(8)
        line = f"bind 'set enable-bracketed-paste off' 2>/dev/null; printf '%s%s %s\\n' {first} {second} $$\n"
        self._write_pty(line.encode())
        answer = re.compile(rf"{first}{second} (\d+)")
        while True:
            screen = self.read_screen()
            match = answer.search(screen)
            if match and screen.rstrip().endswith(CMD_OUTPUT_PS1_END.rstrip()):
                break
            time.sleep(0.05)
        self.shell_pid = int(match[1])
        self.deadline = math.inf
        self.clear_screen()

    def read_screen(self) -> str:
        """OpenHands' screen; raises `CallStopped`, `ShellEnded` or `CallOverdue` in place of waiting on."""
        if self.stopped.is_set():
            raise CallStopped
        if self.process is None or self.process.poll() is not None:
            raise ShellEnded(self.process.returncode if self.process else None)
        if time.monotonic() >= self.deadline:
            raise CallOverdue
        time.sleep(0.01)  # for what is under way, as OpenHands does
        return self.screen()

    def screen(self) -> str:
        """What is on the screen, whatever has become of the shell."""
        with self.output_lock:
            return "".join(self.output_buffer)

    def clear_screen(self) -> None:
        """Keep the last prompt only, once it is there as a whole.

        The end of a prompt that came after the next command was sent would be taken for that command's end.
        """
        deadline = time.monotonic() + SETTLE_S
        while not self.screen().endswith(f"{CMD_OUTPUT_PS1_END}\n") and time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                return
            time.sleep(0.01)
        super().clear_screen()

    def _write_pty(self, data: bytes) -> None:
        """Write all of `data`: the terminal may take less than what is offered, and nothing while it is full."""
        if self._pty_master_fd is None:
            raise ShellEnded(None)
        rest = memoryview(data)
        while rest:
            if self.stopped.is_set():
                raise CallStopped
            if self.process is None or self.process.poll() is not None:
                raise ShellEnded(self.process.returncode if self.process else None)
            if time.monotonic() >= self.deadline:
                raise CallOverdue
            _, writable, _ = select.select([], [self._pty_master_fd], [], 0.1)
            if not writable:
                continue
            try:
                rest = rest[os.write(self._pty_master_fd, rest[:WRITE_CHUNK]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ShellEnded(None) from error

    def _add_text_to_buffer(self, text: str) -> None:
        """One line an item, as OpenHands has it, but a line without an end may not grow without bound.

        Carriage returns are left out at once. OpenHands leaves them out when it reads the screen, but not when it looks
        for the last prompt to keep: it does not find that, and asks for another one, which may come too late (see
        `clear_screen`).
        """
        *whole, rest = text.replace("\r", "").split("\n")
        for line in [f"{line}\n" for line in whole] + ([rest] if rest else []):
            last = self.output_buffer[-1] if self.output_buffer else "\n"
            if last.endswith("\n") or len(last) >= LINE_PIECE:
                self.output_buffer.append(line)
            else:
                self.output_buffer[-1] = last + line


class ContainerTerminalExecutor(TerminalExecutor):
    """OpenHands' executor over one `ContainerTerminal`. Blocks: call it on a thread, one call at a time.

    `start` makes a terminal (not yet initialised); `end` kills, in the container, the shell of the given process id
    and what it runs in the foreground. `no_change_timeout_s`: None is OpenHands' 30 s.
    """

    def __init__(
        self,
        start: Callable[[], ContainerTerminal],
        end: Callable[[int], None],
        workdir: str,
        no_change_timeout_s: int | None = None,
    ) -> None:
        # Not super().__init__: it would start a shell of this machine.
        self.shell_path = None
        self.full_output_save_dir = None
        self._pool = None
        self._sessions: dict[int, TerminalSession] = {}
        self._sessions_lock = threading.Lock()
        self._working_dir = workdir
        self._session: TerminalSession | None = None
        self._start, self._end = start, end
        self._no_change_timeout_s = no_change_timeout_s
        self._deadline = math.inf
        self._stopped = False

    def open(self) -> None:
        """Start the shell; raises `ShellEnded` or `CallOverdue`."""
        terminal = self._start()
        session = TerminalSession(terminal, self._no_change_timeout_s)
        session._cwd = self._working_dir  # the container's, not the client's on this machine
        try:
            session.initialize()
        except BaseException:
            session.close()
            raise
        terminal.deadline = self._deadline
        self._session = session
        if self._stopped:
            terminal.stopped.set()

    def run(self, action: TerminalAction, limit_s: float) -> TerminalObservation:
        """Carry out `action`. Past `limit_s` the observation is that of OpenHands' hard time-out: the command goes on,
        and the next call may interact with it.

        Raises `ShellEnded`, `CallStopped`, and ValueError for what OpenHands takes for a mistake of the model.
        """
        if action.timeout is not None and action.timeout > limit_s:
            action = action.model_copy(update={"timeout": limit_s})
        self._stopped = False
        self._deadline = time.monotonic() + limit_s + (OVERDUE_GRACE_S if action.timeout is not None else 0.0)
        self._terminal.stopped.clear()
        self._terminal.deadline = self._deadline
        try:
            return self(action)
        except CallOverdue:
            return self._timed_out(action, limit_s)
        except CallStopped:
            self._timed_out(action, limit_s)
            raise

    @property
    def _terminal(self) -> ContainerTerminal:
        if self._session is None:
            raise ShellEnded(None)
        terminal: ContainerTerminal = self._session.terminal
        return terminal

    def _timed_out(self, action: TerminalAction, limit_s: float) -> TerminalObservation:
        screen = self._terminal.screen()
        assert self._session is not None
        observation: TerminalObservation = self._session._handle_hard_timeout_command(
            action.command.strip(),
            terminal_content=screen,
            ps1_matches=CmdOutputMetadata.matches_ps1_metadata(screen),
            timeout=limit_s,
        )
        return observation

    def last_words(self, command: str) -> str:
        """What a shell that has ended had said since its last prompt, without the echo of `command`."""
        if self._session is None:
            return ""
        said: str = self._terminal.screen().rpartition(CMD_OUTPUT_PS1_END)[2]
        return said.lstrip().removeprefix(command.strip()).strip()

    def stop(self) -> None:
        """Make a call that runs on another thread raise `CallStopped` soon."""
        self._stopped = True
        if self._session is not None:
            self._terminal.stopped.set()

    def restart(self) -> None:
        """End the shell, if it has not ended, and start another one."""
        self.close()
        self.open()

    def _reset_single_session(self) -> TerminalObservation:
        self.restart()
        return TerminalObservation.from_text(text=self._RESET_TEXT, command="[RESET]", exit_code=0)

    def close(self) -> None:
        """End the shell, its foreground command, and its client. Any state, any number of times."""
        session, self._session = self._session, None
        if session is not None:
            self._end(session.terminal.shell_pid)
            session.close()


END_SHELL = r"""
read -r line 2>/dev/null </proc/$1/stat || exit 0
set -- "$1" ${line##*) }
# state ppid pgrp session tty tpgid: the last is what runs in the foreground
if [ "$7" -gt 1 ]; then kill -9 -- "-$7"; fi
kill -9 "$1"
"""
"""Shell script: $1 is the process id of a shell with a terminal; kills it and its foreground process group."""
