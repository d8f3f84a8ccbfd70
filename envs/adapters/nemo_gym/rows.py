"""Rows of a NeMo Gym data set: what the policy is shown, in chat form, and the whole row for the server that grades.

A row is what is sent to OpenAI's Responses API (`responses_create_params`: `input`, `instructions`, `tools`), and
beside it whatever the resource server needs to grade.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.arguments import ArgumentError
from envs.core import Message

_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}


class RowError(ArgumentError):
    """A data set, or one row of it, that cannot be played; names the file, the row and the key."""


@dataclass(frozen=True, slots=True)
class Row:
    """One task. `data`: the row as it stands in the file."""

    task_id: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    data: Mapping[str, Any]


@functools.lru_cache(maxsize=16)
def load_rows(path: Path) -> tuple[Row, ...]:
    """The rows of a JSON-lines file, once a process. Raises `RowError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(f"data: {path} cannot be read: {error}") from error
    rows = [_row(line, f"{path}, line {number}", len(lines)) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise RowError(f"data: {path} holds no rows")
    width = len(str(len(rows)))
    return tuple(Row(f"{path.stem}-{i:0{width}d}", *row) for i, row in enumerate(rows))


def _row(line: str, where: str, count: int) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...], dict[str, Any]]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError(f"data: {where} is no JSON: {error}") from error
    asked = data.get("responses_create_params") if isinstance(data, dict) else None
    if not isinstance(asked, dict):
        raise RowError(f"data: {where} has no responses_create_params: it is no row of NeMo Gym")
    return tuple(_opening(asked, where)), tuple(_tool(tool, where) for tool in asked.get("tools") or ()), data


def _opening(asked: dict[str, Any], where: str) -> list[Message]:
    messages: list[Message] = []
    if asked.get("instructions"):
        messages.append({"role": "system", "content": str(asked["instructions"])})
    given = asked.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise RowError(f"data: {where}: input must be a text or a list of messages")
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        role = _ROLES.get(item.get("role")) if kind == "message" else None
        if role is None:
            raise RowError(f"data: {where}: input holds {kind!r}, and only messages of people and models can be shown")
        messages.append({"role": role, "content": _text(item.get("content"), where)})
    return messages


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise RowError(f"data: {where}: a message holds something other than text")
    return "".join(part["text"] for part in parts)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise RowError(f"data: {where}: a tool must be a function with a name, not {str(tool)[:80]}")
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": str(tool.get("description") or ""), "parameters": parameters}
    return {"type": "function", "function": function}


def response_of(messages: Sequence[Message], row: Mapping[str, Any], *, truncated: bool) -> dict[str, Any]:
    """What the policy did, as the Response that `/verify` takes: messages, calls and their outputs in order.

    `messages`: those after the opening; an assistant's text without its thinking, its calls in OpenAI's chat form.
    """
    output: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        called = {item["call_id"] for item in output if item["type"] == "function_call"}
        if message["role"] == "tool" and message.get("tool_call_id") in called:
            output.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
            continue
        if message["role"] == "assistant" and (message["content"].strip() or not message.get("tool_calls")):
            text = {"type": "output_text", "text": message["content"], "annotations": []}
            item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed"}
            output.append({**item, "content": [text]})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            named = {"name": function["name"], "arguments": function["arguments"], "call_id": call["id"]}
            output.append({"type": "function_call", "id": f"fc_{call['id']}", "status": "completed", **named})
    asked = row["responses_create_params"]
    return {
        "id": "resp_0",
        "created_at": 0.0,
        "model": "policy",
        "object": "response",
        "output": output,
        "parallel_tool_calls": bool(asked.get("parallel_tool_calls", True)),
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
    }
