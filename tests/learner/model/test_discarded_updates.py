"""Case N1: a gradient or a loss that is no number moves nothing, and weights that are none go nowhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from learner_tools import (
    action,
    build_learner,
    episode,
    moments,
    prompt,
    random_episodes,
    same,
    snapshot,
    write_untied_copy,
)

from agent.episode import Episode, EpisodeError, validate
from learner.data.batch import build_batch
from learner.faults import LearnerFault
from learner.model.forward import PolicyForward
from learner.model.trainee import Trainee
from learner.parallel.collectives import standard_deviation
from learner.run.checkpoint import CheckpointError, checkpoints
from learner.run.folder import append_metrics
from learner.run.learner import Learner
from learner.run.loop import Loop
from learner.sao import StepResult
from learner.sft import fit

Spoiler = Callable[[Trainee, float], None]


def spoil_a_gradient(trainee: Trainee, number: float) -> None:
    """One element of one gradient of the next backward pass is `number`."""
    parameter = trainee.parameters[-1]
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient.index_fill(0, first, number))[1])
    first = torch.tensor([0])


def spoil_a_loss(trainee: Trainee, number: float) -> None:
    """The next loss is `number`, its gradients as they would be."""
    add = trainee.add_gradients

    def spoiled(loss: torch.Tensor) -> None:
        trainee.add_gradients = add  # type: ignore[method-assign]
        add(loss + number)

    trainee.add_gradients = spoiled  # type: ignore[method-assign]


def whole(trainee: Trainee) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], int]:
    return snapshot(trainee), moments(trainee), trainee.updates


def untouched(trainee: Trainee, before: tuple[dict[str, torch.Tensor], list[torch.Tensor], int]) -> bool:
    weights, state, updates = before
    pairs = zip(moments(trainee), state, strict=True)
    return same(snapshot(trainee), weights) and all(torch.equal(*p) for p in pairs) and trainee.updates == updates


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spoil", [spoil_a_gradient, spoil_a_loss])
def test_a_spoiled_update_of_the_policy_is_discarded_and_the_next_one_taken(
    micro_model: Path, tmp_path: Path, spoil: Spoiler, number: float
) -> None:
    own, twin = (build_learner(micro_model, tmp_path) for _ in range(2))
    for learner in (own, twin):
        learner.step(random_episodes(8, seed=9))
    before = whole(own.policy)
    spoil(own.policy, number)
    _, result = own.step(random_episodes(8))
    assert (result.policy_moved, result.policy_discarded, result.critic_discarded) == (False, 1, 0)
    assert result.critic_moved
    assert untouched(own.policy, before)
    assert all(parameter.grad is None for parameter in own.policy.parameters)
    assert own.critic is not None
    assert twin.critic is not None
    twin.step(random_episodes(8))
    assert same(snapshot(own.critic), snapshot(twin.critic))  # the critic has learned as if nothing had been
    _, result = own.step(random_episodes(8, seed=1))
    assert (result.policy_moved, result.policy_discarded) == (True, 0)
    assert not untouched(own.policy, before)
    assert (own.policy.discarded, own.policy.discarded_in_row) == (1, 0)


@pytest.mark.parametrize("spoil", [spoil_a_gradient, spoil_a_loss])
def test_the_policy_learns_from_the_values_of_a_critic_whose_update_was_discarded(
    micro_model: Path, tmp_path: Path, spoil: Spoiler
) -> None:
    """The critic is as good as before the step, so its values are: the policy takes the step they teach."""
    own, twin = (build_learner(micro_model, tmp_path, learner={"critic_updates": 1}) for _ in range(2))
    for learner in (own, twin):
        learner.step(random_episodes(8, seed=9))
    assert own.critic is not None
    assert twin.critic is not None
    before = whole(own.critic)
    spoil(own.critic, math.nan)
    _, result = own.step(random_episodes(8))
    assert (result.critic_moved, result.critic_discarded) == (False, 1)
    assert (result.policy_moved, result.policy_discarded) == (True, 0)
    assert untouched(own.critic, before)
    twin.critic.step = lambda: twin.critic.discard() or 0.0  # type: ignore[method-assign,union-attr,func-returns-value]
    twin.step(random_episodes(8))
    assert same(snapshot(own.policy), snapshot(twin.policy))


def test_one_of_several_critic_updates_is_discarded_alone(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"critic_updates": 3})
    assert own.critic is not None
    spoil_a_gradient(own.critic, math.nan)
    _, result = own.step(random_episodes(8))
    assert (result.critic_moved, result.critic_discarded, own.critic.updates) == (True, 1, 2)


def test_a_policy_of_which_nothing_is_a_number_is_no_gate_at_work(micro_model: Path, tmp_path: Path) -> None:
    """Else a run whose every log-prob is NaN would count steps for ever and learn nothing."""
    own = build_learner(micro_model, tmp_path, learner={"algorithm": "grpo"})
    forward = own.policy.module.forward

    def broken(*arguments: torch.Tensor, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = forward(*arguments, **named)
        return logprobs * math.nan, entropy

    own.policy.module.forward = broken
    _, result = own.step(random_episodes(8, group_size=8))
    assert (result.policy_moved, result.policy_discarded) == (False, 1)


def spoiled_weights(own: Learner, which: str) -> None:
    trainee = own.policy if which == "policy" else own.critic
    assert trainee is not None
    with torch.no_grad():
        trainee.parameters[0].view(-1)[3] = math.inf


@pytest.mark.parametrize("which", ["policy", "critic"])
def test_weights_that_are_no_numbers_are_not_saved_and_the_good_checkpoints_stay(
    micro_model: Path, tmp_path: Path, which: str
) -> None:
    own = build_learner(micro_model, tmp_path)
    own.step(random_episodes(8))
    good = own.save(tmp_path / "c")
    own.progress.step += 1
    spoiled_weights(own, which)
    with pytest.raises(CheckpointError, match=rf"{which}\..* is not finite"):
        own.save(tmp_path / "c")
    assert checkpoints(tmp_path / "c") == [good]
    build_learner(micro_model, tmp_path).resume(good)


def test_a_policy_that_is_no_numbers_is_neither_exported_nor_streamed(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path)
    spoiled_weights(own, "policy")
    with pytest.raises(LearnerFault, match="not finite"):
        own.export(tmp_path / "v1")
    assert not list(tmp_path.glob("*v1"))
    with pytest.raises(LearnerFault, match="not finite"):
        list(own.weights())


def test_an_optimiser_that_makes_weights_into_no_numbers_is_caught_in_its_step(
    micro_model: Path, tmp_path: Path
) -> None:
    """eps 0 divides 0 by 0 where a gradient was always 0 (a token unseen); the gradients' norm says nothing of it."""
    untied = write_untied_copy(micro_model, tmp_path / "untied")
    own = build_learner(untied, tmp_path, learner={"policy": {"lr": 1e-3, "eps": 0.0, "warmup_steps": 0}})
    with pytest.raises(LearnerFault, match=r"step 1: the policy's weights are not finite \(model\..*eps"):
        own.step(random_episodes(8))
    assert own.progress.step == 0


