"""What do clients notice of sockets that begin a request and never finish its header?

    python -m benchmarks.serve_slow_headers [--quick] [--sockets 1100] [--seconds 20] [--rounds 3] [--json FILE]

The tiny recipe (after its cold start) is served as it is by default, with a limit of `--descriptors` open files.
Clients from 127.0.0.2 stream answers and ask for the list of models, in closed loops with pauses. In every round they
do so twice as long as `--seconds`: first alone, then while other processes at 127.0.0.1 hold `--sockets` connections
that have each sent half a header, adds a byte to each now and then, and opens those again that the server has closed.

`--same-address`: the clients come from 127.0.0.1, too, so that they compete with the sockets for their address's share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from agent.child_processes import start_child, stop_child
from benchmarks.report import machine, save_json, show
from benchmarks.serve_load import milliseconds, quantile
from benchmarks.serving import RECIPE, ServedRun, ask, questions

_HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
_PAUSE_S = 0.05
_BETWEEN_BYTES_S = 1.0
_OPEN_AGAIN_S = 0.5
_CLIENTS = 4
_A_PROCESS = 500
_OPENING_S = 3.0


@dataclass
class Seen:
    """What the clients saw of one phase: seconds of each call, and what failed."""

    models_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)


async def _client(http: aiohttp.ClientSession, url: str, model: str, number: int, seen: Seen) -> None:
    asked, count = questions(), 0
    while True:
        count += 1
        await asyncio.sleep(_PAUSE_S)
        try:
            began = time.perf_counter()
            async with http.get(f"{url}/v1/models") as answer:
                await answer.read()
                if answer.status != 200:
                    seen.faults[f"models {answer.status}"] += 1
            seen.models_s.append(time.perf_counter() - began)
            if count % 5 == number % 5:
                reply = await ask(http, url, model, asked[count % len(asked)], count)
                if reply.fault or not reply.pieces:
                    seen.faults[reply.fault[:60] or "empty"] += 1
                else:
                    seen.first_s.append(reply.pieces[0] - reply.sent)
        except (aiohttp.ClientError, TimeoutError) as error:
            seen.faults[type(error).__name__] += 1


async def phase(url: str, model: str, address: str, seconds: float) -> Seen:
    """Clients for `seconds`."""
    seen, connector = Seen(), aiohttp.TCPConnector(limit=0, local_addr=(address, 0), force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=20)) as http:
        tasks = [asyncio.create_task(_client(http, url, model, i, seen)) for i in range(_CLIENTS)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seen


@contextlib.asynccontextmanager
async def attacked(url: str, sockets: int, log: Path) -> AsyncIterator[None]:
    """While the sockets are there; they are in processes of their own, which have the same limit of open files."""
    processes = []
    try:
        for begin in range(0, sockets, _A_PROCESS):
            share = min(_A_PROCESS, sockets - begin)
            processes.append(
                await start_child(
                    *(sys.executable, "-m", "benchmarks.serve_slow_headers", "--attack", url, "--sockets", str(share)),
                    log=log,
                    env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                    when_parent_dies=signal.SIGKILL,
                )
            )
        await asyncio.sleep(_OPENING_S)  # all of them are open by then; afterwards they are opened again one by one
        yield
    finally:
        for process in processes:
            await stop_child(process)


async def attack(url: str, sockets: int) -> None:
    """Hold `sockets` connections with half a header each, until ended."""
    host, _, port = url.removeprefix("http://").partition(":")

    async def one() -> None:
        loop = asyncio.get_running_loop()
        while True:
            with socket.socket() as slow, contextlib.suppress(OSError):
                slow.setblocking(False)
                await loop.sock_connect(slow, (host, int(port)))
                await loop.sock_sendall(slow, _HALF)
                while True:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_BETWEEN_BYTES_S):
                            if not await loop.sock_recv(slow, 1):
                                break
                    await loop.sock_sendall(slow, b"x")
            await asyncio.sleep(_OPEN_AGAIN_S)

    await asyncio.gather(*(one() for _ in range(sockets)))


def figures(name: str, parts: Sequence[Seen]) -> dict[str, Any]:
    """The figures of all phases of one kind together."""
    models = [s for seen in parts for s in seen.models_s]
    first = [s for seen in parts for s in seen.first_s]
    faults = sum((seen.faults for seen in parts), Counter())
    return {
        "phase": name,
        "calls": len(models),
        "answers": len(first),
        "models_s": {"p50": quantile(models, 0.5), "p99": quantile(models, 0.99), "max": max(models, default=None)},
        "first_token_s": {"p50": quantile(first, 0.5), "p99": quantile(first, 0.99)},
        "faults": dict(faults),
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(options.descriptors, hard), min(options.descriptors, hard)))
    quiet, loud = [], []
    address = "127.0.0.1" if options.same_address else "127.0.0.2"
    with tempfile.TemporaryDirectory(prefix="serve_slow_headers") as scratch:
        served = ServedRun(options.recipe, options.runs or Path(scratch), "slow-headers", options.overrides)
        await served.prepare()
        await served.start(learn=False)
        log = served.folder / "server.log"
        try:
            await phase(served.url, served.name, address, 2.0)
            for _ in range(options.rounds):
                quiet.append(await phase(served.url, served.name, address, options.seconds))
                async with attacked(served.url, options.sockets, served.folder / "attack.log"):
                    loud.append(await phase(served.url, served.name, address, options.seconds))
        finally:
            written = log.stat().st_size
            await served.stop()
    return {
        "machine": machine(),
        "sockets": options.sockets,
        "descriptors": options.descriptors,
        "same_address": options.same_address,
        "log_bytes": written,
        "rows": [figures("alone", quiet), figures("attacked", loud)],
    }


def table(report: dict[str, Any]) -> None:
    """Print it."""
    rows = report["rows"]
    ratio = (rows[1]["models_s"]["p99"] or float("nan")) / (rows[0]["models_s"]["p99"] or float("nan"))
    show(
        f"{report['sockets']} sockets that never finish a header, {report['descriptors']} descriptors",
        ["", "calls", "models ms p50 / p99 / max", "answers", "first token ms p50 / p99", "faults"],
        [
            [
                row["phase"],
                str(row["calls"]),
                milliseconds([row["models_s"]["p50"], row["models_s"]["p99"], row["models_s"]["max"]]),
                str(row["answers"]),
                milliseconds([row["first_token_s"]["p50"], row["first_token_s"]["p99"]]),
                str(row["faults"] or "none"),
            ]
            for row in rows
        ],
        [f"p99 of the list of models: {ratio:.2f} times the one alone; server's log: {report['log_bytes']} bytes"],
    )


def main() -> int:
    """Command line; see `--help`."""
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--sockets", type=int, default=1100)
    parser.add_argument("--descriptors", type=int, default=1024, help="the limit of open files (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--same-address", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one round of 5 seconds each way")
    parser.add_argument("--runs", type=Path, help="where runs and the cold-started model are kept (else: thrown away)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attack", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if min(options.sockets, options.rounds) < 1 or options.seconds <= 0:
        parser.error("--sockets, --rounds and --seconds must be positive")
    if options.attack:
        asyncio.run(attack(options.attack, options.sockets))
    if options.quick:
        options.seconds, options.rounds = min(options.seconds, 5.0), 1
    report = asyncio.run(run(options))
    table(report)
    save_json(options.json, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
