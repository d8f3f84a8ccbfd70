"""What every section of a recipe shares: unknown keys are errors, values are fixed once read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RecipeError(ValueError):
    """A recipe that cannot be run; the message names the key and says what to write instead."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
