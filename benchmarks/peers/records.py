"""What an episode costs as a record: bytes a token, CPU time to write, read and lay out, and the way through the store.

    python benchmarks/peers/records.py                      # 2 minutes on a quiet machine
    python benchmarks/peers/records.py --quick --json out.json

`--root CHECKOUT` measures another version of this project beside it, by the code that lies there.

Episodes are turns of 150 sampled tokens and 277 of an observation, with text (a word a token), ids below 150,000 and
log-probs as varied as sampled ones. The store is a process with its file in --scratch (a disk, not a tmpfs), reached
over HTTP by the project's own client. Times are CPU time; those of one record are the best of nine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.peers.cost import answer  # noqa: E402
from benchmarks.report import save_json, show  # noqa: E402

_SIZES = ("wire_bytes", "disk_bytes", "disk_bytes_bare", "memory_bytes", "memory_bytes_bare")
_TIMES = ("encode_ms", "decode_ms", "compact_ms", "from_disk_ms", "rows_ms")
ACTED, SEEN, LONG = 150, 277, 131_072
WORDS = [
    "".join(random.Random(n).choices("etaoinshrdlu", k=2 + n % 7)) for n in range(4096)
]  # about 6 bytes with the blank, as English has


def make_episode(name: str, tokens: int, rng: random.Random) -> Any:
    """An episode of `tokens` tokens, the last action's included."""
    from agent.episode import Episode, Segment, StopReason

    def part(count: int) -> tuple[tuple[int, ...], str]:
        return tuple(rng.choices(range(1000, 150_000), k=count)), " ".join(rng.choices(WORDS, k=count))

    segments = [Segment("prompt", *part(200))]
    left = tokens - 200
    while left > 0:
        acted = min(left, ACTED)
        logprobs = tuple(-rng.expovariate(2.0) for _ in range(acted))
        segments.append(Segment("action", *part(acted), logprobs, (3,) * acted, "stop"))
        left -= acted
        if left > ACTED:
            seen = min(left - ACTED, SEEN)
            segments.append(Segment("observation", *part(seen)))
            left -= seen
    turns = sum(segment.kind == "action" for segment in segments)
    rewards = (0.0,) * (turns - 1) + (1.0,)
    return Episode(name, "peers", name, tuple(segments), rewards, StopReason.TERMINATED)


# -- workers: a process each


def record_worker(given: argparse.Namespace) -> dict[str, Any]:
    """One long episode: bytes, memory of many, and CPU milliseconds."""
    import msgspec

    from agent import episode as records
    from learner.data.batch import build_batch

    decode, encode = records.decode, records.encode
    compact = getattr(records, "compact", encode)  # older code kept them as they came
    episode = make_episode("one", given.tokens, random.Random(0))
    count = sum(len(segment.token_ids) for segment in episode.segments)
    silent = [msgspec.structs.replace(segment, text="") for segment in episode.segments]
    silent_one = msgspec.structs.replace(episode, segments=tuple(silent))
    data, bare = encode(episode), encode(silent_one)
    kept, kept_bare = compact(episode), compact(silent_one)
    del episode, silent, silent_one
    held = {}
    for name, packed in (("memory_bytes", data), ("memory_bytes_bare", bare)):
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # what is free goes back, or the next would be built from it
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = _resident()
        alive = [decode(packed) for _ in range(32)]
        held[name] = (_resident() - before) / 32 / count
        del alive
    episode = decode(data)
    return {
        "tokens": count,
        "wire_bytes": len(data) / count,
        "disk_bytes": len(kept) / count,
        "disk_bytes_bare": len(kept_bare) / count,
        **held,
        "encode_ms": _best(lambda: encode(episode)),
        "decode_ms": _best(lambda: decode(data)),
        "compact_ms": _best(lambda: compact(episode)),
        "from_disk_ms": _best(lambda: decode(kept)),
        "rows_ms": _best(lambda: build_batch([episode])),
    }


def _resident() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


def _best(work: Callable[[], Any], repeats: int = 9) -> float:
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - began))
    return min(times)


