"""`sao/PythonTIR-v0`: math problems, a Python interpreter as the tool, an answer that is graded.

An action is the model's text of one turn. With a tool call in it, the code runs and its plain output is the
observation; without one, the episode ends and the last `\\boxed{...}` that it says is the answer.
"""

from __future__ import annotations

import asyncio
import copy
import random
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

from envs.arguments import Count, Number, Seconds, check_options, checked_arguments, containing, one_of
from envs.core import TRUNCATIONS, AsyncEnv, EnvironmentFault, Step
from envs.python_tir.machinery import Machinery, MachinerySettings, acquire_machinery, release_machinery
from envs.python_tir.problems.sets import Problem, ProblemSet, TaskIds
from envs.python_tir.problems.sources import Spec, check_spec, load_problems
from envs.said import COUNTED, Counted, said
from envs.tool_calls import TOOL_FORMATS, ToolFormat, parse_action
from sandboxes.backends import BACKENDS
from sandboxes.base import Limits, SandboxFault
from sandboxes.packages import check_packages

if TYPE_CHECKING:
    from sandboxes.base import PythonResult, PythonSession

PYTHON_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code and return what it prints, with the value of a last expression. "
        "State is kept between calls.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}
"""The OpenAI schema of the one tool."""

SYSTEM_PROMPTS: dict[Literal["tools", "fenced"], str] = {
    "tools": "Solve the problem. You may run Python with the python tool, one call a message. "
    "When you are done, give the final answer in \\boxed{}, without a tool call.",
    "fenced": "Solve the problem. You may run Python: write one ```python block a message, and its output is the "
    "reply. When you are done, give the final answer in \\boxed{}, without a code block.",
}
"""What opens an episode unless `system_prompt` says otherwise."""

NO_PROBLEMS: Spec = {
    "source": "reasoning_gym",
    "size": 1000,
    "seed": 0,
    "answer_form": "number",
    "families": {"chain_sum": {"min_terms": 3}, "products": {"max_terms": 3}, "lcm": {"max_numbers": 4}},
}
"""The problems of an environment made without any: generated, so that the bare id works offline."""

_START_LIMIT_S = 60.0
_GRACE_S = 30.0
"""How much longer than its own limit a sandbox call may take before the sandbox counts as broken."""


