"""Several training environments in one run, mixed by weight."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, model_validator

from agent.runtime.settings import EnvConfig
from agent.store.config import NAME
from envs.asking.endpoint import ModelEndpoint
from envs.mcp_tools.settings import ToolSettings
from learner.config.section import Section


class MixedEnvConfig(Section):
    """One environment of a mixture. Each task is drawn from it with probability `weight` / sum of all weights.

    `name`: what its figures are called; without one the last part of its id.
    """

    name: str = Field(pattern=NAME)
    id: str
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    model: ModelEndpoint | None = None
    tools: ToolSettings | None = None

    @property
    def env(self) -> EnvConfig:
        """Without name and weight."""
        return EnvConfig(id=self.id, kwargs=self.kwargs, model=self.model, tools=self.tools)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        if isinstance(data, dict) and "name" not in data and isinstance(data.get("id"), str):
            return {"name": re.sub(r"[^A-Za-z0-9_.-]", "-", data["id"].rpartition("/")[2]), **data}
        return data


def check_mixture(environments: tuple[MixedEnvConfig, ...]) -> None:
    """Raise `ValueError` where two environments could not be told apart."""
    names = [one.name for one in environments]
    if len(set(names)) < len(names):
        raise ValueError(f"environments: two are called alike ({', '.join(names)}); give each a `name`")
