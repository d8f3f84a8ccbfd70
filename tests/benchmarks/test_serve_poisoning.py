"""The poisoning exercise: its arithmetic, and that its replies are what the learner takes them for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from agent.simulate.compare import make_env
from benchmarks.serve_poisoning import ARMS, RECIPE, Plan, Served, falls
from envs.style_shift.traces import style_traces
from learner.config import TinyModelConfig, load_recipe
from learner.model.tiny import write_tiny_model
from learner.run.learner import Learner

PLAN = Plan(rounds=9, alone=3, honest=32, poison=64)


def test_a_fall_is_counted_where_all_arms_are_there_and_late_only() -> None:
    late = {"quiet": 0.9, "uncapped": 0.1, "capped": 0.86}
    results = [{"arm": arm, "seed": 0, "rewards": [0.5] * 7 + [late[arm]] * 2} for arm in ARMS]
    results.append({"arm": "quiet", "seed": 1, "rewards": [0.0] * 9})
    found = falls(results, PLAN)
    assert [row["seed"] for row in found["seeds"]] == [0]
    assert found["share"] == pytest.approx(0.05)


def test_arms_are_paired_and_the_poisoner_comes_later() -> None:
    assert PLAN.verdicts("uncapped", 5) == PLAN.verdicts("capped", 5)
    assert PLAN.verdicts("capped", 2) == PLAN.verdicts("quiet", 2)
    assert PLAN.verdicts("capped", 3).count("poisoner") == 64
    honest = [judge for judge in PLAN.verdicts("capped", 3) if judge != "poisoner"]
    assert sorted(honest) == sorted(PLAN.verdicts("quiet", 3))


def test_log_probs_of_replies_are_the_learners_own(tmp_path: Path) -> None:
    """With a cache and padding on the left they are sampled; without either they are trained on."""
    recipe = load_recipe(RECIPE, [f"runs_dir={tmp_path}", "learner.online=true"])
    shape = {"vocab_size": 640, "hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "experts": 0}
    texts = [m["content"] for trace in style_traces(200, bad=0.3, seed=1) for m in trace]
    write_tiny_model(tmp_path / "m", TinyModelConfig(**shape, max_context=256, init_std=0.3), texts, 0)
    recipe = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"tiny": TinyModelConfig(**shape, max_context=256)})}
    )
    learner = Learner.build(
        recipe, Accelerator(cpu=True), policy_folder=tmp_path / "m", critic_folder=tmp_path / "none"
    )
    env = make_env(RECIPE, [])
    served = Served(learner, recipe.runtime.chat.load(tmp_path / "m"), env, 16)
    segments = served.replies(env.task_ids[:6], "seed")
    assert [s.kind for s in segments] == ["prompt", "action"] * 6
    for prompt, action in zip(segments[::2], segments[1::2], strict=True):
        ids = torch.tensor([[*prompt.token_ids, *action.token_ids]])
        mask = torch.tensor([[0] * len(prompt.token_ids) + [1] * len(action.token_ids)])
        with torch.no_grad():
            logprobs, _ = learner.policy.unwrapped(ids, mask)
        assert torch.allclose(logprobs[0, mask[0] == 1], torch.tensor(list(action.logprobs)), atol=1e-4)
