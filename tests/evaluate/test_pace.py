"""No minute holds more than its limits, whatever comes when; on a clock of the test's own."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.evaluate.endpoint.pace import WINDOW_S, Pace


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def in_any_minute(times: list[float], weights: list[int]) -> int:
    """The most that any sliding minute holds."""
    return max(
        (sum(w for at, w in zip(times, weights, strict=True) if start <= at < start + WINDOW_S) for start in times),
        default=0,
    )


@settings(max_examples=60)
@given(
    gaps=st.lists(st.floats(0, 30), min_size=1, max_size=25),
    sizes=st.lists(st.integers(0, 60), min_size=25, max_size=25),
    rpm=st.none() | st.integers(1, 6),
    tpm=st.none() | st.integers(20, 100),
)
def test_no_minute_holds_more_requests_or_tokens_than_allowed(
    gaps: list[float], sizes: list[int], rpm: int | None, tpm: int | None
) -> None:
    clock = Clock()

    async def go() -> list[float]:
        pace, times = Pace(rpm, tpm, clock=clock, sleep=clock.sleep), []
        for gap, size in zip(gaps, sizes, strict=False):
            clock.now += gap
            times.append((await pace.admit(size)).at)
        return times

    times = asyncio.run(go())
    assert times == sorted(times)
    if rpm is not None:
        assert in_any_minute(times, [1] * len(times)) <= rpm
    if tpm is not None:
        assert in_any_minute(times, [min(size, tpm) for size in sizes[: len(times)]]) <= tpm


async def test_without_limits_nothing_waits() -> None:
    clock = Clock()
    pace = Pace(clock=clock, sleep=clock.sleep)
    for _ in range(1000):
        await pace.admit(10**9)
    assert clock.now == 1000.0


async def test_what_a_request_really_cost_is_what_counts() -> None:
    clock = Clock()
    pace = Pace(tpm=100, clock=clock, sleep=clock.sleep)
    admission = await pace.admit(90)
    pace.settle(admission, 10)
    await pace.admit(90)
    assert clock.now == 1000.0
    await pace.admit(1)
    assert clock.now == pytest.approx(1000.0 + WINDOW_S, abs=0.1)


async def test_what_the_endpoint_asks_for_holds_everybody_in_order() -> None:
    clock = Clock()
    pace = Pace(clock=clock, sleep=clock.sleep)
    order: list[int] = []

    async def one(number: int) -> None:
        await pace.admit(1)
        order.append(number)

    pace.hold(7)
    pace.hold(3)  # a shorter one takes nothing back
    assert pace.held_s == 7
    await asyncio.gather(*(one(number) for number in range(5)))
    assert order == list(range(5))
    assert clock.now == 1007.0
    assert pace.held_s == 0
