"""A request at its time limit is told to hand over; nothing of it is left, however that ends."""

from __future__ import annotations

import asyncio

import pytest

from agent.engines.overtime import Overtime

SOON_S, LATE_S = 0.01, 60.0


class Request:
    """Ends with "whole" when `ended` is set, with "part" when it was told to hand over (if it does that)."""

    def __init__(self, *, hands_over: bool = True, fails: Exception | None = None) -> None:
        self.hands_over, self.fails = hands_over, fails
        self.told, self.ended = asyncio.Event(), asyncio.Event()
        self.aborts = 0

    async def work(self) -> str:
        await (self.told.wait() if self.hands_over else self.ended.wait())
        return "part"

    async def abort(self) -> None:
        self.aborts += 1
        if self.fails is not None:
            raise self.fails
        self.told.set()


def tasks() -> set[asyncio.Task[object]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[operator]


async def test_a_request_in_time_costs_no_task_and_no_abort() -> None:
    request = Request()
    overtime = Overtime(LATE_S, request.abort, LATE_S)
    async with overtime:
        assert tasks() == set()
    assert (overtime.reached, request.aborts) == (False, 0)


async def test_what_is_handed_over_at_the_limit_is_lost() -> None:
    request = Request()
    overtime = Overtime(SOON_S, request.abort, LATE_S)
    async with overtime:
        assert await request.work() == "part"
    assert (overtime.reached, request.aborts, tasks()) == (True, 1, set())


async def test_a_request_that_hands_nothing_over_is_waited_for() -> None:
    request = Request(hands_over=False)
    overtime = Overtime(SOON_S, request.abort, SOON_S)
    with pytest.raises(TimeoutError):
        async with overtime:
            await request.work()
    assert (overtime.reached, tasks()) == (True, set())


async def test_an_abort_that_fails_is_hidden_behind_the_grace() -> None:
    request = Request(fails=ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        async with Overtime(SOON_S, request.abort, LATE_S):
            await request.work()
    assert tasks() == set()


async def test_tokens_that_arrive_while_the_abort_fails_are_lost() -> None:
    """The block ended by itself: what it has counts, whatever became of the abort."""
    failed = asyncio.Event()

    async def abort() -> None:
        failed.set()
        raise ConnectionError("gone")

    overtime = Overtime(SOON_S, abort, LATE_S)
    async with overtime:
        await failed.wait()
        found = "whole"
    assert (found, overtime.reached) == ("whole", True)


async def test_cancelling_is_taken_for_the_time_limit() -> None:
    request = Request()

    async def run() -> None:
        async with Overtime(LATE_S, request.abort, LATE_S):
            await request.work()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (request.aborts, tasks()) == (0, set())
