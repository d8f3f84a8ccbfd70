"""One rank: `RANK= WORLD_SIZE= MASTER_*= python context_worker.py MODELS FOLDER REPLICATE CONTEXT`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from learner_tools import (
    Gradients,
    action,
    build_learner,
    carrying,
    episode,
    observation,
    prompt,
    random_episodes,
    snapshot,
)
from torch import nn

from agent.engines.base import Completion
from agent.episode import Episode
from learner.config import ModelConfig, OptimizerConfig, RecipeError
from learner.data.batch import build_batch
from learner.model.forward import PolicyForward
from learner.model.loading import load_policy_model
from learner.model.trainee import Trainee
from learner.parallel.layout import LaidOutAccelerator, Layout, layout_of
from learner.parallel.ranks import Ranks
from learner.probes.parity_report import trainer_logprobs
from learner.run.learner import Learner
from learner.sft import fit

STEPS = 3
MODELS = ("dense", "moe", "sliding")
SETTINGS: dict[str, Any] = {
    "policy": {"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3},
    "critic": {"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3},
    "critic_updates": 2,
    "batch_size": 16,
    "truncation": "bootstrap",
    "micro_batch_tokens": 60,
    "max_padding": 0.99,
    "logprob_chunk": 3,  # rows reach the vocabulary in pieces that are computed again
}


def rows() -> list[Episode]:
    """Rows of all widths: some shorter than the parts are many, and actions that start at each place of a row."""
    rng = random.Random(7)
    made = random_episodes(8, seed=11)
    for width in (2, 3):
        made.append(episode([prompt([5] * (width - 1)), action([7], -5.6)], [1.0], name=f"short{width}"))
    for start in range(4, 10):  # of 13 tokens: with 2 parts the border is at 7, with 4 at 4, 8 and 12
        first = [rng.randrange(263) for _ in range(start - 3)]
        turns = [prompt(first), action([9], -5.5), observation([3, 4]), action([8] * (13 - start), -5.8)]
        made.append(episode(turns, [0.0, float(start % 2)], name=f"border{start}"))
    return made


def build(model: Path, folder: Path, accelerator: Any = None) -> Learner:
    """A learner on `model` whose critic knows something; layers are computed again in the backward pass."""
    kind = {
        "path": str(model),
        "recompute_layers": True,
        "attention_implementation": "eager" if model.name == "sliding" else "sdpa",
    }
    own = build_learner(model, folder, accelerator=accelerator, model=kind, learner=SETTINGS)
    assert own.critic is not None
    with torch.no_grad():
        own.critic.unwrapped.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return own


def trained(own: Learner, episodes: Sequence[Episode]) -> dict[str, Any]:
    """What three steps leave: every gradient on the way, weights, figures, and what is known of this rank's tokens."""
    assert own.critic is not None
    recorded = {"policy": Gradients(own.policy), "critic": Gradients(own.critic)}
    found: dict[str, Any] = {"steps": []}
    for _ in range(STEPS):
        batch, result = own.step(episodes)
        tokens = {"logprobs": result.logprobs, "values": result.values, "advantages": result.advantages}
        step = {"ids": batch.episode_ids, "mask": batch.action_mask, "figures": result.figures, "tokens": tokens}
        found["steps"].append(step)
    for name, trainee in (("policy", own.policy), ("critic", own.critic)):
        updates = [{k.removeprefix("module."): g for k, g in update.items()} for update in recorded[name].updates]
        found[name] = {"gradients": [whole(update) for update in updates], "weights": whole(snapshot(trainee))}
    return found


def whole(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same, where ranks hold parts of a tensor."""
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}


def routed(model: Path, folder: Path, accelerator: Any = None) -> dict[str, Any]:
    """A step whose tokens go to experts that the episodes carry, other ones for each token."""
    episodes = rows()
    shape = (*build_batch(episodes).input_ids.shape, 2)
    first = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(2))
    experts = torch.stack([first, (first + 1) % 4], dim=-1)
    kind = {"path": str(model), "recompute_layers": True}
    settings = {**SETTINGS, "routing": "replayed"}
    own = build_learner(model, folder, accelerator=accelerator, model=kind, learner=settings, engine={"launch": "vllm"})
    _, result = own.step(carrying(episodes, experts))
    figures = {name: figure for name, figure in result.figures.items() if name.startswith("router/")}
    return {"figures": figures, "weights": whole(snapshot(own.policy))}


def cold_start(model: Path, accelerator: Any) -> dict[str, torch.Tensor]:
    """The weights after two updates of supervised learning."""
    batch = build_batch(rows())
    examples = [
        (ids[:n], mask[:n]) for ids, mask, n in zip(batch.input_ids, batch.action_mask, batch.lengths, strict=True)
    ]
    forward = PolicyForward(load_policy_model(model, ModelConfig(path=model), layout_of(accelerator)))
    policy = Trainee.prepare(forward, OptimizerConfig(lr=1e-3, eps=1e-3), accelerator, total_steps=2)
    fit(policy, examples, steps=2, batch_size=8, seed=0, progress=lambda *_, **__: None, micro_batch_rows=3)
    return whole(snapshot(policy))


class Blurred(nn.Module):
    """A layer that mixes a row's tokens outside attention, as no rule by name could know."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.inner(hidden)
        return inner + hidden.cumsum(1)


def refusal(model: Path, accelerator: Any) -> str:
    """What is said of a model that computes something else in parts."""
    loaded = load_policy_model(model, ModelConfig(path=model))
    loaded.base_model.layers[0].mlp = Blurred(loaded.base_model.layers[0].mlp)
    try:
        Trainee.prepare(PolicyForward(loaded), OptimizerConfig(lr=1e-3), accelerator, total_steps=1)
    except RecipeError as error:
        return str(error)
    return ""


COMPLETION = Completion(token_ids=(9, 8, 7), logprobs=(-1.0,) * 3, versions=(0,) * 3, finish_reason="stop")


if __name__ == "__main__":
    torch.set_num_threads(1)
    models, folder, (replicate, context) = Path(sys.argv[1]), Path(sys.argv[2]), map(int, sys.argv[3:])
    accelerator = LaidOutAccelerator(cpu=True)
    accelerator.layout = Layout(replicate=replicate, context=context)
    rank = accelerator.process_index
    for name in MODELS:
        own = build(models / name, folder, accelerator)
        torch.save(trained(own, rows()), folder / f"{name}_{rank}.pt")
    probed = trainer_logprobs(own.policy.unwrapped, [1, 2, 3, 4], COMPLETION)  # on all ranks: weights are cut
    if rank == 0:
        torch.save(probed, folder / "probe.pt")
    accelerator.wait_for_everyone()
    torch.save(routed(models / "moe", folder, accelerator), folder / f"routed_{rank}.pt")
    torch.save(cold_start(models / "moe", accelerator), folder / f"sft_{rank}.pt")
    (folder / f"refused_{rank}.json").write_text(json.dumps(refusal(models / "dense", accelerator)))
    Ranks(own).leave()
