"""The numbers of a method that a recipe may set, each with the question whether the method reads it at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from learner.methods.algorithm import Algorithm


@dataclass(frozen=True)
class Option:
    """Where a number stands in an `Algorithm` ("critic.updates"), whether it acts there, and on what it would act."""

    path: str
    acts: Callable[[Algorithm], bool]
    wants: str


def _has_critic(algorithm: Algorithm) -> bool:
    return algorithm.critic is not None


def _has_interval(algorithm: Algorithm) -> bool:
    return algorithm.ratio not in ("none", "sequence_trust")


def _has_history(algorithm: Algorithm) -> bool:
    return algorithm.running_mean is not None


def _has_vtrace(algorithm: Algorithm) -> bool:
    return algorithm.baseline == "vtrace"


OPTIONS: dict[str, Option] = {
    "critic_updates": Option("critic.updates", _has_critic, "a critic"),
    "critic_trainable": Option("critic.trainable", _has_critic, "a critic"),
    "eps_low": Option("eps_low", _has_interval, "a ratio"),
    "eps_high": Option("eps_high", _has_interval, "a ratio"),
    "mismatch": Option("mismatch", lambda a: a.ratio == "icepop", "IcePop's mask"),
    # Groups and running means compare the undiscounted rewards of whole episodes.
    "gamma": Option("gamma", _has_critic, "a critic"),
    "lam": Option("lam", lambda a: a.baseline == "critic", "a critic's baseline"),
    "alpha": Option("alpha", lambda a: a.baseline == "critic" and a.lam is None, "an adaptive lambda"),
    "samples_per_prompt": Option("samples_per_prompt", lambda a: a.needs_groups, "groups of one prompt"),
    "aggregation": Option("aggregation", lambda _: True, "a policy loss"),
    "denominator": Option("denominator", lambda a: a.ratio == "dis", "the gate of DIS"),
    "normalize_group": Option("normalize_group", lambda a: a.baseline == "group", "a group's deviation"),
    "rho_bar": Option("rho_bar", _has_vtrace, "V-trace"),
    "c_bar": Option("c_bar", _has_vtrace, "V-trace"),
    "max_divergence": Option("max_divergence", lambda a: a.ratio == "sequence_trust", "trust by episode"),
    "running_mean.window": Option("running_mean.window", _has_history, "a running mean"),
    "running_mean.per_prompt": Option("running_mean.per_prompt", _has_history, "a running mean"),
    "running_mean.include_current": Option("running_mean.include_current", _has_history, "a running mean"),
}
"""From a recipe's key to the number that it sets."""


def with_options(algorithm: Algorithm, chosen: Mapping[str, Any]) -> Algorithm:
    """`algorithm` with the numbers that `chosen` names by their keys; those of a part that it lacks are left out.

    Raises `ValueError` where the numbers contradict each other.
    """
    changes: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for key, value in chosen.items():
        part, _, name = OPTIONS[key].path.rpartition(".")
        (parts.setdefault(part, {}) if part else changes)[name] = value
    for part, numbers in parts.items():
        if (now := getattr(algorithm, part)) is not None:
            changes[part] = replace(now, **numbers)
    return replace(algorithm, **changes)


def number_of(algorithm: Algorithm, key: str) -> Any:
    """What `algorithm` has for a recipe's key; None where it lacks the part that would hold it."""
    part, _, name = OPTIONS[key].path.rpartition(".")
    holder = getattr(algorithm, part) if part else algorithm
    return None if holder is None else getattr(holder, name)


def complaints(algorithm: Algorithm, chosen: Mapping[str, Any]) -> list[str]:
    """A sentence for each key of `chosen` that changes nothing in what `algorithm` does."""
    return [
        f"{key} has no effect with {algorithm.name!r}: it is for a method with {OPTIONS[key].wants}"
        for key in chosen
        if not OPTIONS[key].acts(algorithm)
    ]


def carried(chosen: Mapping[str, Any], head: Algorithm, variant: Algorithm) -> dict[str, Any]:
    """Of the numbers chosen for `head` those that hold for a variant of it too.

    A variant keeps what makes it one: a number in which the two presets differ is its own.
    """
    return {
        key: value
        for key, value in chosen.items()
        if OPTIONS[key].acts(variant) and number_of(variant, key) == number_of(head, key)
    }
