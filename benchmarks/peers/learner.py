"""A policy's optimiser step against TRL's: tokens a CPU second, peak memory, and whether the gradients agree.

    python -m venv trl && trl/bin/pip install trl==1.16.0 torch==2.13.0
    python benchmarks/peers/learner.py --trl trl/bin/python                    # 40 minutes on a quiet machine
    python benchmarks/peers/learner.py --trl trl/bin/python --models moe --batches short --rounds 1

Both are given the same weights (5 million parameters, float32), tokens, advantages, recorded log-probs, rate and clip.
Log-probs are the model's own and a little noise, so nothing is gated or clipped and both losses have one gradient.
Each step runs in a process of its own with one thread, and is the second one there; the two take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.peers.cost import answer, cost_of  # noqa: E402
from benchmarks.report import save_json, show  # noqa: E402

EPISODES, VOCABULARY = 32, 2048
LENGTHS = {"short": (256, 512), "long": (1536, 2048)}
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "head_dim": 32, "init_std": 0.02, "max_context": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "moe": {"hidden_size": 192, "layers": 4, "heads": 6, "kv_heads": 2, "experts": 8, "expert_width": 224},
    "dense": {"hidden_size": 256, "layers": 5, "heads": 8, "kv_heads": 4, "experts": 0, "expert_width": 480},
}
WHO = ("project", "stock", "tuned")


def make_batch(name: str) -> dict[str, np.ndarray]:
    """ids int64[N,T], action bool[N,T], length, prompt int64[N], advantage float32[N]: turns of 16 to 64 tokens, with
    an observation as long behind each."""
    rng, (low, high) = random.Random(1), LENGTHS[name]
    length = np.array([high, *(rng.randint(low, high) for _ in range(EPISODES - 1))])
    prompt = np.array([rng.randint(n // 8, n // 4) for n in length])
    action = np.zeros((EPISODES, high), bool)
    for row in range(EPISODES):
        at = int(prompt[row])
        while at < length[row]:
            turn = rng.randint(16, 64)
            action[row, at : min(at + turn, length[row])] = True
            at += 2 * turn
    ids = np.random.default_rng(1).integers(VOCABULARY, size=action.shape) * (np.arange(high) < length[:, None])
    advantage = np.array([rng.gauss(0.0, 1.0) for _ in range(EPISODES)], np.float32)
    return {"ids": ids, "action": action, "length": length, "prompt": prompt, "advantage": advantage}


def prepare(folder: Path, model: str, batches: list[str]) -> None:
    """Write a model folder, and beside the weights the batches with log-probs that the model would give."""
    import torch
    from transformers import AutoModelForCausalLM

    from learner.config import TinyModelConfig
    from learner.model.forward import PolicyForward
    from learner.model.tiny import write_tiny_model

    torch.set_num_threads(1)
    rng = random.Random(0)
    texts = ["".join(rng.choice("abcdefghij ") for _ in range(200)) for _ in range(200)]
    write_tiny_model(folder, TinyModelConfig(**COMMON, **MODELS[model]), texts, 0)
    policy = PolicyForward(AutoModelForCausalLM.from_pretrained(folder).eval())
    for name in batches:
        batch, noise = make_batch(name), np.random.default_rng(0)
        logprobs = np.zeros(batch["ids"].shape, np.float32)
        for row, (ids, mask) in enumerate(zip(batch["ids"], batch["action"], strict=True)):
            with torch.no_grad():
                own = policy(torch.from_numpy(ids)[None], torch.from_numpy(mask)[None], False)[0].numpy()[0]
            logprobs[row] = np.where(mask, own + noise.normal(0.0, 0.02, own.shape), 0.0)
        np.savez(folder / f"{name}.npz", **batch, logprobs=logprobs)  # type: ignore[arg-type]


def project_step(folder: Path, name: str, gradients: Path) -> None:
    """The project's worker: `learner.updates.update_policy` with the defaults of a recipe."""
    import torch
    from accelerate import Accelerator

    from learner.config import Recipe
    from learner.data.batch import Batch
    from learner.data.buckets import Buckets, padding_share
    from learner.run.learner import Learner
    from learner.updates import update_policy

    torch.set_num_threads(1)
    data = {key: torch.from_numpy(array) for key, array in np.load(folder / f"{name}.npz").items()}
    section = {"algorithm": "grpo_dis", "batch_size": EPISODES, "policy": {"lr": 1e-6, "warmup_steps": 0}}
    recipe = Recipe.model_validate({"name": "peers", "model": {"path": str(folder)}, "learner": section})
    own = Learner.build(recipe, Accelerator(cpu=True), policy_folder=folder, critic_folder=folder / "none")
    mask, names = data["action"], tuple(map(str, range(EPISODES)))
    batch = Batch(
        input_ids=data["ids"],
        action_mask=mask,
        rollout_logprobs=data["logprobs"],
        versions=torch.where(mask, 0, -1),
        rewards=torch.zeros(mask.shape),
        turn_ids=torch.where(mask, 0, -1),
        lengths=data["length"],
        truncated=torch.zeros(EPISODES, dtype=torch.bool),
        group_ids=torch.arange(EPISODES) // 8,
        episodes=torch.arange(EPISODES),
        episode_ids=names,
        task_ids=names,
        families=names,
    )
    limits, advantages = recipe.learner, data["advantage"][:, None] * mask
    cut: list[Buckets] = []

    def step() -> float:
        buckets = Buckets.of(
            batch,
            own.policy.accelerator,
            max_tokens=limits.micro_batch_tokens,
            max_padding=limits.max_padding,
            packed=own.policy.unwrapped.packed,
        )
        cut.append(buckets)
        figures = update_policy(buckets, own.policy, own.algorithm, advantages, float(batch.action_tokens))[2]
        return figures["gate/share"]

    def keep(optimizer: Any, *_: Any) -> None:
        named = own.policy.unwrapped.model.named_parameters()
        np.savez(gradients, **{n: p.grad.numpy() for n, p in named if p.grad is not None})

    handle = own.policy.optimizer.optimizer.register_step_pre_hook(keep)
    gated = step()
    handle.remove()
    cost = cost_of(step)
    cutting = cut[-1]
    padding = 0.0 if own.policy.unwrapped.packed else padding_share(cutting.batch.lengths.tolist(), cutting.rows)
    answer(cost | {"micro_batches": len(cut[-1]), "padding": padding, "gated": gated})


