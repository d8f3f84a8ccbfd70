"""What a simulation says of a method must follow from its rewards."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.simulate.recovery import LEAST, Interaction, by_step, interval, mean_reward, share_by_step, steps_to_recover

rewards = st.floats(0, 1, allow_nan=False)


def test_recovery_is_counted_from_the_shift() -> None:
    line = [0.9] * 10 + [0.0] * 5 + [0.9] * 10
    # Steps 15, 16 and 17 are the first three good ones in a row: the eighth step after the shift.
    assert steps_to_recover(line, 10, 25) == 8
    assert steps_to_recover(line, 10, 17) is None


def test_a_reward_that_never_fell_takes_no_longer_than_the_smoothing() -> None:
    assert steps_to_recover([0.7] * 30, 10, 30) == 3


def test_one_lucky_batch_is_no_recovery() -> None:
    assert steps_to_recover([1.0] * 10 + [0.0, 1.0, 0.0, 0.0, 1.0, 0.0], 10, 16) is None


def test_who_had_nothing_recovers_nothing() -> None:
    """A collapsed method has reward 0 before and after a shift, which is no quick recovery."""
    assert steps_to_recover([0.0] * 40, 20, 40) is None


def test_nothing_before_the_shift_is_an_error() -> None:
    with pytest.raises(ValueError, match="no reward"):
        steps_to_recover([None, None, 1.0], 2, 3)


@given(st.lists(rewards, min_size=5, max_size=30), st.lists(st.one_of(st.none(), rewards), min_size=1, max_size=40))
def test_the_answer_is_the_first_step_whose_window_reaches_the_goal(before: list[float], after: list) -> None:
    shift, stop = len(before), len(before) + len(after)
    found = steps_to_recover([*before, *after], shift, stop)
    earlier = before[-10:]
    goal = 0.8 * math.fsum(earlier) / len(earlier)

    def reached(steps: int) -> bool:
        seen = [r for r in after[:steps] if r is not None][-3:]
        return len(seen) == 3 and after[steps - 1] is not None and math.fsum(seen) / 3 >= goal - 1e-9

    expected = next((n for n in range(1, len(after) + 1) if reached(n)), None)
    assert found == (expected if goal >= 0.8 * LEAST else None)


@given(st.lists(rewards, min_size=12, max_size=40), st.integers(1, 20))
def test_rewards_before_a_late_recovery_do_not_matter_if_they_are_zero(line: list[float], delay: int) -> None:
    """A recovery that comes `delay` steps later is reported `delay` steps later."""
    high = [1.0] * 10
    first = steps_to_recover([*high, *line, *high], 10, 200)
    later = steps_to_recover([*high, *[0.0] * (delay + 3), *line, *high], 10, 200)
    assert first is not None
    assert later is not None
    assert later >= delay


def test_the_interval_is_students() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, low, high) == pytest.approx((3.0, 1.0368, 4.9632), abs=1e-3)  # 3 -+ 2.776 * 1.5811 / sqrt(5)
    assert math.isnan(interval([1.0])[1])


def test_figures_by_step_leave_gaps_and_ignore_what_came_after_the_end() -> None:
    def at(step: int, style: str, reward: float) -> Interaction:
        return Interaction(0, step, step, "t", style, "cute", 1, reward, 0.1)

    seen = [at(0, "cute", 1.0), at(0, "academic", 0.0), at(2, "cute", 1.0), at(3, "cute", 1.0)]
    assert by_step(seen, 3) == [0.5, None, 1.0]
    assert share_by_step(seen, "cute", 3) == [0.5, None, 1.0]
    assert mean_reward(seen, 0, 3) == pytest.approx(2 / 3)
