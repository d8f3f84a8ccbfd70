"""What a judge is. `lexical` holds the embedded one, `llm` the one behind an HTTP endpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from envs.core import EnvironmentFault
from envs.style_shift.schedule import NONE, STYLES


class JudgeFault(EnvironmentFault):
    """There is no verdict: the judge is down, or what it says cannot be read as one. Never a reward of 0."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says of a text.

    `quality`: 1 for a sound answer to the prompt, whatever its style, else 0. `style`: the one of `STYLES` that the
    text is in, or "none". `reasoning`: why, for whoever reads it.
    """

    quality: int
    style: str
    reasoning: str

    def __post_init__(self) -> None:
        if self.quality not in (0, 1) or isinstance(self.quality, bool):
            raise ValueError(f"quality is 0 or 1, not {self.quality!r}")
        if self.style not in (*STYLES, NONE):
            raise ValueError(f"style is one of {', '.join(STYLES)} or {NONE}, not {self.style!r}")

    def matches(self, style: str) -> int:
        """1 if the text is in `style`, else 0."""
        return int(self.style == style)

    def reward(self, style: str) -> float:
        """The paper's reward with `style` preferred: quality times style, both 0 or 1."""
        return float(self.quality * self.matches(style))


class Judge(ABC):
    """Reads short texts. One judge may be asked by many coroutines of one event loop at once."""

    @abstractmethod
    async def judge(self, prompt: str, text: str, style: str) -> Verdict:
        """Judge `text` as an answer to `prompt`, while `style` is the preferred one.

        `style` says which question a verdict answers (a cache must not mix them up); a judge is not to lean towards
        it. Raises `JudgeFault` if there is no verdict.
        """

    async def aclose(self) -> None:
        """Give back what the judge holds. May be called any number of times."""
        return
