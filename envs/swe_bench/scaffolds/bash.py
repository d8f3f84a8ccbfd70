"""A scaffold without dependencies: a shell whose state lasts from call to call, and `submit`.

Every call is a bash of its own in the container. It takes up what the one before it left in a file there: working
folder, variables (exported or not) and functions. Shell options, aliases and traps do not last, and neither does a
process: whatever a call started has ended when its observation is read.
"""

from __future__ import annotations

import copy
import secrets
import shlex
from collections.abc import Mapping
from typing import Any

from envs.swe_bench.scaffolds.scaffold import OFFLINE, ToolOutcome
from sandboxes.base import ContainerSandbox, Limits, RunResult, SandboxFault

SYSTEM_PROMPT = (
    "You are a software engineer in a code repository. Look at the code and its tests, reproduce the problem, fix its "
    "cause in as few changes as it takes, run the tests, then call submit. Make one tool call in each message."
)
USER_PROMPT = "The repository is in {workdir}. Fix this issue:\n\n{problem_statement}"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a bash command. The working folder, variables and functions last from call to call; "
            "processes end with their call. There is no terminal to type into and no network.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "The command; may have several lines."}},
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "submit",
            "description": "Hand in the repository as it is now. Ends the task.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
]

OUTPUT_BYTES = 16 * 2**10
ENVIRONMENT = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", **OFFLINE}
_OPEN_LIMIT_S = 60.0

# The command comes on standard input: as an argument it could be too long, in a file it would be there to be seen.
# The state is saved by a trap too, since commands may call exit; `command -p` and `builtin`, since they may change PATH
# and define functions; the run's mark is left out, because the next run has one of its own.
# All in one line, so that bash counts the lines of the command from 1 in what it says of them.
_SHELL = r"""
exec 2>&1;
__sao_command=$(command -p cat; printf x);
exec </dev/null;
cd -- WORKDIR 2>/dev/null;
if [ -r STATE ]; then unset $(compgen -e -X MARK); . STATE 2>/dev/null; fi;
__sao_save='{ builtin set +xvu; } 2>/dev/null;
  ( builtin unset MARK __sao_command __sao_save __sao_code; builtin declare -p; builtin declare -f;
    builtin printf "builtin cd -- %q || builtin cd -- %q\nOLDPWD=%q\n" "$PWD" WORKDIR "$OLDPWD"
  ) 2>/dev/null >| STATE.new && command -p mv -f STATE.new STATE';
trap "$__sao_save" EXIT;
eval "${__sao_command%x}";
{ __sao_code=$?; builtin set +xvu; } 2>/dev/null;
eval "$__sao_save";
exit $__sao_code
""".strip().replace("\n", " ")


class BashScaffold:
    """Two tools, `bash` and `submit`; see `envs.swe_bench.scaffolds.scaffold.Scaffold` for the life of a scaffold.

    `output_bytes` bounds an observation: the first and the last half of longer output are shown, and how much was cut.
    """

    def __init__(self, *, output_bytes: int = OUTPUT_BYTES) -> None:
        self._output_bytes = output_bytes
        self._sandbox: ContainerSandbox | None = None
        self._script = ""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI tool schemas of `bash` and `submit`."""
        return copy.deepcopy(TOOLS)

    def opening(self, problem_statement: str, workdir: str) -> list[dict[str, Any]]:
        """The chat messages that open an episode: system and user."""
        # str.replace, not format: an issue's own braces are code.
        user = USER_PROMPT.replace("{workdir}", workdir).replace("{problem_statement}", problem_statement.strip())
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": user}]

    async def open(self, sandbox: ContainerSandbox, workdir: str, *, activate: str = "") -> None:
        """Begin in `workdir` of a container that runs. Raises `SandboxFault`, also where it has no bash."""
        limits = Limits(wall_clock_s=_OPEN_LIMIT_S)
        entered = await sandbox.run(["bash", "--norc", "-c", 'cd -- "$0"', workdir], limits=limits)
        if entered.exit_code == 127:
            raise SandboxFault(f"the image {sandbox.image} has no bash: give one that has, or use another scaffold")
        if entered.exit_code != 0:
            raise SandboxFault(f"there is no folder {workdir} in the image {sandbox.image}: {entered.stderr.strip()}")
        state = f"/tmp/.shell-{secrets.token_hex(8)}"
        mark = sandbox.run_variable or "__sao_mark"
        script = _SHELL.replace("WORKDIR", shlex.quote(workdir)).replace("STATE", state).replace("MARK", mark)
        self._sandbox, self._script = sandbox, script
        if activate:
            # The first call of the shell, whose state the agent's first one takes up.
            await self._run(f"{{\n{activate}\n}} >/dev/null 2>&1", _OPEN_LIMIT_S)

    async def call(self, name: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolOutcome:
        """Carry out one tool call; past `timeout_s` seconds all it started is killed and the outcome says so."""
        if self._sandbox is None:
            raise RuntimeError("open the scaffold before calling its tools")
        if mistake := _mistake(name, arguments):
            return ToolOutcome(mistake)
        if name == "submit":
            return ToolOutcome("Submitted.", finished=True)
        return ToolOutcome(_observation(await self._run(arguments["command"], timeout_s), timeout_s))

    async def _run(self, command: str, timeout_s: float) -> RunResult:
        assert self._sandbox is not None
        return await self._sandbox.run(
            ["bash", "--noprofile", "--norc", "-c", self._script],
            stdin=command.encode("utf-8", "replace") + b"\n",
            limits=Limits(wall_clock_s=timeout_s, output_bytes=self._output_bytes),
            env=ENVIRONMENT,
            cwd="/",  # the shell itself goes where it was: an agent may have removed every other folder
        )

    async def close(self) -> None:
        """Let go of the container; what the shell kept there goes with it. Any state, any number of times."""
        self._sandbox = None


def _mistake(name: str, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with a call, in words for the model; None if nothing is."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in TOOLS}
    if name not in schemas:
        return f"There is no tool {name[:40]!r}. The tools are bash (argument: command) and submit (no argument)."
    unknown = [key for key in arguments if key not in schemas[name]]
    if unknown:
        takes = "no argument" if name == "submit" else "one argument, command"
        return f"{name} takes {takes}; it has no {unknown[0][:40]!r}. Nothing was done."
    if name == "submit":
        return None
    command = arguments.get("command")
    if not isinstance(command, str):
        return 'bash needs the argument command, a string, for example {"command": "ls"}. Nothing was run.'
    if not command.strip():
        return "The command is empty. Nothing was run."
    if "\0" in command:
        return "The command holds a NUL byte; write it as \\0 inside printf. Nothing was run."
    return None


def _observation(result: RunResult, timeout_s: float) -> str:
    """The output, and in the last line how the command ended."""
    if result.timed_out:
        end = (
            f"[stopped after {timeout_s:g} s: the command and all it started were killed; "
            "folder, variables and functions are as before it]"
        )
    else:
        end = f"[exit {result.exit_code}]"
    parts = (result.stdout.rstrip("\n"), result.stderr.rstrip("\n"), end)
    return "\n".join(part for part in parts if part)
