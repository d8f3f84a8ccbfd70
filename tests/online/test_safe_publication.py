"""Safe learning: what spoils the weights is dropped, what follows the users is not."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from agent.chat.renderer import ChatRenderer
from agent.episode import Episode, Segment, StopReason
from envs.style_shift.traces import style_traces
from learner.config import Recipe, parse_recipe
from learner.data.traces import encode_trace
from learner.model.tiny import write_tiny_model
from learner.probes.held_out import HeldOutProbe, decide
from learner.run.learner import Learner
from learner.sft import fit

SHAPE = {"vocab_size": 640, "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "experts": 0}
scores = st.floats(-20, 0, allow_nan=False)


@given(scores, scores, st.floats(0.01, 5))
def test_a_fall_above_the_margin_is_dropped_and_nothing_else_is(score: float, best: float, margin: float) -> None:
    decision = decide(score, best, margin)
    assert decision.publish == (score >= best or best - score <= margin)
    assert bool(decision.reason) != decision.publish


@given(st.lists(scores, min_size=1, max_size=40), st.floats(0.1, 2))
def test_small_falls_do_not_add_up(found: list[float], margin: float) -> None:
    """Nothing that is published is further below anything published before than the margin."""
    best, published = None, []
    for score in found:
        decision = decide(score, best, margin)
        if decision.publish:
            published.append(score)
            best = decision.best
    assert all(max(published[:i]) - score <= margin + 1e-12 for i, score in enumerate(published) if i)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_never_passes(score: float) -> None:
    assert not decide(score, -1.0, 5.0).publish
    assert not decide(score, None, 5.0).publish


def recipe_in(folder: Path, **learner: object) -> Recipe:
    return parse_recipe(
        {
            "name": "safe",
            "runs_dir": str(folder),
            "model": {"tiny": SHAPE},
            "env": {"id": "sao/StyleShift-v0", "kwargs": {"prompts": "tiny", "show_candidates": False}},
            "learner": {
                "batch_size": 8,
                "held_out_probe": {"prompts": 2},
                "policy": {"lr": 1e-3, "warmup_steps": 0},
                "tracker": None,
                **learner,
            },
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen some sound texts in every style: enough to have something to lose."""
    folder = tmp_path_factory.mktemp("safe") / "model"
    traces = list(style_traces(600, bad=0.0, seed=1))
    recipe = recipe_in(folder)
    assert recipe.model.tiny is not None
    write_tiny_model(folder, recipe.model.tiny, [m["content"] for t in traces for m in t], 0)
    learner = learner_on(folder, policy={"lr": 1e-2, "warmup_steps": 5})
    renderer = ChatRenderer.from_pretrained(folder)
    examples = [encode_trace(t, renderer) for t in traces]
    fit(learner.policy, examples, steps=80, batch_size=32, seed=0, progress=lambda *_, **__: None)
    trained = folder.with_name("trained")
    return learner.export(trained)


def learner_on(folder: Path, **changes: object) -> Learner:
    recipe = recipe_in(folder.parent / "runs", **changes)
    return Learner.build(recipe, Accelerator(cpu=True), policy_folder=folder, critic_folder=folder / "none")


def judged(learner: Learner, style: int, reward: float, count: int = 8) -> list[Episode]:
    """Served episodes: `count` texts of one style with `reward`, in the learner's own tokens."""
    renderer, rng = ChatRenderer.from_pretrained(learner.source), random.Random(style)
    traces = [t for i, t in enumerate(style_traces(8 * count, bad=0.0, seed=2)) if i % 4 == style][:count]
    episodes = []
    for number, trace in enumerate(traces):
        prompt = tuple(renderer.start(trace[:1], None).token_ids)
        action = tuple(renderer.encode_action(trace[1]["content"]))
        segments = (
            Segment("prompt", prompt, ""),
            Segment("action", action, "", logprobs=(-0.5,) * len(action), versions=(0,) * len(action)),
        )
        episodes.append(
            Episode(
                id=f"{style}-{number}-{rng.random()}",
                env_id="served",
                task_id=f"t{number}",
                segments=segments,
                turn_rewards=(reward,),
                stop_reason=StopReason.TERMINATED,
            )
        )
    return episodes


def probe_of(learner: Learner) -> HeldOutProbe:
    probe = HeldOutProbe.build(learner.recipe, ChatRenderer.from_pretrained(learner.source))
    assert probe is not None
    return probe


def test_a_policy_that_narrows_to_one_style_keeps_its_score(trained: Path) -> None:
    learner = learner_on(trained)
    probe, policy = probe_of(learner), learner.policy.unwrapped
    before = probe.score(policy)
    renderer = ChatRenderer.from_pretrained(trained)
    cute = [encode_trace(t, renderer) for i, t in enumerate(style_traces(400, bad=0.0, seed=3)) if i % 4 == 1]
    fit(learner.policy, cute, steps=60, batch_size=32, seed=0, progress=lambda *_, **__: None)
    academic = [e for i, e in enumerate(style_traces(40, bad=0.0, seed=3)) if i % 4 == 0]
    rows = [encode_trace(t, renderer) for t in academic]
    with torch.no_grad():
        other = sum(float(policy(ids[None], mask[None])[0].sum() / mask.sum()) for ids, mask in rows) / len(rows)
    after = probe.score(policy)
    assert other < before - 0.5, "it should have forgotten the other styles, or this shows nothing"
    assert decide(after, before, 1.0).publish


def test_a_step_that_wrecks_the_weights_is_dropped_and_leaves_no_trace(trained: Path) -> None:
    """The next batch is learned from as if the poisoned one had never been."""
    learner, twin = (learner_on(trained, policy={"lr": 1e-3, "warmup_steps": 0}) for _ in range(2))
    probe = probe_of(learner)
    best = probe.score(learner.policy.unwrapped)
    healthy = learner.policy.config
    learner.remember()
    learner.policy.config = healthy.model_copy(update={"lr": 5.0})
    learner.step(judged(learner, 0, 1.0))
    assert not decide(probe.score(learner.policy.unwrapped), best, 1.0).publish
    learner.roll_back()
    learner.policy.config = healthy
    assert learner.progress.step == 1
    for each in (learner, twin):
        each.step(judged(each, 1, 1.0))
    for name, tensor in twin.policy.unwrapped.state_dict().items():
        assert torch.equal(tensor, learner.policy.unwrapped.state_dict()[name]), name
    assert twin.critic is not None
    assert learner.critic is not None
    for name, tensor in twin.critic.unwrapped.state_dict().items():
        assert torch.equal(tensor, learner.critic.unwrapped.state_dict()[name]), name
    assert decide(probe.score(learner.policy.unwrapped), best, 1.0).publish


def test_the_running_mean_forgets_a_dropped_batch(trained: Path) -> None:
    learner = learner_on(trained, algorithm="sao_running_mean", running_mean={"window": 128, "per_prompt": False})
    assert learner.running_mean is not None
    learner.step(judged(learner, 0, 1.0))
    before = learner.running_mean.state_dict()
    assert before["window"] == 128
    assert not before["per_prompt"]
    learner.remember()
    learner.step(judged(learner, 1, 0.0))
    assert learner.running_mean.state_dict() != before
    learner.roll_back()
    assert learner.running_mean.state_dict() == before
