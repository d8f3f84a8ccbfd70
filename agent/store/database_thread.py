"""One thread that owns a database, so that no disk write happens in the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from agent.store.database import Database

T = TypeVar("T")
Job = tuple[Callable[[], Any] | None, "Future[Any]"]
"""What to run (None: settle the file), and whose answer it is."""


class DatabaseThread:
    """Runs operations on a database, in the order they came; what has piled up shares one commit (and its fsync).

    async with no context manager on purpose: `close()` waits for the thread, and belongs at the end of the process.
    """

    GROUP = 256

    def __init__(self, database: Database) -> None:
        self._database = database
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="database", daemon=True)
        self._thread.start()

    async def run(self, operation: Callable[[], T], *, timeout_s: float = 60.0) -> T:
        """`operation()` inside a transaction; returns after it is durable, raises what it raised.

        A caller that is cancelled or runs out of time leaves the operation in the queue: it still happens.
        """
        job: Future[T] = Future()
        self._jobs.put((operation, job))
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(job)), timeout_s)

    async def settle(self, *, timeout_s: float = 60.0) -> bool:
        """`Database.settle`, between two groups; calls that wait for it together share it."""
        job: Future[bool] = Future()
        self._jobs.put((None, job))
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(job)), timeout_s)

    def close(self) -> None:
        """Finish what is queued, close the database, end the thread."""
        self._jobs.put(None)
        self._thread.join(timeout=30.0)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            jobs: list[Job] = []
            item = self._jobs.get()
            while True:
                if item is None:
                    stopping = True
                else:
                    jobs.append(item)
                if stopping or len(jobs) >= self.GROUP:
                    break
                try:
                    item = self._jobs.get_nowait()
                except queue.Empty:
                    break
            if jobs:
                self._settle(jobs)
        self._database.close()

    def _settle(self, jobs: list[Job]) -> None:
        changes = [(operation, job) for operation, job in jobs if operation is not None]
        self._answer([job for _, job in changes], lambda: self._database.apply([change for change, _ in changes]))
        waiting = [job for operation, job in jobs if operation is None]
        if waiting:
            self._answer(waiting, lambda: [self._database.settle()] * len(waiting))

    def _answer(self, jobs: list[Future[Any]], work: Callable[[], list[Any]]) -> None:
        try:
            answers = work() if jobs else []
        except Exception as error:  # the thread must live on: every caller hears of it
            answers = [error] * len(jobs)
        for job, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, Exception):
                job.set_exception(answer)
            else:
                job.set_result(answer)
