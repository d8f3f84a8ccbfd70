"""The learner: policy and critic with their optimisers, as one thing that steps, saves and goes on.

Its life: build ──resume()?──▶ ready ──step()*, save()*, export()*──▶ done. It knows nothing of engines or stores.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from agent.episode import Episode
from agent.serve.config import ServeConfig
from learner.advantages import RunningMeanBaseline
from learner.algorithms import Algorithm
from learner.config import Recipe, RecipeError
from learner.data.batch import Batch, build_batch, places_of_rows, shuffled_rewards, without_constant_groups
from learner.data.minibatches import minibatches_of, places, share_of_rank
from learner.faults import LearnerFault
from learner.model.adapter import WithoutAdapter, add_adapter, write_adapter
from learner.model.critic import freeze, freeze_router, load_critic
from learner.model.finite import first_not_finite, require_finite
from learner.model.forward import PolicyForward
from learner.model.layers import Layer, lasting, layer_count, whole_layer
from learner.model.loading import copy_tokenizer, load_policy_model, write_policy
from learner.model.routing import Routing
from learner.model.trainee import Trainee, lay_out, pack_rows
from learner.parallel.collectives import largest
from learner.parallel.layout import layout_of
from learner.run.checkpoint import CheckpointError, Checkpoints, Progress
from learner.run.folder import written_at_once
from learner.run.going_back import kept_checkpoints
from learner.run.metrics import ratio_metrics
from learner.run.profiling import watching
from learner.run.throughput import Speedometer
from learner.sao import StepResult, sao_step
from learner.updates import StepSettings


def load_reference(recipe: Recipe, start: Path, policy: PolicyForward, accelerator: Accelerator) -> nn.Module:
    """The policy that `learner.kl` pulls to, frozen: `start`, where RL begins, or the folder that the recipe names.

    Where the layout cuts weights, its weights are cut as the policy's are. With an adapter the start is `policy`
    without it.
    """
    assert recipe.learner.kl is not None
    if recipe.learner.kl.reference == "start" and recipe.model.policy_adapter is not None:
        return WithoutAdapter(policy)
    folder = start if recipe.learner.kl.reference == "start" else recipe.learner.kl.reference
    if not (folder / "config.json").exists():
        raise RecipeError(f"learner.kl.reference: {folder} holds no model (it has no config.json)")
    model = load_policy_model(folder, recipe.model, layout_of(accelerator))
    forward = PolicyForward(model, temperature=recipe.runtime.sampling.temperature, chunk=recipe.learner.logprob_chunk)
    forward.requires_grad_(False).eval().to(accelerator.device)
    lay_out(forward, accelerator)
    return forward


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
    reference: nn.Module | None = None
    _remembered: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.speed = Speedometer(self.recipe, self.algorithm, self.policy, self.critic)
        config, serve = self.recipe.learner, self.recipe.serve or ServeConfig()
        versions = serve.keep_versions if config.online else None
        keep = kept_checkpoints(config.keep_checkpoints, versions, config.checkpoint_every)
        self.checkpoints = Checkpoints(self.policy.accelerator, keep=keep)

    @classmethod
    def build(cls, recipe: Recipe, accelerator: Accelerator, *, policy_folder: Path, critic_folder: Path) -> Learner:
        """Load policy and critic, freeze what the algorithm freezes, make the optimisers."""
        config, algorithm, layout = recipe.learner, recipe.learner.resolve(), layout_of(accelerator)
        if layout.cut and algorithm.critic is not None and algorithm.critic.trainable == "lora":
            raise RecipeError(
                "learner.critic_trainable: 'lora' is not written for weights that are cut over processes "
                f"({recipe.hardware.layout}); choose experts, mlp or all"
            )
        model = load_policy_model(policy_folder, recipe.model, layout)
        if recipe.model.policy_adapter is not None:
            add_adapter(model, recipe.model.policy_adapter)
        forward = PolicyForward(
            model,
            temperature=recipe.runtime.sampling.temperature,
            chunk=config.logprob_chunk,
            entropy_gradient=config.entropy_bonus > 0,
        )
        if config.freeze_router:
            freeze_router(forward.model)
        if config.routing != "own":
            forward.routing = Routing(forward.model, replay=config.routing == "replayed")
        own_steps = max(config.steps - config.critic_only_steps, 1)
        policy = Trainee.prepare(forward, config.policy, accelerator, total_steps=own_steps)
        policy.updates_per_step = config.policy_epochs * config.policy_minibatches
        critic = None
        if algorithm.critic is not None:
            module = load_critic(policy_folder, critic_folder, recipe.model, layout)
            freeze(module, algorithm.critic.trainable)
            critic = Trainee.prepare(module, config.critic, accelerator, total_steps=config.steps)
            critic.updates_per_step = algorithm.critic.updates
        shares = layout.data_ranks
        if algorithm.running_mean and shares > 1:
            raise RecipeError(
                f"learner.algorithm {algorithm.name!r} keeps one history of rewards in the order of completion; "
                "run it in a single process"
            )
        if algorithm.needs_whole_batch and shares > 1:
            raise RecipeError(
                f"learner.algorithm {algorithm.name!r} compares with the mean of the whole batch, and a process has "
                "only its own part; run it in a single process"
            )
        if algorithm.normalize_task and shares > 1:
            raise RecipeError(
                f"learner.algorithm {algorithm.name!r} standardises advantages over all episodes of a task, and a "
                "process has only its own; run it in a single process"
            )
        prompts = config.batch_size // algorithm.samples_per_prompt
        if prompts < shares * config.policy_minibatches:
            parts = f" in {config.policy_minibatches} minibatches" if config.policy_minibatches > 1 else ""
            raise RecipeError(
                f"learner.batch_size {config.batch_size} is {prompts} prompts of {algorithm.name!r}, which cannot be "
                f"dealt to {shares} processes{parts}; raise it, or start fewer"
            )
        mean = algorithm.running_mean.build() if algorithm.running_mean else None
        pack_rows(config.packing, recipe.model.attention_implementation, [policy, *([critic] if critic else [])])
        reference = None
        if config.kl is not None:
            reference = load_reference(recipe, policy_folder, forward, accelerator)
            reference.packed = policy.unwrapped.packed
        return cls(recipe, algorithm, policy, critic, mean, Progress(), policy_folder, reference=reference)

    def step(self, episodes: Sequence[Episode], own: Sequence[int] | None = None) -> tuple[Batch, StepResult]:
        """One step on a claimed batch. Every rank is given all of it and takes its own part, whose rows are returned.

        `own`: which episodes that is, by index, if not the share that is dealt to it.
        """
        config = self.recipe.learner
        if config.shuffle_rewards:
            episodes = shuffled_rewards(episodes, self.recipe.seed + self.progress.step)
        batch = build_batch(
            episodes,
            truncation=config.truncation,
            temperature=self.recipe.runtime.sampling.temperature,
            routing=config.routing != "own",
        )
        if batch.experts is not None:
            self.policy.unwrapped.routing.check(batch.experts)
        elif config.routing == "replayed":
            raise LearnerFault(
                "learner.routing is 'replayed', and no episode of this batch carries the experts that its engine "
                "chose. Use an engine that returns them, or write learner.routing=own"
            )
        figures: dict[str, float] = {}
        if config.skip_constant_groups:
            batch, figures["rollout/constant_groups"] = without_constant_groups(batch)
        settings = StepSettings(
            advantage_scale=config.advantage_scale,
            truncation=config.truncation,
            micro_batch_tokens=config.micro_batch_tokens,
            max_padding=config.max_padding,
            packed=self.policy.unwrapped.packed,
            train_policy=self.progress.step >= config.critic_only_steps,
            policy_epochs=config.policy_epochs,
            kl_coefficient=config.kl.coefficient if config.kl is not None else 0.0,
            kl_in_reward=config.kl is not None and config.kl.form == "reward",
            entropy_bonus=config.entropy_bonus,
            entropy=config.entropy_every > 0 and self.progress.step % config.entropy_every == 0,
        )
        accelerator = self.policy.accelerator
        parts = minibatches_of(episodes, config.policy_minibatches)
        if own is None:
            layout = layout_of(accelerator)
            own = share_of_rank(episodes, parts, layout.data_rank(accelerator.process_index), layout.data_ranks)
        rows = places_of_rows(episodes, own)
        part = batch.rows(rows)
        started = time.monotonic()
        with watching(config.profile, self.recipe.run_dir, self.progress.step + 1, accelerator.process_index):
            result = sao_step(
                part,
                self.policy,
                self.critic,
                self.algorithm,
                settings,
                self.running_mean,
                minibatches=places(rows, [places_of_rows(episodes, one) for one in parts]),
                reference=self.reference,
            )
        self.speed.note(batch, settings, time.monotonic() - started)
        result.figures |= figures
        if result.policy_moved or result.critic_moved:
            self.check_weights(f"step {self.progress.step + 1}")
        if result.logprobs is not None:
            result.figures |= ratio_metrics(result.logprobs, part.rollout_logprobs, part.action_mask)
        self.progress.step += 1
        self.progress.episodes += len(episodes)
        self.progress.action_tokens += batch.action_tokens
        stale = (self.progress.version - batch.versions >= 1) & batch.action_mask
        self.progress.stale_tokens += int(stale.sum())
        return part, result

    def check_weights(self, purpose: str) -> None:
        """Raise `LearnerFault` on every rank where one has weights that are not finite; a collective."""
        modules = {name: trainee.unwrapped for name, trainee in self._trainees()}
        wrong = any(first_not_finite(module.named_parameters()) for module in modules.values())
        if largest(self.policy.accelerator, int(wrong)):
            require_finite(modules, purpose)
            raise LearnerFault(f"{purpose}: weights of another rank are not finite")

    def score(self, input_ids: Tensor, action_mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """The policy's log-probs and entropy at another `temperature`, without gradients, as every rank finds them."""
        own, device = self.policy.unwrapped, self.policy.accelerator.device
        usual, own.temperature = own.temperature, temperature
        try:
            with self.policy.reading():
                return self.policy.module(input_ids.to(device), action_mask.to(device))
        finally:
            own.temperature = usual

    def remember(self) -> None:
        """Keep a copy of all that a step changes, for `roll_back`: weights, moments, schedules, running baseline.

        It costs as much memory as they do, and is made before a step whose outcome may be dropped.
        """
        self._remembered = {
            name: {
                "weights": {k: v.detach().clone() for k, v in lasting(trainee.unwrapped).items()},
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
            with torch.no_grad():
                for key, weight in lasting(trainee.unwrapped).items():
                    weight.copy_(self._remembered[name]["weights"][key])
            trainee.load_state_dict(copy.deepcopy(self._remembered[name]["state"]))
        if self.running_mean is not None:
            self.running_mean.load_state_dict(self._remembered["baseline"])

    def release(self) -> None:
        """Wait for the write under way; let what belongs to a group of processes go. The modules stay as they are."""
        self.checkpoints.close()
        for _, trainee in self._trainees():
            trainee.module = trainee.unwrapped

    def _trainees(self) -> list[tuple[str, Trainee]]:
        return [(n, t) for n, t in (("policy", self.policy), ("critic", self.critic)) if t is not None]

    def begin_save(self, folder: Path) -> None:
        """Begin to write a checkpoint, which goes on while the learner does; all ranks together."""
        self.progress.baseline = self.running_mean.state_dict() if self.running_mean else None
        self.checkpoints.begin(folder, self.progress, dict(self._trainees()))

    def finish_save(self) -> Path | None:
        """Wait until what was begun is on the disk; raises `CheckpointError` where it cannot be written."""
        return self.checkpoints.finish()

    def save(self, folder: Path) -> Path:
        """Write a checkpoint and wait for it; see `learner.run.checkpoint`."""
        self.begin_save(folder)
        path = self.finish_save()
        assert path is not None
        return path

    def resume(self, path: Path) -> list[str]:
        """Go on from a checkpoint. Returns what to tell the person: where it goes on, and which rates hold.

        Moments and counters come from the checkpoint; rates, betas and decay from the recipe.
        """
        trainees = dict(self._trainees())
        self.progress, counters = self.checkpoints.load(path, trainees)
        for name, trainee in trainees.items():
            if wrong := first_not_finite(trainee.unwrapped.named_parameters()):
                raise CheckpointError(
                    f"the checkpoint {path} holds weights of the {name} that are not finite ({wrong}). Delete this "
                    "folder to go on from the checkpoint before it"
                )
        lines = [f"going on from {path}, step {self.progress.step}"]
        for name, trainee in trainees.items():
            trainee.rest()
            trainee.updates, before = counters[name]["updates"], counters[name]["lr"]
            if before != trainee.config.lr:
                lines.append(f"{name} learning rate: the recipe's {trainee.config.lr:g} holds, the run had {before:g}")
        if self.running_mean is not None and self.progress.baseline is not None:
            self.running_mean.load_state_dict(self.progress.baseline)
        return lines

    @property
    def layers(self) -> int:
        """How many times `layer` gives something."""
        return layer_count(self.policy.unwrapped.model)

    def layer(self, index: int, as_trained: bool = False) -> Layer:
        """A layer of the policy on the main process, all ranks together (see `whole_layer`): in the dtype that engines
        take, or as it is trained. The tensors hold until the next step."""
        main, dtype = self.policy.accelerator.is_main_process, self._dtype(as_trained)
        return whole_layer(self.policy.unwrapped.model, index, wanted=main, dtype=dtype)

    def weights(self, as_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """All layers one after another; with several ranks through `Ranks.weights`, which has all of them take part."""
        for index in range(self.layers):
            yield from self.layer(index, as_trained)

    def export(
        self, folder: Path, weights: Iterable[tuple[str, Tensor]] | None = None, *, as_trained: bool = False
    ) -> Path:
        """Write the policy in Hugging Face format, complete with tokenizer, and return the folder. An adapter is added
        to the weights.

        `weights`: as `Ranks.weights` gives them; None: this process's own. Written beside its place and renamed, so
        that nobody reads half a snapshot; the oldest of several go.
        """
        given, dtype = self.weights(as_trained) if weights is None else weights, self._dtype(as_trained)
        with written_at_once(folder) as scratch:
            write_policy(self.policy.unwrapped.model, given, self.source, scratch, dtype=dtype)
        return folder

    def export_adapter(self, folder: Path) -> Path:
        """Write the policy's adapter alone, in peft's form and with the tokenizer; otherwise as `export`."""
        with written_at_once(folder) as scratch:
            write_adapter(self.policy.unwrapped.model, self.source, scratch)
            copy_tokenizer(self.source, scratch)
        return folder

    def export_for_engines(self, folder: Path, weights: Iterable[tuple[str, Tensor]] | None = None) -> Path:
        """What engines are given in a folder: the adapter where the recipe says so, else `export`."""
        adapter = self.recipe.model.policy_adapter
        if adapter is not None and adapter.publish == "adapter":
            return self.export_adapter(folder)
        return self.export(folder, weights)

    def _dtype(self, as_trained: bool) -> torch.dtype | None:
        return None if as_trained else getattr(torch, self.recipe.published_dtype)
