"""Do engines and trainer agree? Asked before training, and again, in small, after every publication.

A publication can go wrong in silence: a kernel that keeps the old experts packed, a tied output layer that is passed
over. So each engine samples a few tokens under the weights that it was just given, and the trainer, which still has
these weights, scores them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.chat.renderer import ChatRenderer
from agent.engines.base import Completion, Engine, EngineFault
from agent.episode import SamplingParams
from envs import make_core
from envs.asking.model import NoModel
from learner.config import Recipe
from learner.faults import LearnerFault
from learner.model.forward import PolicyForward
from learner.probes import parity_report

GATE_PROMPTS, GATE_TOKENS = 8, 32
PROBE_PROMPTS, PROBE_TOKENS = 4, 8
_LONGEST = 256  # tokens of a probe's prompt: a probe is to cost less than one action
# What is asked where there is no environment: whatever the model says to it, both sides must score it alike.
_PLAIN_PROMPTS = (
    "Hello!", "Write about rain.", "What is 17 + 25?", "Tell me a story.", "Say something about the sea.",
    "Explain why the sky is blue.", "List three things.", "Thank you.",
)  # fmt: skip


@dataclass
class ParityProbe:
    """The prompts, and how an answer is judged.

        probe = await ParityProbe.build(recipe, policy, model=folder)
        reports = await probe.gate(engines)                  # raises LearnerFault where they disagree
        figures, fault = await probe.check(engines, version) # after a publication; fault "" where they agree

    The policy must hold the served weights until the call returns.
    """

    policy: PolicyForward
    prompts: list[list[int]]
    sampling: SamplingParams
    bounds: tuple[float, float]
    threshold: float
    vocabulary: int
    timeout_s: float = 60.0
    behind_server: bool = False
    rounding: str = ""  # what of a difference is no fault of the engine's

    @classmethod
    async def build(cls, recipe: Recipe, policy: PolicyForward, *, model: Path) -> ParityProbe:
        """Prompts are the first held-out tasks as the agent would see them; a few plain ones online, and where the
        runtime has a Python of its own (`runtime.python`), whose environments need not open in this one, or the
        environment has to ask a model for its own.

        `policy` is the trainer's own, `model` the folder with its tokenizer and chat template. Online a server stands
        between, whose operator may pin a version or go back to one at any moment.
        """
        renderer = await asyncio.to_thread(recipe.runtime.chat.load, model)
        plain = recipe.learner.online or recipe.runtime.python is not None
        prompts = _plain_prompts(renderer) if plain else await task_prompts(recipe, renderer)
        algorithm = recipe.learner.resolve()
        return cls(
            policy=policy,
            prompts=prompts,
            sampling=SamplingParams(
                temperature=recipe.runtime.sampling.temperature,
                max_tokens=min(GATE_TOKENS, recipe.runtime.max_tokens_per_turn),
                stop_token_ids=renderer.stop_token_ids,
            ),
            bounds=algorithm.trusted_log_ratios,
            threshold=recipe.learner.parity_threshold,
            vocabulary=policy.model.config.get_text_config().vocab_size,
            behind_server=recipe.learner.online,
            rounding=_rounding(recipe),
        )

    async def gate(self, engines: Sequence[Engine], version: int | None = None) -> list[parity_report.ParityReport]:
        """A report for each engine. Raises `LearnerFault` at the first that disagrees, `EngineFault` if one is down.

        Where a server stands between and samples from another version than `version` (held or on trial there), nothing
        can be compared, and there is no report.
        """
        reports = []
        for engine in engines:
            completions = await parity_report.sample(engine, self.prompts, self.sampling, timeout_s=self.timeout_s)
            served = {v for completion in completions for v in completion.versions}
            if self.behind_server and version is not None and served - {version}:
                continue
            report = await self._compare(self.prompts, completions)
            if not report.mean_difference <= self.threshold:
                raise LearnerFault(
                    f"engine and trainer disagree: {report}{self.rounding}. Every ratio would be wrong; mend "
                    "the cause, or raise learner.parity_threshold if you know why"
                )
            reports.append(report)
        return reports

    async def check(self, engines: Sequence[Engine], version: int) -> tuple[dict[str, float], str]:
        """Figures of a probe of all engines at `version`, and what is wrong, or "".

        An engine that does not answer is counted (`parity/unanswered`) and is no disagreement: its health is others'
        business. Figures are of the worst engine.
        """
        prompts = self.marked(version)
        sampling = SamplingParams(temperature=self.sampling.temperature, max_tokens=PROBE_TOKENS)
        answers = await asyncio.gather(
            *(parity_report.sample(engine, prompts, sampling, timeout_s=self.timeout_s) for engine in engines),
            return_exceptions=True,
        )
        figures = {"parity/unanswered": 0.0}
        fault = ""
        for answer in answers:
            if isinstance(answer, EngineFault):
                figures["parity/unanswered"] += 1
                continue
            if isinstance(answer, BaseException):
                raise answer
            served = sorted({v for completion in answer for v in completion.versions})
            if self.behind_server and served and served != [version]:  # pinned, or gone back meanwhile
                figures["parity/not_served"] = 1.0
                continue
            if served != [version]:
                fault = fault or f"an engine sampled under version {served} after version {version} was published"
                continue
            report = await self._compare(prompts, answer)
            for name, value in (
                ("max_difference", report.max_difference),
                ("mean_difference", report.mean_difference),
                ("gated_share", report.gated_share),
            ):
                worst = figures.get(f"parity/{name}", 0.0)
                figures[f"parity/{name}"] = value if math.isnan(value) else max(worst, value)
            if not report.mean_difference <= self.threshold:
                fault = fault or f"engine and trainer disagree after a publication: {report}{self.rounding}"
        return figures, fault

    def marked(self, version: int) -> list[list[int]]:
        """The probe's prompts, with two tokens before them that say the version: no cache holds them yet."""
        mark = [version % self.vocabulary, version // self.vocabulary % self.vocabulary]
        shortest = sorted(self.prompts, key=len)[:PROBE_PROMPTS]
        return [[*mark, *prompt[:_LONGEST]] for prompt in shortest]

    async def _compare(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
    ) -> parity_report.ParityReport:
        return await asyncio.to_thread(
            parity_report.compare, self.policy, prompts, completions, bounds=self.bounds, threshold=self.threshold
        )


def _rounding(recipe: Recipe) -> str:
    if recipe.published_dtype == recipe.model.computes_in:
        return ""
    return (
        f". Weights are published in {recipe.published_dtype} (engine.dtype), and the trainer computes in "
        f"{recipe.model.computes_in}"
    )


def _plain_prompts(renderer: ChatRenderer) -> list[list[int]]:
    said = [[{"role": "user", "content": text}] for text in _PLAIN_PROMPTS[:GATE_PROMPTS]]
    return [list(renderer.start(messages, None).token_ids) for messages in said]


async def task_prompts(recipe: Recipe, renderer: ChatRenderer) -> list[list[int]]:
    """Token ids of the first held-out tasks' prompts; of a few plain ones for an environment that asks a model."""
    config = recipe.held_out_sets[0].env
    env = make_core(config.id, **config.kwargs)
    prompts = []
    try:
        if env.take_model(NoModel()):
            return _plain_prompts(renderer)
        for task_id in [env.task_ids[i] for i in range(min(GATE_PROMPTS, len(env.task_ids)))]:
            _, info = await env.areset(options={"task_id": task_id})
            prompts.append(list(renderer.start(info["messages"], info.get("tools") or []).token_ids))
    finally:
        await env.aclose()
    return prompts
