"""What a step thought of every action token, for `agent.inspect`."""

from __future__ import annotations

import torch

from agent.inspect.annotations import TokenAnnotations
from learner.data.batch import Batch
from learner.sao import StepResult


def step_annotations(batch: Batch, result: StepResult, version: int) -> list[TokenAnnotations]:
    """An entry for each episode of `batch`; none for a step that only trained the critic.

    `version`: the one that the step began from. What is gated is what the method's own loss left out: whole episodes
    for GSPO, nothing for a method without a ratio.
    """
    if result.logprobs is None or result.advantages is None or result.gated is None:
        return []
    values = result.values if result.values is not None else torch.zeros_like(result.advantages)
    return [
        TokenAnnotations(
            episode_id=episode_id,
            trained_version=version,
            logprobs=result.logprobs[row][mask].numpy(),
            values=values[row][mask].numpy(),
            advantages=result.advantages[row][mask].numpy(),
            gated=result.gated[row][mask].numpy(),
        )
        for row, (episode_id, mask) in enumerate(zip(batch.episode_ids, batch.action_mask, strict=True))
    ]
