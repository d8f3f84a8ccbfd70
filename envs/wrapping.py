"""`WrappedCore`: a core around another one, which changes what it overrides and passes the rest on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envs.core import AsyncEnv, Model, Step
from envs.tool_calls import ToolFormat


class WrappedCore(AsyncEnv):
    """Passes every call on to `inner`, and reads of public attributes that it has not itself."""

    def __init__(self, inner: AsyncEnv) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "inner":  # `inner` is not there yet in a copy that is being made
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.inner, name)

    @property
    def tool_format(self) -> ToolFormat:
        """As the inner environment's own."""
        return self.inner.tool_format

    @tool_format.setter
    def tool_format(self, tool_format: ToolFormat) -> None:
        self.inner.tool_format = tool_format

    @property
    def task_ids(self) -> Sequence[str]:
        """As the inner environment's own."""
        return self.inner.task_ids

    def take_model(self, model: Model) -> bool:
        """As the inner environment's own."""
        return self.inner.take_model(model)

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """As the inner environment's own."""
        return await self.inner.areset(seed=seed, options=options)

    async def astep(self, action: str) -> Step:
        """As the inner environment's own."""
        return await self.inner.astep(action)

    async def atruncate(self, reason: str, action: str = "") -> Step:
        """As the inner environment's own."""
        return await self.inner.atruncate(reason, action)

    async def aclose(self) -> None:
        """As the inner environment's own."""
        await self.inner.aclose()


def with_figures(step: Step, figures: dict[str, Any]) -> Step:
    """`step` with `figures` among its metrics, if it ends the episode."""
    observation, reward, terminated, truncated, info = step
    if not (terminated or truncated):
        return step
    metrics = {**(info.get("metrics") or {}), **figures}
    return observation, reward, terminated, truncated, {**info, "metrics": metrics}
