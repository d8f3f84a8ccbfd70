"""Episodes made by hand, a micro model, and learners on it: real parts, only small."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from agent.episode import Episode, Experts, SamplingParams, Segment, StopReason
from learner.config import Recipe, TinyModelConfig, parse_recipe
from learner.model.tiny import write_tiny_model
from learner.model.trainee import Trainee
from learner.run.learner import Learner

MICRO = {
    "vocab_size": 320,
    "hidden_size": 16,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "experts": 4,
    "experts_per_token": 2,
    "expert_width": 16,
    "max_context": 512,
}
TEXTS = ["What is 1 + 1? <tool_call>{}</tool_call> \\boxed{2}"] * 4


def write_micro_model(folder: Path, *, seed: int = 0, **changes: int) -> Path:
    """A random micro model as an ordinary model folder."""
    write_tiny_model(folder, TinyModelConfig(**{**MICRO, **changes}), TEXTS, seed)
    return folder


def write_untied_copy(source: Path, folder: Path) -> Path:
    """The model of `source` with a head of its own, unlike its embedding; the tokenizer is the same."""
    shutil.copytree(source, folder)
    config = AutoConfig.from_pretrained(source)
    config.tie_word_embeddings = False
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(source, config=config)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.05)
    model.save_pretrained(folder)
    return folder


def micro_recipe(folder: Path, **sections: Any) -> Recipe:
    """A recipe whose run lives in `folder`; sections are merged over small defaults."""
    data: dict[str, Any] = {
        "name": "micro",
        "runs_dir": str(folder),
        "model": {"tiny": MICRO},
        "learner": {
            "steps": 8,
            "batch_size": 8,
            "policy": {"lr": 1e-2, "warmup_steps": 1, "weight_decay": 0.1},
            "critic": {"lr": 1e-2, "warmup_steps": 1, "weight_decay": 0.1},
            "keep_checkpoints": 3,
        },
        "engine": {"max_context": 512},
        "runtime": {"max_context_tokens": 400, "max_tokens_per_turn": 16},
    }
    for name, section in sections.items():
        if isinstance(section, dict) and isinstance(data.get(name), dict) and name != "model":
            data[name] = {**data[name], **section}
        else:
            data[name] = section
    return parse_recipe(data)


def build_learner(source: Path, folder: Path, *, accelerator: Accelerator | None = None, **sections: Any) -> Learner:
    """A learner on the model folder `source`, its critic fresh on the same body; no `accelerator`: a plain one."""
    torch.manual_seed(0)
    recipe, place = micro_recipe(folder, **sections), accelerator or Accelerator(cpu=True)
    return Learner.build(recipe, place, policy_folder=source, critic_folder=folder / "none")


def action(ids: Sequence[int], logprobs: Sequence[float] | float = -5.0, versions: Sequence[int] | int = 0) -> Segment:
    """An action segment; a single log-prob or version holds for every token."""
    count = len(ids)
    return Segment(
        "action",
        tuple(ids),
        logprobs=(logprobs,) * count if isinstance(logprobs, float) else tuple(logprobs),
        versions=(versions,) * count if isinstance(versions, int) else tuple(versions),
        finish_reason="stop",
    )


def prompt(ids: Sequence[int]) -> Segment:
    return Segment("prompt", tuple(ids))


def observation(ids: Sequence[int]) -> Segment:
    return Segment("observation", tuple(ids))


def episode(
    segments: Sequence[Segment],
    rewards: Sequence[float],
    *,
    name: str = "e0",
    stop: StopReason = StopReason.TERMINATED,
    group: str | None = None,
    task: str = "task",
    **fields: Any,
) -> Episode:
    return Episode(
        id=name,
        env_id="sao/PythonTIR-v0",
        task_id=task,
        segments=tuple(segments),
        turn_rewards=tuple(rewards),
        stop_reason=stop,
        sampling=SamplingParams(),
        group_id=group,
        **fields,
    )


def random_episodes(count: int, *, seed: int = 0, vocab: int = 263, group_size: int = 1) -> list[Episode]:
    """Episodes of one to three turns and quite different lengths, with rewards 0 or 1."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        segments = [prompt([rng.randrange(vocab) for _ in range(rng.randint(2, 9))])]
        turns = rng.randint(1, 3)
        for turn in range(turns):
            size = rng.randint(1, 7)
            ids = [rng.randrange(vocab) for _ in range(size)]
            segments.append(action(ids, [-5.7 + rng.uniform(-0.3, 0.3) for _ in ids]))
            if turn + 1 < turns:
                segments.append(observation([rng.randrange(vocab) for _ in range(rng.randint(1, 6))]))
        reward = [0.0] * (turns - 1) + [float(rng.random() < 0.5)]
        group = f"g{i // group_size}"
        found.append(episode(segments, reward, name=f"e{i}", task=f"t{i // group_size}", group=group))
    return found


def carrying(episodes: Sequence[Episode], experts: torch.Tensor) -> list[Episode]:
    """The episodes with the experts [B,T,layers,k] of every token, but of the last one of an action."""
    found = []
    for row, episode in enumerate(episodes):
        start, segments = 0, []
        for segment in episode.segments:
            known = len(segment.token_ids) - (segment.kind == "action")
            packed = Experts.pack(experts[row, start : start + known].numpy())
            segments.append(msgspec.structs.replace(segment, experts=packed))
            start += len(segment.token_ids)
        found.append(msgspec.structs.replace(episode, segments=tuple(segments)))
    return found


class Gradients:
    """Every gradient that a trainee's optimiser is about to use, one dict of clones an update."""

    def __init__(self, trainee: Trainee) -> None:
        self.updates: list[dict[str, torch.Tensor]] = []
        self._names = {id(p): name for name, p in trainee.module.named_parameters()}
        trainee.optimizer.optimizer.register_step_pre_hook(self._record)

    def _record(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.updates.append(
            {
                self._names[id(p)]: p.grad.detach().clone()
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            }
        )


def snapshot(trainee: Trainee) -> dict[str, torch.Tensor]:
    """Clones of all parameters."""
    return {name: p.detach().clone() for name, p in trainee.unwrapped.named_parameters()}


def moments(trainee: Trainee) -> list[torch.Tensor]:
    """Every tensor in the optimiser's state, in the order of its parameters, cloned."""
    states = trainee.optimizer.state_dict()["state"]
    return [value.clone() for _, state in sorted(states.items()) for _, value in sorted(state.items())]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def changed(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> Iterator[str]:
    """The names of the tensors that differ in any bit."""
    return (name for name in left if not torch.equal(left[name], right[name]))
