"""`sao/StyleShift-v0`: short texts for a reader whose preferred style changes while the policy learns.

An action is a text, and ends the episode. Its reward is quality times style, both 0 or 1, as a judge sees them; the
style that counts is the schedule's at the episode's global step, and the policy is never told which one it is.
"""

from __future__ import annotations

import asyncio
import operator
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from envs.arguments import Count, Seconds, check_options, checked_arguments
from envs.core import TRUNCATIONS, AsyncEnv, Step
from envs.said import said
from envs.style_shift.judging.judge import Judge, JudgeFault, Verdict
from envs.style_shift.judging.spec import JudgeSpec, acquire_judge, llm_settings, release_judge
from envs.style_shift.prompts import Language, Task, tasks
from envs.style_shift.schedule import NONE, PAPER_STEPS, Schedule

TITLES: dict[Language, dict[str, str]] = {
    "en": {"academic": "Academic", "cute": "Cute", "chuunibyou": "Chuunibyou", "classical": "Classical"},
    "zh": {"academic": "学术", "cute": "可爱", "chuunibyou": "中二", "classical": "古风"},
}
"""What the candidates are called in a prompt."""

CANDIDATE_LINES: dict[Language, str] = {
    "en": "Choose one of these styles: {candidates}.",
    "zh": "请从以下风格中选择一种：{candidates}。",  # noqa: RUF001
}
"""What follows the prompt with `show_candidates`."""


