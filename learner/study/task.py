"""Is a task fit for a study? How much of the return a critic can know at the prompt, and as the episode goes on.

The critic is the project's own: value pretraining on episodes of the cold-started policy, all parameters, then read on
episodes that it was not trained on. At an episode's first action token it has seen the prompt alone; at the first token
of a later turn, all before it.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from agent.episode import Episode
from learner.config import Recipe, RecipeError
from learner.data.batch import build_batch, is_trained, rows_of
from learner.data.buckets import Buckets
from learner.maths.statistics import EVStatistics
from learner.model.critic import new_critic
from learner.model.loading import load_body
from learner.model.trainee import Trainee
from learner.parallel.layout import layout_of
from learner.parallel.ranks import make_accelerator
from learner.pretrain_value import collect_episodes, fit_critic
from learner.run.display import Display
from learner.run.folder import claim_run
from learner.sft import starting_model
from learner.updates import StepSettings, read_values

WANTED = {"prompt": 0.3, "middle": 0.6}
"""The explained variance above which a task is fit."""

PLACES = {"prompt": 0.0, "quarter": 0.25, "middle": 0.5, "three quarters": 0.75, "last turn": 1.0}
"""Where values are read: at the first token of the turn that lies so far into the episode."""


@dataclass(frozen=True)
class Fitness:
    """What was found. `explained`: explained variance by place; `all_tokens`: over all action tokens."""

    recipe: str
    explained: dict[str, float]
    all_tokens: float
    success: float
    turns: dict[str, float]
    success_by_turns: dict[str, tuple[int, float]]
    action_tokens: float
    trained_on: int
    held_out: int

    @property
    def is_fit(self) -> bool:
        """Whether it is above what is wanted everywhere."""
        return all(self.explained[place] > least for place, least in WANTED.items())


def turn_at(turns: int, share: float) -> int:
    """The number of the turn, from 0, that lies `share` into an episode of so many."""
    return min(turns - 1, math.floor(share * turns))


def by_place(
    values: torch.Tensor, turn_ids: torch.Tensor, mask: torch.Tensor, rewards: Sequence[float]
) -> dict[str, float]:
    """Explained variance of the episodes' returns by place. values, turn_ids, mask [B,T]; a row is an episode."""
    found: dict[str, float] = {}
    for place, share in PLACES.items():
        read = []
        for row in range(len(rewards)):
            own = turn_ids[row][mask[row]]
            numbers = own.unique()
            first = int((own == numbers[turn_at(len(numbers), share)]).nonzero()[0])
            read.append(float(values[row][mask[row]][first]))
        returns = torch.tensor(list(rewards), dtype=torch.float64)
        given = torch.tensor(read, dtype=torch.float64)
        found[place] = EVStatistics.of(returns, given, torch.ones_like(returns)).value()
    return found


def measure(recipe: Recipe, display: Display) -> Fitness:
    """Cold start (found again if it is there), episodes of it, a critic, and what it knows where."""
    config = recipe.value_pretraining
    if config is None:
        raise RecipeError("value_pretraining: the recipe has no such section, and a task is measured with one")
    if not recipe.learner.resolve().needs_critic:
        raise RecipeError(f"learner.algorithm: {recipe.learner.algorithm!r} has no critic; measure the task with sao")
    with claim_run(recipe) as folder:
        accelerator = make_accelerator(recipe)
        model = starting_model(recipe, display, accelerator)
        total = config.episodes + config.held_out_episodes
        shutil.rmtree(folder / "task", ignore_errors=True)
        episodes = asyncio.run(collect_episodes(recipe, model, folder / "task", total, display))
        episodes.sort(key=lambda episode: episode.id)  # quick ones finish first
        held_out, train = episodes[: config.held_out_episodes], episodes[config.held_out_episodes :]
        torch.manual_seed(recipe.seed)
        critic = new_critic(load_body(model, recipe.model, layout_of(accelerator)))
        trainee, figures = fit_critic(critic, train, held_out, recipe, display, accelerator)
        explained = _read(trainee, held_out, recipe)
        fitness = _told(recipe, explained, figures["explained_variance_held_out"], train, held_out)
        (folder / "task.json").write_text(json.dumps(asdict(fitness), indent=1), encoding="utf-8")
        return fitness


def _read(critic: Trainee, episodes: list[Episode], recipe: Recipe) -> dict[str, float]:
    """Explained variance by place of the episodes that a run would be trained on."""
    config = recipe.learner
    trained = [e for e in episodes if is_trained(e, config.truncation)]
    batch = build_batch(trained, truncation=config.truncation)
    tokens, padding, packed = config.micro_batch_tokens, config.max_padding, critic.unwrapped.packed
    buckets = Buckets.of(batch, critic.accelerator, max_tokens=tokens, max_padding=padding, packed=packed)
    values, _ = read_values(buckets, critic, StepSettings())
    rewards = [trained[index].reward for index, _ in rows_of(trained)]
    whole = buckets.batch
    return by_place(values.cpu(), whole.turn_ids.cpu(), whole.action_mask.bool().cpu(), rewards)


def _told(
    recipe: Recipe, explained: dict[str, float], all_tokens: float, train: list[Episode], held_out: list[Episode]
) -> Fitness:
    episodes = [*train, *held_out]
    lengths = sorted(len(e.actions) for e in episodes)
    by_turns: dict[int, list[bool]] = {}
    for episode in episodes:
        by_turns.setdefault(len(episode.actions), []).append(episode.reward > 0)
    quantile = {f"p{p}": float(lengths[min(len(lengths) - 1, p * len(lengths) // 100)]) for p in (10, 50, 90, 99)}
    return Fitness(
        recipe=recipe.name,
        explained=explained,
        all_tokens=all_tokens,
        success=sum(e.reward > 0 for e in episodes) / len(episodes),
        turns=quantile,
        success_by_turns={str(n): (len(won), sum(won) / len(won)) for n, won in sorted(by_turns.items())},
        action_tokens=sum(e.action_tokens for e in episodes) / len(episodes),
        trained_on=len(train),
        held_out=len(held_out),
    )


def task_page(fitness: Fitness, command: str, machine: str, date: str) -> str:
    """The findings as a page."""
    lines = ["# Is the task fit?", "", f"Made by `{command}` ({machine}, {date}); do not edit.", ""]
    lines += [
        f"Explained variance of the return by a critic that was pretrained on {fitness.trained_on:,} episodes of the "
        f"cold-started policy, all parameters, on {fitness.held_out} others; read at the first token of a turn.",
        "",
        "| where | explained variance | wanted |",
        "|---|---|---|",
    ]
    for place, value in fitness.explained.items():
        lines.append(f"| {place} | {value:.3f} | {f'above {WANTED[place]}' if place in WANTED else ''} |")
    lines += [f"| all action tokens | {fitness.all_tokens:.3f} | |", ""]
    verdict = "fit for a study" if fitness.is_fit else "**not** fit for a study"
    spread = ", ".join(f"{name} {value:.0f}" for name, value in fitness.turns.items())
    lines += [
        f"The task is {verdict}. Success {fitness.success:.1%}, {fitness.action_tokens:.0f} action tokens an episode, "
        f"turns {spread}.",
        "",
        "| turns | episodes | success |",
        "|---|---|---|",
    ]
    for turns, (count, success) in fitness.success_by_turns.items():
        lines.append(f"| {turns} | {count} | {success:.1%} |")
    return "\n".join(lines) + "\n"


def write_task_page(fitness: Fitness, path: Path, command: str, machine: str, date: str) -> None:
    """Write the page to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(task_page(fitness, command, machine, date), encoding="utf-8")
