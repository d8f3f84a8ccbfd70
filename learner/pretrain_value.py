"""Value pretraining: `python -m learner.pretrain_value RECIPE` fits the critic before RL starts.

python -m learner.pretrain_value recipes/tir_tiny.yaml value_pretraining.episodes=512
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from agent import episode as records
from agent.episode import Episode
from envs import make_core
from learner.batch import build_batch, shuffled_rewards
from learner.cli import command
from learner.config import Recipe, RecipeError
from learner.critic import freeze, load_head, new_critic, save_critic
from learner.display import Display
from learner.forward import CriticForward
from learner.models import load_body
from learner.ranks import make_accelerator, own_rows, share, share_result
from learner.sao import StepSettings, explained_variance_of, update_critic
from learner.services import Services
from learner.sft import run_sft
from learner.trainee import Buckets, Trainee

_LEASE_WAIT_S = 5.0


def count_tasks(recipe: Recipe) -> int:
    """How many training tasks the recipe's environment has."""

    async def count() -> int:
        env = make_core(recipe.env.id, **recipe.env.kwargs)
        try:
            return len(env.task_ids)
        finally:
            await env.aclose()

    return asyncio.run(count())


async def collect_episodes(recipe: Recipe, model: Path, folder: Path, count: int, display: Display) -> list[Episode]:
    """`count` episodes of the policy in `model`, one a task, by the same engines as in training.

    Engines of `engine.urls` are given that policy first. Store and runtime are started here even if the run's own
    are elsewhere: these episodes are not the run's.
    """
    config = {
        "tasks": await asyncio.to_thread(count_tasks, recipe),
        "seed": recipe.seed + 1,
        "batch": count,
        "max_lag": 0,
    }
    async with Services.start(
        recipe,
        model=model,
        folder=folder,
        store_config=config,
        version=0,
        own_store=True,
        own_engines=recipe.learner.online,  # a server's engine has users
    ) as services:
        with display.stage("Value rollouts", count) as advance:
            done = 0
            while True:
                services.check()
                claim = await services.store.claim(count, version=0, wait_s=_LEASE_WAIT_S if done else 1.0)
                ready = count if claim else (await services.store.status()).ready
                advance(ready - done)
                done = ready
                if claim:
                    return [records.decode(data) for data in claim.episodes]


def load_critic(policy_folder: Path, critic_folder: Path, recipe: Recipe) -> CriticForward:
    """The pretrained critic, or a fresh one on the policy's body if there was no value pretraining."""
    if not (critic_folder / "config.json").exists():
        return new_critic(load_body(policy_folder, recipe.model))
    critic = new_critic(load_body(critic_folder, recipe.model))
    load_head(critic, critic_folder)
    return critic


def fit_critic(
    critic: CriticForward,
    train: list[Episode],
    held_out: list[Episode],
    recipe: Recipe,
    display: Display,
    accelerator: Accelerator,
) -> tuple[Trainee, dict[str, float]]:
    """Regress on the returns of `train`; report explained variance on `held_out` before and after."""
    config = recipe.value_pretraining
    assert config is not None
    freeze(critic, config.trainable)
    trainee = Trainee.prepare(critic, config.optimizer, accelerator, total_steps=config.steps)
    # The rollouts are the policy's own: V-trace's ratios are 1, and its targets the returns.
    algorithm, settings = replace(recipe.learner.resolve(), baseline="critic"), StepSettings()

    def cut(episodes: list[Episode]) -> Buckets:
        own = build_batch(
            [episodes[i] for i in own_rows(episodes, accelerator.process_index, accelerator.num_processes)]
        )
        limits = recipe.learner
        return Buckets.of(own, accelerator, max_tokens=limits.micro_batch_tokens, max_padding=limits.max_padding)

    checked = cut(held_out).parts
    figures = {"explained_variance_before": explained_variance_of(checked, trainee).value()}
    if recipe.learner.shuffle_rewards:  # a critic that knows the real rewards would teach them through its values
        train = shuffled_rewards(train, recipe.seed)
    rng, order = random.Random(recipe.seed), list[Episode]()
    with display.stage("Value pretraining", config.steps) as advance:
        for _ in range(config.steps):
            if len(order) < config.batch_size:
                order = rng.sample(train, len(train))
            chosen = [order.pop() for _ in range(min(config.batch_size, len(order)))]
            tokens = float(sum(episode.action_tokens for episode in chosen))
            _, statistics = update_critic(cut(chosen), trainee, algorithm, settings, tokens)
            advance(1, explained_variance=statistics.value())
    figures["explained_variance_held_out"] = explained_variance_of(checked, trainee).value()
    return trainee, figures


def run_value_pretraining(recipe: Recipe, model: Path, display: Display, accelerator: Accelerator) -> Path:
    """Pretrain the critic of `recipe` and return its folder, `runs/<name>/value`; done once, then found again.

    An algorithm without a critic goes on without.
    """
    target, scratch = recipe.run_dir / "value", recipe.run_dir / ".value"
    config = recipe.value_pretraining
    if config is not None and not recipe.pretrains_critic:
        display.log(f"no value pretraining: {recipe.learner.algorithm} has no critic")
    if config is None or not recipe.pretrains_critic or share(accelerator, (target / "config.json").exists()):
        return target
    total = config.episodes + config.held_out_episodes

    def rollouts() -> list[Episode]:
        shutil.rmtree(scratch, ignore_errors=True)
        return asyncio.run(collect_episodes(recipe, model, scratch, total, display))

    episodes = share_result(accelerator, rollouts, limit_s=recipe.learner.collective_timeout_s)
    # Held out by name, not by completion: quick episodes finish first.
    episodes.sort(key=lambda episode: episode.id)
    held_out, train = episodes[: config.held_out_episodes], episodes[config.held_out_episodes :]
    torch.manual_seed(recipe.seed)
    critic = new_critic(load_body(model, recipe.model))
    trainee, figures = fit_critic(critic, train, held_out, recipe, display, accelerator)
    figures["success"] = sum(e.reward > 0 for e in episodes) / len(episodes)
    if accelerator.is_main_process:
        save_critic(trainee.unwrapped, scratch)
        (scratch / "figures.json").write_text(json.dumps(figures, indent=1))
        scratch.rename(target)
    accelerator.wait_for_everyone()
    accelerator.free_memory()  # it holds what it has prepared: this critic's moments would stay through RL
    display.log(
        f"critic pretrained: held-out explained variance {figures['explained_variance_held_out']:.3f}, "
        f"success of the rollouts {figures['success']:.1%}"
    )
    return target


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""

    def run(recipe: Recipe, display: Display) -> dict[str, Any]:
        if recipe.value_pretraining is None:
            raise RecipeError("value_pretraining: the recipe has no such section")
        if not recipe.pretrains_critic:
            raise RecipeError(f"learner.algorithm: {recipe.learner.algorithm!r} has no critic to pretrain")
        accelerator = make_accelerator(recipe)
        model = starting_model(recipe, display, accelerator)
        folder = run_value_pretraining(recipe, model, display, accelerator)
        return {"critic": str(folder), **json.loads((folder / "figures.json").read_text())}

    return command(__doc__, run, argv)


def starting_model(recipe: Recipe, display: Display, accelerator: Accelerator) -> Path:
    """The policy that RL starts from: the cold start's if the recipe has one, else `model.path`."""
    if recipe.sft is not None:
        return run_sft(recipe, display, accelerator)
    if recipe.model.path is None:
        raise RecipeError("sft: a tiny model needs a cold start (its weights are random)")
    return recipe.model.path


if __name__ == "__main__":
    raise SystemExit(main())
