"""What an agent is given in a repository: tools, the words that introduce them, and what a call of one does.

An environment opens one scaffold an episode, for the container that holds the repository:

    new ──open(sandbox)──▶ open ──call()*──▶ open ──close()──▶ closed

`close()` may be called in any state, any number of times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sandboxes.base import ContainerSandbox

OFFLINE: Mapping[str, str] = {"PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
"""Variables for shells in containers without network, where a second attempt is only time."""


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

    async def open(self, sandbox: ContainerSandbox, workdir: str, *, activate: str = "") -> None:
        """Make the tools work in `workdir` of a container that has been started.

        `activate`: shell lines that bring in the repository's environment, as grading does it.
        """
        ...

    async def call(self, name: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolOutcome:
        """Carry out one tool call; past `timeout_s` (seconds) it is stopped and the outcome says so."""
        ...

    async def close(self) -> None: ...
