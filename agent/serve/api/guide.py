"""What the page can offer where the recipe has style-shift prompts: prompts that the model knows, the style of what was
judged, and simulated users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.serve.config import ServeRecipe
from envs.making import make_core
from envs.style_shift.env import StyleShift
from envs.style_shift.judging.lexical import LexicalJudge

ENV_ID = "sao/StyleShift-v0"
_PROMPTS = 24
_LONGEST = 4000


@dataclass(frozen=True)
class Guide:
    """`prompts`: some that the model has seen the like of. `reads_style`: the judge is the word-counting one."""

    prompts: Sequence[str]
    reads_style: bool

    @classmethod
    def of(cls, recipe: ServeRecipe) -> Guide | None:
        """The guide of `recipe`, None for one of another environment. Raises `ValueError` for wrong `env.kwargs`."""
        if recipe.env.id != ENV_ID:
            return None
        env = make_core(ENV_ID, **recipe.env.kwargs)
        assert isinstance(env, StyleShift)
        # Spread over topics and forms alike: the two are the digits of the index.
        ids = env.task_ids
        if len(ids) >= 3 * _PROMPTS:
            ids = [ids[i * len(ids) // _PROMPTS + i % 3] for i in range(_PROMPTS)]
        prompts = [env.task(task_id).prompt for task_id in ids[:_PROMPTS]]
        return cls(prompts, recipe.env.kwargs.get("judge", "lexical") == "lexical")

    async def style_of(self, prompt: str, text: str) -> str | None:
        """The style that the judge sees in an answer, "none" included; None where it would cost a call elsewhere."""
        if not self.reads_style or len(text) > _LONGEST:
            return None
        return (await LexicalJudge().judge(prompt[:_LONGEST], text, "")).style
