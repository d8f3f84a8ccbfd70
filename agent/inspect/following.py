"""Episodes followed while they grow: what `python -m agent.inspect RUN --live` asks of the run's runtimes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import psutil
from rich.console import Console
from rich.live import Live

from agent.doors.door import bearer, wrong_key
from agent.doors.keys import found_key, given_key
from agent.inspect.live_view import Seen, event_line, live_screen
from agent.live import LiveReport

EVERY_S = 0.5
_ANSWER_S = 5.0
_RATE_S = 10.0
_SHOWN_EVENTS = 6

_reports = msgspec.json.Decoder(LiveReport)


class NothingRuns(ValueError):
    """There is no runtime to follow; the message says what to do."""


class _Runtime:
    """One runtime's address, and what it has said so far."""

    def __init__(self, name: str, url: str, key: str) -> None:
        self.name, self.url, self.headers = name, url.rstrip("/"), bearer(key)
        self.after = 0
        self.last: LiveReport | None = None
        self._sampled: deque[tuple[float, int]] = deque()

    def rate(self, report: LiveReport) -> float:
        """Tokens a second over the last seconds."""
        now = time.monotonic()
        self._sampled.append((now, report.sampled_tokens))
        while now - self._sampled[0][0] > _RATE_S:
            self._sampled.popleft()
        began, before = self._sampled[0]
        return (report.sampled_tokens - before) / (now - began) if now > began else 0.0


async def follow(run: str, console: Console, *, limit: int, key_file: Path | None = None) -> None:
    """Show the episodes of `run`, a run's folder or a runtime's address, until it has ended; `limit` of each runtime.

    On a terminal they are a screen that changes, elsewhere each event is a line. Raises `NothingRuns`, and `DoorFault`
    where the key is wrong.
    """
    is_address = run.startswith(("http://", "https://"))
    folder = Path(run)
    runtimes: dict[str, _Runtime] = {}
    lines: deque[str] = deque(maxlen=_SHOWN_EVENTS)
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with _screen(console) as live, aiohttp.ClientSession(timeout=timeout) as session:
        began = told = False
        while True:
            found = {run: run} if is_address else await asyncio.to_thread(_addresses, folder)
            for name, url in found.items():
                if name not in runtimes or runtimes[name].url != url:
                    # Read now: a run that is only just starting makes its key before its first runtime.
                    runtimes[name] = _Runtime(name, url, await asyncio.to_thread(_key, run, is_address, key_file))
            seen = []
            for runtime in [runtimes[name] for name in found]:
                report = await _ask(session, runtime, limit)
                if report is None:
                    continue
                began = True
                for line in _news(runtime, report, several=len(found) > 1):
                    lines.append(line)
                    if live is None:
                        console.print(line, highlight=False, markup=False, soft_wrap=True)
                seen.append(Seen(runtime.name, report, runtime.rate(report)))
            if live is not None and seen:
                live.update(live_screen(seen, lines, console.width), refresh=True)
            if not seen and (is_address or not await asyncio.to_thread(_is_trained, folder)):
                if not began:
                    raise NothingRuns(_NOTHING.format(run=run))
                break
            if not seen and not began and not told:
                told = True
                console.print(f"{run} is starting: no runtime of it yet", highlight=False, markup=False)
            await asyncio.sleep(EVERY_S)
    console.print(f"{run} has ended", highlight=False, markup=False)


_NOTHING = (
    "nothing runs in {run}, so there is nothing to follow. Start it (learner.train opens its runtime's port by itself; "
    "a runtime started by hand needs metrics_port, and port_file or its address in place of the folder), or leave "
    "--live out for the episodes that are finished"
)


@contextlib.asynccontextmanager
async def _screen(console: Console) -> AsyncIterator[Live | None]:
    if not console.is_terminal:
        yield None
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield live


def _key(run: str, is_address: bool, key_file: Path | None) -> str:
    return given_key(key_file) if is_address else found_key(Path(run), key_file)


def _addresses(folder: Path) -> dict[str, str]:
    """The addresses of the runtimes whose port is in `folder` or one below, by name."""
    found = {}
    for file in sorted([*folder.glob("*runtime*.port"), *folder.glob("*/*runtime*.port")]):
        with contextlib.suppress(OSError, ValueError):
            name = str(file.relative_to(folder).with_suffix(""))
            found[name] = f"http://127.0.0.1:{int(file.read_text())}"
    return found


def _is_trained(folder: Path) -> bool:
    """Whether the learner whose number is in the run's lock is still there. Between two stages no runtime is."""
    lock = folder / ".lock"
    try:
        written, process = lock.stat().st_mtime, psutil.Process(int(lock.read_text()))
        return process.create_time() <= written + 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, psutil.Error):
        return False


async def _ask(session: aiohttp.ClientSession, runtime: _Runtime, limit: int) -> LiveReport | None:
    """What a runtime says; its last report from one that is too busy, None from one that is gone. Raises `WrongKey`."""
    query = {"limit": str(limit), "after": str(runtime.after)}
    try:
        async with session.get(f"{runtime.url}/episodes", params=query, headers=runtime.headers) as answer:
            if answer.status == 401:
                raise wrong_key(f"the runtime at {runtime.url}")
            answer.raise_for_status()
            runtime.last = report = _reports.decode(await answer.read())
            return report
    except TimeoutError:
        return None if runtime.last is None else msgspec.structs.replace(runtime.last, events=[], missed=0)
    except (aiohttp.ClientError, msgspec.DecodeError):
        return None


def _news(runtime: _Runtime, report: LiveReport, *, several: bool) -> list[str]:
    name = runtime.name if several else ""
    lines = [f"{report.missed} events of {runtime.name} were missed"] if report.missed and runtime.after else []
    lines += [event_line(event, name) for event in report.events]
    if report.events:
        runtime.after = report.events[-1].number
    return lines
