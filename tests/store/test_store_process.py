"""The store as a process: real SIGKILL, real HTTP, real time limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from aiohttp import web
from store_tools import make_episode, running_store

from agent.episode import Episode, Segment, compact, decode
from agent.store.client import StoreClient
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger
from agent.store.protocol import StoreFault, StoreFull, Ticket
from agent.store.reading import EpisodeFilter, EpisodeReader
from agent.store.server import StoreServer

KEYS = ("tasks=50", "batch=4")


async def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    """Cases D3 and H1: episodes, claims, version and data cursor are there after the store was killed."""
    path = tmp_path / "run" / "episodes.sqlite"
    async with running_store(path, *KEYS, kill=True) as (store, _):
        first = await store.lease(8, "w")
        await asyncio.gather(*(store.put(t.id, make_episode(t.id)) for t in first[:7]))
        claim = await store.claim(4, 0)
        assert claim is not None
        await store.set_version(5)
    async with running_store(path) as (store, _):  # the saved configuration counts
        status = await store.status()
        assert (status.version, status.ready, status.claimed, status.leased) == (5, 3, 4, 1)
        assert (await store.put(first[0].id, make_episode(first[0].id))).outcome == "duplicate"
        await store.recover(claim.id)
        assert await store.release_worker("w") == 1
        again = await store.lease(8, "w")
        assert again[0].id == first[7].id
        assert not {t.task_index for t in again[1:]} & {t.task_index for t in first}
        status = await store.status()
        assert (status.trained, status.claimed) == (4, 0)


async def test_second_store_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "episodes.sqlite"
    command = [sys.executable, "-m", "agent.store", "--path", str(path), *KEYS]
    async with running_store(path, *KEYS) as (_, process):
        second = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
    assert second.returncode == 2
    assert f"process {process.pid}" in second.stderr
    assert "Traceback" not in second.stderr


async def test_a_run_started_again_at_once_waits_for_the_store_of_the_killed_one(
    tmp_path: Path,
) -> None:
    """That one notices its parent's end within half a second, and has requests to end."""
    path = tmp_path / "episodes.sqlite"
    leaving = Ledger(path, StoreConfig(tasks=50, batch=4))
    words = ("-m", "agent.store", "--path", str(path), "--exit-with-parent", *KEYS)
    store = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=asyncio.subprocess.PIPE)
    assert store.stderr is not None
    try:
        async with asyncio.timeout(30):
            assert f"process {os.getpid()}".encode() in await store.stderr.readline()
            leaving.close()
            assert b" at http://" in await store.stderr.readline()
    finally:
        store.kill()
        await store.wait()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["bach=4"], "bach"),
        (["batch=0"], "batch"),
        (["batch"], "key=value"),
        ([], "tasks"),
        (["tasks=["], "tasks"),
    ],
)
def test_bad_configuration_is_one_clear_line(tmp_path: Path, keys: list[str], named: str) -> None:
    command = [sys.executable, "-m", "agent.store", "--path", str(tmp_path / "e.sqlite"), *keys]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "e.sqlite").write_text("no database " * 1000)
    command = [sys.executable, "-m", "agent.store", "--path", str(tmp_path / "e.sqlite"), *KEYS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert "is it an episode store" in ended.stderr
    with pytest.raises(StoreFault, match="no readable"):
        EpisodeReader(tmp_path / "e.sqlite")


async def test_long_polls_answer_when_there_is_something(tmp_path: Path) -> None:
    """Case D1: a claim and a lease wait without asking again, and are answered by the change itself."""
    async with running_store(tmp_path / "e.sqlite", *KEYS, "max_lag=0") as (store, _):
        claiming = asyncio.create_task(store.claim(4, 0, wait_s=30.0))
        tickets = await store.lease(4, "w")
        leasing = asyncio.create_task(store.lease(4, "w", wait_s=30.0))
        async with asyncio.timeout(10):
            for ticket in tickets:
                await store.put(ticket.id, make_episode(ticket.id))
            claim = await claiming
            assert claim is not None
            assert [decode(data).id for data in claim.episodes] == [t.id for t in tickets]
            assert not leasing.done()
            await store.commit(claim.id, 0)
            assert len(await leasing) == 4
        assert await store.claim(4, 0, wait_s=0.05) is None


async def test_a_dropped_stale_episode_wakes_the_runtime(tmp_path: Path) -> None:
    """Case D2: capacity that a waiting claim frees reaches a waiting lease at once."""
    keys = (*KEYS, "max_lag=0", "stale_policy=drop", "max_lag_at_claim=0")
    async with running_store(tmp_path / "e.sqlite", *keys) as (store, _):
        for ticket in await store.lease(4, "w"):
            await store.put(ticket.id, make_episode(ticket.id, 0))
        leasing = asyncio.create_task(store.lease(4, "w", wait_s=30.0))
        claiming = asyncio.create_task(store.claim(4, 1, wait_s=30.0))
        async with asyncio.timeout(10):
            for ticket in await leasing:
                await store.put(ticket.id, make_episode(ticket.id, 1))
            assert await claiming is not None
        assert (await store.status()).counters["stale"] == 4


DELAYS_S = (0.0, 0.001, 0.002, 0.003, 0.005, 0.008, 0.02)


async def test_cancelled_lease_and_claim_leak_nothing(tmp_path: Path) -> None:
    """Case D2: a caller that gives up while the store answers must not lose tickets or a batch."""
    async with running_store(tmp_path / "e.sqlite", *KEYS, "max_lag=0") as (store, _):
        tickets: list[Ticket] = []
        for delay in DELAYS_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    tickets += await store.lease(4, "w", wait_s=1.0)
        async with asyncio.timeout(10):
            while len(tickets) < 4:
                tickets += await store.lease(4, "w", wait_s=1.0)
        assert len({t.id for t in tickets}) == 4
        for ticket in tickets:
            await store.put(ticket.id, make_episode(ticket.id))
        claim = None
        for delay in DELAYS_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    claim = claim or await store.claim(4, 0, wait_s=1.0)
        assert claim or await store.claim(4, 0, wait_s=5.0)


async def test_an_answer_that_never_arrived_is_undone_by_the_next_call(tmp_path: Path) -> None:
    """Case D2: exactly the lost request's tickets and claim come back."""
    async with running_store(tmp_path / "e.sqlite", *KEYS, "max_lag=0") as (store, _):
        kept = await store.lease(1, "w")
        lost = StoreClient(store.url)  # its connection breaks after the store has decided
        await lost.lease(3, "w")
        store._lost_leases = list(await _requests(tmp_path / "e.sqlite", kept[0].id))
        again = await store.lease(4, "w")
        await lost.close()
        assert len(again) == 3
        for ticket in [*kept, *again]:
            await store.put(ticket.id, make_episode(ticket.id))
        claim = await store.claim(4, 0)
        assert claim is not None
        store._lost_claims = [claim.id]
        repeated = await store.claim(4, 0, wait_s=5.0)
        assert repeated is not None
        assert repeated.episodes == claim.episodes
        assert repeated.id != claim.id
        assert not store._lost_claims


async def test_leases_and_claims_side_by_side_do_not_void_each_other(tmp_path: Path) -> None:
    """Case D10: no ticket is in flight twice, and no episode in two claims, because one client asked twice at once."""
    async with running_store(tmp_path / "e.sqlite", *KEYS, "max_lag=4") as (store, _):
        leased = await asyncio.gather(*(store.lease(2, f"w{i}", wait_s=5.0) for i in range(8)))
        tickets = [ticket for some in leased for ticket in some]
        assert len({t.id for t in tickets}) == len(tickets) == 16
        for ticket in tickets:
            await store.put(ticket.id, make_episode(ticket.id))
        claims = await asyncio.gather(*(store.claim(4, 0, wait_s=5.0) for _ in range(4)))
        assert len({data for claim in claims if claim for data in claim.episodes}) == 16
        assert (await store.status()).claimed == 16


async def test_a_lock_held_by_another_program_does_not_end_the_watch_over_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case D2: a dead worker's tickets come back, also after the file was locked for longer than SQLite waits."""
    ledger = Ledger(tmp_path / "e.sqlite", StoreConfig(tasks=5, batch=1, worker_timeout_s=0.4))
    ledger.sql.execute("PRAGMA busy_timeout=50")
    runner = web.AppRunner(StoreServer(ledger).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with StoreClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as store, asyncio.timeout(60):
        await store.lease(1, "w")
        store._workers.clear()  # it is not heard of again
        with contextlib.closing(sqlite3.connect(tmp_path / "e.sqlite", isolation_level=None, timeout=30)) as other:
            other.execute("BEGIN IMMEDIATE")
            while "cannot look after silent workers" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            other.execute("ROLLBACK")
        await store.lease(1, "v")
        store._workers.clear()
        while (await store.status()).leased:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await runner.cleanup()


async def _requests(path: Path, but: str) -> set[str]:
    with EpisodeReader(path) as reader:
        rows = reader._sql.execute("SELECT request FROM tickets WHERE status = 'leased' AND id != ?", (but,))
        return {row[0] for row in rows}


async def test_a_bad_episode_is_an_answer_not_a_fault(tmp_path: Path) -> None:
    """Cases B4 and C: fewer log-probs than tokens, no action token, or no episode at all: counted rejections."""
    async with running_store(tmp_path / "e.sqlite", *KEYS, "max_attempts=1") as (store, _):
        one, two, three = await store.lease(3, "w")
        good = make_episode(one.id)
        prompt = good.segments[0]
        unscored = Segment("action", (1, 2), logprobs=(-1.0,), versions=(0, 0))
        bad = {"segments": (prompt, unscored)}
        ending = await store.put(one.id, msgspec.structs.replace(good, **bad))
        assert ending.outcome == "given_up"
        assert "log-probs" in ending.reason
        ending = await store.put(
            two.id, msgspec.structs.replace(make_episode(two.id), segments=(prompt,), turn_rewards=())
        )
        assert "no action token" in ending.reason
        async with aiohttp.ClientSession() as session:
            async with session.put(f"{store.url}/tickets/{three.id}/episode", data=b"\xc1garbage") as response:
                assert response.status == 200
            async with session.post(f"{store.url}/lease", data=b"\xc1garbage") as response:
                assert response.status == 400
        status = await store.status()
        assert status.counters["rejected"] == 3
        assert status.leased == status.ready == 0


async def test_a_full_disk_is_a_typed_fault_over_http(tmp_path: Path) -> None:
    """A full disk: 507 with what to do; what was acknowledged can still be read."""

    def varied(name: str) -> Episode:  # what is the same all over takes hardly any room
        rng, one = random.Random(name), make_episode(name)
        ids, logprobs = rng.choices(range(2**31), k=3000), [-rng.expovariate(2.0) for _ in range(3000)]
        action = Segment("action", ids, "x", logprobs, (0,) * 3000, "stop")
        return msgspec.structs.replace(one, segments=(one.segments[0], action))

    async with running_store(tmp_path / "e.sqlite", "tasks=99", "batch=32", "max_bytes=400000") as (store, _):
        tickets = await store.lease(32, "w")
        puts = [store.put(t.id, varied(t.id)) for t in tickets]
        answers = await asyncio.gather(*puts, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, StoreFull)]
        assert refused
        assert "make room" in str(refused[0])
        rows = await store.episodes()
        assert 1 < len(rows) == len(tickets) - len(refused)
        for row in rows:
            assert await store.episode(row.id) == varied(row.id)


async def test_evaluation_over_http(tmp_path: Path) -> None:
    """Case D7."""
    async with running_store(tmp_path / "e.sqlite", *KEYS) as (store, _):
        name = await store.start_evaluation(2, [5, 6], 2)
        for ticket in await store.lease(4, "w"):
            assert (ticket.kind, ticket.pinned_version) == ("evaluate", 2)
            assert (await store.evaluation(name)).episodes == []
            await store.put(ticket.id, make_episode(ticket.id, 2))
        status = await store.evaluation(name)
        assert (status.finished, status.requested, len(status.episodes)) == (4, 4, 4)
        assert (await store.status()).ready == 0
        with pytest.raises(StoreFault, match="404"):
            await store.evaluation("none")


async def test_episodes_can_be_listed_and_read_with_and_without_a_store(tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    async with running_store(path, *KEYS) as (store, _):
        tickets = await store.lease(5, "w")
        for length, ticket in enumerate(tickets, start=1):
            await store.put(ticket.id, make_episode(ticket.id, tokens=length))
        await store.claim(4, 0)
        ready = await store.episodes(EpisodeFilter(status="ready"))
        assert [row.id for row in ready] == [tickets[4].id]
        page = await store.episodes(EpisodeFilter(limit=2, offset=1, newest_first=True, min_reward=0.5))
        assert [row.tokens for row in page] == [4, 3]
        assert (await store.episode(tickets[0].id)).action_tokens == 1
        with EpisodeReader(path) as reader:
            assert reader.list() == await store.episodes()
    with EpisodeReader(path) as reader:
        assert decode(reader.get(tickets[4].id)).action_tokens == 5
        assert reader.get(tickets[4].id) == compact(make_episode(tickets[4].id, tokens=5))  # and not as it came
        assert [row.status for row in reader.list()] == ["claimed"] * 4 + ["ready"]
        with pytest.raises(StoreFault, match="no episode"):
            reader.get("none")


async def test_a_store_that_is_away_is_a_fault_that_says_what_to_do(tmp_path: Path) -> None:
    async with running_store(tmp_path / "e.sqlite", *KEYS) as (store, process):
        waiting = asyncio.create_task(store.claim(4, 0, wait_s=60.0))
        await store.status()
        url = store.url
        process.terminate()
        async with asyncio.timeout(8):  # a long poll does not hold the end up
            assert await waiting is None
            await process.wait()
    client = StoreClient(url)
    with pytest.raises(StoreFault, match=r"start `python -m agent\.store`"):
        await client.status()
    assert not await client.healthy()
    await client.close()


async def test_the_store_ends_with_its_parent_only_when_asked(tmp_path: Path) -> None:
    """Case D8: --exit-with-parent; the port file goes with the store."""
    port_file = tmp_path / "port"
    script = (
        "import subprocess, sys, pathlib, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'agent.store', '--path', sys.argv[1], '--port-file', sys.argv[2],"
        " '--exit-with-parent', 'tasks=1', 'batch=1'])\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.02)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "e.sqlite"), str(port_file)]
    await asyncio.to_thread(subprocess.run, command, check=True, timeout=30, stderr=subprocess.DEVNULL)
    async with asyncio.timeout(10):
        while port_file.exists():  # noqa: ASYNC110 - another process; nothing tells
            await asyncio.sleep(0.05)


async def test_a_store_whose_parent_ends_while_it_starts_ends_too(tmp_path: Path) -> None:
    """Case D8: --exit-with-parent counts from the start of the process, not from the end of its imports."""
    script = (
        "import pathlib, subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'agent.store', '--path', sys.argv[1],"
        " '--exit-with-parent', 'tasks=1', 'batch=1'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(p.pid, flush=True)\n"
        "while 'pydantic_core' not in pathlib.Path(f'/proc/{p.pid}/maps').read_text(): time.sleep(0.001)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "e.sqlite")]
    done = await asyncio.to_thread(subprocess.run, command, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        store = psutil.Process(int(done.stdout))
        try:
            await asyncio.to_thread(store.wait, 30)
        finally:
            if store.is_running():
                store.kill()


async def test_a_store_that_was_suspended_takes_no_lease_from_a_live_worker(tmp_path: Path) -> None:
    """Case M5: at SIGCONT nobody had been heard of for longer than the limit, and every lease was revoked."""
    async with running_store(tmp_path / "e.sqlite", *KEYS, "worker_timeout_s=2") as (store, process):
        assert len(await store.lease(4, "w")) == 4
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(3)  # what is tested: longer than worker_timeout_s
        process.send_signal(signal.SIGCONT)
        status = await store.status()
        # Its watch has looked at least once when a worker that is silent from now on has lost its ticket.
        assert status.leased == 4
        store._workers.clear()
        seen = status.leased
        async with asyncio.timeout(30):
            began = time.monotonic()
            while seen == 4:
                await asyncio.sleep(0.02)
                seen = (await store.status()).leased
        assert time.monotonic() - began >= 0.5, "taken at once after the suspension"
