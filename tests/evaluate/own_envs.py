"""Environments of somebody else's: one that counts with the model, one whose machinery is broken."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Text

from envs.core import AsyncEnv, EnvironmentFault, Step


class Counting(gymnasium.Env[str, str]):
    """Says a number three times, and pays half a point for each number after it."""

    observation_space = Text(100)
    action_space = Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._turn, self._number = 0, int(self.np_random.integers(100))
        return f"after {self._number}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reward = 0.5 * (action == str(self._number + 1))
        self._turn, self._number = self._turn + 1, self._number + 10
        return f"after {self._number}", reward, self._turn == 3, False, {}


class Broken(AsyncEnv):
    """Its machine is never there."""

    @property
    def task_ids(self) -> list[str]:
        return ["a", "b"]

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise EnvironmentFault("there is no machine")

    async def astep(self, action: str) -> Step:
        raise AssertionError

    async def atruncate(self, reason: str, action: str = "") -> Step:
        raise AssertionError

    async def aclose(self) -> None: ...
