"""The episode store over HTTP: msgpack bodies, long polls, errors as text with a status that says whose fault it is.

400 the request makes no sense; 401 without the shared key; 404 no such ticket, claim, evaluation or episode;
409 refused, the text says why; 503 the store is stopping; 507 the disk is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from agent import STARTED_BY
from agent import episode as episodes
from agent.child_processes import announce_port
from agent.doors.guard import guard
from agent.metrics_page import metrics_page
from agent.store import reading
from agent.store.database_thread import DatabaseThread
from agent.store.ending import Ending
from agent.store.figures import Traffic, file_bytes, store_figures
from agent.store.ledger import Ledger
from agent.store.protocol import (
    MSGPACK,
    Claim,
    ClaimRequest,
    CommitRequest,
    EvaluationRequest,
    FailRequest,
    LeaseRequest,
    PauseRequest,
    RecoverRequest,
    ReleaseRequest,
    ReturnRequest,
    SetAsideRequest,
    StoreFault,
    StoreFull,
    VersionRequest,
    WorkerRequest,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

MAX_BODY = 512 * 2**20
MAX_WAIT_S = 300.0
_PRUNE_EVERY_S, _PRUNE_PAUSE_S = 2.0, 0.05
_LONG = 2**20
"""From so many bytes on decoding and checking an episode takes about half a millisecond: no more in the loop."""
_LONG_TO_COMPACT = 2**16


class StoreServer:
    """The HTTP face of one ledger.

    Long polls (`/lease`, `/claim`) look again whenever anything has changed, so that nobody spins; they answer
    "none" when their time is over or the server stops. `key`: the shared key, asked for if there is one.
    """

    def __init__(self, ledger: Ledger, *, key: str = "") -> None:
        self.ledger = ledger
        self._key, self._traffic = key, Traffic()
        self._thread = DatabaseThread(ledger)
        self._changed = asyncio.Event()
        self._stopping = False
        self._wanted: dict[str, int] = {}  # by claim that is waited for, how many episodes
        self._tasks: list[asyncio.Task[None]] = []

    def application(self) -> web.Application:
        """The aiohttp application; its start-up and clean-up start and end everything else."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[guard(self._key), self._counted, _errors_as_text])
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/status", self._status),
                web.get("/metrics", self._metrics),
                web.post("/lease", self._lease),
                web.post("/heartbeat", self._heartbeat),
                web.put("/tickets/{id}/episode", self._deliver),
                web.post("/tickets/{id}/failure", self._fail),
                web.post("/claim", self._claim),
                web.post("/commit", self._commit),
                web.post("/release", self._release),
                web.post("/recover", self._recover),
                web.post("/version", self._version),
                web.post("/set_aside", self._set_aside),
                web.get("/set_aside", self._list_aside),
                web.post("/set_aside/return", self._return),
                web.post("/pause", self._pause),
                web.post("/release_worker", self._release_worker),
                web.post("/evaluations", self._start_evaluation),
                web.get("/evaluations/{id}", self._evaluation),
                web.delete("/evaluations/{id}", self._cancel_evaluation),
                web.get("/episodes", self._list_episodes),
                web.get("/episodes/{id}", self._read_episode),
                web.put("/episodes/{id}", self._offer),
                web.delete("/episodes/{id}", self._forget),
            ]
        )
        app.on_startup.append(self._start)
        app.on_shutdown.append(self._shutdown)
        app.on_cleanup.append(self._cleanup)
        return app

    async def _start(self, _: web.Application) -> None:
        self._tasks = [asyncio.create_task(self._reap(), name="reap"), asyncio.create_task(self._prune(), name="prune")]

    async def _shutdown(self, _: web.Application) -> None:
        self.stop()

    def stop(self) -> None:
        """Let every long poll answer at once, and refuse what comes after."""
        self._stopping = True
        self._notify()

    async def _cleanup(self, _: web.Application) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._thread.close)

    async def _reap(self) -> None:
        period = min(1.0, self.ledger.config.worker_timeout_s / 4)
        last = time.monotonic()

        def reap() -> int:
            # Suspended, swapped out or busy with its disk, the store heard nobody: that is no worker's silence.
            nonlocal last
            now = time.monotonic()
            deaf_s, last = max(0.0, now - last - period), now
            return self.ledger.tickets.reap(deaf_s=deaf_s)

        while True:
            await asyncio.sleep(period)
            try:
                if await self._thread.run(reap):
                    self._notify()
            except (StoreFault, sqlite3.Error, TimeoutError) as error:
                log.error("cannot look after silent workers: %s", error)

    async def _prune(self) -> None:
        """Hold the file to `keep_trained`, step by step, with pauses in which everybody else has the file."""
        while self.ledger.config.keep_trained is not None:
            pause_s = _PRUNE_EVERY_S
            try:
                if (await self._thread.run(self.ledger.prune)).episodes:
                    pause_s = _PRUNE_PAUSE_S
            except (StoreFault, sqlite3.Error, TimeoutError) as error:
                log.error("cannot prune: %s", error)
            await asyncio.sleep(pause_s)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, operation: Callable[[], T]) -> T:
        """Run a change; whoever waits for one looks again."""
        if self._stopping:
            raise web.HTTPServiceUnavailable(text="the episode store is stopping: connect to the next one")
        answer = await self._thread.run(operation)
        self._notify()
        return answer

    async def _poll(self, attempt: Callable[[], Awaitable[T]], complete: Callable[[T], bool], wait_s: float) -> T:
        """Repeat `attempt` after every change until its answer is `complete`, at most `wait_s` (and MAX_WAIT_S)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(max(0.0, wait_s), MAX_WAIT_S)
        while True:
            changed = self._changed  # taken before the attempt: a change during it is not missed
            answer = await attempt()
            left = deadline - loop.time()
            if complete(answer) or left <= 0 or self._stopping:
                return answer
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)

    # -- handlers

    async def _healthz(self, _: web.Request) -> web.Response:
        await self._thread.run(lambda: None, timeout_s=5.0)
        return web.json_response({"status": "stopping" if self._stopping else "ok"})

    async def _status(self, request: web.Request) -> web.Response:
        status = await self._thread.run(self.ledger.status)
        status = msgspec.structs.replace(status, wanted=max(self._wanted.values(), default=0))
        if MSGPACK in request.headers.get("Accept", ""):
            return _packed(status)
        return web.Response(body=msgspec.json.encode(status), content_type="application/json")

    async def _metrics(self, _: web.Request) -> web.Response:
        status, size = await self._thread.run(lambda: (self.ledger.status(), file_bytes(self.ledger.path)))
        return metrics_page(store_figures(status, self._traffic, size))

    @web.middleware
    async def _counted(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = f"{request.method} {resource.canonical if resource is not None else 'unknown'}"
        answer: web.StreamResponse | None = None
        try:
            answer = await handler(request)
            return answer
        except web.HTTPException as error:
            answer = error
            raise
        finally:
            if answer is not None:  # else its caller is gone
                size = answer.content_length or 0
                self._traffic.count(route, answer.status, request.content_length or 0, size)

    async def _lease(self, request: web.Request) -> web.Response:
        body = await _body(request, LeaseRequest)
        if body.n < 1 or not body.worker:
            raise web.HTTPBadRequest(text="a lease needs n >= 1 and the name of the worker")
        if body.void:
            await self._change(lambda: self.ledger.tickets.void(body.void))
        tickets = await self._poll(
            lambda: self._thread.run(lambda: self.ledger.tickets.lease(body.n, body.worker, body.request, body.kind)),
            bool,
            0 if self._stopping else body.wait_s,
        )
        return _packed(tickets)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body = await _body(request, WorkerRequest)
        await self._thread.run(lambda: self.ledger.tickets.heard_of(body.worker))
        return _packed(None)

    async def _deliver(self, request: web.Request) -> web.Response:
        ticket, data = request.match_info["id"], await request.read()
        try:
            episode = await _decoded(data)
        except episodes.EpisodeError as error:
            reason = str(error)
            return _packed(await self._change(lambda: self.ledger.tickets.reject(ticket, reason)))
        kept = await _compacted(episode, len(data))
        return _packed(await self._change(lambda: self.ledger.tickets.deliver(ticket, episode, kept)))

    async def _fail(self, request: web.Request) -> web.Response:
        ticket, body = request.match_info["id"], await _body(request, FailRequest)
        ending = await self._change(
            lambda: self.ledger.tickets.fail(ticket, body.reason, retry=body.retry, worker=body.worker)
        )
        return _packed(ending)

    async def _claim(self, request: web.Request) -> web.Response:
        body = await _body(request, ClaimRequest)
        claims = self.ledger.claims
        if body.void:
            await self._change(lambda: claims.void(body.void))

        async def attempt() -> Claim | None:
            freed, claim = await self._thread.run(
                lambda: (claims.prepare(body.version), claims.take(body.claim_id, body.n, body.version))
            )
            if freed:
                self._notify()
            return claim

        self._wanted[body.claim_id] = body.n
        try:
            claim = await self._poll(attempt, lambda taken: taken is not None, 0 if self._stopping else body.wait_s)
        finally:
            self._wanted.pop(body.claim_id, None)
        return _packed(claim)

    async def _commit(self, request: web.Request) -> web.Response:
        body = await _body(request, CommitRequest)
        return _packed(await self._change(lambda: self.ledger.claims.commit(body.claim_id, body.version)))

    async def _release(self, request: web.Request) -> web.Response:
        body = await _body(request, ReleaseRequest)
        return _packed(await self._change(lambda: self.ledger.claims.release(body.claim_id)))

    async def _recover(self, request: web.Request) -> web.Response:
        body = await _body(request, RecoverRequest)
        return _packed(await self._change(lambda: self.ledger.claims.recover(body.claim_ids)))

    async def _version(self, request: web.Request) -> web.Response:
        body = await _body(request, VersionRequest)
        return _packed(await self._change(lambda: self.ledger.set_version(body.version)))

    async def _set_aside(self, request: web.Request) -> web.Response:
        body = await _body(request, SetAsideRequest)
        return _packed(await self._change(lambda: self.ledger.asides.put(body.version)))

    async def _list_aside(self, _: web.Request) -> web.Response:
        return _packed(await self._thread.run(self.ledger.asides.listing))

    async def _return(self, request: web.Request) -> web.Response:
        body = await _body(request, ReturnRequest)
        return _packed(await self._change(lambda: self.ledger.asides.give_back(body.without)))

    async def _pause(self, request: web.Request) -> web.Response:
        body = await _body(request, PauseRequest)
        return _packed(await self._change(lambda: self.ledger.tickets.pause(body.paused)))

    async def _release_worker(self, request: web.Request) -> web.Response:
        body = await _body(request, WorkerRequest)
        return _packed(await self._change(lambda: self.ledger.tickets.release_worker(body.worker)))

    async def _start_evaluation(self, request: web.Request) -> web.Response:
        body = await _body(request, EvaluationRequest)
        start = self.ledger.evaluations.start
        return _packed(
            await self._change(
                lambda: start(
                    body.version,
                    body.tasks,
                    body.samples,
                    body.name,
                    environment=body.environment,
                    pinned=body.pinned,
                )
            )
        )

    async def _evaluation(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        return _packed(await self._thread.run(lambda: self.ledger.evaluations.read(name)))

    async def _cancel_evaluation(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        return _packed(await self._change(lambda: self.ledger.evaluations.cancel(name)))

    async def _list_episodes(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.convert(dict(request.query), reading.EpisodeFilter, strict=False)
        except msgspec.ValidationError as error:
            raise web.HTTPBadRequest(text=f"episodes: {error}") from error
        return _packed(await self._thread.run(lambda: reading.list_episodes(self.ledger.sql, wanted)))

    async def _read_episode(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        data = await self._thread.run(lambda: reading.read_episode(self.ledger.sql, name))
        if isinstance(data, str):
            raise web.HTTPNotFound(text=data)
        return web.Response(body=data, content_type=MSGPACK)

    async def _offer(self, request: web.Request) -> web.Response:
        data = await request.read()
        episode = await _decoded(data)  # EpisodeError is a ValueError: 400
        if episode.id != request.match_info["id"]:
            raise web.HTTPBadRequest(text=f"the episode's id is {episode.id}, not {request.match_info['id']}")
        offers, judge = self.ledger.offers, request.query.get("judge", "")
        if request.query.get("replace"):
            return _packed(await self._change(lambda: offers.replace(episode, data)))
        return _packed(await self._change(lambda: offers.take(episode, data, judge)))

    async def _forget(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        free = await self._change(lambda: self.ledger.offers.forget(name))
        if not await self._thread.settle():
            raise StoreFault(f"{name} is deleted, but somebody who reads the file keeps it in the log: repeat the call")
        return _packed(free)


async def serve(
    ledger: Ledger, host: str, port: int, *, port_file: Path | None, exit_with_parent: bool, key: str = ""
) -> None:
    """Serve `ledger` until SIGTERM or SIGINT (or the parent's end, if asked), and close it. Raises OSError.

    `port` 0: any free one. `port_file` says which, once the store answers. `key`: see `StoreServer`. What hangs then
    ends with the process (`agent.store.ending`).
    """
    ending = Ending.of_signals()
    server = StoreServer(ledger, key=key)
    runner = web.AppRunner(
        server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=10.0, keepalive_timeout=90.0
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        port = runner.addresses[0][1]
        announce_port(port_file, port)
        log.info("episode store %s at http://%s:%d", ledger.path, host, port)
        while not ending.asked.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ending.asked.wait(), 0.5 if exit_with_parent else None)
            if exit_with_parent and os.getppid() != STARTED_BY:
                ending.begin()
                break
        server.stop()
    finally:
        await runner.cleanup()
        if port_file is not None:
            await asyncio.to_thread(port_file.unlink, missing_ok=True)


async def _decoded(data: bytes) -> episodes.Episode:
    return episodes.decode(data) if len(data) < _LONG else await asyncio.to_thread(episodes.decode, data)


async def _compacted(episode: episodes.Episode, size: int) -> bytes:
    """What of it goes to the disk; `size`: how many bytes it is encoded. 64 kB take a millisecond."""
    if size < _LONG_TO_COMPACT:
        return episodes.compact(episode)
    return await asyncio.to_thread(episodes.compact, episode)


async def _body(request: web.Request, kind: type[S]) -> S:
    try:
        return msgspec.msgpack.decode(await request.read(), type=kind)
    except msgspec.DecodeError as error:
        raise web.HTTPBadRequest(text=f"{request.path}: {error}") from error


def _packed(value: Any) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(value), content_type=MSGPACK)


@web.middleware
async def _errors_as_text(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except StoreFull as error:
        return web.Response(status=507, text=str(error))
    except StoreFault as error:
        return web.Response(status=409, text=str(error))
    except KeyError as error:
        return web.Response(status=404, text=str(error.args[0]))
    except ValueError as error:
        return web.Response(status=400, text=str(error))
    except TimeoutError:
        return web.Response(status=503, text="the store's disk did not answer in time: repeat the call")
