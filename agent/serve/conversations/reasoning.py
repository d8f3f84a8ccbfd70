"""Thinking apart from what is said, as it streams in. Decisions only.

`think`: between `<think>` and `</think>`, the first of which may stand at the end of the prompt. `harmony`: in a
channel of its own; its turns are told whole, so nothing is to be done here. `none`: a reply is what it is.
"""

from __future__ import annotations

from typing import Literal

from agent.wire.answer import Said
from envs.tool_formats.reading import THINK_CLOSE, THINK_OPEN

ReasoningForm = Literal["think", "harmony", "none"]


class ReasoningFilter:
    """Takes the text of one reply in pieces; the blank lines around thinking are in neither part.

    begin ──<think>, or the prompt has opened it──▶ thinking ──</think>──▶ between ──no line break──▶ said
      └──anything else──▶ said
    """

    def __init__(self, form: ReasoningForm, prompt: str = "") -> None:
        """`prompt`: the text before the reply."""
        self.form = form
        opened = prompt.rstrip().endswith(THINK_OPEN)
        self._state = "said" if form != "think" else "thinking" if opened else "begin"
        self._text = ""
        self.reasoning = self.content = ""

    def add(self, text: str) -> Said:
        """Take new text; what is certain of it."""
        return self._told(text, final=False)

    def finish(self) -> Said:
        """What was held back: of a reply that ends in its thinking, nothing is said."""
        return self._told("", final=True)

    def _told(self, text: str, *, final: bool) -> Said:
        self._text += text
        if self._state == "begin":
            begun = self._text.lstrip()
            if begun.startswith(THINK_OPEN):
                self._state, self._text = "thinking", begun.removeprefix(THINK_OPEN)
            elif final or not THINK_OPEN.startswith(begun):
                self._state = "said"
            else:
                return Said()
        reasoning = ""
        if self._state == "thinking":
            reasoning = self._thought(final=final)
        if self._state == "between":
            self._text = self._text.lstrip("\n")
            self._state = "said" if self._text else "between"
        content = ""
        if self._state == "said":
            content, self._text = self._text, ""
        self.reasoning += reasoning
        self.content += content
        return Said(reasoning, content)

    def _thought(self, *, final: bool) -> str:
        if not self.reasoning:
            self._text = self._text.lstrip("\n")
        at = self._text.find(THINK_CLOSE)
        if at >= 0:
            thought, self._text = self._text[:at].rstrip("\n"), self._text[at + len(THINK_CLOSE) :]
            self._state = "between"
            return thought
        if final:
            thought, self._text = self._text.rstrip("\n"), ""
            return thought
        held = next(n for n in range(len(THINK_CLOSE) - 1, -1, -1) if self._text.endswith(THINK_CLOSE[:n]))
        kept = len(self._text[: len(self._text) - held].rstrip("\n"))
        thought, self._text = self._text[:kept], self._text[kept:]
        return thought
