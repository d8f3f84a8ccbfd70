"""The learner: policy and critic with their optimisers, as one thing that steps, saves and goes on.

Its life: build ──resume()?──▶ ready ──step()*, save()*, export()*──▶ done. It knows nothing of engines or stores.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from agent.episode import Episode
from learner.advantages import RunningMeanBaseline
from learner.algorithms import Algorithm
from learner.batch import Batch, build_batch, shuffled_rewards
from learner.checkpoint import Progress, load_checkpoint, save_checkpoint
from learner.config import Recipe, RecipeError
from learner.critic import freeze
from learner.forward import PolicyForward
from learner.models import checkpoint_tensors, load_policy_model, save_policy_model
from learner.pretrain_value import load_critic
from learner.ranks import own_rows
from learner.sao import StepResult, StepSettings, sao_step
from learner.trainee import Trainee

_KEEP_SNAPSHOTS = 3


@dataclass
class Learner:
    """Everything that a checkpoint holds, and the step that changes it."""

    recipe: Recipe
    algorithm: Algorithm
    policy: Trainee
    critic: Trainee | None
    running_mean: RunningMeanBaseline | None
    progress: Progress
    source: Path
    _remembered: dict[str, Any] | None = None

    @classmethod
    def build(cls, recipe: Recipe, accelerator: Accelerator, *, policy_folder: Path, critic_folder: Path) -> Learner:
        """Load policy and critic, freeze what the algorithm freezes, make the optimisers."""
        config, algorithm = recipe.learner, recipe.learner.resolve()
        forward = PolicyForward(
            load_policy_model(policy_folder, recipe.model),
            temperature=recipe.runtime.sampling.temperature,
            chunk=config.logprob_chunk,
        )
        policy = Trainee.prepare(forward, config.policy, accelerator, total_steps=config.steps)
        critic = None
        if algorithm.critic is not None:
            module = load_critic(policy_folder, critic_folder, recipe)
            freeze(module, algorithm.critic.trainable)
            total = config.steps * algorithm.critic.updates
            critic = Trainee.prepare(module, config.critic, accelerator, total_steps=total)
        if algorithm.running_mean and accelerator.num_processes > 1:
            raise RecipeError(
                f"learner.algorithm {algorithm.name!r} keeps one history of rewards in the order of completion; "
                "run it in a single process"
            )
        if algorithm.normalize_task and accelerator.num_processes > 1:
            raise RecipeError(
                f"learner.algorithm {algorithm.name!r} standardises advantages over all episodes of a task, and a "
                "process has only its own; run it in a single process"
            )
        prompts = config.batch_size // algorithm.samples_per_prompt
        if prompts < accelerator.num_processes:
            raise RecipeError(
                f"learner.batch_size {config.batch_size} is {prompts} prompts of {algorithm.name!r}, which cannot be "
                f"dealt to {accelerator.num_processes} processes; raise it, or start fewer"
            )
        mean = algorithm.running_mean.build() if algorithm.running_mean else None
        return cls(recipe, algorithm, policy, critic, mean, Progress(), policy_folder)

    def step(self, episodes: Sequence[Episode], rows: Sequence[int] | None = None) -> tuple[Batch, StepResult]:
        """One step on a claimed batch. Every rank is given all of it and takes its own rows, which are returned.

        `rows`: which those are, if not the share that `own_rows` deals.
        """
        config = self.recipe.learner
        if config.shuffle_rewards:
            episodes = shuffled_rewards(episodes, self.recipe.seed + self.progress.step)
        batch = build_batch(episodes, truncation=config.truncation)
        settings = StepSettings(
            advantage_scale=config.advantage_scale,
            truncation=config.truncation,
            micro_batch_tokens=config.micro_batch_tokens,
            max_padding=config.max_padding,
            train_policy=self.progress.step >= config.critic_only_steps,
        )
        accelerator = self.policy.accelerator
        if rows is None:
            rows = own_rows(episodes, accelerator.process_index, accelerator.num_processes)
        part = batch.rows(rows)
        result = sao_step(part, self.policy, self.critic, self.algorithm, settings, self.running_mean)
        self.progress.step += 1
        self.progress.episodes += batch.size
        self.progress.action_tokens += batch.action_tokens
        stale = (self.progress.version - batch.versions >= 1) & batch.action_mask
        self.progress.stale_tokens += int(stale.sum())
        return part, result

    def remember(self) -> None:
        """Keep a copy of all that a step changes, for `roll_back`: weights, moments, schedules, running baseline.

        It costs as much memory as they do, and is made before a step whose outcome may be dropped.
        """
        self._remembered = {
            name: {
                "weights": {k: v.detach().clone() for k, v in trainee.unwrapped.state_dict().items()},
                "state": copy.deepcopy(trainee.state_dict()),
            }
            for name, trainee in self._trainees()
        }
        self._remembered["baseline"] = copy.deepcopy(self.running_mean.state_dict()) if self.running_mean else None

    def roll_back(self) -> None:
        """Be again as at the last `remember`, but for the counters: the step has been made, and taught nothing.

        The critic and the moments go back too: what spoiled the policy has spoiled them.
        """
        if self._remembered is None:
            raise RuntimeError("nothing is remembered: call remember() before the step")
        for name, trainee in self._trainees():
            trainee.unwrapped.load_state_dict(self._remembered[name]["weights"])
            trainee.load_state_dict(copy.deepcopy(self._remembered[name]["state"]))
        if self.running_mean is not None:
            self.running_mean.load_state_dict(self._remembered["baseline"])

    def _trainees(self) -> list[tuple[str, Trainee]]:
        return [(n, t) for n, t in (("policy", self.policy), ("critic", self.critic)) if t is not None]

    def save(self, folder: Path) -> Path:
        """Write a checkpoint; see `learner.checkpoint`."""
        self.progress.baseline = self.running_mean.state_dict() if self.running_mean else None
        modules = {"policy": self.policy.unwrapped}
        states: dict[str, Any] = {"policy": self.policy.state_dict()}
        if self.critic is not None:
            modules["critic"] = self.critic.unwrapped
            states["critic"] = self.critic.state_dict()
        return save_checkpoint(folder, self.progress, modules, states, keep=self.recipe.learner.keep_checkpoints)

    def resume(self, path: Path) -> list[str]:
        """Go on from a checkpoint. Returns what to tell the person: where it goes on, and which rates hold."""
        modules = {"policy": self.policy.unwrapped}
        if self.critic is not None:
            modules["critic"] = self.critic.unwrapped
        self.progress, states = load_checkpoint(path, modules)
        lines = [f"going on from {path}, step {self.progress.step}"]
        for name, trainee in (("policy", self.policy), ("critic", self.critic)):
            if trainee is None:
                continue
            before = states[name].get("lr")
            trainee.load_state_dict(states[name])
            if before is not None and before != trainee.config.lr:
                lines.append(f"{name} learning rate: the recipe's {trainee.config.lr:g} holds, the run had {before:g}")
        if self.running_mean is not None and self.progress.baseline is not None:
            self.running_mean.load_state_dict(self.progress.baseline)
        return lines

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights as `export` would write them; the tensors hold until the next step."""
        return checkpoint_tensors(self.policy.unwrapped.model)

    def export(self, folder: Path) -> Path:
        """Write the policy in Hugging Face format, complete with tokenizer, and return the folder.

        Written beside its place and renamed, so that nobody reads half a snapshot; the oldest of several go.
        """
        scratch = folder.with_name(f".{folder.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        save_policy_model(self.policy.unwrapped.model, self.source, scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        snapshots = sorted((p for p in folder.parent.glob("v*") if p.is_dir()), key=lambda p: int(p.name[1:]))
        for old in snapshots[:-_KEEP_SNAPSHOTS]:
            shutil.rmtree(old, ignore_errors=True)
        return folder
