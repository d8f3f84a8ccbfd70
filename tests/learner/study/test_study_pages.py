"""Pages and tables: made from CSVs alone, honest about what is missing, and the same every time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from study_tools import STUDY

from learner.study.figures import common_updates, fell_at, with_interval
from learner.study.page import write_page
from learner.study.record import Record, RecordError, read_records, record_path, write_record
from learner.study.search import chosen, conclude, search_study
from learner.study.task import PLACES, Fitness, by_place, task_page, turn_at

FACTS = {
    "command": "python -m learner.train",
    "machine": "2 cores, 24 GiB, no GPU",
    "date": "2026-12-01",
    "seconds": "90",
}


def record(folder: Path, arm: str, seed: int, rewards: list[float]) -> None:
    rows = [{"step": i + 1.0, "reward": reward, "gated": 0.002} for i, reward in enumerate(rewards)]
    write_record(record_path(folder / "main", arm, seed), rows, FACTS)


def test_a_page_says_what_the_csvs_hold_and_is_the_same_every_time(tmp_path: Path) -> None:
    for seed, end in enumerate((0.6, 0.8, 1.0)):
        record(tmp_path, "sao", seed, [0.5] * 4 + [end])
    record(tmp_path, "grpo", 0, [0.25] * 5)
    page = write_page(STUDY, tmp_path)
    text = page.read_text()
    assert "| SAO | 3 | 0.560 [0.461, 0.659] | 0.800 [0.303, 1.297] |" in text
    assert "| GRPO | 1 | 0.250 | 0.250 |" in text
    assert "With 1 seed of an arm nothing is shown yet" in text
    assert "SAO 97.3, GRPO 84.2." in text
    assert "2 cores, 24 GiB, no GPU" in text
    assert "not searched" in text
    picture = (tmp_path / "main" / "curves.png").read_bytes()
    assert write_page(STUDY, tmp_path).read_text() == text
    assert (tmp_path / "main" / "curves.png").read_bytes() == picture


def test_a_page_compares_what_all_runs_have_made_and_names_what_is_missing(tmp_path: Path) -> None:
    record(tmp_path, "sao", 0, [0.1, 0.1, 0.1, 0.9])
    text = write_page(STUDY, tmp_path).read_text()
    assert "first 4 updates" in text
    assert "the study asks for 5" in text
    assert "Not run yet: GRPO." in text
    assert "Nothing yet" in write_page(STUDY, tmp_path / "empty").read_text()
    record(tmp_path, "grpo", 0, [0.1, 0.1])
    assert common_updates({arm.name: read_records(tmp_path / "main", arm.name) for arm in STUDY.arms}) == 2


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "sao-seed0.csv").write_text("nonsense\n")
    with pytest.raises(RecordError, match=r"sao-seed0\.csv is no CSV"):
        write_page(STUDY, tmp_path)


def test_arms_with_like_names_are_told_apart(tmp_path: Path) -> None:
    record(tmp_path, "sao", 0, [1.0])
    record(tmp_path, "sao-seed0-x", 1, [1.0])
    assert [found.seed for found in read_records(tmp_path / "main", "sao")] == [0]


def test_a_collapse_is_seen_and_a_dip_is_none() -> None:
    def run(*parts: tuple[float, int]) -> Record:
        rewards = [value for value, count in parts for _ in range(count)]
        return Record("sao", 0, tuple({"step": i + 1.0, "reward": r} for i, r in enumerate(rewards)), {})

    assert 30 <= fell_at(run((0.8, 30), (0.1, 30)), 60) <= 45
    assert math.isnan(fell_at(run((0.8, 30), (0.1, 20), (0.8, 20)), 70))
    assert math.isnan(fell_at(run((0.2, 30), (0.8, 30)), 60))
    assert math.isnan(fell_at(run((0.8, 3)), 3))


def test_one_seed_has_no_interval_and_none_has_no_cell() -> None:
    assert with_interval([0.5], "{:.2f}") == "0.50"
    assert with_interval([math.nan], "{:.2f}") == ""
    assert with_interval([0.4, 0.6], "{:.1f}") == "0.5 [-0.8, 1.8]"


def test_a_search_decides_by_mean_reward_once_all_settings_are_finished(tmp_path: Path) -> None:
    study = search_study(STUDY, 3)
    sao = [arm for arm in study.arms if arm.name.startswith("sao--")]
    for i, arm in enumerate(sao):
        if i == 5:
            assert "chosen" not in conclude(STUDY, tmp_path, seeds=(1000,))["sao"]
        rows = [{"step": 1.0, "reward": 0.9 if i == 2 else 0.1}]
        write_record(record_path(tmp_path / "search", arm.name, 1000), rows, FACTS)
    told = conclude(STUDY, tmp_path, seeds=(1000, 1001))
    assert told["sao"]["chosen"] == list(sao[2].words[-3:])
    assert told["sao"]["seeds"] == [1000]
    assert not told["sao"]["at_the_edge"]
    assert "grpo" not in told
    assert chosen(tmp_path, STUDY.arms[0]) == tuple(told["sao"]["chosen"])
    assert chosen(tmp_path, STUDY.arms[1]) == ()
    assert "| chosen |" in (tmp_path / "search.md").read_text()


def test_explained_variance_is_read_at_the_first_token_of_a_turn() -> None:
    """Two episodes with rewards 1 and 0: the values know nothing at the prompt, half of it in the middle, all late."""
    turn_ids = torch.tensor([[0, 0, -1, 1, 1, -1, 2, 2], [0, 0, -1, 1, 1, -1, 2, 2]])
    mask = turn_ids >= 0
    good, bad = [0.5, 9, 9, 0.75, 9, 9, 1.0, 9], [0.5, -9, -9, 0.25, -9, -9, 0.0, -9]
    found = by_place(torch.tensor([good, bad]), turn_ids, mask, [1.0, 0.0])
    assert list(found) == list(PLACES)
    assert found["prompt"] == pytest.approx(0.0)
    assert found["middle"] == pytest.approx(0.75)
    assert found["last turn"] == pytest.approx(1.0)
    assert [turn_at(5, share) for share in PLACES.values()] == [0, 1, 2, 3, 4]
    assert turn_at(1, 1.0) == 0


def test_a_task_is_fit_only_above_both_thresholds() -> None:
    def fitness(prompt: float, middle: float) -> Fitness:
        explained = dict.fromkeys(PLACES, 0.9) | {"prompt": prompt, "middle": middle}
        return Fitness("chains", explained, 0.5, 0.4, {"p50": 4.0}, {"4": (10, 0.4)}, 50.0, 100, 20)

    assert fitness(0.31, 0.61).is_fit
    assert not fitness(0.29, 0.9).is_fit
    assert not fitness(0.9, math.nan).is_fit
    text = task_page(fitness(0.29, 0.9), "python -m learner.study task", "2 cores", "2026-12-01")
    assert "**not** fit" in text
    assert "| middle | 0.900 | above 0.6 |" in text
