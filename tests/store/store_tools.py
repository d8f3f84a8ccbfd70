"""Episodes made by hand, a ledger with a clock that tests turn, and a real store process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from agent.episode import Episode, Segment, StopReason, decode, encode
from agent.store.client import StoreClient
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger
from agent.store.protocol import Claim, Ending, Ticket

T = TypeVar("T")


def make_episode(
    ticket_id: str, version: int = 0, *, tokens: int = 2, stop: StopReason = StopReason.TERMINATED, **fields: Any
) -> Episode:
    """A valid episode of one action, every token sampled by `version`."""
    action = Segment("action", tuple(range(tokens)), text="x", logprobs=(-0.5,) * tokens, versions=(version,) * tokens)
    return Episode(
        id=ticket_id,
        env_id="env",
        task_id="task",
        segments=(Segment("prompt", (1, 2)), action),
        turn_rewards=(1.0,),
        stop_reason=stop,
        **fields,
    )


class Bench:
    """A ledger, and its operations as plain calls, each durable."""

    def __init__(self, path: Path, config: StoreConfig | None, *, durable: bool = True) -> None:
        self.now = 1000.0
        self.path = path
        self.config = config
        self.durable = durable
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.path, self.config, clock=lambda: self.now)
        if not self.durable:
            self.ledger.sql.execute("PRAGMA synchronous=OFF")

    def restart(self) -> None:
        self.ledger.close()
        self.open()

    def do(self, operation: Callable[[], T]) -> T:
        [answer] = self.ledger.apply([operation])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def lease(self, count: int, worker: str = "w") -> list[Ticket]:
        return self.do(lambda: self.ledger.tickets.lease(count, worker))

    def put(self, ticket: Ticket | str, version: int = 0, **fields: Any) -> Ending:
        name = ticket if isinstance(ticket, str) else ticket.id
        episode = make_episode(name, version, **fields)
        return self.do(lambda: self.ledger.tickets.deliver(name, episode, encode(episode)))

    def fail(self, ticket: Ticket, *, retry: bool = True) -> Ending:
        return self.do(lambda: self.ledger.tickets.fail(ticket.id, "engine is down", retry=retry))

    def claim(self, name: str, count: int, version: int = 0) -> Claim | None:
        return self.do(lambda: self.ledger.claims.take(name, count, version))

    def commit(self, name: str, version: int = 0) -> None:
        self.do(lambda: self.ledger.claims.commit(name, version))

    def recover(self, *names: str) -> None:
        self.do(lambda: self.ledger.claims.recover(names))

    def counters(self) -> dict[str, int]:
        return self.ledger.counters()

    def statuses(self) -> dict[str, str]:
        return {row["id"]: row["status"] for row in self.ledger.all("SELECT id, status FROM episodes")}


def bench(tmp_path: Path, **keys: object) -> Bench:
    """A new ledger of 100 tasks and batches of 4, unless `keys` say otherwise."""
    return Bench(tmp_path / "episodes.sqlite", StoreConfig(**{"tasks": 100, "batch": 4, **keys}))


def ids(claim: Claim | None) -> list[str]:
    """The claim's episodes, by id; there must be a claim."""
    assert claim is not None
    return [decode(data).id for data in claim.episodes]


@contextlib.asynccontextmanager
async def running_store(
    path: Path, *keys: str, kill: bool = False
) -> AsyncIterator[tuple[StoreClient, asyncio.subprocess.Process]]:
    """`python -m agent.store` on `path`, and a client; ended by SIGTERM, or by SIGKILL if `kill`."""
    port_file = path.with_suffix(".port")
    port_file.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent.store", "--path", str(path), "--port-file", str(port_file)),
        *("--exit-with-parent", *keys),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20):
            while (line := await process.stderr.readline()) and b" at http://" not in line:
                pass
            assert line, "the store ended at its start"
            async with StoreClient(f"http://127.0.0.1:{int(port_file.read_text())}", timeout_s=10.0) as client:
                drain = asyncio.create_task(process.stderr.read())
                yield client, process
        if process.returncode is None:
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await process.wait() == (-9 if kill else 0)
            await drain
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
