"""OpenHands' tools as a scaffold: its definitions, executors and system prompt, without its agent loop.

The terminal is OpenHands' over a `docker exec` into the container, the file editor is OpenHands' over files that are
fetched and put back; task tracker, think and finish need no container. `docs/openhands.md` says what differs from
OpenHands on a machine of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from envs.swe_bench.scaffolds.openhands import library as openhands_library
from envs.swe_bench.scaffolds.scaffold import OFFLINE, ToolOutcome
from sandboxes.base import ContainerSandbox, Limits, SandboxFault
from sandboxes.cancellation import to_the_end

T = TypeVar("T")

USER_PROMPT = (
    "The repository is in {workdir}. Fix the following issue in it; change what the fix needs and nothing else. "
    "Reproduce the problem first, and run the tests when you are done. Nobody answers questions. "
    "When the repository is as it should be, call finish.\n\n<issue>\n{problem_statement}\n</issue>"
)
SHELL_ENVIRONMENT: dict[str, str | None] = {
    "TERM": "xterm-256color",
    "GIT_PAGER": "cat",
    "PAGER": "cat",
    "PS1": None,  # as OpenHands sets it for the process that it starts on the terminal
    "PS2": "",
    **OFFLINE,
}
_CONTROL_S = 60.0


class OpenHandsScaffold:
    """OpenHands' five tools; see `envs.swe_bench.scaffolds.scaffold.Scaffold` for the life of a scaffold.

    `no_change_timeout_s`: seconds without output after which a terminal call without a time-out of its own returns;
    None is OpenHands' 30. `system_prompt`: None is OpenHands' own. The first use of OpenHands in a process takes
    13-30 s of CPU, on a thread in `open`. Needs a sandbox that has terminals.
    """

    def __init__(self, *, no_change_timeout_s: int | None = None, system_prompt: str | None = None) -> None:
        self._no_change_timeout_s = no_change_timeout_s
        self._system_prompt = system_prompt
        self._library: Any = None  # envs.swe_bench.scaffolds.openhands.tools
        self._sandbox: ContainerSandbox | None = None
        self._toolbox: Any = None
        self._editor: Any = None
        self._folder: Path | None = None
        # A thread of its own: a command may block it for minutes, and a loop's shared threads are few.
        self._thread: ThreadPoolExecutor | None = None
        self._lock = asyncio.Lock()

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI tool schemas; they name the working folder, so `open` comes first."""
        schemas: list[dict[str, Any]] = self._open_toolbox().schemas()
        return schemas

    def opening(self, problem_statement: str, workdir: str) -> list[dict[str, Any]]:
        """The chat messages that open an episode: system and user."""
        if self._system_prompt is None:
            self._system_prompt = openhands_library.load().system_prompt()
        # str.replace, not format: an issue's own braces are code.
        user = USER_PROMPT.replace("{workdir}", workdir).replace("{problem_statement}", problem_statement.strip())
        return [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": user}]

    async def open(self, sandbox: ContainerSandbox, workdir: str, *, activate: str = "") -> None:
        """Start the shell in `workdir`. Raises `SandboxFault`, also for want of bash there, and `OpenHandsMissing`."""
        if self._sandbox is not None:
            raise RuntimeError("this scaffold has been opened before; make one for each episode")
        user = await _user(sandbox, workdir)
        # The interactive shell reads its `.bashrc` after this, as it does without.
        shell = ["bash", "-c", f"{{\n{activate}\n}} >/dev/null 2>&1\nexec bash"] if activate else ["bash"]
        command = sandbox.terminal_command(shell, env=SHELL_ENVIRONMENT, cwd=workdir, user=user)
        self._library = library = await asyncio.to_thread(openhands_library.load)
        loop = asyncio.get_running_loop()
        self._folder = folder = Path(tempfile.mkdtemp(prefix="openhands-"))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openhands")
        self._sandbox = sandbox

        def start() -> Any:
            return library.ContainerTerminal(command, folder)

        def end(shell_pid: int) -> None:
            ending = self._end_shell(sandbox, shell_pid)
            asyncio.run_coroutine_threadsafe(ending, loop).result()

        def terminal() -> Any:
            return library.ContainerTerminalExecutor(start, end, workdir, self._no_change_timeout_s)

        try:
            self._toolbox = await self._in_thread(lambda: library.Toolbox(workdir, terminal))
            self._editor = library.ContainerEditor(sandbox, workdir, folder, self._toolbox.editor, self._in_thread)
            await self._start_shell(self._toolbox.terminal.open)
            if self._system_prompt is None:
                self._system_prompt = await self._in_thread(library.system_prompt)
        except BaseException:
            await self.close()
            raise

    async def call(self, name: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolOutcome:
        """Carry out one tool call.

        A terminal command that takes longer than `timeout_s` seconds is told as OpenHands tells its own time-outs: it
        goes on, and the next calls may wait for it, type into it or interrupt it. An editor call has at least a minute.
        Calls wait for each other.
        """
        toolbox = self._open_toolbox()
        async with self._lock:
            call = toolbox.read(name, arguments)
            if isinstance(call, str):
                return ToolOutcome(call)
            try:
                if call.name == toolbox.terminal_name:
                    observation = await self._terminal(call.action, timeout_s)
                    if isinstance(observation, str):
                        return ToolOutcome(observation)
                elif call.name == toolbox.editor_name:
                    async with asyncio.timeout(max(timeout_s, _CONTROL_S)):
                        observation = await self._editor.run(call.action)
                else:
                    observation = toolbox.run(call)
            except TimeoutError:
                return ToolOutcome(f"The tool '{call.name}' did not end in time; look at what it has done.")
            except ValueError as error:  # what OpenHands' executors raise for a mistake of the model
                return ToolOutcome(f"Error executing tool '{call.name}': {error}")
            text = self._library.observation_text(call.name, observation)
            return ToolOutcome(text, finished=call.name == toolbox.finish_name)

    async def close(self) -> None:
        """End the shell and all it left in the container, its client, and what was staged here. Any state, any number
        of times; a container that has gone already is no error."""
        await to_the_end(self._close())

    async def _close(self) -> None:
        thread, self._thread = self._thread, None
        folder, self._folder = self._folder, None
        if self._toolbox is not None and thread is not None and self._sandbox is not None:
            self._toolbox.terminal.stop()
            with contextlib.suppress(SandboxFault):
                # Without `background`: what the shell left behind in the background ends as well.
                await self._sandbox.run(["true"], limits=Limits(wall_clock_s=_CONTROL_S))
            with contextlib.suppress(SandboxFault):
                await asyncio.get_running_loop().run_in_executor(thread, self._toolbox.terminal.close)
        if self._editor is not None and thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._editor.close)
        if thread is not None:
            thread.shutdown(wait=False)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _open_toolbox(self) -> Any:
        if self._toolbox is None or self._thread is None:
            raise RuntimeError("open the scaffold before using its tools")
        return self._toolbox

    async def _terminal(self, action: Any, timeout_s: float) -> Any:
        """A terminal observation, or a text where the shell ended under the command."""
        terminal = self._toolbox.terminal
        try:
            return await self._in_thread(lambda: terminal.run(action, timeout_s))
        except self._library.ShellEnded as ended:
            assert self._sandbox is not None
            # The container's end is a fault; a shell that was told to end is the model's doing.
            await self._sandbox.run(["true"], limits=Limits(wall_clock_s=_CONTROL_S), background=True)
            said = terminal.last_words(action.command)
            await self._start_shell(terminal.restart)
            note = (
                f"[The shell has ended with exit code {ended.code}. A new one has been started: variables, functions "
                "and the working folder are as at the beginning.]"
            )
            return f"{said}\n{note}" if said else note

    async def _start_shell(self, start: Callable[[], None]) -> None:
        try:
            await self._in_thread(start)
        except (self._library.ShellEnded, self._library.CallOverdue) as error:
            assert self._sandbox is not None
            await self._sandbox.run(["true"], limits=Limits(wall_clock_s=_CONTROL_S), background=True)
            raise SandboxFault(f"no shell could be started in a container of {self._sandbox.image}: {error}") from error

    async def _end_shell(self, sandbox: ContainerSandbox, shell_pid: int) -> None:
        with contextlib.suppress(SandboxFault):  # it has ended with its container
            await sandbox.run(
                ["sh", "-c", self._library.END_SHELL, "sh", str(shell_pid)],
                limits=Limits(wall_clock_s=_CONTROL_S),
                cwd="/",
                background=True,
            )

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Run `function` on the scaffold's thread; if this task is cancelled, stop it and wait for its end."""
        if self._thread is None:
            raise RuntimeError("this scaffold is closed")
        future = asyncio.get_running_loop().run_in_executor(self._thread, function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if self._toolbox is not None:
                self._toolbox.terminal.stop()
            await to_the_end(_ended(future))
            raise


async def _ended(future: asyncio.Future[Any]) -> None:
    await asyncio.wait([future], timeout=_CONTROL_S)
    if future.done() and not future.cancelled():
        future.exception()  # the caller is told of its own cancellation


async def _user(sandbox: ContainerSandbox, workdir: str) -> str:
    """The numeric user and group that commands run as; raises `SandboxFault` for an image that cannot hold a shell."""
    answer = await sandbox.run(
        ["sh", "-c", 'command -v bash >/dev/null || exit 9; cd -- "$1" && id -u && id -g', "sh", workdir],
        limits=Limits(wall_clock_s=_CONTROL_S),
        cwd="/",
        background=True,
    )
    ids = answer.stdout.split()
    if answer.exit_code == 9:
        raise SandboxFault(f"the image {sandbox.image} has no bash: give one that has, or use another scaffold")
    if answer.exit_code != 0 or len(ids) != 2:
        raise SandboxFault(f"there is no folder {workdir} in the image {sandbox.image}: {answer.stderr.strip()}")
    return ":".join(ids)
