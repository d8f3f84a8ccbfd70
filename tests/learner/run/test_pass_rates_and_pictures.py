"""Scores of an evaluation, and what a person sees: lines, sparklines, curves, help."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_tools import action, episode, prompt
from rich.console import Console

from agent.estimates import wilson_interval
from learner.run.display import Display, sparkline
from learner.run.metrics import quantiles
from learner.run.pass_rates import EVERY_FAMILY, pass_rate_table, pass_rates
from learner.run.plots import draw_curves, read_metrics


def answered(task: str, reward: float, family: str, *, turns: int = 1, reused: bool = False):  # type: ignore[no-untyped-def]
    segments = [prompt([1]), *[action([2, 3]) for _ in range(turns)]]
    rewards = [0.0] * (turns - 1) + [reward]
    return episode(segments, rewards, task=task, metrics={"family": family, "reused_output": reused})


def test_pass_at_one_is_the_mean_over_tasks_of_the_mean_over_samples() -> None:
    """A task that was sampled more often does not weigh more."""
    episodes = [answered("a", 1, "sums")] * 3 + [answered("b", 0, "sums")] + [answered("c", 1, "lcm", turns=3)] * 2
    every, *families = pass_rates(episodes)
    assert every.family == EVERY_FAMILY
    assert (every.tasks, every.episodes) == (3, 6)
    assert every.success == pytest.approx(2 / 3)
    found = {s.family: s for s in families}
    assert found["sums"].success == pytest.approx(0.5)
    assert found["lcm"].success == 1.0
    assert (found["lcm"].turns, found["sums"].turns) == (3.0, 1.0)


def test_samples_of_one_task_are_averaged_before_the_interval() -> None:
    tasks = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1]]
    episodes = [answered(f"t{i}", r, "sums") for i, row in enumerate(tasks) for r in row]
    every = pass_rates(episodes)[0]
    means = [0.5, 1.0, 0.0, 0.75]
    mean = sum(means) / 4
    half = 1.96 * math.sqrt(sum((m - mean) ** 2 for m in means) / 3 / 4)
    assert every.success == pytest.approx(mean)
    assert (every.low, every.high) == pytest.approx((max(0, mean - half), min(1, mean + half)))


def test_one_sample_a_task_has_wilsons_interval() -> None:
    every = pass_rates([answered(f"t{i}", float(i < 9), "sums") for i in range(10)])[0]
    assert (every.low, every.high) == pytest.approx((0.5958, 0.9821), abs=1e-4)  # Wilson's own numbers for 9 of 10


def test_tasks_that_all_fail_or_all_pass_are_no_certainty() -> None:
    for reward in (0.0, 1.0):
        every = pass_rates([answered(f"t{i % 8}", reward, "sums") for i in range(16)])[0]
        assert every.high - every.low > 0.3
        assert (every.low, every.high)[int(reward)] == reward


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_holds_the_share_and_stays_in_bounds(counts: tuple[int, int]) -> None:
    low, high = wilson_interval(*counts)
    assert 0 <= low <= counts[0] / counts[1] + 1e-12
    assert counts[0] / counts[1] - 1e-12 <= high <= 1
    assert low < high


def test_the_share_of_episodes_that_reuse_an_output_is_told() -> None:
    episodes = [answered(f"t{i}", 1, "sums", reused=i < 3) for i in range(4)]
    assert pass_rates(episodes)[0].reused == 0.75
    text = io.StringIO()
    Console(file=text, width=120).print(pass_rate_table(pass_rates(episodes)))
    assert "100.0%" in text.getvalue()
    assert "75.0%" in text.getvalue()


def test_no_episodes_at_all_are_no_crash() -> None:
    every = pass_rates([])[0]
    assert (every.tasks, every.episodes) == (0, 0)


def test_sparklines_go_from_smallest_to_largest_and_bear_anything() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([]) == sparkline([math.nan]) == ""
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([1.0, math.nan, math.inf, 2.0]) == "▁█"


def test_without_a_terminal_there_is_a_plain_line_a_step() -> None:
    text = io.StringIO()
    with Display("micro", Console(file=text, width=60)) as display:
        display.log("a [/bracket] of the person's own")
        with display.stage("Cold start", 2) as advance:
            advance(2, loss=0.25)
        display.step(3, 60, {"rollout/reward": 0.5, "evaluation/success": 0.875, "gate/share": 0.001})
        display.step(4, 60, {"rollout/reward": 0.75, "critic/explained_variance": math.nan})
    said = text.getvalue()
    assert "\x1b" not in said
    assert "a [/bracket] of the person's own\n" in said
    assert "Cold start 2/2  loss 0.250" in said
    line = next(line for line in said.splitlines() if line.startswith("step 3/60"))
    assert "reward 0.500" in line
    assert "held-out success 87.5%" in line
    assert "gated share 0.100%" in line
    assert "step 4/60  reward 0.750" in said


def test_in_a_terminal_the_table_holds_what_was_promised() -> None:
    text = io.StringIO()
    figures = {
        "rollout/reward": 0.5,
        "evaluation/success": 0.9,
        "critic/explained_variance": 0.2,
        "gate/share": 0.0,
        "lag/mean": 1.5,
        "engine/tokens_per_s": 5000.0,
        "queue/ready": 12.0,
        "time/step_s": 2.0,
    }
    with Display("micro", Console(file=text, width=120, force_terminal=True)) as display:
        display.step(1, 60, figures)
        display.step(2, 60, figures)
    words = (
        "reward",
        "held-out success",
        "explained variance",
        "gated share",
        "policy lag",
        "tokens/s",
        "queue length",
    )
    for word in (*words, "left", "2/60"):
        assert word in text.getvalue(), word


def test_the_curves_of_a_resumed_run_take_the_later_record_of_a_step(tmp_path: Path) -> None:
    """A killed run did step 2 without a checkpoint, and its last line is cut."""
    records = [
        {"step": 0, "evaluation/success": 0.3},
        {"step": 1, "rollout/success": 0.3, "critic/explained_variance": None},
        {"step": 2, "rollout/success": 0.1},
    ]
    later = [{"step": 2, "rollout/success": 0.4, "evaluation/success": 0.5}, {"step": 3, "rollout/success": 0.5}]
    lines = [*map(json.dumps, records), '{"step": 3, "rollout/succ', *map(json.dumps, later)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines) + "\n")
    found = read_metrics(path)
    assert [(r["step"], r.get("rollout/success")) for r in found] == [(0, None), (1, 0.3), (2, 0.4), (3, 0.5)]
    draw_curves(path, tmp_path / "curves.png", "micro")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_without_metrics_still_has_a_picture(tmp_path: Path) -> None:
    draw_curves(tmp_path / "none.jsonl", tmp_path / "curves.png", "micro")
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_quantiles_of_nothing_are_no_figures() -> None:
    assert quantiles([], "x") == {}
    assert quantiles([1.0, 2.0, 3.0], "x")["x_p50"] == 2.0


@pytest.mark.parametrize("command", ["train", "sft", "pretrain_value", "evaluate"])
def test_help_shows_an_example_that_names_the_command(command: str) -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as caught:
        importlib.import_module(f"learner.{command}").main(["--help"])
    assert caught.value.code == 0
    assert re.search(rf"example:\s+python -m learner\.{command} \S+\.yaml", text.getvalue()), text.getvalue()
