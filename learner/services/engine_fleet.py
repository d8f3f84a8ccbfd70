"""The engines of a run as the learner sees them: started, supervised, and kept at the newest published weights.

async with Fleet.start(recipe, model=..., version=0, folder=...) as fleet:
    await fleet.publish(1, Path("runs/x/weights/v1"), timeout_s=60)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

from agent.child_processes import end_group, log_tail, stop_child
from agent.engines.base import Engine, EngineFault, EngineHealth
from agent.engines.client import HttpEngine
from learner.config import Recipe
from learner.faults import LearnerFault
from learner.services.engine_launchers import launcher
from learner.services.engine_member import HUNG_S, RESTART_WINDOW_S, Member
from learner.services.shared_key import shared_key
from learner.services.weight_transfer import Carrier, Transfer, Weights

log = logging.getLogger(__name__)

_CHECK_S = 10.0
_KEEP_EVERY_S = 2.0
_POLL_S = 0.05
_STOP_LIMIT_S = 15.0


class Fleet:
    """Every engine of a run, each with a task that keeps it serving the newest published snapshot:

        launched here ─▶ serving ──ended, or killed when it hangs──▶ started again with the newest snapshot ─▶ serving
                            ▲                          └─ more than `engine.restarts` in an hour: LearnerFault
        of `engine.urls` ───┘──does not answer──▶ away ──answers, published to──▶ serving

    A restart takes the old port, so that nobody has to learn a new address. A publication succeeds when one engine
    has taken it; the others are given it as soon as they answer. An engine that answers and still refuses the
    weights (another model, say) is a `LearnerFault`: waiting would not change its mind.

    With `engine.transfer` other than "snapshot" weights are streamed (agent/engines/weight_stream.py), from the trainer
    itself where it gives no folder. Then an engine that is started again begins with the last folder, and is given
    the trainer's weights while these hold still: see `weights_change`.
    """

    def __init__(
        self,
        members: list[Member],
        *,
        version: int,
        model: Path,
        adopt: bool,
        restarts: int,
        patience_s: float,
        timeout_s: float,
        transfer: Transfer,
    ) -> None:
        self._members = members
        # None: nothing is published yet, see `adopt`.
        self._newest: tuple[int, Weights | None] = (version, None if adopt else model)
        self._last_folder = (version, model)
        self._transfer, self._changing = transfer, False
        self._carrier = Carrier(transfer)
        self._restarts, self._patience_s, self._timeout_s = restarts, patience_s, timeout_s
        self._keepers: list[asyncio.Task[None]] = []
        self._last_seen = time.monotonic()

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        recipe: Recipe,
        *,
        model: Path,
        version: int,
        folder: Path,
        use_addresses: bool = True,
        adopt: bool = False,
        first_device: int = 0,
    ) -> AsyncIterator[Fleet]:
        """Start `engine.count` engines, or publish `model` to those of `engine.urls`; either way they serve it as
        `version` when this returns. With `use_addresses=False` the addresses of the recipe are left alone. With
        `adopt` they are left with what they serve, and the next publication is the first: the server whose engines
        they are has seen to it. `first_device`: so many engines come before these on the devices of the engines.

        Raises `EngineFault` if an engine does not start, `LearnerFault` if none of the addresses takes the weights
        within `runtime.limits.engine_patience_s`.
        """
        urls = recipe.engine.urls if use_addresses else ()
        key = await asyncio.to_thread(shared_key, recipe)
        stale = recipe.engine.keep_stale_cache
        fleet = cls(
            [Member(f"engine {url}", HttpEngine(url, keep_stale_cache=stale, key=key)) for url in urls],
            version=version,
            model=model,
            adopt=adopt and bool(urls),
            restarts=recipe.engine.restarts,
            patience_s=recipe.runtime.limits.engine_patience_s,
            timeout_s=recipe.learner.publication_timeout_s,
            transfer=recipe.engine.transfer,
        )
        try:
            if not urls:
                count = recipe.engine.count
                launching = [fleet._add(recipe, index, folder, first_device, key) for index in range(count)]
                for outcome in await asyncio.gather(*launching, return_exceptions=True):
                    if isinstance(outcome, BaseException):
                        raise outcome
            fleet._keepers = [
                asyncio.create_task(fleet._keep(member), name=f"keep {member.name}") for member in fleet._members
            ]
            await fleet._until_served(f"the weights of {model}")
            yield fleet
        finally:
            # Shielded: a second Ctrl-C must not leave a child behind; SIGKILL cannot, see the children's own watch.
            await asyncio.shield(asyncio.ensure_future(fleet._take_down()))

    @property
    def engines(self) -> list[Engine]:
        """The engines that serve the newest version. Those that are away come back to this list by themselves."""
        return [m.engine for m in self._members if m.served == self._newest[0]]

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of all engines, the ones that are away too."""
        return tuple(m.engine.url for m in self._members)

    def check(self) -> None:
        """Raise `LearnerFault` if an engine is beyond what is done for it here, or all stay away too long."""
        for keeper in self._keepers:
            if keeper.done() and not keeper.cancelled() and (error := keeper.exception()) is not None:
                raise error
        for member in self._members:
            if member.has_refused:
                raise LearnerFault(
                    f"{member.name} does not take the weights of version {self._newest[0]}: {member.trouble}. "
                    "Does it serve the model of this recipe, and can it read the run's folder?"
                )
        if not self.engines and time.monotonic() - self._last_seen > self._patience_s:
            raise LearnerFault(
                f"no engine has served version {self._newest[0]} for {self._patience_s:g} s ({self._troubles()}); "
                "start one again, or raise runtime.limits.engine_patience_s"
            )

    @contextlib.asynccontextmanager
    async def weights_change(self) -> AsyncIterator[None]:
        """The trainer's weights change in this block: none is given to an engine meanwhile, but by `publish`."""
        self._changing = True
        for member in self._members if self._transfer != "snapshot" else ():
            async with member.lock:  # what is under way comes first
                pass
        try:
            yield
        finally:
            self._changing = False

    async def publish(self, version: int, weights: Weights, *, timeout_s: float) -> None:
        """Give `weights` to every engine as `version`; returns once one of them serves it.

        `timeout_s` bounds the publication to one engine. While none is there, waits for one to come back: as long as
        `runtime.limits.engine_patience_s`, then `LearnerFault`.
        """
        self._newest, self._timeout_s, self._changing = (version, weights), timeout_s, False
        if isinstance(weights, Path):
            self._last_folder = (version, weights)
        for member in self._members:
            member.refusals, member.served = 0, None
        await asyncio.gather(*(self._bring_up_to_date(m) for m in self._members if not m.starting))
        await self._until_served(f"version {version}")

    async def healths(self) -> list[EngineHealth]:
        """What the engines say of themselves; those that do not answer in time are left out."""
        answers = await asyncio.gather(*(_ask_health(m) for m in self._members))
        return [answer for answer in answers if isinstance(answer, EngineHealth)]

    async def _add(self, recipe: Recipe, index: int, folder: Path, first_device: int, key: str) -> None:
        name = "engine" if recipe.engine.count == 1 else f"engine-{index}"
        launch = launcher(recipe, first_device + index, folder / f"{name}.log", key)
        version, weights = self._last_folder
        process, url = await launch(weights, version, 0)
        client = HttpEngine(url, keep_stale_cache=recipe.engine.keep_stale_cache, key=key)
        self._members.append(Member(name, client, process, launch, log=folder / f"{name}.log", served=version))

    async def _until_served(self, what: str) -> None:
        self._last_seen, told = time.monotonic(), False
        while not self.engines:
            self.check()
            if self._troubles() and not told:
                log.warning("waiting for an engine to take %s (%s)", what, self._troubles())
                told = True
            await asyncio.sleep(_POLL_S)

    def _troubles(self) -> str:
        return "; ".join(f"{m.name}: {m.trouble}" for m in self._members if m.trouble)

    async def _keep(self, member: Member) -> None:
        while True:
            if member.has_ended:
                await self._start_again(member)
            await self._bring_up_to_date(member)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_EVERY_S):
                    await (asyncio.Event() if member.process is None else member.process).wait()

    async def _start_again(self, member: Member) -> None:
        process = member.process
        assert process is not None
        assert member.launch is not None
        assert member.log is not None
        why = f"it ended with code {process.returncode}"
        member.served, member.starting = None, True
        try:
            while True:
                if not member.may_restart(time.monotonic(), self._restarts):
                    raise LearnerFault(
                        f"the {member.name} is not started again: {why}, after {len(member.restarts)} restarts within "
                        f"{RESTART_WINDOW_S / 60:.0f} minutes (engine.restarts). The end of its log, {member.log}:\n"
                        f"{log_tail(member.log)}\nRun the same command again to go on from the last checkpoint"
                    )
                member.restarts.append(time.monotonic())
                member.trouble = why
                version, weights = self._last_folder
                log.warning("starting the %s again with version %d: %s", member.name, version, why)
                end_group(process)
                await stop_child(process)
                try:
                    member.process, _ = await member.launch(weights, version, member.port)
                except EngineFault as fault:
                    why = str(fault)
                    continue
                member.serves(version)
                member.silent_since, self._last_seen = None, time.monotonic()
                return
        finally:
            member.starting = False

    async def _bring_up_to_date(self, member: Member) -> None:
        """Publish the newest snapshot to an engine that answers and does not serve it."""
        async with member.lock:
            answer = await _ask_health(member)
            if isinstance(answer, str):
                if not member.trouble:
                    log.warning("%s is away: %s", member.name, answer)
                now = time.monotonic()
                member.falls_silent(answer, now)
                if member.process is not None and member.hangs(now):
                    log.warning("killing the %s: it has not answered for %g s", member.name, HUNG_S)
                    member.silent_since = None
                    end_group(member.process)
                return
            member.silent_since = None
            version, weights = self._newest
            if weights is None or member.served == version == answer.version:
                member.serves(version)
                self._last_seen = time.monotonic()
                return
            if self._changing and not isinstance(weights, Path):
                member.waits("it waits for the end of the step")
                return
            try:
                async with asyncio.timeout(self._timeout_s):
                    await member.engine.publish(version, self._carrier.pack(weights, limit_s=self._timeout_s))
            except (EngineFault, TimeoutError) as error:
                member.refuses(error, str(error) or f"version {version} was not taken within {self._timeout_s:g} s")
                log.warning("%s: %s", member.name, member.trouble)
            else:
                if member.trouble:
                    log.warning("%s is back, with version %d", member.name, version)
                member.serves(version)
                self._last_seen = time.monotonic()

    async def _take_down(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(m.engine.close() for m in self._members), return_exceptions=True)
        children = [m.process for m in self._members if m.process is not None]
        await asyncio.gather(*(stop_child(child, grace_s=_STOP_LIMIT_S) for child in children))


async def _ask_health(member: Member) -> EngineHealth | str:
    """Its health, or why there is none."""
    try:
        async with asyncio.timeout(_CHECK_S):
            return await member.engine.health()
    except (EngineFault, TimeoutError) as error:
        return str(error) or f"its health was not answered within {_CHECK_S:g} s"
