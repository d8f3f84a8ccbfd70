"""What a step thought of every action token, for `agent.inspect`."""

from __future__ import annotations

from typing import Any

import numpy as np
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
    rows_of: dict[int, list[int]] = {}
    for row, episode in enumerate(batch.episodes.tolist()):
        rows_of.setdefault(episode, []).append(row)

    def tokens(tensor: torch.Tensor, rows: list[int]) -> np.ndarray[Any, Any]:
        """Of every action token of an episode, one chain after the other."""
        return torch.cat([tensor[row][batch.action_mask[row]] for row in rows]).numpy()

    return [
        TokenAnnotations(
            episode_id=batch.episode_ids[rows[0]],
            trained_version=version,
            logprobs=tokens(result.logprobs, rows),
            values=tokens(values, rows),
            advantages=tokens(result.advantages, rows),
            gated=tokens(result.gated, rows),
        )
        for rows in rows_of.values()
    ]
