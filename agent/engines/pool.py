"""Several engines behind one runtime: who serves, who is away, and where an episode goes when its engine fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from agent.backoff import Unreachable, backoff_s
from agent.engines.base import Completion, Disconnected, Engine, EngineFault, EngineHealth, Sticky, WeightStream
from agent.episode import SamplingParams

log = logging.getLogger(__name__)

GIVEN_UP_AFTER = 3
"""Checks in a row without an answer, after which requests that are still at the engine are given up."""

ASKED_APART_S = 0.2
"""Seconds between two questions to one engine, however many episodes want to know how it is."""

BEHIND_S = 60.0
"""How long a sound engine may be behind the newest version: a publication does not reach all in the same moment."""


BUSY_S = 0.2
"""A check whose time limit itself comes later than this says nothing of the engine: with thousands of episodes under
way the event loop may take seconds to go round, and a check goes round with it several times."""


class _Member:
    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self.load = self.sessions = 0
        self.sound = False
        self.trouble = "not asked yet"
        self.version = -1
        self.behind_since: float | None = None
        self.misses = 0
        self.doubts = 0
        self.questions = self.answered = 0
        self.wanted = asyncio.Event()
        self.was_asked = asyncio.Event()
        self.requests: set[asyncio.Timeout] = set()  # one of each request that is at the engine

    def give_up(self) -> None:
        """End all requests that are at the engine."""
        now = asyncio.get_running_loop().time()
        given_up, self.requests = self.requests, set()
        for request in given_up:
            request.reschedule(now)


class EnginePool:
    """An episode goes to the least loaded engine and stays there, so that its prefix stays in that engine's cache.

    What an engine is to the pool:

        unknown ──answers──▶ sound ──a connection broke──▶ doubted ──answers──▶ sound
                               │                              └─ does not ─▶ away
                               └─ a check failed, or its weights are older ─▶ away ──answers, newest version──▶ sound

    Only a sound engine is given episodes and requests. Each is asked for its health every `check_every_s`, a doubted
    one and one that failed at a request at once, one that is away with growing pauses. A request that failed is no
    reason to take an engine from the others: its episode asks how the engine is, and moves. One that stays silent for
    `GIVEN_UP_AFTER` checks (it may hang and keep its connections open) also loses the requests that are still at it:
    their episodes move.

    Weights: an engine that comes back must have a version that is not below the newest one that any engine was seen
    with, so a restarted one waits until the learner has published to it again. One whose version goes back is away at
    once; a sound one may be behind for `BEHIND_S`, while a publication is under way. Versions that are rolled back on
    purpose need a new pool, i.e. a new runtime.

        pool = EnginePool({url: HttpEngine(url) for url in urls}, patience_s=600)
        running = asyncio.create_task(pool.run())     # asks; without it nobody becomes sound
        async with pool.seat() as seat:               # counts as that engine's load
            episode = await rollout(ticket, env, seat, renderer, settings, recover=seat.move)

    The pool only says where a request may go. Whether it is made again is decided in `agent.runtime.engine_requests`.
    """

    def __init__(
        self, engines: dict[str, Engine], *, patience_s: float, check_every_s: float = 5.0, check_s: float = 10.0
    ) -> None:
        self._members = [_Member(name, engine) for name, engine in engines.items()]
        self._patience_s, self._check_every_s, self._check_s = patience_s, check_every_s, check_s
        self._newest = -1
        self._any_sound = asyncio.Event()

    async def run(self) -> None:
        """Ask the engines how they are, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for member in self._members:
                group.create_task(self._watch(member), name=f"watch {member.name}")

    async def ready(self) -> None:
        """Return once an engine is sound; raises `Unreachable` when all stay away longer than `patience_s`."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._any_sound.wait()
        except TimeoutError as error:
            reasons = "; ".join(f"{m.name}: {m.trouble}" for m in self._members)
            raise Unreachable(
                f"no engine of {', '.join(m.name for m in self._members)} has been fit to serve for "
                f"{self._patience_s:g} s ({reasons}); start one again, or raise limits.engine_patience_s"
            ) from error

    def states(self) -> list[tuple[str, int, bool, int]]:
        """Each engine: its name, how many episodes it serves, whether it is sound, and its version (-1: not known)."""
        return [(m.name, m.load, m.sound, m.version) for m in self._members]

    @contextlib.asynccontextmanager
    async def seat(self) -> AsyncIterator[Seat]:
        """A place for one episode; waits for a sound engine as `ready` does."""
        seat = Seat(self, await self._least_loaded())
        try:
            yield seat
        finally:
            seat._member.load -= 1

    def loads(self) -> str:
        """For the log: how many episodes each engine serves."""
        return ", ".join(f"{m.name} {m.load}{'' if m.sound else ' (away)'}" for m in self._members)

    async def _least_loaded(self) -> _Member:
        while True:
            await self.ready()
            sound = [member for member in self._members if member.sound]
            if sound:
                member = min(sound, key=lambda m: m.load)
                member.load += 1
                return member

    def _doubt(self, member: _Member, fault: EngineFault) -> None:
        """A connection broke: it gets no request before its health has been asked."""
        member.doubts += 1
        member.wanted.set()
        if member.sound:
            self._set(member, str(fault))

    async def _ask(self, member: _Member) -> None:
        """Return once a question that began after this call is over; all who ask meanwhile share one."""
        member.questions += 1
        mine = member.questions
        member.wanted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * self._check_s + self._check_every_s):
                while member.answered < mine:
                    await member.was_asked.wait()

    def _saw(self, member: _Member, version: int) -> None:
        member.version = max(member.version, version)
        self._newest = max(self._newest, version)

    def _set(self, member: _Member, trouble: str) -> None:
        """`trouble` "": the engine is sound."""
        if member.sound and trouble:
            log.warning("engine %s gets no requests: %s", member.name, trouble)
        elif not member.sound and not trouble:
            log.info("engine %s serves version %d", member.name, member.version)
        member.sound, member.trouble = not trouble, trouble
        if any(m.sound for m in self._members):
            self._any_sound.set()
        else:
            self._any_sound.clear()

    async def _watch(self, member: _Member) -> None:
        fruitless = 0
        while True:
            member.wanted.clear()
            questions = member.questions
            await self._check(member)
            member.answered = questions
            member.was_asked.set()
            member.was_asked = asyncio.Event()
            fruitless = 0 if member.sound else fruitless + 1
            pause = backoff_s(fruitless, first_s=0.2, most_s=self._check_every_s) if fruitless else self._check_every_s
            asked = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await member.wanted.wait()
            apart = min(ASKED_APART_S, self._check_every_s)
            await asyncio.sleep(asked + apart - time.monotonic())

    async def _check(self, member: _Member) -> None:
        doubts, limit = member.doubts, asyncio.timeout(self._check_s)
        try:
            async with limit:
                health = await member.engine.health()
        except (EngineFault, TimeoutError) as error:
            if member.sound and limit.expired() and _late_s(limit) > BUSY_S:
                log.warning("engine %s was not heard in time: this process has more to do than it can", member.name)
                return
            member.misses += 1
            self._set(member, str(error) or f"its health was not answered within {self._check_s:g} s")
            if member.misses >= GIVEN_UP_AFTER:
                member.give_up()
            return
        member.misses = 0
        if doubts == member.doubts:  # else a request failed while it was asked: its answer may be older than that
            self._set(member, self._weights_trouble(member, health.version))

    def _weights_trouble(self, member: _Member, version: int) -> str:
        """Why an engine that answers with `version` must not serve; "" if it may."""
        went_back = version < member.version
        self._saw(member, version)
        if version >= self._newest:
            member.behind_since = None
            return ""
        now = time.monotonic()
        member.behind_since = now if member.behind_since is None else member.behind_since
        if member.sound and not went_back and now - member.behind_since < BEHIND_S:
            return ""
        return f"its weights are of version {version}, the newest are of {self._newest}; publish to it again"


class Seat:
    """An episode's place at one engine of a pool. To a rollout it is an `Engine`, whichever engine is behind it."""

    def __init__(self, pool: EnginePool, member: _Member) -> None:
        self._pool = pool
        self._sit_down(member)

    def _sit_down(self, member: _Member) -> None:
        self._member, self._generate = member, member.engine.generate
        if isinstance(member.engine, Sticky):
            member.sessions += 1
            self._generate = functools.partial(member.engine.generate_in, member.sessions)

    @property
    def name(self) -> str:
        """The engine of this episode, as the pool was given it."""
        return self._member.name

    async def move(self, fault: EngineFault) -> None:
        """After `fault`: sit down at a sound engine, the same one perhaps, once this one has been asked how it is.

        Raises `Unreachable` when all engines stay away longer than the pool's patience.
        """
        if isinstance(fault, Disconnected):
            self._pool._doubt(self._member, fault)
        else:
            await self._pool._ask(self._member)
        left, found = self._member, await self._pool._least_loaded()
        left.load -= 1
        self._sit_down(found)

    async def version(self) -> int:
        """The policy version of the engine, asked after this call; raises `EngineFault` where it is not sound."""
        await self._pool._ask(self._member)
        if not self._member.sound:
            raise EngineFault(f"engine {self._member.name} is away: {self._member.trouble}")
        return self._member.version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """As `Engine.generate`; also a fault when the engine is not fit to serve, or stops being so."""
        member = self._member
        if not member.sound:
            raise EngineFault(f"engine {member.name} is away: {member.trouble}")
        had, until_given_up = member.version, asyncio.timeout(None)
        member.requests.add(until_given_up)
        try:
            async with until_given_up:
                completion = await self._generate(prompt_ids, sampling, request_id=request_id, timeout_s=timeout_s)
        except TimeoutError as error:
            if not until_given_up.expired():
                raise
            raise EngineFault(f"engine {member.name} is away: {member.trouble}") from error
        finally:
            member.requests.discard(until_given_up)
        if completion.versions:
            # It was restarted between two checks: these tokens would be taken for ones of newer weights.
            if completion.versions[0] < had:
                raise EngineFault(
                    f"the policy version of engine {member.name} goes back from {had} to {completion.versions[0]}"
                )
            self._pool._saw(member, completion.versions[-1])
        return completion

    async def publish(self, version: int, weights: Path | WeightStream) -> None:
        """Not from here: weights are published by the learner, to every engine."""
        raise NotImplementedError("publish to the engines, not through an episode's seat")

    async def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        await self._member.engine.abort(request_id)

    async def health(self) -> EngineHealth:
        """As `Engine.health`."""
        return await self._member.engine.health()

    async def close(self) -> None:
        """Nothing: the engines are their owner's to close."""


def _late_s(limit: asyncio.Timeout) -> float:
    """By how much the event loop was late for a limit that has just passed."""
    due = limit.when()
    return 0.0 if due is None else asyncio.get_running_loop().time() - due
