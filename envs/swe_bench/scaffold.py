"""What an agent is given in a repository: tools, the words that introduce them, and what a call of one does.

An environment opens one scaffold an episode, for the container that holds the repository:

    new ──open(sandbox)──▶ open ──call()*──▶ open ──close()──▶ closed

`close()` may be called in any state, any number of times.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sandboxes.docker import DockerSandbox

log = logging.getLogger(__name__)

ScaffoldName = Literal["auto", "openhands", "bash"]


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What one tool call gave: the observation's text, and whether it was the agent's last word."""

    text: str
    finished: bool = False


class Scaffold(Protocol):
    """The tools of one episode. A model's mistake (unknown tool, wrong arguments) is an outcome with a text that says
    so; a failure of the container is a `SandboxFault`."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI tool schemas."""
        ...

    def opening(self, problem_statement: str, workdir: str) -> list[dict[str, Any]]:
        """The chat messages that open an episode: system and user."""
        ...

    async def open(self, sandbox: DockerSandbox, workdir: str) -> None:
        """Make the tools work in `workdir` of a container that has been started."""
        ...

    async def call(self, name: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolOutcome:
        """Carry out one tool call; past `timeout_s` (seconds) it is stopped and the outcome says so."""
        ...

    async def close(self) -> None: ...


def make_scaffold(name: ScaffoldName) -> Scaffold:
    """The scaffold of that name; "auto" is OpenHands' where it can be imported (Python 3.12), else `bash`."""
    if name == "auto":
        name = "openhands" if have_openhands() else "bash"
        if name == "bash":
            _say_once()
    if name == "openhands":
        from envs.swe_bench.openhands import OpenHandsScaffold

        return OpenHandsScaffold()
    from envs.swe_bench.bash import BashScaffold

    return BashScaffold()


def have_openhands() -> bool:
    """Whether OpenHands' libraries are installed here; does not import them."""
    # Not `openhands` alone: any folder of that name on the path is a package without files.
    try:
        return importlib.util.find_spec("openhands.tools") is not None
    except ModuleNotFoundError:
        return False


_said = False


def _say_once() -> None:
    global _said
    if not _said:
        _said = True
        log.warning("OpenHands cannot be imported here (it needs Python 3.12): the agent gets `bash` and `submit` only")
