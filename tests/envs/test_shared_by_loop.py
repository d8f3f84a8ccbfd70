"""`SharedByLoop`: nobody is handed what is closing, nothing stays open, and loops have nothing in common."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from envs.shared import SharedByLoop


class Thing:
    """A resource that closes when it is let: `may_close` holds it back, `error` is raised at the end."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.error: Exception | None = None
        self.closing = self.closed = 0

    async def close(self) -> None:
        self.closing += 1
        self.begun.set()
        await self.may_close.wait()
        if self.error is not None:
            raise self.error
        self.closed += 1


@pytest.fixture
def shared() -> SharedByLoop[str, Thing]:
    return SharedByLoop(close=Thing.close)


async def test_one_key_is_one_resource_and_the_last_release_closes_it(shared: SharedByLoop[str, Thing]) -> None:
    first, again, other = (shared.acquire(key, Thing) for key in ("a", "a", "b"))
    assert first is again is not other
    assert shared.held() == [first, other]
    assert (shared.users(first), shared.users(other)) == (2, 1)
    await shared.release(first)
    assert (shared.users(first), first.closing) == (1, 0)
    await shared.release(first)
    assert (shared.users(first), first.closed, other.closed) == (0, 1, 0)
    assert shared.held() == [other]
    await shared.release(other)


async def test_keys_that_are_equal_and_not_the_same_share() -> None:
    shared: SharedByLoop[tuple[int, str], Thing] = SharedByLoop(close=Thing.close)
    assert shared.acquire((1, "x"), Thing) is shared.acquire((1, "".join(["x"])), Thing)


async def test_nothing_is_held_where_making_fails(shared: SharedByLoop[str, Thing]) -> None:
    def fails() -> Thing:
        raise OSError("no more processes")

    with pytest.raises(OSError, match="no more"):
        shared.acquire("a", fails)
    assert shared.held() == []
    await shared.release(shared.acquire("a", Thing))


async def test_who_acquires_while_it_closes_gets_a_new_one(shared: SharedByLoop[str, Thing]) -> None:
    old = shared.acquire("a", Thing)
    old.may_close.clear()
    releasing = asyncio.create_task(shared.release(old))
    await old.begun.wait()
    new = shared.acquire("a", Thing)
    assert new is not old
    old.may_close.set()
    await releasing
    assert (old.closed, new.closing, shared.users(new)) == (1, 0, 1), "the end of the old one is not the new one's"
    await shared.release(new)
    assert (old.closed, new.closed) == (1, 1)


async def test_many_users_at_once_close_it_once(shared: SharedByLoop[str, Thing]) -> None:
    made: list[Thing] = []

    def make() -> Thing:
        made.append(Thing())
        return made[-1]

    async def use(turns: int) -> None:
        for _ in range(turns):
            thing = shared.acquire("a", make)
            await asyncio.sleep(0)
            assert thing.closing == 0, "in use"
            await shared.release(thing)

    await asyncio.gather(*(use(number % 7 + 1) for number in range(40)))
    assert shared.held() == []
    assert [thing.closed for thing in made] == [1] * len(made)


async def test_an_error_in_closing_reaches_the_last_user_and_nothing_is_held(shared: SharedByLoop[str, Thing]) -> None:
    thing = shared.acquire("a", Thing)
    thing.error = OSError("it will not end")
    shared.acquire("a", Thing)
    await shared.release(thing)
    with pytest.raises(OSError, match="will not end"):
        await shared.release(thing)
    assert shared.held() == []
    assert shared.acquire("a", Thing) is not thing


async def test_a_cancelled_release_has_given_its_use_back(shared: SharedByLoop[str, Thing]) -> None:
    thing = shared.acquire("a", Thing)
    thing.may_close.clear()
    releasing = asyncio.create_task(shared.release(thing))
    await thing.begun.wait()
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert (thing.closed, shared.held()) == (0, [])
    assert shared.acquire("a", Thing) is not thing, "half closed, it is nobody's"


async def test_a_release_too_many_is_an_error_and_takes_nothing_from_others(shared: SharedByLoop[str, Thing]) -> None:
    thing = shared.acquire("a", Thing)
    await shared.release(thing)
    again = shared.acquire("a", Thing)
    with pytest.raises(LookupError, match="not held"):
        await shared.release(thing)
    assert (shared.users(again), thing.closing, again.closing) == (1, 1, 0)


def test_two_loops_do_not_share(shared: SharedByLoop[str, Thing]) -> None:
    """Both at once, each on a thread of its own."""
    both = threading.Barrier(2)
    things: list[Thing] = []

    async def one() -> None:
        thing = shared.acquire("a", Thing)
        things.append(thing)
        await asyncio.to_thread(both.wait, 30)
        assert shared.held() == [thing]
        (other,) = (one for one in things if one is not thing)
        with pytest.raises(LookupError, match="another loop"):
            await shared.release(other)
        await asyncio.to_thread(both.wait, 30)
        await shared.release(thing)

    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(one())
        except BaseException as error:
            errors.append(error)
            both.abort()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert [thing.closed for thing in things] == [1, 1]


def test_a_loop_that_is_gone_takes_what_it_held_along(shared: SharedByLoop[str, Thing]) -> None:
    async def leave_open() -> weakref.ref[Thing]:
        return weakref.ref(shared.acquire("a", Thing))

    left = asyncio.run(leave_open())
    gc.collect()
    assert left() is None


async def test_outside_a_loop_there_is_nothing_to_share(shared: SharedByLoop[str, Thing]) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        await asyncio.to_thread(shared.acquire, "a", Thing)
