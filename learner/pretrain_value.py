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
from agent.runtime.settings import EnvConfig
from envs import make_core
from learner.advantages import skip_observation_gae
from learner.config import Recipe, RecipeError
from learner.data.batch import Batch, build_batch, is_trained, shuffled_rewards
from learner.data.buckets import Buckets, Piece
from learner.faults import LearnerFault
from learner.maths.statistics import EVStatistics
from learner.model.critic import freeze, new_critic, save_critic
from learner.model.finite import require_finite
from learner.model.forward import CriticForward
from learner.model.loading import load_body
from learner.model.trainee import Trainee, pack_rows
from learner.parallel.collectives import merged, share, share_result
from learner.parallel.dealing import rows_of_rank
from learner.parallel.layout import layout_of
from learner.parallel.ranks import make_accelerator
from learner.run.cli import command
from learner.run.display import Display
from learner.services.processes import Services
from learner.sft import starting_model
from learner.updates import StepSettings, update_critic

_LEASE_WAIT_S = 5.0


def tasks_of_store(recipe: Recipe) -> dict[str, Any]:
    """The keys of a store that say which training tasks there are: of one environment, or of several with weights.

    Raises `RecipeError` for one of several that has none.
    """
    if not recipe.environments:
        return {"tasks": count_tasks(recipe.env)}
    counts = {one.name: count_tasks(one.env) for one in recipe.environments}
    if empty := [name for name, count in counts.items() if not count]:
        raise RecipeError(f"environments: {empty[0]} has no task with these arguments; change them, or leave it out")
    return {
        "environments": [
            {"name": one.name, "tasks": counts[one.name], "weight": one.weight} for one in recipe.environments
        ]
    }


def count_tasks(config: EnvConfig) -> int:
    """How many tasks an environment has."""

    async def count() -> int:
        env = make_core(config.id, **config.kwargs)
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
        **await asyncio.to_thread(tasks_of_store, recipe),
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
        private_store=True,
        private_engines=recipe.learner.online,  # a server's engine has users
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


def fit_critic(
    critic: CriticForward,
    train: list[Episode],
    held_out: list[Episode],
    recipe: Recipe,
    display: Display,
    accelerator: Accelerator,
) -> tuple[Trainee, dict[str, float]]:
    """Regress on the returns of `train`; report explained variance on `held_out` before and after.

    What counts of a truncated episode is as in RL (`learner.truncation`). Raises `LearnerFault` where nothing is left.
    """
    config = recipe.value_pretraining
    assert config is not None
    freeze(critic, config.trainable)
    trainee = Trainee.prepare(critic, config.optimizer, accelerator, total_steps=config.steps)
    pack_rows(recipe.learner.packing, recipe.model.attention_implementation, [trainee])
    # The rollouts are the policy's own: V-trace's ratios are 1, and its targets the returns.
    algorithm = replace(recipe.learner.resolve(), baseline="critic")
    settings = StepSettings(truncation=recipe.learner.truncation)
    train, held_out = ([e for e in part if is_trained(e, settings.truncation)] for part in (train, held_out))
    if not train:
        raise LearnerFault(
            "value pretraining: every episode was truncated, and learner.truncation=drop trains on none of them. Raise "
            "runtime.max_context_tokens or the environment's limits, or choose terminal or bootstrap"
        )

    layout = layout_of(accelerator)

    def cut(episodes: list[Episode]) -> Buckets:
        rows = rows_of_rank(episodes, layout.data_rank(accelerator.process_index), layout.data_ranks)
        limits = recipe.learner
        batch = build_batch([episodes[row] for row in rows], truncation=limits.truncation)
        limit, packed = limits.micro_batch_tokens, trainee.unwrapped.packed
        return Buckets.of(batch, accelerator, max_tokens=limit, max_padding=limits.max_padding, packed=packed)

    checked = cut(held_out)
    figures = {"explained_variance_before": explained_variance_on(checked, trainee, settings.truncation)}
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
            trainee.require_progress(recipe.learner.discard_limit, "value pretraining")
            advance(1, explained_variance=statistics.value())
    if trainee.discarded:
        display.log(f"value pretraining: discarded {trainee.discarded} updates, whose gradient or loss was not finite")
    require_finite({"critic": trainee.unwrapped}, "value pretraining")
    figures["explained_variance_held_out"] = explained_variance_on(checked, trainee, settings.truncation)
    return trainee, figures


@torch.no_grad()
def explained_variance_on(held_out: Buckets, critic: Trainee, truncation: str = "terminal") -> float:
    """Explained variance over held-out episodes of all ranks, without training; NaN where undefined."""

    def read(part: Batch, rows: list[int]) -> Piece:
        values, next_values = critic.module(part.input_ids, lengths=part.lengths)
        bootstrap = part.bootstrap(next_values) if truncation == "bootstrap" else None
        _, returns = skip_observation_gae(part.rewards, values, part.action_mask, lam=1.0, bootstrap=bootstrap)
        return {"values": values, "returns": returns}

    whole = held_out.map(read)
    statistics = EVStatistics.of(whole["returns"], whole["values"], held_out.batch.action_mask)
    return merged(critic.accelerator, statistics).value()


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
    critic = new_critic(load_body(model, recipe.model, layout_of(accelerator)))
    trainee, figures = fit_critic(critic, train, held_out, recipe, display, accelerator)
    figures["success"] = sum(e.reward > 0 for e in episodes) / len(episodes)
    save_critic(trainee.unwrapped, scratch, main=accelerator.is_main_process)
    if accelerator.is_main_process:
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


if __name__ == "__main__":
    raise SystemExit(main())
