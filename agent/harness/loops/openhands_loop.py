"""OpenHands' own agent loop on the tools of a session's environment, as a program of its own.

runtime:
  harness:
    command: ["{python}", -m, agent.harness.loops.openhands_loop]      # further words: see --help

Its agent, its prompts, its events, its way to tell the model of errors; only what a tool does is the environment's: the
terminal and the editor work in the environment's container. `finish` and `think` are OpenHands' own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.harness.loops.environment_tools import CALL_S
from agent.harness.task import TASK_FILE, HarnessTask

_OWN = ("finish", "submit", "think")
"""Tools of an environment for which OpenHands has its own: the end of its loop is the end of the episode."""
_META = ("summary", "security_risk")
"""What OpenHands adds to the arguments of every tool, for its readers."""


def solve(task: HarnessTask, *, prompt: str = "openhands", iterations: int = 500) -> None:
    """Run OpenHands on `task`. Raises what its loop raises; `ImportError` where it is not installed."""
    _quiet()
    try:
        from openhands.sdk import LLM, Agent, Conversation
        from openhands.sdk.tool import Tool, register_tool
        from openhands.sdk.tool.client_tool import ClientTool, ClientToolObservation, ClientToolSpec
        from openhands.sdk.tool.tool import ToolExecutor
        from pydantic import SecretStr
    except ModuleNotFoundError as error:
        raise ImportError(
            "agent.harness.loops.openhands_loop needs OpenHands' libraries and Python 3.12 or newer: `make openhands`, "
            "or pip install 'sao-agents[openhands]' there, and `runtime.python` says where that is"
        ) from error

    class InTheEnvironment(ToolExecutor):
        """Carries a call out where the environment lives."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __call__(self, action: Any, conversation: Any = None) -> Any:
            given = action.model_dump(exclude={"kind", *_META}, exclude_none=True)
            text, ended = _call(task, self._name, given)
            if ended and conversation is not None:
                conversation.pause()  # there is nothing left to work in
            return ClientToolObservation.from_text(text=text)

    tools = []
    for schema in (tool["function"] for tool in task.tools):
        if schema["name"] in _OWN:
            continue
        parameters = {**schema["parameters"], "type": "object"}
        properties = {k: v for k, v in parameters.get("properties", {}).items() if k not in _META}
        required = [name for name in parameters.get("required", []) if name not in _META]
        spec = ClientToolSpec(
            name=schema["name"],
            description=schema.get("description", ""),
            parameters={**parameters, "properties": properties, "required": required},
        )
        tool = ClientTool.from_spec(spec).set_executor(InTheEnvironment(schema["name"]))
        register_tool(schema["name"], tool)
        tools.append(Tool(name=schema["name"]))

    system = "\n\n".join(m["content"] for m in task.messages if m["role"] == "system")
    llm = LLM(
        model=f"openai/{task.model}",
        base_url=task.openai_base_url,
        api_key=SecretStr(task.api_key),
        num_retries=0,  # the runtime makes requests again where that helps
        timeout=None,
        usage_id="policy",
    )
    agent = Agent(
        llm=llm,
        tools=tools,
        include_default_tools=["FinishTool", "ThinkTool"],
        # The agent's character is OpenHands' default, whatever this machine's user has in ~/.openhands.
        **(
            {"system_prompt": system}
            if prompt == "environment" and system
            else {"system_prompt_kwargs": {"cli_mode": True, "soul_content": ""}}
        ),
    )
    with tempfile.TemporaryDirectory(prefix="openhands-") as folder:
        conversation = Conversation(agent, workspace=folder, visualizer=None, max_iteration_per_run=iterations)
        try:
            conversation.send_message(task.prompt)
            conversation.run()
        finally:
            conversation.close()


def _quiet() -> None:
    # On import the SDK would otherwise print a banner and fetch a price list from the network.
    for name, value in {
        "LOG_AUTO_CONFIG": "false",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }.items():
        os.environ.setdefault(name, value)


def _call(task: HarnessTask, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """What the environment's tool answers, and whether its episode has ended; see `environment_tools.call_tool`."""
    body = json.dumps({"name": name, "arguments": arguments}).encode()
    request = urllib.request.Request(f"{task.session_url}/call", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=CALL_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code not in (400, 404):
            raise
        return str(json.load(error)["error"]["message"]), False
    return str(answer["content"]), bool(answer["ended"])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line, as a harness is started."""
    parser = argparse.ArgumentParser(
        prog="python -m agent.harness.loops.openhands_loop",
        description="OpenHands' own agent loop as a harness: it finds its task in $SAO_TASK_FILE.",
        epilog='example, in a recipe:\n  runtime: {harness: {command: ["{python}", -m, '
        "agent.harness.loops.openhands_loop, --prompt, environment]}}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--prompt",
        choices=("openhands", "environment"),
        default="openhands",
        help="whose system prompt: OpenHands' own (default), or the environment's, which is shorter",
    )
    parser.add_argument("--iterations", type=int, default=500, metavar="N", help="most steps of the agent")
    given = parser.parse_args(argv)
    if TASK_FILE not in os.environ:
        parser.error(f"${TASK_FILE} is not set: this program is started by `python -m agent.harness`")
    task = msgspec.json.decode(Path(os.environ[TASK_FILE]).read_bytes(), type=HarnessTask)
    solve(task, prompt=given.prompt, iterations=given.iterations)
    return 0


if __name__ == "__main__":
    sys.exit(main())
