"""A replica's versions: those that another server, the owner, serves. Asked for on its inner port, again and again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp
import msgspec

from agent.doors.door import bearer
from agent.engines.base import EngineFault
from agent.serve.config import ServeError
from agent.serve.versions.publishing import Versions
from agent.wire.errors import ApiError

log = logging.getLogger(__name__)

SERVED_PATH = "/served"
_ASK_S = 10.0


class Served(msgspec.Struct, frozen=True):
    """What a server serves: the number, and the folder of the weights or of the adapter, for whoever can read it."""

    version: int
    path: str


class Follower:
    """Keeps `versions` at what the server whose inner port is at `owner` serves.

    follower = Follower("http://127.0.0.1:8001", key, poll_s=1.0)
    served = await follower.first(versions)  # ServeError if there is no owner and nothing to go on with
    await follower.run(versions)             # never returns; `fault` says why it lags behind, "" if it does not
    """

    def __init__(self, owner: str, key: str, *, poll_s: float) -> None:
        self.owner, self._key, self._poll_s = owner.rstrip("/"), key, poll_s
        self.fault = ""

    async def ask(self) -> Served:
        """What the owner serves now. Raises `ServeError`."""
        limit = aiohttp.ClientTimeout(total=_ASK_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=bearer(self._key)) as session,
                session.get(self.owner + SERVED_PATH) as answer,
            ):
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServeError(
                f"no owner answers at serve.replicas.owner {self.owner} ({error!r}): it is a server with "
                "serve.replicas.port; start it first"
            ) from error
        if answer.status != 200:
            raise ServeError(
                f"the owner at {self.owner} says {answer.status}: {content.decode(errors='replace')[:300]}"
            )
        try:
            return msgspec.json.decode(content, type=Served)
        except msgspec.DecodeError as error:
            raise ServeError(f"{self.owner} is no server's inner port (serve.replicas.port): {error}") from error

    async def first(self, versions: Versions) -> Served | None:
        """What the owner serves at a start; None where it does not answer and `versions` knows some to go on with.

        Raises `ServeError`.
        """
        try:
            return await self.ask()
        except ServeError as error:
            if not await versions.are_known():
                raise
            self.fault = str(error)
            log.error("this replica starts with what it has served last: %s", error)
            return None

    async def run(self, versions: Versions) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._follow(versions, await self.ask())
                fault = ""
            except (ServeError, EngineFault, ApiError, OSError) as error:
                fault = str(error)
            if fault and fault != self.fault:
                log.error("this replica stays at version %d: %s", versions.served, fault)
            self.fault = fault
            await asyncio.sleep(self._poll_s)

    async def _follow(self, versions: Versions, served: Served) -> None:
        if served.version > versions.newest:
            await versions.publish(served.version, Path(served.path))
        elif served.version != versions.served:
            raise ServeError(
                f"the owner serves version {served.version}, and here {versions.newest} is known: it is another run's, "
                "or has lost its table; stop this replica and remove its folder"
            )