def ask(command: list[str]) -> dict[str, Any]:
    """Run a worker with one thread; its last line. Raises `RuntimeError` with what it said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def cosine(one: Path, other: Path) -> float:
    """Of two gradients, over all parameters; both must have the same."""
    a, b = np.load(one), np.load(other)
    names = sorted(a.files)
    if names != sorted(b.files):
        raise RuntimeError(f"other parameters: {set(a.files) ^ set(b.files)}")
    left, right = (np.concatenate([found[n].ravel() for n in names]).astype(np.float64) for found in (a, b))
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="the Python that has TRL (none: the project alone)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        project_step(Path(given.worker[0]), given.worker[1], Path(given.worker[2]))
        return 0
    rows, kept = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for model in given.models:
            folder = Path(scratch) / model
            prepare(folder, model, given.batches)
            for batch in given.batches:
                tokens = int(np.load(folder / f"{batch}.npz")["length"].sum())
                found: dict[str, list[dict[str, Any]]] = {who: [] for who in WHO[: 3 if given.trl else 1]}
                for _ in range(given.rounds):
                    for who in found:
                        target = str(Path(scratch) / f"{who}.npz")
                        command = [sys.executable, __file__, "--worker", str(folder), batch, target]
                        if who != "project":
                            worker = str(Path(__file__).parent / "trl_step.py")
                            command = [str(given.trl), worker, str(folder), batch, who, target]
                        found[who].append(ask(command))
                speed = {who: [tokens / one["cpu_s"] for one in answers] for who, answers in found.items()}
                for who, answers in found.items():
                    against = statistics.median(m / o for m, o in zip(speed["project"], speed[who], strict=True))
                    alike = cosine(Path(scratch) / "project.npz", Path(scratch) / f"{who}.npz")
                    peak = statistics.median(one["peak_mib"] for one in answers)
                    middle = statistics.median(speed[who])
                    first = answers[0]
                    name = who if who == "project" else f"TRL {who}"
                    rows.append(
                        [f"{model}, {batch}: {name}", str(first["micro_batches"]), f"{first['padding']:.0%}",
                         f"{middle:,.0f}", f"{against:.2f}", f"{peak:,.0f}", f"{alike:.7f}"]
                    )  # fmt: skip
                    kept.append({"model": model, "batch": batch, "who": who, "cosine": alike, "answers": answers})
    columns = ["step", "micro-batches", "padding", "tokens a CPU s", "project / it", "peak MiB", "cosine"]
    show("A policy's optimiser step", columns, rows, [f"medians of {given.rounds} rounds, one thread each"])
    save_json(given.json, {"steps": kept})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
