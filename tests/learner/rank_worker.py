"""One rank of the two-process test: `RANK= WORLD_SIZE= MASTER_*= python rank_worker.py MODEL FOLDER CASE`."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from learner_tools import action, build_learner, episode, prompt, random_episodes, snapshot

from agent.episode import Episode, StopReason
from learner.algorithms import get_algorithm
from learner.config import RecipeError
from learner.parallel.ranks import Ranks
from learner.run.learner import Learner

SETTINGS: dict[str, Any] = {
    "policy": {"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3},
    "critic": {"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3},
    "advantage_scale": "std",
    "critic_updates": 2,
    "batch_size": 16,
}

# The groups of eight lie on a rank each, so in every minibatch one of the two has nothing.
SEVERAL: dict[str, dict[str, Any]] = {
    "vapo": {"policy_minibatches": 2, "policy_epochs": 2},
    "sao_k1": {"policy_minibatches": 2, "denominator": "trusted", "eps_high": 0.3, "critic_updates": None},
}


def halves(case: str) -> tuple[list[Episode], list[Episode]]:
    """The part of each rank."""
    mixed = random_episodes(16, seed=5, group_size=8)
    if case == "empty":  # rank 1 was dealt no row
        return mixed, []
    if case.endswith("no_action"):  # rank 1 has episodes, and nothing to train on
        aborted = [episode(e.segments, e.turn_rewards, name=e.id, stop=StopReason.ABORTED) for e in mixed[8:]]
        return mixed[:8], aborted
    if case == "all_gated":  # every token of rank 1 is outside the interval
        return mixed[:8], [episode([prompt([i]), action([3, 4], 8.0)], [1.0], name=f"x{i}") for i in range(8)]
    return mixed[:8], mixed[8:]


def micro_batches(case: str, rank: int) -> int:
    """Tokens a micro-batch: rank 0 needs one micro-batch, rank 1 one for every episode, in the case so called."""
    return (100_000, 1)[rank] if case.endswith("unequal") else 60


def model_of(case: str, model: Path, folder: Path) -> Path:
    """The model folder of a case: with a head of its own where its name says so."""
    return folder / "untied" if case.startswith("untied") else model


def spoil_a_loss(own: Learner) -> None:
    """The policy's first loss on this rank is no number, though its gradient is one."""
    add = own.policy.add_gradients

    def spoiled(loss: torch.Tensor) -> None:
        add(loss + (loss.detach() * float("nan")))
        for parameter in own.policy.parameters:
            parameter.grad = torch.zeros_like(parameter)
        own.policy.add_gradients = add  # type: ignore[method-assign]

    own.policy.add_gradients = spoiled  # type: ignore[method-assign]


def learner(model: Path, folder: Path, algorithm: str, tokens: int) -> Learner:
    settings = SETTINGS if get_algorithm(algorithm).needs_critic else {"policy": SETTINGS["policy"], "batch_size": 16}
    changes = {**settings, "algorithm": algorithm, "micro_batch_tokens": tokens, "max_padding": 0.99}
    changes |= SEVERAL.get(algorithm, {})
    own = build_learner(model, folder, learner={k: v for k, v in changes.items() if v is not None})
    if own.critic is not None:
        with torch.no_grad():
            own.critic.unwrapped.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return own


def trained(own: Learner, episodes: list[Episode], rows: list[int] | None = None) -> dict[str, Any]:
    """Weights and figures after one step, and after a second one on the same episodes; `rows` are this rank's."""
    found: dict[str, Any] = {}
    for step in range(2):
        _, result = own.step(episodes, rows)
        found[f"figures {step}"] = result.figures
        found[f"policy {step}"] = snapshot(own.policy)
        if own.critic is not None:
            found[f"critic {step}"] = snapshot(own.critic)
    return found


if __name__ == "__main__":
    import os

    torch.set_num_threads(1)
    rank, (model, folder, *jobs) = int(os.environ["RANK"]), sys.argv[1:]
    for name in ("sao_running_mean", "agentrl"):  # their advantages look at the whole batch
        try:
            learner(Path(model), Path(folder), name, 60)
        except RecipeError as error:
            (Path(folder) / f"refused_{name}_{rank}").write_text(str(error))
    try:
        build_learner(Path(model), Path(folder), learner={"algorithm": "grpo", "batch_size": 8})
    except RecipeError as error:
        (Path(folder) / f"refused_batch_{rank}").write_text(str(error))
    for job in jobs:
        algorithm, case = job.split(":")
        own = learner(model_of(case, Path(model), Path(folder)), Path(folder), algorithm, micro_batches(case, rank))
        if case == "spoiled" and rank == 1:
            spoil_a_loss(own)
        assert own.policy.accelerator.num_processes == 2
        first, second = halves(case)
        rows = [list(range(len(first))), list(range(len(first), len(first) + len(second)))][rank]
        torch.save(trained(own, [*first, *second], rows), Path(folder) / f"{algorithm}_{case}_{rank}.pt")
    wrapper = weakref.ref(own.policy.module)
    Ranks(own).leave()
    assert wrapper() is None, "torch deadlocks now and then where a wrapper outlives its group"
