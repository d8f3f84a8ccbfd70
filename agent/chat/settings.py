"""How conversations are rendered, as a recipe and a runtime's configuration say it (section `runtime.chat`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from envs.tool_calls import FamilyFormat

if TYPE_CHECKING:
    from agent.chat.renderer import ChatRenderer


class ChatConfig(BaseModel):
    """`template_kwargs`: variables of the model's chat template (such as `enable_thinking` or `reasoning_effort`).

    `tool_format`: the form in which the policy writes tool calls; "auto": the one that its chat template writes.
    `tool_answers`: "user" gives what a tool answers the role `user`, for templates that show no role `tool`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template_kwargs: dict[str, Any] = {}
    tool_format: Literal["auto"] | FamilyFormat = "auto"
    tool_answers: Literal["tool", "user"] = "tool"

    def load(self, folder: Path) -> ChatRenderer:
        """The renderer of a model folder; raises `ChatTemplateError`."""
        from agent.chat.renderer import ChatRenderer  # a configuration is read without it

        return ChatRenderer.from_pretrained(
            folder,
            template_kwargs=self.template_kwargs,
            tool_format=None if self.tool_format == "auto" else self.tool_format,
            tool_answers=self.tool_answers,
        )
