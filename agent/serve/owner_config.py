"""Keys of section `serve` about whose is what, and about feedback."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=40)]


class FeedbackConfig(BaseModel):
    """Section `serve.feedback`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    close_s: float = Field(default=3600.0, gt=0)
    """A judged conversation that is silent for so long is closed: its episode is made. Verdicts go on being taken,
    until the learner has it or `serve.feedback_ttl_s` is over."""
    signals: dict[Name, Annotated[float, Field(ge=0, le=1)]] = Field(default={}, max_length=32)
    """What an implicit signal is worth, such as {regenerate: 0.0, edit: 0.3, copy: 1.0}. Others are refused."""
    aggregate: Literal["mean", "sum", "last"] = "mean"
    """What an episode with several judged turns is worth: the mean of its verdicts, their sum, or the last one."""


class FiguresConfig(BaseModel):
    """Section `serve.figures`: whose feedback's `metadata` may name the style and the phase that everybody sees."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    from_metadata: tuple[Name, ...] = ()
    """Names of keys; `admin...` may always, "*" stands for everybody."""
    styles: tuple[Name, ...] = Field(default=(), max_length=32)
    """The styles that are counted, others as "other". Empty: the first 16 names that come."""


class EventsConfig(BaseModel):
    """Section `serve.events`: who sees single responses and verdicts in /v1/events; everybody else sees figures."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    details: Literal["none", "user", "key"] = "user"
    """`user`: a watcher that names itself (`/v1/events?user=ann`) sees what is its own, under its key. `key`: one that
    names nobody also sees all of its key: only where no two people share a key."""
    admins_see_all: bool = False
    """Keys named `admin...` see the details of everybody."""
