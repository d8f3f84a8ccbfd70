"""OpenHands' tools and prompt as an agent sees them, and what its messages look like.

What OpenHands' agent loop does around a tool call (repairing the call, checking it, wording the errors, turning the
observation into the text of a tool message) is done here with OpenHands' own functions, and without the loop.

Imports `openhands`: reach this module through `library.load`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from openhands.sdk import LLM, Agent, Message, Tool
from openhands.sdk.agent.utils import fix_malformed_tool_arguments, normalize_tool_call, parse_tool_call_arguments
from openhands.sdk.tool import Action, Observation, ToolDefinition
from openhands.sdk.tool.builtins import FinishTool, ThinkTool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool

from envs.swe_bench.scaffolds.openhands.editor import ContainerEditor
from envs.swe_bench.scaffolds.openhands.terminal import (
    END_SHELL,
    CallOverdue,
    ContainerTerminal,
    ContainerTerminalExecutor,
    ShellEnded,
)

__all__ = [
    "END_SHELL",
    "CallOverdue",
    "ContainerEditor",
    "ContainerTerminal",
    "ContainerTerminalExecutor",
    "ShellEnded",
    "ToolCall",
    "Toolbox",
    "observation_text",
    "system_prompt",
]

MODEL = "openai/policy"
"""The name OpenHands is told for the policy: of no family that it has special words for."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that OpenHands would carry out."""

    name: str
    action: Action


class Toolbox:
    """The tools of one episode, in OpenHands' order: terminal, file editor, task tracker, finish, think.

    `terminal` makes the terminal's executor. `editor` is the executor that OpenHands made for the file editor.
    """

    def __init__(self, workdir: str, terminal: Callable[[], ContainerTerminalExecutor]) -> None:
        # The tools ask a conversation's state for three things; there is no conversation.
        state = SimpleNamespace(
            workspace=SimpleNamespace(working_dir=workdir),
            agent=SimpleNamespace(llm=SimpleNamespace(vision_is_active=lambda: False)),
            persistence_dir=None,
        )
        # The terminal's is checked against the folders of this machine, and not used beyond that.
        here = SimpleNamespace(workspace=SimpleNamespace(working_dir="/"))
        self.terminal = terminal()
        tools: list[ToolDefinition] = [
            *TerminalTool.create(here, executor=self.terminal),
            *FileEditorTool.create(state),
            *TaskTrackerTool.create(state),
            *FinishTool.create(state),
            *ThinkTool.create(state),
        ]
        self._tools = {tool.name: tool for tool in tools}
        self.editor = self._tools[FileEditorTool.name].executor
        self.terminal_name = TerminalTool.name
        self.editor_name = FileEditorTool.name
        self.finish_name = FinishTool.name

    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI tool schemas, as OpenHands' agent sends them."""
        return [dict(tool.to_openai_tool(add_security_risk_prediction=True)) for tool in self._tools.values()]

    def read(self, name: str, arguments: dict[str, Any]) -> ToolCall | str:
        """Turn a model's call into an action; a text for the model if OpenHands refuses it."""
        given: dict[str, Any] | None = None
        try:
            given = parse_tool_call_arguments(json.dumps(arguments))
            known, given = normalize_tool_call(name, given, self._tools.keys())
            tool = self._tools.get(known)
            if tool is None:
                return f"Tool '{known}' not found. Available: {list(self._tools)}"
            given = fix_malformed_tool_arguments(given, tool.action_type)
            # Asked for in the schemas, for a reader and for a security analyzer; the tools do not take them.
            given.pop("security_risk", None)
            given.pop("summary", None)
            return ToolCall(known, tool.action_from_arguments(given))
        except ValueError as error:  # pydantic's and json's among them
            parameters = f"Parameters provided: {list(given)}" if given is not None else "Arguments: unparseable JSON"
            return f"Error validating tool '{name}': {error}. {parameters}"

    def run(self, call: ToolCall) -> Observation:
        """Carry out a call of a tool that needs no container."""
        return self._tools[call.name](call.action)


def observation_text(name: str, observation: Observation) -> str:
    """Return the text of the tool message that OpenHands makes of an observation; pictures are left out."""
    message = Message(role="tool", name=name, tool_call_id="call", content=list(observation.to_llm_content))
    content = message.to_chat_dict(
        cache_enabled=False,
        vision_enabled=False,
        function_calling_enabled=True,
        force_string_serializer=False,
        send_reasoning_content=False,
    )["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def system_prompt(model: str = MODEL) -> str:
    """Return OpenHands' system prompt for an agent with these tools, on no terminal and without a browser."""
    agent = Agent(
        llm=LLM(model=model, api_key="none"),
        tools=[Tool(name=tool.name) for tool in (TerminalTool, FileEditorTool, TaskTrackerTool)],
        # The agent's character is OpenHands' default, whatever this machine's user has in ~/.openhands.
        system_prompt_kwargs={"cli_mode": True, "soul_content": ""},
    )
    prompt: str = agent.static_system_message
    return prompt
