"""Policy versions: which weights are served, which are held back, and how to go back to earlier ones.

Rules (docs/serve.md has them for users): a number names one set of weights for ever and numbers only grow, so a
rollback publishes the old weights under a new number. While versions are pinned, publications are kept but not served;
`unpin` serves the newest of them. What was served last is served again after a restart (case G7).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agent.engines.base import Engine, EngineFault
from agent.serve.conversations.journal import Journal
from agent.serve.versions.version_table import Version, VersionTable, origin_of, prunable, to_serve
from agent.store.database_thread import DatabaseThread
from agent.wire.errors import ApiError

log = logging.getLogger(__name__)
T = TypeVar("T")

_SETTLE_S = 10.0
RETURNED = "returned: "
"""How the note of a version begins that a trial found worse."""


class Versions:
    """The one way by which weights reach the engine.

    `on_change` is called with the served version after every change. Publications exclude each other; requests in
    flight go on through them (case G6).
    """

    def __init__(
        self,
        thread: DatabaseThread,
        journal: Journal,
        folder: Path,
        *,
        keep: int,
        publish_s: float,
        tried_first: bool = False,
        on_change: Callable[[Version, bool], None] = lambda version, pinned: None,
    ) -> None:
        self._thread, self._journal, self._folder = thread, journal, folder
        self._table = VersionTable(journal)
        self._keep, self._publish_s, self._on_change = keep, publish_s, on_change
        self._tried_first = tried_first
        self._lock = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._rows: list[Version] = []
        self.pinned = False
        self.engine: Engine | None = None
        self.owner = ""
        """Of a replica: the server whose versions these are. Nothing is pinned or taken back here then."""
        self.on_engine = -1
        """The number of the weights that answer now: the served one's, but for a trial's turns."""
        self.trial: dict[str, Any] = {}
        """How the present or last trial stands, as listed; see `agent.serve.versions.canary`."""

    @property
    def served(self) -> int:
        """The number of the served version; -1 before there is one."""
        numbers = [v.number for v in self._rows if v.status == "served"]
        return numbers[-1] if numbers else -1

    @property
    def newest(self) -> int:
        """The largest number that names weights."""
        return self._rows[-1].number if self._rows else -1

    async def load(self, model: Path, number: int) -> Version:
        """Read the table at a start; the version to serve. An empty table begins with `model` as version `number`."""

        def read() -> tuple[list[Version], bool]:
            if not self._table.rows():
                self._table.put(Version(number, str(model), "start", None, self._journal.clock(), "served"))
            return self._table.rows(), self._table.pinned

        self._rows, self.pinned = await self._thread.run(read)
        current = to_serve(self._rows)
        if current is None:
            log.error("the weights of every version are gone; serving %s under a new number", model)
            current = Version(self.newest + 1, str(model), "start", None, self._journal.clock(), "served")
        await self._put(msgspec.structs.replace(current, status="served"))
        return current

    async def are_known(self) -> bool:
        """Whether the table has any, before `load`."""
        return bool(await self._thread.run(self._table.rows))

    def weights(self) -> tuple[Path, int]:
        """The folder and the number of the served version."""
        current = next(v for v in self._rows if v.number == self.served)
        return Path(current.path), current.number

    async def align(self, engine: Engine) -> None:
        """Take `engine`, and make it serve the served version if it does not."""
        self.engine = engine
        async with self._lock:  # a publication between the two questions would be taken back
            path, number = self.weights()
            if (await engine.health()).version != number:
                await engine.publish(number, path)
            self.on_engine = number

    async def settle(self) -> None:
        """At the end: wait a little for a change that is under way and whose caller has gone."""
        if self._changes:
            _, late = await asyncio.wait(self._changes, timeout=_SETTLE_S)
            for change in late:
                change.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def publish(self, number: int, weights: Path) -> str:
        """A publication by the learner: "served", or "held" while pinned. Again with the same weights is harmless.

        Raises `ApiError` 409 for a number that names other weights (the message and `next_version` say which is free)
        and `EngineFault` for weights that the engine does not take.
        """
        return await self._to_its_end(self._publish(number, weights))

    async def _publish(self, number: int, weights: Path) -> str:
        async with self._lock:
            known = next((v for v in self._rows if v.number == number), None)
            note = await asyncio.to_thread(os.path.abspath, weights)
            if known is not None and known.source == "learner" and known.note == note and known.status != "failed":
                if known.status == "publishing":  # the engine may have it, and the table could not be told
                    if self.pinned or self._tried_first or number != self.newest:
                        await self._put(msgspec.structs.replace(known, status="held"))
                        return "held"
                    await self._serve(known)
                return "held" if known.status == "held" else "served"
            if number <= self.newest:
                raise ApiError(
                    409,
                    f"version {number} cannot be published: numbers up to {self.newest} name other weights; "
                    f"next_version={self.newest + 1}",
                    code="version_taken",
                )
            kept = await asyncio.to_thread(_linked_copy, weights, self._folder / f"v{number}")
            version = Version(number, str(kept), "learner", None, self._journal.clock(), "publishing", note)
            if self.pinned or self._tried_first:
                await self._put(msgspec.structs.replace(version, status="held"))
                why = "versions are pinned" if self.pinned else "it is tried first"
                log.info("version %d is held: %s; %d is served", number, why, self.served)
                self._tell()
                await self._prune()
                return "held"
            await self._serve(version)
            return "served"

    async def pin(self) -> None:
        """Hold publications from now on."""
        self._check_own()
        await self._to_its_end(self._hold())

    async def _hold(self) -> None:
        async with self._lock:
            await self._pin(True)
            self._tell()

    async def unpin(self) -> None:
        """Serve the newest publication that was held, if it is newer than what is served, and then every one."""
        self._check_own()
        await self._to_its_end(self._unpin())

    async def _unpin(self) -> None:
        async with self._lock:
            held = [v for v in self._rows if v.status == "held" and v.number > self.served and v.path]
            if held:
                await self._serve(held[-1])
            await self._pin(False)
            self._tell()

    async def rollback(self, number: int) -> int:
        """Serve the weights of version `number` again, under a new number that is returned, and pin.

        Raises `ApiError` 404 if there are no such weights (any more).
        """
        self._check_own()
        return await self._to_its_end(self._rollback(number))

    async def _rollback(self, number: int) -> int:
        async with self._lock:
            known = await self._known(number)
            new = self.newest + 1
            kept = known.path
            if known.source != "start":
                kept = str(await asyncio.to_thread(_linked_copy, Path(known.path), self._folder / f"v{new}"))
            await self._pin(True)
            await self._serve(Version(new, kept, "rollback", number, self._journal.clock(), "publishing"))
            return new

    @property
    def waiting(self) -> int | None:
        """The newest version that waits to be tried; None while there is none, or versions are pinned."""
        if self.pinned or self.engine is None or self.served < 0:
            return None
        tried = int(self.trial.get("version", -1))
        held = [v.number for v in self._rows if v.status == "held" and v.path and v.number > self.served]
        return held[-1] if held and held[-1] > (tried if self.trial.get("state") == "returned" else -1) else None

    async def swap(self, number: int, *, served: int, trial: int) -> bool:
        """Let the engine answer with version `number`, which is `served` or `trial`, while nothing else is changed.

        False where that is over: versions are pinned, or another one is served. Raises `EngineFault`.
        """
        return await self._to_its_end(self._swap(number, served, trial))

    async def _swap(self, number: int, served: int, trial: int) -> bool:
        async with self._lock:
            rows = {v.number: v for v in self._rows}
            if self.pinned or self.served != served or self.engine is None or rows[trial].status != "held":
                return False
            await self._load(self.engine, rows[number])
            return True

    async def promote(self, number: int, *, served: int) -> bool:
        """Serve the version that was on trial to everybody; False as for `swap`. Raises `EngineFault`."""
        return await self._to_its_end(self._promote(number, served))

    async def _promote(self, number: int, served: int) -> bool:
        async with self._lock:
            if self.pinned or self.served != served:
                return False
            await self._serve(next(v for v in self._rows if v.number == number))
            return True

    async def send_back(self, number: int, *, served: int, reason: str) -> bool:
        """The version that was on trial will not be served to all: the served one answers again. As `promote`."""
        return await self._to_its_end(self._send_back(number, served, reason))

    async def _send_back(self, number: int, served: int, reason: str) -> bool:
        async with self._lock:
            rows = {v.number: v for v in self._rows}
            await self._put(msgspec.structs.replace(rows[number], status="failed", note=f"{RETURNED}{reason}"[:500]))
            if self.pinned or self.served != served or self.engine is None:
                return False
            await self._load(self.engine, rows[served])
            self._tell()
            return True

    async def _load(self, engine: Engine, version: Version) -> None:
        try:
            async with asyncio.timeout(self._publish_s):
                await engine.publish(version.number, Path(version.path))
        except TimeoutError as error:
            raise EngineFault(f"the engine did not take version {version.number} in {self._publish_s} s") from error
        self.on_engine = version.number

    async def made_by(self, number: int) -> int:
        """The version that the weights of `number` were made as, whatever rollbacks went back to it.

        Raises `ApiError` 404 if `number` names no weights that are there.
        """
        async with self._lock:
            return origin_of(self._rows, (await self._known(number)).number)

    async def _known(self, number: int) -> Version:
        known = next((v for v in self._rows if v.number == number), None)
        if known is None or known.status == "failed" or not await asyncio.to_thread(_available, known.path):
            have = [v.number for v in self._rows if v.path and v.status != "failed"]
            raise ApiError(404, f"no weights of version {number}; there are {have}", code="version_not_found")
        return known

    async def listing(self) -> dict[str, Any]:
        """What /v1/versions shows."""
        return {
            "served": self.served,
            "pinned": self.pinned,
            "canary": self.trial or None,
            "versions": [
                {
                    "version": v.number,
                    "source": v.source,
                    "origin": v.origin,
                    "published_at": v.at,
                    "status": self._shown(v),
                    "available": bool(v.path) and v.status != "failed",
                }
                for v in self._rows
            ],
        }

    def _check_own(self) -> None:
        if self.owner:
            raise ApiError(
                409, f"this server is a replica: change versions at their owner's, {self.owner}", code="replica"
            )

    def served_now(self) -> tuple[int, str]:
        """The number and the folder of the served version."""
        path, number = self.weights()
        return number, os.path.abspath(path)

    async def adopt(self, number: int, path: Path) -> Path:
        """A folder of our own with the weights in `path`, which another server serves as `number` and may remove."""
        return await asyncio.to_thread(_linked_copy, path, self._folder / f"v{number}")

    def _shown(self, version: Version) -> str:
        """A version's status in words for people."""
        if version.number == self.served:
            return "serving"
        if version.status == "failed" and version.note.startswith(RETURNED):
            return "returned"
        on_trial = self.trial.get("state") == "trial" and self.trial["version"] == version.number
        return "canary" if version.status == "held" and on_trial else version.status

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` to its end though its caller goes: else engine and table would not say the same."""
        change = asyncio.create_task(work)
        self._changes.add(change)
        change.add_done_callback(self._ended)
        return await asyncio.shield(change)

    def _ended(self, change: asyncio.Task[Any]) -> None:
        self._changes.discard(change)
        if not change.cancelled() and (error := change.exception()) is not None:
            log.info("a change of versions was not made: %s", error)  # its caller may have gone

    async def _serve(self, version: Version) -> None:
        if self.engine is None:
            raise EngineFault("the engine is not there yet: publish again shortly")
        await self._put(msgspec.structs.replace(version, status="publishing"))
        try:
            await self._load(self.engine, version)
        except EngineFault as error:
            await self._put(msgspec.structs.replace(version, status="failed", note=str(error)[:500]))
            raise
        await self._put(msgspec.structs.replace(version, status="served"))
        log.info("version %d (%s) is served", version.number, version.source)
        self._tell()
        await self._prune()

    async def _put(self, version: Version) -> None:
        def write() -> list[Version]:
            self._table.put(version)
            return self._table.rows()

        self._rows = await self._thread.run(write)

    async def _pin(self, pinned: bool) -> None:
        await self._thread.run(lambda: self._table.pin(pinned))
        self.pinned = pinned

    def _tell(self) -> None:
        current = next((v for v in self._rows if v.number == self.served), None)
        if current is not None:
            self._on_change(current, self.pinned)

    async def _prune(self) -> None:
        on_trial = self.trial["version"] if self.trial.get("state") == "trial" else -1
        for version in [v for v in prunable(self._rows, self._keep) if v.number != on_trial]:
            await self._put(msgspec.structs.replace(version, path=""))
            await asyncio.to_thread(shutil.rmtree, version.path, ignore_errors=True)


def _available(path: str) -> bool:
    return bool(path) and Path(path).is_dir()


def _linked_copy(weights: Path, target: Path) -> Path:
    """The snapshot `weights` as a folder of our own, since its owner removes old ones; hard links where possible."""
    scratch = target.with_name(f".{target.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if not weights.is_dir():
        raise ApiError(400, f"no snapshot at {weights}: it must be a folder that this server can read")
    for file in weights.iterdir():
        if file.is_file():
            try:
                os.link(file, scratch / file.name)
            except OSError:
                shutil.copyfile(file, scratch / file.name)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    with contextlib.suppress(OSError):  # so that a crash of the machine does not take the name back
        descriptor = os.open(target.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return target
