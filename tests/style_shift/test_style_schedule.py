"""The schedule decides what is rewarded; a mistake in it would look like a method that adapts well or badly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.style_shift.schedule import STYLES, Schedule, ScheduleError


def test_the_papers_phases_are_the_default() -> None:
    schedule = Schedule.from_spec()
    assert [schedule.at(step).style for step in (0, 159, 160, 299, 300, 429)] == [
        "cute", "cute", "chuunibyou", "chuunibyou", "classical", "classical",
    ]  # fmt: skip
    assert schedule.changes == (160, 300)
    assert schedule.steps == 430
    assert schedule.at(299).candidates == ("academic", "cute", "chuunibyou")
    assert schedule.at(300).candidates == ("cute", "chuunibyou", "classical"), "academic leaves as classical enters"
    assert schedule.at(10**9).style == "classical", "the last phase goes on"


@given(step=st.integers(0, 10_000), before=st.lists(st.integers(0, 10_000), max_size=5), seed=st.integers(0, 2**32))
def test_the_phase_of_a_step_does_not_depend_on_what_was_asked_before(step: int, before: list[int], seed: int) -> None:
    asked, fresh = Schedule.seeded(seed, phases=4, steps=500), Schedule.seeded(seed, phases=4, steps=500)
    for other in before:
        asked.at(other)
    assert asked.at(step) == fresh.at(step)


@given(seed=st.integers(0, 2**32), phases=st.integers(1, 9), steps=st.integers(9, 1000))
def test_a_seeded_schedule_changes_its_style_in_every_phase(seed: int, phases: int, steps: int) -> None:
    schedule = Schedule.seeded(seed, phases=phases, steps=steps)
    assert len(schedule.changes) == phases - 1
    assert all(0 < change < steps for change in schedule.changes)


def test_the_order_of_candidates_in_a_recipe_cannot_tell_the_target() -> None:
    schedule = Schedule.from_spec([{"start": 0, "style": "cute", "candidates": ["cute", "classical", "academic"]}])
    assert schedule.at(0).candidates == ("academic", "cute", "classical")
    assert Schedule.from_spec([{"start": 0, "style": "cute"}]).at(5).candidates == STYLES


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        ([], "at least one"),
        ([{"start": 3, "style": "cute"}], "phase 0"),
        ([{"start": 0, "style": "cute"}, {"start": 0, "style": "academic"}], "phase 1"),
        ([{"start": 0, "style": "cute"}, {"start": 9.5, "style": "academic"}], "phase 1"),
        ([{"start": 0, "style": "gothic"}], "preferred style 'gothic'"),
        ([{"start": 0, "style": "cute", "candidates": ["academic"]}], "not one of its candidates"),
        ([{"start": 0, "style": "cute", "candidates": "cute"}], "candidates are some of"),
        ([{"start": 0, "style": "cute", "length": 5}], "length"),
        ([{"style": "cute"}], "start"),
    ],
)
def test_an_impossible_schedule_is_an_error_that_names_the_phase(phases: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        Schedule.from_spec(phases)


def test_a_negative_step_is_an_error_and_not_the_last_phase() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Schedule.from_spec().at(-1)
