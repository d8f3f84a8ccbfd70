"""The learner's speed: of real tokens, by what the method asks for, and no share of a peak that nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from learner_tools import build_learner, micro_recipe, random_episodes

from learner.algorithms import get_algorithm
from learner.data.batch import build_batch
from learner.model.flops import StepFlops, Work
from learner.run.throughput import Rows, count_logits_again, peak_flops, step_flops, throughput_figures
from learner.updates import StepSettings

KNOWN = {"speed/tokens_per_s", "speed/tflops"}


def test_a_step_says_its_speed_and_on_a_cpu_no_share_of_a_peak(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path)
    own.step(random_episodes(8))
    assert own.speed.figures.keys() == KNOWN
    assert all(value > 0 for value in own.speed.figures.values())


def test_the_recipes_own_peak_gives_shares(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, hardware={"peak_flops": 1e12}, model=recomputing(micro_model))
    own.step(random_episodes(8))
    figures = own.speed.figures
    assert 0 < figures["speed/mfu"] < figures["speed/hfu"]
    assert figures["speed/mfu"] == pytest.approx(figures["speed/tflops"])


def recomputing(folder: Path) -> dict[str, object]:
    return {"path": str(folder), "recompute_layers": True}


def test_the_peak_is_the_recipes_or_the_devices_in_bfloat16_alone(tmp_path: Path) -> None:
    narrow = micro_recipe(tmp_path, model={"path": "x", "compute_dtype": "bfloat16"})
    assert peak_flops(narrow, "NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops(narrow, "NVIDIA H100 PCIe") == 756e12
    assert peak_flops(narrow, "NVIDIA L40S") == 362e12
    assert peak_flops(narrow, "a device of tomorrow") is None
    assert peak_flops(narrow, None) is None
    assert peak_flops(micro_recipe(tmp_path), "NVIDIA H100 80GB HBM3") is None
    assert peak_flops(micro_recipe(tmp_path, hardware={"peak_flops": 5.0}), None) == 5.0


@pytest.fixture
def works(micro_model: Path, tmp_path: Path) -> tuple[Work, Work]:
    own = build_learner(micro_model, tmp_path)
    assert own.critic is not None
    critic = own.critic.unwrapped
    return Work.of(own.policy.unwrapped, own.policy.unwrapped.model.config), Work.of(critic, critic.body.config)


def test_a_step_counts_who_is_gone_through_how_often(works: tuple[Work, Work]) -> None:
    """SAO: two critic updates, the values read again, one policy update. Others read log-probs before, or no critic."""
    policy, critic = works
    batch = build_batch(random_episodes(8))
    rows = Rows(batch.lengths.tolist(), batch.action_mask.sum(1).tolist())
    forward, backward = policy.forward(rows.lengths, rows.actions), policy.backward(rows.lengths, rows.actions)
    values, learned = critic.forward(rows.lengths, rows.lengths), critic.backward(rows.lengths, rows.lengths)
    usual = StepSettings()

    def count(name: str, settings: StepSettings = usual, reference: bool = False) -> float:
        return step_flops(rows, policy, critic, get_algorithm(name), settings, reference=reference).model

    assert count("sao") == pytest.approx(3 * values + 2 * learned + forward + backward)
    assert count("sao", StepSettings(train_policy=False)) == pytest.approx(3 * values + 2 * learned)
    assert count("grpo") == pytest.approx(2 * forward + backward)
    assert count("grpo", StepSettings(policy_epochs=3), reference=True) == pytest.approx(5 * forward + 3 * backward)


def test_logits_are_made_again_where_a_micro_batch_has_more_than_a_chunk() -> None:
    rows = Rows([10, 10, 4], [8, 8, 3])
    assert count_logits_again(rows, micro_batch_tokens=20, max_padding=0.0, chunk=10) == 16
    assert count_logits_again(rows, micro_batch_tokens=10, max_padding=0.0, chunk=10) == 0


def test_no_flops_no_share_and_no_time_no_figure() -> None:
    rows = Rows([10, 5], [3, 2])
    assert throughput_figures(rows, None, 2.0, devices=1, peak=1.0) == {"speed/tokens_per_s": 7.5}
    assert throughput_figures(rows, None, 0.0, devices=1, peak=1.0) == {}
    figures = throughput_figures(rows, StepFlops(8e12, 2e12), 2.0, devices=4, peak=2e12)
    assert figures["speed/tflops"] == pytest.approx(4.0)
    assert figures["speed/mfu"] == pytest.approx(0.5)
    assert figures["speed/hfu"] == pytest.approx(0.625)