async def store_worker(given: argparse.Namespace) -> dict[str, Any]:
    """`--episodes` of `--tokens` put, claimed and committed over HTTP: CPU of client and store, and bytes written."""
    import msgspec
    import psutil

    from agent.episode import decode
    from agent.store.client import StoreClient
    from learner.data.batch import build_batch

    rng = random.Random(0)
    few = [make_episode(str(n), given.tokens, rng) for n in range(min(given.episodes, 16))]
    with tempfile.TemporaryDirectory(dir=given.scratch.absolute()) as folder:
        port = Path(folder) / "port"
        command = [sys.executable, "-m", "agent.store", "--path", f"{folder}/e.sqlite", "--port-file", str(port)]
        keys = ["--exit-with-parent", "tasks=100000", f"batch={given.episodes}", "max_lag=64"]
        process = await asyncio.create_subprocess_exec(
            *(*command, *keys),
            cwd=os.environ.get("MEASURED_ROOT", ROOT),  # the module of that name which is nearest is the one that runs
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            while not port.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            child = psutil.Process(process.pid)

            def spent() -> tuple[float, float, float]:
                times = child.cpu_times()
                return times.user + times.system, child.io_counters().write_chars / 1e6, time.process_time()

            async with StoreClient(f"http://127.0.0.1:{port.read_text().strip()}") as store:
                tickets: list[Any] = []
                while len(tickets) < given.episodes:
                    tickets += await store.lease(given.episodes - len(tickets), "w", 5.0)
                waiting = [msgspec.structs.replace(few[n % len(few)], id=ticket.id) for n, ticket in enumerate(tickets)]

                async def deliver() -> None:
                    while waiting:
                        one = waiting.pop()
                        await store.put(one.id, one)

                marks = [spent()]
                await asyncio.gather(*(deliver() for _ in range(16)))
                marks.append(spent())
                claim = await store.claim(given.episodes, 3, 30.0)
                assert claim is not None
                marks.append(spent())
                await store.commit(claim.id, 4)
                marks.append(spent())
                began = time.process_time()
                batch = build_batch([decode(data) for data in claim.episodes])
                tensors_s = time.process_time() - began
        finally:
            process.terminate()
            await process.wait()
        size = sum(file.stat().st_size for file in Path(folder).glob("e.sqlite*"))  # noqa: ASYNC240
    (put, put_mb, put_client), (claimed, claim_mb, claim_client), (_, commit_mb, _) = (
        tuple(b - a for a, b in zip(before, after, strict=True)) for before, after in itertools.pairwise(marks)
    )
    tokens = int(batch.lengths.sum())
    return {
        "mb": sum(map(len, claim.episodes)) / 1e6,
        "tokens": tokens,
        "file_bytes_token": size / tokens,
        "put_store_ms": 1e3 * put / given.episodes,
        "put_client_ms": 1e3 * put_client / given.episodes,
        "put_mb_written": put_mb,
        "claim_store_s": claimed,
        "claim_client_s": claim_client,
        "claim_mb_written": claim_mb + commit_mb,
        "tensors_s": tensors_s,
    }


# -- the whole


def measure(root: Path, words: list[str], rounds: int) -> dict[str, float]:
    """The median of a worker's figures."""
    answers = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "MEASURED_ROOT": str(root)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise SystemExit(f"records.py {' '.join(words)} failed:\n{done.stderr[-2000:]}")
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    return {key: statistics.median(one[key] for one in answers) for key in answers[0]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--root", type=Path, action="append", default=[], help="another checkout to measure beside this"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small episodes, one round: does it run")
    parser.add_argument("--scratch", type=Path, default=Path.cwd(), help="where the store's file lies while it runs")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--worker", choices=("record", "store"), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=LONG, help=argparse.SUPPRESS)
    parser.add_argument("--episodes", type=int, default=64, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        answer(record_worker(given) if given.worker == "record" else asyncio.run(store_worker(given)))
    else:
        compare(given)


def compare(given: argparse.Namespace) -> None:
    """Measure every checkout, and report."""
    rounds, long, sizes = (1, 4096, [(2048, 16)]) if given.quick else (given.rounds, LONG, [(32_768, 64), (LONG, 16)])
    records, stores = [], []
    for root in [ROOT, *given.root]:
        found = measure(root, ["--worker", "record", "--tokens", str(long)], rounds)
        records.append({"root": str(root), **found})
    for tokens, episodes in sizes:
        words = ["--worker", "store", "--tokens", str(tokens), "--episodes", str(episodes)]
        for root in [ROOT, *given.root]:
            found = measure(root, [*words, "--scratch", str(given.scratch)], rounds)
            stores.append({"root": str(root), "tokens_each": tokens, "episodes": episodes, **found})
    show(
        f"An episode of {long:,} tokens as a record",
        [
            *("code", "wire B/token", "disk B/token", "without text", "memory B/token", "without text", "encode ms"),
            *("decode ms", "to disk ms", "from disk ms", "rows ms"),
        ],
        [
            [
                _name(one["root"]),
                *(f"{one[key]:.1f}" for key in _SIZES),
                *(f"{one[key]:.2f}" for key in _TIMES),
            ]
            for one in records
        ],
        [],
    )
    show(
        "The store over HTTP, 16 puts at once, then one claim of all and its commit",
        [
            "code",
            "episodes x tokens",
            "MB",
            "put: store ms",
            "client ms",
            "claim: store s",
            "written MB",
            "to tensors s",
        ],
        [
            [
                _name(one["root"]),
                f"{one['episodes']} x {one['tokens_each']:,}",
                f"{one['mb']:.1f}",
                f"{one['put_store_ms']:.1f}",
                f"{one['put_client_ms']:.1f}",
                f"{one['claim_store_s']:.3f}",
                f"{one['claim_mb_written']:.1f}",
                f"{one['tensors_s']:.3f}",
            ]
            for one in stores
        ],
        ["put: CPU ms of one; written: what the store's process wrote to files during claim and commit"],
    )
    save_json(given.json, {"records": records, "stores": stores})


def _name(root: str) -> str:
    return "this" if Path(root) == ROOT else Path(root).name


if __name__ == "__main__":
    if root := os.environ.get("MEASURED_ROOT"):  # a worker: the code to measure goes before what measures
        sys.path.insert(0, root)
    main()