class StyleShift(AsyncEnv):
    """Short texts under a preference that shifts; `docs/style_shift.md` is its manual page.

    `prompts`: "all", "english", "chinese", "tiny" or a list of prompts. `phases`: mappings of `start`, `style`,
    `candidates`, or None for the paper's; `steps`: the experiment's length; `schedule_seed`: draw the phases from it
    instead. `step`: the global step of episodes whose reset names none; None draws one with the seed. `judge`: see
    `envs.style_shift.judging.spec.JudgeSpec`. `judge_timeout_s`: seconds one verdict may take. `show_candidates`:
    whether the prompt lists the phase's candidates (in one order, whichever is preferred). `system_prompt`: "" for
    none. `max_chars`: a longer text is no short text; it has quality 0 without being judged.
    """

    @checked_arguments(apart=("prompts", "phases", "judge"))
    def __init__(
        self,
        prompts: str | Sequence[str] = "all",
        *,
        phases: Sequence[Mapping[str, Any]] | None = None,
        steps: Count = PAPER_STEPS,
        schedule_seed: int | None = None,
        step: Annotated[int, Field(ge=0)] | None = None,
        judge: JudgeSpec = "lexical",
        judge_timeout_s: Seconds = 300.0,
        show_candidates: bool = True,
        system_prompt: str = "",
        max_chars: Count = 2000,
    ) -> None:
        if phases is not None and schedule_seed is not None:
            raise ValueError("phases and schedule_seed exclude each other: the second draws the first")
        self._tasks = tasks(prompts)
        self._by_id = {task.task_id: task for task in self._tasks}
        if schedule_seed is None:
            self.schedule = Schedule.from_spec(phases, steps)
        else:
            self.schedule = Schedule.seeded(schedule_seed, steps=steps)
        llm_settings(judge)  # a spec that is none is an error now, not in the middle of a run
        self._spec = judge
        self._judge: Judge | None = None
        self._judge_timeout_s = judge_timeout_s
        self._show_candidates = show_candidates
        self._system_prompt = system_prompt
        self._max_chars = max_chars
        self._random = random.Random()
        self._task: Task | None = None  # None between episodes
        self._step = 0
        self.global_step = step

    @property
    def task_ids(self) -> Sequence[str]:
        """Every prompt's id."""
        return tuple(self._by_id)

    @property
    def global_step(self) -> int | None:
        """The step of episodes whose reset names none; whoever drives the environment may set it between episodes."""
        return self._global_step

    @global_step.setter
    def global_step(self, step: int | None) -> None:
        self._global_step = None if step is None else _as_step(step)

    def task(self, task_id: str) -> Task:
        """The task `task_id`. Raises `ValueError` if there is none."""
        try:
            return self._by_id[task_id]
        except KeyError:
            raise ValueError(f"there is no task {task_id!r}; the first is {self._tasks[0].task_id!r}") from None

    def messages(self, task_id: str, step: int) -> list[dict[str, str]]:
        """The chat messages that open an episode of `task_id` in global step `step`: all that the policy sees."""
        task = self.task(task_id)
        prompt = task.prompt
        if self._show_candidates:
            titles = TITLES[task.language]
            separator = "、" if task.language == "zh" else ", "
            named = separator.join(titles[style] for style in self.schedule.at(step).candidates)
            prompt += "\n" + CANDIDATE_LINES[task.language].replace("{candidates}", named)
        opening = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return [*opening, {"role": "user", "content": prompt}]

    async def verdict(self, task_id: str, action: str, step: int) -> Verdict:
        """Judge what `action` says (no thinking, no calls) for `task_id` in global step `step`; no episode is needed.

        Raises `JudgeFault` if there is no verdict.
        """
        task, text = self.task(task_id), said(action).strip()
        if not text:
            return Verdict(0, NONE, "There is no text.")
        if len(text) > self._max_chars:
            return Verdict(0, NONE, f"The text has {len(text)} characters; a short one has at most {self._max_chars}.")
        if self._judge is None:
            self._judge = acquire_judge(self._spec)
        try:
            async with asyncio.timeout(self._judge_timeout_s):
                return await self._judge.judge(task.prompt, text, self.schedule.at(step).style)
        except TimeoutError as error:
            raise JudgeFault(f"the judge took longer than judge_timeout_s={self._judge_timeout_s:g} s") from error

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode of `options["task_id"]` in global step `options["step"]`.

        A task that is not named is drawn with `seed`. A step that is not named is `global_step`, and where that is
        None it is drawn with `seed` from the schedule's length. Raises `ValueError` for an unknown task or option,
        or a step that is no whole number from 0 up.
        """
        asked = check_options(options, "task_id", "step")
        self._task = None
        if seed is not None:
            self._random.seed(seed)
        drawn_step, drawn_task = self._random.randrange(self.schedule.steps), self._random.choice(self._tasks)
        task_id, step = asked.get("task_id"), asked.get("step")
        task = drawn_task if task_id is None else self.task(str(task_id))
        if step is not None:
            self._step = _as_step(step)
        else:
            self._step = drawn_step if self._global_step is None else self._global_step
        messages = self.messages(task.task_id, self._step)
        self._task = task
        # Neither the step nor the phase is in here: whatever `info` says at reset may end up in a prompt.
        return messages[-1]["content"], {
            "messages": messages,
            "tools": [],
            "task_id": task.task_id,
            "segment": "prompt",
        }

    async def astep(self, action: str) -> Step:
        """Judge the text and end the episode. Raises `JudgeFault`, an `EnvironmentFault`, if there is no verdict."""
        return await self._finish(action, None)

    async def atruncate(self, reason: str, action: str = "") -> Step:
        """End the episode for `reason` and judge `action` as it stands."""
        if reason not in TRUNCATIONS:
            raise ValueError(f"a truncation is one of {', '.join(TRUNCATIONS)}, not {reason!r}")
        return await self._finish(action, reason)

    async def aclose(self) -> None:
        """End the episode and give back this environment's share of the judge."""
        self._task = None
        judge, self._judge = self._judge, None
        if judge is not None:
            await release_judge(judge)

    async def _finish(self, action: str, truncation: str | None) -> Step:
        if self._task is None:
            raise RuntimeError("no episode is running: reset the environment first")
        task, self._task = self._task, None
        verdict = await self.verdict(task.task_id, action, self._step)
        target = self.schedule.at(self._step).style
        info: dict[str, Any] = {
            "messages": [],
            "segment": "observation",
            "metrics": {
                "step": self._step,
                "phase": self.schedule.index(self._step),
                "target": target,
                "style": verdict.style,
                "style_match": verdict.matches(target),
                "quality": verdict.quality,
                "chars": len(action),
            },
        }
        if truncation is not None:
            info["truncation"] = truncation
        return "", verdict.reward(target), truncation is None, truncation is not None, info


def _as_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise ValueError(f"a global step is a whole number, not {step!r}") from None
    if number < 0 or isinstance(step, bool):
        raise ValueError(f"a global step is 0 or more, not {step!r}")
    return number


__all__ = ["CANDIDATE_LINES", "TITLES", "StyleShift"]
