"""The one way to talk to the episode store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from agent.doors.door import WrongKey, bearer, wrong_key
from agent.doors.keys import given_key
from agent.episode import Episode, EpisodeError, decode, encode
from agent.store.protocol import (
    MSGPACK,
    AsideOf,
    Claim,
    Ending,
    EpisodeRow,
    EvaluationStatus,
    StoreFault,
    StoreFull,
    StoreStatus,
    Ticket,
)
from agent.store.reading import EpisodeFilter

log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_S = 5.0


class StoreClient:
    """The episode store at `url`, for runtimes, learners and displays.

        async with StoreClient("http://127.0.0.1:8700") as store:
            for ticket in await store.lease(8, "runtime-0", wait_s=10.0):
                await store.put(ticket.id, episode)

    Every call has a time limit (`timeout_s`, on top of what it was told to wait) and raises `StoreFault` when the
    store is away or refuses. Nothing is retried here: calls are safe to repeat, and the caller knows for how long.
    A call that is cancelled or fails while the store answers leaves nothing behind: tickets or a claim that never
    arrived are given back with the next call of the same kind.

    From the first lease until `release_worker` or `close` a task of the client tells the store every few seconds that
    the worker is alive; a silent worker's tickets are dealt to others.

    `kind`: what it leases, None: tickets of both kinds. `key`: the shared key, "" for none; None: that of $SAO_KEY, if
    there is one. A store that refuses it raises `WrongKey`, which is no `StoreFault`: nothing helps but another key.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        kind: Literal["train", "evaluate"] | None = None,
        key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._kind = kind
        self._key = given_key() if key is None else key
        self.timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._workers: set[str] = set()
        self._heart: asyncio.Task[None] | None = None
        self._lost_leases: list[str] = []
        self._lost_claims: list[str] = []

    async def __aenter__(self) -> StoreClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- runtimes

    async def lease(self, n: int, worker: str, wait_s: float = 0.0) -> list[Ticket]:
        """1 to `n` tickets for `worker`, or [] if there is none within `wait_s` seconds."""
        self._workers.add(worker)
        if self._heart is None:
            self._heart = asyncio.create_task(self._beat())
        request, void = uuid.uuid4().hex, list(self._lost_leases)
        body = {"n": n, "worker": worker, "wait_s": wait_s, "request": request, "void": void, "kind": self._kind}
        try:
            tickets = await self._call("POST", "/lease", list[Ticket], body, wait_s=wait_s)
        except BaseException:  # also cancelled: whatever the store answers, it does not arrive
            self._lost_leases.append(request)
            raise
        self._lost_leases = [r for r in self._lost_leases if r not in void]
        return tickets

    async def put(self, ticket_id: str, episode: Episode) -> Ending:
        """Deliver the episode that ends a ticket; returns after it is on the disk. Safe to repeat.

        `StoreFull`: no room; keep the episode and repeat. A bad episode is no fault but an `Ending`.
        """
        return await self._call("PUT", f"/tickets/{ticket_id}/episode", Ending, data=encode(episode))

    async def fail(self, ticket_id: str, reason: str, retry: bool = True, worker: str = "") -> Ending:
        """End a ticket without an episode (infrastructure fault), unless another than `worker` holds it by now."""
        body = {"reason": reason, "retry": retry, "worker": worker}
        return await self._call("POST", f"/tickets/{ticket_id}/failure", Ending, body)

    async def release_worker(self, worker: str) -> int:
        """Give back every ticket `worker` ("*": anybody) holds: at its restart, or when it is known to be dead."""
        self._workers.discard(worker)
        return await self._call("POST", "/release_worker", int, {"worker": worker})

    # -- the learner

    async def claim(self, n: int, version: int, wait_s: float = 0.0) -> Claim | None:
        """Exactly `n` ready episodes for a learner at policy `version`, or None if not so many within `wait_s`."""
        claim_id, void = uuid.uuid4().hex, list(self._lost_claims)
        body = {"claim_id": claim_id, "n": n, "version": version, "wait_s": wait_s, "void": void}
        try:
            claim = await self._call("POST", "/claim", Claim | None, body, wait_s=wait_s)
        except BaseException:
            self._lost_claims.append(claim_id)
            raise
        self._lost_claims = [c for c in self._lost_claims if c not in void]
        return claim

    async def commit(self, claim_id: str, version: int) -> None:
        """The claim is trained and in a checkpoint on the disk. Safe to repeat.

        `version`: the policy version the step made (to be announced next, with `set_version`), or the present one
        if it publishes none.
        """
        await self._call("POST", "/commit", None, {"claim_id": claim_id, "version": version})

    async def release(self, claim_id: str) -> None:
        """Give the claim's episodes back untrained."""
        await self._call("POST", "/release", None, {"claim_id": claim_id})

    async def recover(self, last_claim_id: str | Sequence[str] | None) -> None:
        """When a learner starts: the claim(s) its checkpoint holds are committed, all other open ones released."""
        claims = [last_claim_id] if isinstance(last_claim_id, str) else list(last_claim_id or ())
        await self._call("POST", "/recover", None, {"claim_ids": claims})

    async def set_version(self, version: int) -> None:
        """Announce that the engines serve `version` now."""
        await self._call("POST", "/version", None, {"version": version})

    async def pause(self, paused: bool) -> None:
        """Stop (or go on) dealing new training tickets; evaluations and retries go on."""
        await self._call("POST", "/pause", None, {"paused": paused})

    async def start_evaluation(
        self,
        version: int,
        tasks: Sequence[int],
        samples: int,
        name: str = "",
        *,
        environment: str = "",
        pinned: bool = True,
    ) -> str:
        """Have `samples` episodes of every held-out task of `environment` run at `version`; the evaluation's id.

        The same arguments give the same evaluation; `name` tells apart what is to be measured twice. With `pinned`
        false the engines may move on to other versions meanwhile.
        """
        body = {"version": version, "tasks": list(tasks), "samples": samples, "name": name}
        body |= {"environment": environment, "pinned": pinned}
        return await self._call("POST", "/evaluations", str, body)

    async def evaluation(self, evaluation_id: str) -> EvaluationStatus:
        """Progress; all episodes once `finished == requested`."""
        return await self._call("GET", f"/evaluations/{evaluation_id}", EvaluationStatus)

    async def cancel_evaluation(self, evaluation_id: str) -> None:
        """Give up what of an evaluation has not begun."""
        await self._call("DELETE", f"/evaluations/{evaluation_id}", None)

    # -- episodes without a ticket

    async def offer(self, episode: Episode, *, judge: str = "") -> Ending:
        """Hand in an episode that no ticket was leased for; returns after it is on the disk. Safe to repeat.

        `judge`: a name for whoever judged it, for `max_share_per_user`.
        """
        query = {"judge": judge} if judge else None
        return await self._call("PUT", f"/episodes/{episode.id}", Ending, data=encode(episode), query=query)

    async def replace(self, episode: Episode) -> Ending:
        """Offer again what has changed; "superseded" if it does not wait for the learner any more. Safe to repeat."""
        query = {"replace": "1"}
        return await self._call("PUT", f"/episodes/{episode.id}", Ending, data=encode(episode), query=query)

    async def forget(self, episode_id: str) -> bool:
        """Delete what an offered episode says, from the file and its log, so that it is never trained (again).

        False while a claim holds it: the learner has it in memory, and perhaps in its recordings. Safe to repeat.
        `StoreFault` too where it must be repeated.
        """
        return await self._call("DELETE", f"/episodes/{episode_id}", bool)

    async def set_aside(self, version: int) -> int:
        """A rollback to `version`: what was trained since and what waits is never claimed again; how many episodes."""
        return await self._call("POST", "/set_aside", int, {"version": version})

    async def aside(self) -> list[AsideOf]:
        """What is set aside, by judge."""
        return await self._call("GET", "/set_aside", list[AsideOf])

    async def give_back(self, without: Sequence[str] = ()) -> int:
        """Make what is set aside ready again, but for the verdicts of the judges `without`; how many episodes."""
        return await self._call("POST", "/set_aside/return", int, {"without": list(without)})

    # -- displays

    async def status(self) -> StoreStatus:
        """Counts, sums and quantiles."""
        return await self._call("GET", "/status", StoreStatus)

    async def episodes(self, wanted: EpisodeFilter | None = None) -> list[EpisodeRow]:
        """The rows that match `wanted`, in order of completion."""
        fields = msgspec.to_builtins(wanted or EpisodeFilter())
        query = {name: str(value) for name, value in fields.items() if value is not None}
        return await self._call("GET", "/episodes", list[EpisodeRow], query=query)

    async def episode(self, episode_id: str) -> Episode:
        """One episode; `StoreFault` if there is none, or its tokens are gone."""
        content = await self._call("GET", f"/episodes/{episode_id}", None, raw=True)
        try:
            return decode(content)
        except EpisodeError as error:
            raise StoreFault(f"episode {episode_id} of {self.url} cannot be read: {error}") from error

    async def healthy(self) -> bool:
        """Whether the store answers and takes work."""
        try:
            async with self._open().get(f"{self.url}/healthz", timeout=aiohttp.ClientTimeout(total=5.0)) as response:
                return response.status == 200 and (await response.json())["status"] == "ok"
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        """End the heartbeat and the connections. May be called any number of times."""
        if self._heart is not None:
            self._heart.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heart
            self._heart = None
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- underneath

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit on connections: long polls would starve deliveries.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),  # the store keeps them for longer
                headers={"Accept": MSGPACK, "Content-Type": MSGPACK, **bearer(self._key)},
            )
        return self._session

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for worker in sorted(self._workers):
                try:
                    await self._call("POST", "/heartbeat", None, {"worker": worker}, limit_s=HEARTBEAT_S)
                except (StoreFault, WrongKey) as error:
                    log.warning("heartbeat of %s: %s", worker, error)

    async def _call(
        self,
        method: str,
        path: str,
        answer: Any,
        body: dict[str, Any] | None = None,
        *,
        data: bytes | None = None,
        query: dict[str, str] | None = None,
        wait_s: float = 0.0,
        limit_s: float | None = None,
        raw: bool = False,
    ) -> Any:
        """One request; the body decoded as `answer`, or as it is if `raw`."""
        if body is not None:
            data = msgspec.msgpack.encode(body)
        total = (self.timeout_s if limit_s is None else limit_s) + max(0.0, wait_s)
        try:
            async with self._open().request(
                method, self.url + path, data=data, params=query, timeout=aiohttp.ClientTimeout(total=total)
            ) as response:
                content = await response.read()
                status = response.status
        except TimeoutError as error:
            raise StoreFault(
                f"the episode store at {self.url} did not answer {method} {path} within {total:.0f} s: "
                "is its disk overloaded? Repeat the call, or raise the client's timeout_s"
            ) from error
        except aiohttp.ClientError as error:
            raise StoreFault(
                f"no episode store at {self.url} ({error}): start `python -m agent.store` again on the run's file; "
                "everything it acknowledged is there, then repeat the call"
            ) from error
        if status == 401:
            raise wrong_key(f"the episode store at {self.url}")
        if status != 200:
            kind = StoreFull if status == 507 else StoreFault
            text = content.decode(errors="replace") or f"{method} {path} failed"
            raise kind(f"episode store, {status}: {text}")
        if raw:
            return content
        try:
            return msgspec.msgpack.decode(content, type=answer)
        except msgspec.DecodeError as error:
            raise StoreFault(
                f"{self.url}{path} answered something else than an episode store of this version: {error}"
            ) from error
