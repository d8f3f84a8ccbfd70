"""Trainer and engine must give the same tokens the same log-probs, or every ratio is wrong: the comparison, and what
it reports.

It is asked for by hand (`python -m learner.parity`), at the start of a run and after every publication
(`learner.probes.parity_probe`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agent.engines.base import Completion, Engine
from agent.episode import SamplingParams
from learner.model.forward import PolicyForward

Measure = Literal["mean", "max"]
"""Which of the differences is held against the threshold."""

_TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)


@dataclass(frozen=True)
class ParityReport:
    """Absolute differences of log-probs over `tokens` sampled tokens, and what they would do to the gate.

    `*_ratio_error` are those of |ratio - 1|, the ratio being exp(trainer's log-prob - engine's).
    """

    version: int
    tokens: int
    max_difference: float
    mean_difference: float
    p99_difference: float
    max_ratio: float
    gated_share: float
    cause: str = ""
    max_ratio_error: float = 0.0
    mean_ratio_error: float = 0.0
    p99_ratio_error: float = 0.0

    def worst(self, measure: Measure) -> float:
        """The difference that `measure` names."""
        return self.max_difference if measure == "max" else self.mean_difference

    def __str__(self) -> str:
        text = (
            f"parity at version {self.version} over {self.tokens} tokens: |difference| max {self.max_difference:.2e}, "
            f"mean {self.mean_difference:.2e}, p99 {self.p99_difference:.2e}; ratio max {self.max_ratio:.4f}; "
            f"gated {self.gated_share:.3%}"
        )
        return text + (f". Likely cause: {self.cause}" if self.cause else "")


async def sample(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, timeout_s: float = 60.0
) -> list[Completion]:
    """One completion a prompt, all at once."""
    return list(await asyncio.gather(*(engine.generate(p, sampling, timeout_s=timeout_s) for p in prompts)))


@torch.no_grad()
def trainer_logprobs(policy: PolicyForward, prompt: Sequence[int], completion: Completion) -> Tensor:
    """What the trainer makes of the completion's tokens: log-probs float32[n]."""
    device = next(policy.parameters()).device
    ids = torch.tensor([[*prompt, *completion.token_ids]], device=device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, len(prompt) :] = True
    return policy(ids, mask)[0][0, len(prompt) :].float().cpu()


def compare(
    policy: PolicyForward,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    bounds: tuple[float, float],
    threshold: float,
    measure: Measure = "mean",
) -> ParityReport:
    """Score what the engine sampled with the trainer; `bounds` are the gate's in log space.

    Names the likely cause where the mean (or max) difference is above `threshold`.
    """
    engine = torch.tensor([p for c in completions for p in c.logprobs])
    trainer = torch.cat([trainer_logprobs(policy, p, c) for p, c in zip(prompts, completions, strict=True)])
    log_ratio = trainer - engine
    difference = log_ratio.abs()
    mean = float(difference.mean())
    ratio_error = log_ratio.exp().sub(1.0).abs()
    cause = ""
    if not float(difference.max() if measure == "max" else mean) <= threshold:
        cause = _likely_cause(policy, prompts, completions, engine, mean)
    return ParityReport(
        version=max(v for c in completions for v in c.versions),
        tokens=len(engine),
        max_difference=float(difference.max()),
        mean_difference=mean,
        p99_difference=float(difference.quantile(0.99)),
        max_ratio=float(log_ratio.max().exp()),
        gated_share=float(((log_ratio <= bounds[0]) | (log_ratio >= bounds[1])).float().mean()),
        cause=cause,
        max_ratio_error=float(ratio_error.max()),
        mean_ratio_error=float(ratio_error.mean()),
        p99_ratio_error=float(ratio_error.quantile(0.99)),
    )


def _likely_cause(
    policy: PolicyForward,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    engine: Tensor,
    mean: float,
) -> str:
    if any(isinstance(m, torch.nn.Dropout) and m.training and m.p > 0 for m in policy.modules()):
        return "dropout is on in the trainer: call model.eval()"
    usual = policy.temperature
    try:
        for factor in _TEMPERATURES:
            policy.temperature = usual * factor
            trainer = torch.cat([trainer_logprobs(policy, p, c) for p, c in zip(prompts, completions, strict=True)])
            if float((trainer - engine).abs().mean()) < 0.1 * mean:
                return (
                    f"temperature: the engine's log-probs fit a temperature of {usual * factor:.2g}, the trainer uses "
                    f"{usual:.2g}; start the engine with processed log-probs, or set runtime.sampling.temperature"
                )
    finally:
        policy.temperature = usual
    trainer = torch.cat([trainer_logprobs(policy, p, c) for p, c in zip(prompts, completions, strict=True)])
    if bool((engine >= trainer - 1e-4).all()):
        return "truncated sampling (top-p, top-k): every engine log-prob is at least the trainer's; turn it off"
    if mean < 0.05:
        return "dtype: engine and trainer compute in different precisions; use the same, or float32 for the router"
    return "different weights or another model: is the engine serving the version that the trainer holds?"
