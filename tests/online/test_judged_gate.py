"""Held-out verdicts: what people said of replies that were given tells a better policy from a worse one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from agent.episode import Episode, Segment, StopReason
from learner.config import TinyModelConfig, parse_recipe
from learner.config.section import RecipeError
from learner.model.tiny import write_tiny_model
from learner.probes.judged import JudgedGate, Value, compare, value_of
from learner.run.learner import Learner

SHAPE = {"vocab_size": 320, "hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "experts": 0}


def test_an_estimate_by_hand() -> None:
    """Two replies, one three times as likely as when it was sampled: (3 x 1 + 1 x 0) / 4, of 16 / 10 conversations."""
    found = value_of([math.log(3.0), 0.0], [1.0, 0.0])
    assert (round(found.reward, 6), round(found.effective, 6)) == (0.75, 1.6)
    assert math.isnan(value_of([], []).reward)
    assert value_of([math.nan, 0.0], [9.0, 0.5]) == Value(0.5, 1.0), "a log-prob that is not finite counts for nothing"


@given(st.lists(st.tuples(st.floats(-600, 600), st.floats(0, 1)), min_size=1, max_size=40))
def test_an_estimate_is_a_mean_of_the_rewards(rows: list[tuple[float, float]]) -> None:
    ratios, rewards = zip(*rows, strict=True)
    found = value_of(ratios, rewards)
    assert min(rewards) - 1e-9 <= found.reward <= max(rewards) + 1e-9
    assert 1 - 1e-9 <= found.effective <= len(rows) + 1e-9


def test_only_a_fall_that_rests_on_enough_is_dropped() -> None:
    def publish(after: Value) -> bool:
        return compare(Value(0.7, 50), after, tolerance=0.05, least=24).publish

    assert publish(Value(0.66, 50))
    assert not publish(Value(0.6, 50))
    assert publish(Value(0.1, 10)), "ten conversations hold nothing up"
    assert publish(Value(math.nan, 0))


def test_what_is_held_out_is_trained_never_and_a_batch_is_never_empty() -> None:
    gate = JudgedGate(0.3, 64)
    episodes = [judged(f"e{i}", [5, 6], 1.0) for i in range(200)]
    train = gate.split(episodes)
    again = JudgedGate(0.3, 64).split(episodes)
    assert [e.id for e in train] == [e.id for e in again], "the same after a restart: none is trained later"
    assert 110 < len(train) < 170
    assert len(gate.split(episodes[:1])) == 1


def judged(name: str, action: list[int], reward: float, logprob: float = -5.7) -> Episode:
    tokens = len(action)
    segments = (
        Segment("prompt", (1, 2, 3)),
        Segment("action", action, logprobs=[logprob] * tokens, versions=[0] * tokens),
    )
    return Episode(
        id=name,
        env_id="serve",
        task_id="t",
        segments=segments,
        turn_rewards=(reward,),
        stop_reason=StopReason.TERMINATED,
    )


def test_a_step_towards_what_people_dislike_is_seen_on_the_models_own_replies(tmp_path: Path) -> None:
    """A real policy: after steps towards the disliked reply its estimated reward is lower, towards the liked higher."""
    model = tmp_path / "model"
    write_tiny_model(model, TinyModelConfig(**SHAPE, max_context=64), ["Write about rain."] * 4, 0)
    recipe = parse_recipe({"name": "x", "runs_dir": str(tmp_path), "model": {"tiny": SHAPE | {"max_context": 64}}})
    learner = Learner.build(recipe, Accelerator(cpu=True), policy_folder=model, critic_folder=tmp_path / "none")
    liked, disliked = [11, 12, 13, 14], [21, 22, 23, 24]
    gate = JudgedGate(0.5, 64)
    gate._kept.extend(judged(f"{i}", liked if i % 2 else disliked, float(i % 2)) for i in range(32))
    policy = learner.policy.unwrapped
    before = gate.value(policy, 1.0)
    assert before.reward == pytest.approx(0.5, abs=0.1)
    assert before.effective > 16

    def towards(action: list[int]) -> Value:
        ids, mask = torch.tensor([[1, 2, 3, *action]]), torch.tensor([[0] * 3 + [1] * len(action)])
        learner.remember()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            (-policy(ids, mask)[0].sum() / len(action)).backward()
            optimizer.step()
        found = gate.value(policy, 1.0)
        learner.roll_back()
        return found

    better, worse = towards(liked), towards(disliked)
    assert better.reward > before.reward + 0.05 > before.reward - 0.05 > worse.reward
    assert not compare(before, worse, tolerance=0.05, least=8).publish
    assert compare(before, better, tolerance=0.05, least=8).publish


def test_a_gate_of_verdicts_without_verdicts_is_refused() -> None:
    def recipe(**learner: object) -> None:
        parse_recipe({"name": "x", "model": {"path": "m"}, "learner": {"judged_gate": {}, **learner}})

    recipe(online=True)
    with pytest.raises(RecipeError, match="judged_gate"):
        recipe()
    with pytest.raises(RecipeError, match="record_batches"):
        recipe(online=True, record_batches=1)