class PythonTIR(AsyncEnv):
    """Tool-integrated reasoning on math problems; `docs/python_tir.md` is its manual page.

    `problems`: see `envs.python_tir.problems.sources`. `tool_format`: the form of calls, "auto" for the
    policy's own (`AsyncEnv.tool_format`), "fenced" for a block of Python. `max_turns`: actions that
    an episode may take. `max_context_chars`: characters of all messages together. `wall_clock_s`: seconds from reset to
    the end. `call_timeout_s`: seconds one tool call may take (longer is an observation, not a fault). `system_prompt`:
    None for the default, "" for none. `prompt_template`: holds `{problem}`. `sandbox`: "auto" or a backend's name.
    `memory_mb`, `output_bytes`: limits of the interpreter; `spares`: interpreters kept warm, for all environments of an
    event loop together. `tool=False` is the control: the same prompt, but every call is answered with a refusal.
    `reward_correct`, `reward_wrong`: what the grade is worth; a partial score lies between. `answer_in`: "said", or
    "everything" to let drafts in thinking and code in calls answer as well. `grader_workers`, `grader_timeout_s`: the
    grader's. `packages`: installed packages that the interpreter may import beside `sandboxes.packages.MATHEMATICS`.
    """

    @checked_arguments(apart=("problems", "packages"))
    def __init__(
        self,
        problems: Spec | None = None,
        *,
        tool_format: Annotated[str, one_of("auto", *TOOL_FORMATS)] = "auto",
        max_turns: Count = 50,
        max_context_chars: Count | None = None,
        wall_clock_s: Seconds | None = 3600.0,
        call_timeout_s: Seconds = 10.0,
        system_prompt: str | None = None,
        prompt_template: Annotated[str, containing("{problem}")] = "{problem}",
        sandbox: Annotated[str, one_of("auto", *BACKENDS)] = "auto",
        memory_mb: Count = 512,
        output_bytes: Count = 16 * 1024,
        spares: Annotated[int, Field(ge=0)] = 4,
        tool: bool = True,
        reward_correct: Number = 1.0,
        reward_wrong: Number = 0.0,
        answer_in: Annotated[Counted, one_of(*COUNTED)] = "said",
        grader_workers: Count = 1,
        grader_timeout_s: Seconds = 5.0,
        packages: Sequence[str] = (),
    ) -> None:
        self._spec: Spec = NO_PROBLEMS if problems is None else problems
        check_spec(self._spec)
        self._problems: ProblemSet | None = None
        self._own_format = cast(Literal["auto"] | ToolFormat, tool_format)
        self._max_turns = max_turns
        self._max_context_chars = max_context_chars
        self._wall_clock_s = wall_clock_s
        self._call_timeout_s = call_timeout_s
        self._style: Literal["tools", "fenced"] = "fenced" if tool_format == "fenced" else "tools"
        self._system_prompt = SYSTEM_PROMPTS[self._style] if system_prompt is None else system_prompt
        self._prompt_template = prompt_template
        self._tool = tool
        self._reward_correct, self._reward_wrong = reward_correct, reward_wrong
        self._answer_in: Counted = answer_in
        limits = Limits(wall_clock_s=call_timeout_s, memory_bytes=memory_mb * 2**20, output_bytes=output_bytes)
        self._settings = MachinerySettings(
            sandbox, limits, spares, grader_workers, grader_timeout_s, check_packages(packages)
        )
        self._machinery: Machinery | None = None
        self._random = random.Random()
        self._problem: Problem | None = None  # None between episodes
        self._session: PythonSession | None = None
        self._begin_counts()

    def _begin_counts(self) -> None:
        self._turns = self._calls = self._malformed = self._errors = self._timeouts = 0
        self._reused_output = False
        self._numbers: list[str] = []
        self._context_chars = 0
        self._last_action = ""
        self._deadline = float("inf")

    @property
    def _format(self) -> ToolFormat:
        return self.tool_format if self._own_format == "auto" else self._own_format

    @property
    def task_ids(self) -> Sequence[str]:
        """Every problem's id. Loads the problems if need be: generated ones at once, others from disk or network."""
        return TaskIds(self._load())

    def _load(self) -> ProblemSet:
        if self._problems is None:
            self._problems = load_problems(self._spec)
        return self._problems

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode. `options["task_id"]` names the problem; else `seed` draws it.

        Raises `ProblemSourceError` for problems that cannot be loaded and `ValueError` for an unknown task id or
        option.
        """
        asked = check_options(options, "task_id")
        await self._end()
        problems = self._problems
        if problems is None:
            problems = await asyncio.to_thread(self._load)
        if seed is not None:
            self._random.seed(seed)
        task_id = asked.get("task_id")
        try:
            index = self._random.randrange(len(problems)) if task_id is None else problems.index(str(task_id))
        except KeyError:
            raise ValueError(f"there is no task {task_id!r}; the first is {problems.task_id(0)!r}") from None
        self._problem = problem = problems[index]
        if self._machinery is None:
            self._machinery = acquire_machinery(self._settings)
        self._begin_counts()
        if self._wall_clock_s is not None:
            self._deadline = time.monotonic() + self._wall_clock_s
        # str.replace, not format: a problem's own braces are LaTeX.
        prompt = self._prompt_template.replace("{problem}", problem.question)
        messages = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        messages.append({"role": "user", "content": prompt})
        self._context_chars = sum(len(message["content"]) for message in messages)
        return prompt, {
            "messages": messages,
            # Shown in the control without the tool as well: the prompt must not be the difference between the two.
            "tools": [copy.deepcopy(PYTHON_TOOL)] if self._style == "tools" else [],
            "task_id": problem.task_id,
            "family": problem.family,
            "segment": "prompt",
        }

    async def astep(self, action: str) -> Step:
        """Carry out a tool call, or grade the answer.

        Raises `EnvironmentFault` if sandbox or grader fail; the episode is void then, and needs `areset`.
        """
        self._require_episode()
        self._note(action)
        parsed = parse_action(action, [PYTHON_TOOL], self._format)
        if parsed.call is None and parsed.error is None:
            return await self._finish(truncation=None)
        if parsed.call is not None:
            self._calls += 1
        else:
            self._malformed += 1
        # What cannot be answered any more is not carried out either.
        if self._past_context():
            return await self._finish(truncation="context")
        if time.monotonic() >= self._deadline:
            return await self._finish(truncation="wall_clock")
        if self._turns >= self._max_turns:
            return await self._finish(truncation="turns")
        if not self._tool:
            observation = "The tool is not available."
        elif parsed.call is None:
            observation = parsed.error or ""
        else:
            observation = await self._call(parsed.call.arguments["code"])
        self._context_chars += len(observation)
        if time.monotonic() >= self._deadline:
            return await self._finish(truncation="wall_clock")
        if self._past_context():
            return await self._finish(truncation="context")
        message = {"role": "tool", "content": observation, "tool_call_id": f"call_{self._turns}"}
        return observation, 0.0, False, False, {"messages": [message], "segment": "observation"}

    async def atruncate(self, reason: str, action: str = "") -> Step:
        """End the episode for `reason` and grade `action`, or the last action if it is empty."""
        self._require_episode()
        if reason not in TRUNCATIONS:
            raise ValueError(f"a truncation is one of {', '.join(TRUNCATIONS)}, not {reason!r}")
        if action:
            self._note(action)
        return await self._finish(truncation=reason)

    async def aclose(self) -> None:
        """End the episode and give back the interpreter and this environment's share of pool and grader."""
        try:
            await self._end()
        finally:
            machinery, self._machinery = self._machinery, None
            if machinery is not None:
                await release_machinery(machinery)

    def _require_episode(self) -> None:
        if self._problem is None:
            raise RuntimeError("no episode is running: reset the environment first")

    def _note(self, action: str) -> None:
        self._last_action = action
        self._turns += 1
        self._context_chars += len(action)

    def _past_context(self) -> bool:
        return self._max_context_chars is not None and self._context_chars > self._max_context_chars

    async def _call(self, code: str) -> str:
        """Run `code` in the episode's interpreter, started at the first call: many episodes never need one."""
        if not self._reused_output:
            self._reused_output = any(_holds_number(code, number) for number in self._numbers)
        limit = min(self._call_timeout_s, max(0.1, self._deadline - time.monotonic()))
        try:
            if self._session is None:
                assert self._machinery is not None
                async with asyncio.timeout(_START_LIMIT_S):
                    self._session = await self._machinery.pool.session()
            async with asyncio.timeout(limit + _GRACE_S):
                result: PythonResult = await self._session.run(code, timeout_s=limit)
        except (SandboxFault, TimeoutError) as error:
            await self._end()
            raise EnvironmentFault(f"the Python sandbox failed: {error or type(error).__name__}") from error
        self._timeouts += result.status == "timeout"
        self._errors += result.status in ("error", "died")
        number = result.output.strip()
        if _NUMBER.fullmatch(number):
            self._numbers.append(number)
        return result.output

    async def _finish(self, *, truncation: str | None) -> Step:
        """Grade the last action, end the episode, and say how it went."""
        problem, machinery = self._problem, self._machinery
        assert problem is not None
        assert machinery is not None
        try:
            text = said(self._last_action, self._format) if self._answer_in == "said" else self._last_action
            score = await machinery.grader.score(text, problem.answer, problem.rules, counted="everything")
        finally:
            await self._end()
        correct = score >= problem.rules.solved_at
        info: dict[str, Any] = {
            "messages": [],
            "segment": "observation",
            "metrics": {
                "turns": self._turns,
                "tool_calls": self._calls,
                "malformed_calls": self._malformed,
                "tool_errors": self._errors,
                "timeouts": self._timeouts,
                "reused_output": self._reused_output,
                "correct": bool(correct),
                "family": problem.family,
            },
        }
        if truncation is not None:
            info["truncation"] = truncation
        share = score if problem.rules.partial else float(correct)
        if problem.rules.scorer is not None:
            info["metrics"]["score"] = score
        reward = self._reward_wrong + share * (self._reward_correct - self._reward_wrong)
        return "", reward, truncation is None, truncation is not None, info

    async def _end(self) -> None:
        """Leave the episode; its interpreter goes back. Counts stay, for whoever reports them."""
        self._problem = None
        session, self._session = self._session, None
        if session is None:
            return
        try:
            async with asyncio.timeout(_GRACE_S):
                await session.close()
        except (SandboxFault, TimeoutError) as error:
            raise EnvironmentFault(f"the Python sandbox did not close: {error or 'time limit'}") from error


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def _holds_number(code: str, number: str) -> bool:
    """Whether `number` stands in `code` as a number of its own, not as a part of a longer one or of a name."""
    return re.search(rf"(?<![\w.]){re.escape(number)}(?![\w.])", code) is not None


__all__ = ["NO_PROBLEMS", "PYTHON_TOOL", "SYSTEM_PROMPTS", "PythonTIR"]
