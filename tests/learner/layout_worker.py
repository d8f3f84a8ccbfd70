"""One rank of a learner in a layout: `RANK= WORLD_SIZE= MASTER_*= python layout_worker.py FOLDER MODEL:KEYS ...`.

KEYS are those of `hardware`, as `fsdp=2,ep=2`; `narrow=1` among them computes in bfloat16,
`recompute=1` makes layers' activations twice, `kl=1` pulls to another policy. What came of a job lies in
FOLDER/MODEL_KEYS_RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from learner_tools import micro_recipe, moments, random_episodes
from torch.distributed.tensor import DTensor

from learner.config import RecipeError
from learner.data.buckets import Buckets
from learner.model.trainee import Trainee
from learner.parallel.ranks import Ranks, make_accelerator
from learner.run.learner import Learner

SETTINGS: dict[str, Any] = {
    "policy": {"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3, "clip_norm": 0.05},
    "critic": {"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3, "clip_norm": 0.5},
    "advantage_scale": "std",
    "critic_updates": 2,
    "batch_size": 16,
    "micro_batch_tokens": 100,
    "max_padding": 0.99,
}


def learner(model: Path, folder: Path, keys: str, **sections: Any) -> Learner:
    """A learner on `model` in the layout `keys`, with a critic whose head is not 0."""
    hardware = {name: int(size) for name, size in (word.split("=") for word in keys.split(",") if word)}
    narrow, again, pulled = (hardware.pop(key, 0) for key in ("narrow", "recompute", "kl"))
    settings = SETTINGS
    if pulled:
        settings = {**SETTINGS, "kl": {"coefficient": 5.0, "reference": str(model.with_name("other"))}}
    if narrow or again:
        precision = "bfloat16" if narrow else "float32"
        sections["model"] = {"path": str(model), "compute_dtype": precision, "recompute_layers": bool(again)}
    torch.manual_seed(0)
    recipe = micro_recipe(folder, **{"hardware": hardware, "learner": settings, **sections})
    accelerator = make_accelerator(recipe)
    own = Learner.build(recipe, accelerator, policy_folder=model, critic_folder=folder / "none")
    # Shares are cut into more micro-batches on the first rank than on the others, which must not matter.
    place = accelerator.layout.data_rank(accelerator.process_index)
    fewer = recipe.learner.model_copy(update={"micro_batch_tokens": 100 if place == 0 else 400})
    own.recipe = recipe.model_copy(update={"learner": fewer})
    if own.critic is not None:
        with torch.no_grad():
            own.critic.unwrapped.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return own


def whole(trainee: Trainee) -> dict[str, torch.Tensor]:
    """Clones of all weights, put together."""
    return {
        name: (p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()).clone()
        for name, p in trainee.unwrapped.named_parameters()
    }


def trained(own: Learner, steps: int = 3) -> dict[str, Any]:
    """Figures of each step, and all weights after the last."""
    figures = [own.step(random_episodes(16, seed=step))[1].figures for step in range(steps)]
    assert own.critic is not None
    return {"figures": figures, "policy": whole(own.policy), "critic": whole(own.critic)}


def rolled_back(own: Learner) -> None:
    """A step is made, taken back, and made again: the same to the last bit, and nothing whole was kept."""

    def state() -> list[torch.Tensor]:
        parts = [p for t in (own.policy, own.critic) if t for p in (*t.unwrapped.parameters(), *moments(t))]
        return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in parts]

    before = state()
    own.remember()
    own.step(random_episodes(16, seed=9))
    after = state()
    own.roll_back()
    assert all(torch.equal(a, b) for a, b in zip(state(), before, strict=True))
    own.step(random_episodes(16, seed=9))
    assert all(torch.equal(a, b) for a, b in zip(state(), after, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def held(trainee: Trainee) -> tuple[int, int]:
    """Numbers of this rank, and of the whole module."""
    parameters = list(trainee.unwrapped.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return sum(p.numel() for p in local), sum(p.numel() for p in parameters)


def narrow_parts(trainee: Trainee) -> list[str]:
    """What a forward makes in bfloat16 while its weights are float32; empty where all is float32."""
    assert all(p.dtype == torch.float32 for p in trainee.unwrapped.parameters())
    found = []

    def see(module: torch.nn.Module, _: Any, output: Any) -> None:
        found.extend([type(module).__name__] if getattr(output, "dtype", None) == torch.bfloat16 else [])

    hooks = [m.register_forward_hook(see) for m in trainee.unwrapped.modules() if isinstance(m, torch.nn.Linear)]
    with trainee.reading():
        trainee.module(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool))
    for hook in hooks:
        hook.remove()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *jobs = sys.argv[1:]
    counts: list[tuple[int, int]] = []
    bucketed = Buckets.of

    def counted(*arguments: Any, **options: Any) -> Buckets:
        found = bucketed(*arguments, **options)
        counts.append((len(found.rows), len(found)))
        return found

    Buckets.of = counted  # type: ignore[method-assign, assignment]
    for job in jobs:
        model, keys = job.split(":")
        name = f"{Path(model).name}_{keys}"
        counts.clear()
        try:
            own = learner(Path(model), Path(folder), keys)
        except RecipeError as error:
            (Path(folder) / f"{name}.refused").write_text(str(error))
            continue
        rank = own.policy.accelerator.process_index
        found = {
            **trained(own),
            "held": held(own.policy),
            "narrow": narrow_parts(own.policy),
            "micro-batches": list(counts),
        }
        torch.save(found, Path(folder) / f"{name}_{rank}.pt")
        if own.policy.accelerator.layout.cut:
            rolled_back(own)
    ranks = Ranks(own)
    weights = whole(own.policy)
    if ranks.accelerator.is_main_process:  # a probe: the main process asks, alone
        ids = torch.arange(12).reshape(2, 6)
        asked, _ = ranks.policy(ids, ids > 1)
        torch.save({"weights": weights, "ids": ids, "logprobs": asked}, Path(folder) / "asked.pt")
        ranks.dismiss()
    else:
        ranks.follow()
    ranks.leave()