def test_a_checkpoint_of_no_numbers_is_named_and_not_gone_on_from(
    micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = build_learner(micro_model, tmp_path)
    own.step(random_episodes(8))
    spoiled_weights(own, "critic")
    monkeypatch.setattr("learner.run.checkpoint.first_not_finite", lambda state: None)
    saved = own.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"step_00001 holds weights of the critic that are not finite .*Delete"):
        build_learner(micro_model, tmp_path).resume(saved)


def test_a_cold_start_discards_too_and_ends_after_too_many_in_a_row(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path)
    batch = build_batch(random_episodes(8))
    examples = list(zip(batch.input_ids, batch.action_mask, strict=True))
    settings: dict[str, Any] = {"batch_size": 4, "seed": 0, "progress": lambda *_, **__: None}
    spoil_a_loss(own.policy, math.nan)
    fit(own.policy, examples, steps=3, discard_limit=2, **settings)
    assert (own.policy.updates, own.policy.discarded) == (2, 1)
    own.policy.add_gradients = lambda loss: Trainee.add_gradients(own.policy, loss * math.nan)  # type: ignore[method-assign]
    with pytest.raises(LearnerFault, match="cold start: 2 updates in a row"):
        fit(own.policy, examples, steps=9, discard_limit=2, **settings)
    assert own.policy.updates == 2


