"""Baselines without a critic that need only one rollout a prompt: running means of past rewards."""

from __future__ import annotations

import math
from collections import deque
from typing import Any


class RunningMeanBaseline:
    """Advantage of a reward over the mean of the last `window` rewards, of the same prompt or of all.

    >>> baseline = RunningMeanBaseline(window=8, per_prompt=True)
    >>> baseline.advantage(1.0, "p7"), baseline.advantage(1.0, "p7")
    (1.0, 0.0)

    SAO compares with two of them: the last 8 rewards of the prompt (its ablation) and the last 128 of all prompts
    with the current one inside (`include_current=True`: b_t = mean(r_{t-127..t}), its online experiment). Rewards
    enter in the order of the calls. An empty history is a baseline of 0. The state belongs into the checkpoint.
    """

    def __init__(self, window: int, per_prompt: bool, include_current: bool = False) -> None:
        """`window` counts the current reward when `include_current`; raises `ValueError` below 1."""
        if window < 1:
            raise ValueError(f"window is {window}, expected at least 1")
        self.window = window
        self.per_prompt = per_prompt
        self.include_current = include_current
        self._history: dict[str, deque[float]] = {}

    def advantage(self, reward: float, prompt_id: str | int | None = None) -> float:
        """`reward` minus the baseline; then `reward` joins the history.

        Raises `ValueError` for a reward that is not finite, or when a per-prompt baseline gets no `prompt_id`.
        """
        reward = float(reward)
        if not math.isfinite(reward):
            raise ValueError(f"reward is {reward}; a running mean would never recover from it")
        if self.per_prompt and prompt_id is None:
            raise ValueError("this baseline is kept per prompt: pass prompt_id")
        key = str(prompt_id) if self.per_prompt else ""
        history = self._history.setdefault(key, deque(maxlen=self.window))
        before = math.fsum(history) / len(history) if history else 0.0
        history.append(reward)
        return reward - (math.fsum(history) / len(history) if self.include_current else before)

    def state_dict(self) -> dict[str, Any]:
        """The settings and every history, as plain JSON types."""
        return {
            "window": self.window,
            "per_prompt": self.per_prompt,
            "include_current": self.include_current,
            "history": {key: list(rewards) for key, rewards in self._history.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the histories of `state_dict()`; raises `ValueError` if it was made with other settings."""
        for key in ("window", "per_prompt", "include_current"):
            if state[key] != getattr(self, key):
                raise ValueError(
                    f"running baseline: {key} is {getattr(self, key)} here and {state[key]} in the saved state"
                )
        self._history = {key: deque(rewards, maxlen=self.window) for key, rewards in state["history"].items()}
