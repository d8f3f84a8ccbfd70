"""What a harness is told of the episode that it is to make."""

from __future__ import annotations

from typing import Any

import msgspec

TASK_FILE = "SAO_TASK_FILE"


class HarnessTask(msgspec.Struct, frozen=True):
    """One task. `messages` and `tools` are what the environment opens its episode with, in OpenAI's form.

    `session_url` ends in a secret of this episode; below it are `/call`, `/answer`, `/reward` and `/task`
    (docs/harness.md), and the two wires. Any `api_key` will do; this one is the same secret. A program finds this
    struct as JSON in the file $SAO_TASK_FILE.
    """

    task_id: str
    seed: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    session_url: str
    openai_base_url: str
    anthropic_base_url: str
    api_key: str
    model: str
    evaluation: bool = False
    """Whether the episode is measured and not trained on."""

    @property
    def prompt(self) -> str:
        """What the user says first, and last: all of their messages."""
        return "\n\n".join(str(m.get("content") or "") for m in self.messages if m.get("role") == "user")


def task_at(session_url: str, **told: Any) -> HarnessTask:
    """The task of a session at `session_url`; `told` are the other fields."""
    return HarnessTask(
        session_url=session_url,
        openai_base_url=f"{session_url}/v1",
        anthropic_base_url=session_url,  # Anthropic's clients write /v1/messages behind it
        api_key=session_url.rsplit("/", 1)[-1],
        **told,
    )