async def test_a_run_ends_after_so_many_steps_in_a_row_with_its_last_batch_committed(tmp_path: Path) -> None:
    """Else the batch that cannot be learned from would be given to every session after it."""
    said, committed = list[str](), list[int]()
    config = SimpleNamespace(discard_limit=3)
    loop: Any = Loop.__new__(Loop)
    loop.recipe, loop.display, loop.folder = SimpleNamespace(learner=config), SimpleNamespace(log=said.append), tmp_path
    loop.learner = SimpleNamespace(progress=SimpleNamespace(step=0, claims=["c"]))

    async def commit() -> None:
        committed.append(loop.learner.progress.step)

    loop._commit_all = commit
    spoiled, taken = StepResult(critic_discarded=2, policy_discarded=1), StepResult()
    for step, result in enumerate([spoiled, spoiled, taken, spoiled, spoiled], start=1):
        loop.learner.progress.step = step
        await loop._heed_discards(result)
    assert len(said) == 4
    assert said[0].startswith("step 1: discarded an update of critic and policy")
    assert not committed
    with pytest.raises(LearnerFault, match=r"last 3 steps each had to discard.*learner\.discard_limit"):
        await loop._heed_discards(spoiled)
    assert committed == [5]


def record(reward: float = 1.0, logprob: float = -1.0) -> Episode:
    return replace_rewards(episode([prompt([1, 2]), action([3, 4], [logprob, -1.0])], [1.0], name="e"), reward)


def replace_rewards(one: Episode, reward: float) -> Episode:
    return msgspec.structs.replace(one, turn_rewards=(reward,) * len(one.turn_rewards))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (record(reward=math.nan), "reward"),
        (record(reward=math.inf), "reward"),
        (record(reward=-1e30), "reward"),
        (record(logprob=math.nan), "log-prob"),
        (record(logprob=math.inf), "log-prob"),
    ],
)
def test_episodes_with_numbers_that_are_none_are_refused_where_they_enter(wrong: Episode, what: str) -> None:
    with pytest.raises(EpisodeError, match=what):
        validate(wrong)
    validate(record(logprob=-math.inf))  # a probability of 0, which the gate counts


def test_a_value_that_is_no_number_spoils_its_own_episode_only() -> None:
    """The scale of the advantages is that of the others, not 1."""
    advantages = torch.tensor([[1.0, math.nan], [5.0, 5.0]])
    found = standard_deviation(Accelerator(cpu=True), advantages, torch.tensor([[True, True], [True, False]]))
    assert found == pytest.approx(2.0)


def test_figures_that_are_no_numbers_leave_lines_that_every_reader_takes(tmp_path: Path) -> None:
    append_metrics(tmp_path, 1, {"critic/gradient_norm": math.inf, "policy/gradient_norm": math.nan, "gate/share": 0.5})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "critic/gradient_norm": null, "policy/gradient_norm": null, "gate/share": 0.5}\n'


@pytest.mark.parametrize("tied", [True, False])
def test_a_piece_without_an_action_gives_every_parameter_a_gradient_of_zeros(
    micro_model: Path, tmp_path: Path, tied: bool
) -> None:
    """Case N2: what a rank runs that has no piece left; its head may be no part of its body."""
    folder = micro_model if tied else write_untied_copy(micro_model, tmp_path / "untied")
    policy: PolicyForward = build_learner(folder, tmp_path).policy.unwrapped
    logprobs, entropy = policy(torch.ones(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.bool))
    assert not logprobs.any()
    assert not entropy.any()
    logprobs.sum().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())
    assert ("model.lm_head.weight" in gradients) is not tied
