"""What a person reads about wrong keys, whichever configuration they are in."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent.configuration_errors import wrong_keys


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = Field(default=1, gt=0)
    least: int = 0

    @model_validator(mode="after")
    def _fits(self) -> Section:
        if self.least > self.size:
            raise ValueError(f"least={self.least} is above size={self.size}")
        return self


class Whole(Section):
    name: str
    section: Section = Section()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"name": "a", "szie": 1}, "szie: unknown key"),
        ({"name": "a", "section": {"szie": 1}}, "section.szie: unknown key"),
        ({}, "name: is required"),
        ({"name": "a", "size": 0}, "size: Input should be greater than 0"),
        ({"name": "a", "section": {"least": 5}}, "section: least=5 is above size=1"),
        ({"name": "a", "least": 5}, "least=5 is above size=1"),
        ({"szie": 1}, "name: is required; szie: unknown key"),
    ],
)
def test_each_wrong_key_is_named_and_what_is_wrong_with_none_stands_alone(data: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Whole.model_validate(data)
    assert wrong_keys(refused.value) == said
