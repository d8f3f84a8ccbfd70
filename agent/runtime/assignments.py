"""What a ticket asks for: which environment, and how to sample in it. Decided from configuration and ticket alone."""

from __future__ import annotations

from dataclasses import dataclass

from agent.episode import EpisodeError
from agent.runtime.settings import EnvConfig, RuntimeConfig, SamplingConfig
from agent.store.protocol import Ticket


class UnknownEnvironment(EpisodeError):
    """A ticket names an environment that this runtime was not given: a second attempt would end the same way."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name`: of one of several environments or evaluation sets, "" where there is one only."""

    name: str
    env: EnvConfig
    sampling: SamplingConfig
    max_tokens_per_turn: int
    max_context_tokens: int


def assignment_of(config: RuntimeConfig, ticket: Ticket) -> Assignment:
    """The environment of `ticket` and its sampling; raises `UnknownEnvironment`."""
    name, evaluating = ticket.environment, ticket.kind == "evaluate"
    if evaluating and name in config.evaluations:
        chosen = config.evaluations[name]
        return Assignment(
            name,
            chosen.env,
            chosen.sampling or config.sampling,
            chosen.max_tokens_per_turn or config.max_tokens_per_turn,
            chosen.max_context_tokens or config.max_context_tokens,
        )
    if not name:
        env = (config.evaluation_env or config.env) if evaluating else config.env
        sampling = (config.evaluation_sampling or config.sampling) if evaluating else config.sampling
        return Assignment(name, env, sampling, config.max_tokens_per_turn, config.max_context_tokens)
    if not evaluating and name in config.environments:
        return Assignment(
            name, config.environments[name], config.sampling, config.max_tokens_per_turn, config.max_context_tokens
        )
    key = "evaluations" if evaluating else "environments"
    known = ", ".join(getattr(config, key)) or "none"
    raise UnknownEnvironment(
        f"ticket {ticket.id} is for {name!r}, and `{key}` of this runtime has {known}: give runtime and store the same"
    )
