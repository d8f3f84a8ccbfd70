"""The page of a model on a hub: how it was trained, how it did, and its recipe. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from learner.config import ENDLESS, Recipe

CURVES = "curves.png"
"""The picture that the page shows, beside it."""

_ADDRESSES = frozenset({"url", "urls", "host", "hosts", "keys_file", "runs_dir", "hub", "serve"})
_SECRETS = ("_key", "_token", "_secret", "password", "api_key", "token")
_FIGURES = (
    ("held-out success", "evaluation/success"),
    ("reward of the batch", "rollout/reward"),
    ("action tokens an episode", "rollout/action_tokens"),
    ("explained variance of the critic", "critic/explained_variance"),
    ("entropy of the policy", "policy/entropy"),
    ("gated share of tokens", "gate/share"),
)


def model_card(recipe: Recipe, step: int, records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with the metadata that a hub reads. `records`: the run's metrics, oldest first (see `read_metrics`)."""
    algorithm = recipe.learner.algorithm
    of = f" of {recipe.learner.steps}" if recipe.learner.steps < ENDLESS else ""
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, sao]",
        "---",
        "",
        f"# {recipe.name}",
        "",
        f"A policy after {step}{of} steps of reinforcement learning with `{algorithm}`, by "
        "[Single-Rollout Asynchronous Optimization](https://arxiv.org/abs/2607.07508) or a method of the same table, "
        f"in the environment `{recipe.env.id}`.",
        "",
        f"![curves]({CURVES})",
        "",
        "| | last | best held-out |",
        "|---|---|---|",
    ]
    known = [record for record in records if record["step"] <= step]
    scored = [record for record in known if _number(record.get("evaluation/success")) is not None]
    best = max(scored, key=lambda record: float(record["evaluation/success"]), default={})
    for label, key in _FIGURES:
        last = next((value for record in reversed(known) if (value := _number(record.get(key))) is not None), None)
        there = _number(best.get(key))
        if last is not None:
            lines.append(f"| {label} | {last:.4g} | {'' if there is None else f'{there:.4g}'} |")
    if best:
        lines += ["", f"Best held-out: at step {best['step']}."]
    settings = yaml.safe_dump(shareable(recipe), sort_keys=False, allow_unicode=True)
    return "\n".join([*lines, "", "## Recipe", "", "```yaml", settings.rstrip(), "```", ""])


def shareable(recipe: Recipe) -> dict[str, Any]:
    """What the recipe sets, without addresses, secrets and the places of files: of a path, its last name."""
    data: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    return _without(data)


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without(v) for k, v in value.items() if k not in _ADDRESSES and not str(k).endswith(_SECRETS)}
    if isinstance(value, list | tuple):
        return [_without(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return value.rstrip("/").rsplit("/", 1)[-1]
    return value


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
