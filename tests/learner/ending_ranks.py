"""Pairs of ranks of which one fails: `python ending_ranks.py FOLDER LIMIT_S` leaves what became of them in FOLDER.

Every pair is forked from this process, so that torch is imported once. None has a launcher that would end the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from learner.parallel.collectives import beating, total
from learner.parallel.ranks import Ranks
from learner.run.cli import guarded

COLLECTIVE_LIMIT_S = 600.0


def ordinary(accelerator: Accelerator) -> float:
    """What the other rank does in a step meanwhile: it waits for this one."""
    return total(accelerator, 1.0)


def out_of_memory(accelerator: Accelerator) -> None:
    raise torch.OutOfMemoryError("no room for 7 GiB")


def killed(accelerator: Accelerator) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stuck(accelerator: Accelerator) -> None:
    time.sleep(3.0)
    total(accelerator, 1.0)


def signalled(accelerator: Accelerator) -> None:
    """What a launcher does to every rank when it is told to stop."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    total(accelerator, 1.0)


Step = Callable[[Accelerator], object]
# By case: what each rank does in a step; None for the main one: it fails between two steps.
CASES: dict[str, tuple[Step | None, Step]] = {
    "main_in_step": (out_of_memory, ordinary),
    "main_between": (None, ordinary),
    "main_killed": (killed, ordinary),
    "other_in_step": (ordinary, out_of_memory),
    "other_killed": (ordinary, killed),
    "other_fails_early": (stuck, out_of_memory),
    "other_signalled": (ordinary, signalled),  # the one case in which nothing fails
}


def rank_of(case: str, rank: int, taken_down: Path) -> int:
    """The life of one rank, as in `learner.train`."""
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_LIMIT_S))]
    )
    steps = CASES[case]

    def step() -> None:
        own = steps[rank] or ordinary
        own(accelerator)

    policy = SimpleNamespace(accelerator=accelerator)
    ranks = Ranks(SimpleNamespace(policy=policy, step=step, release=lambda: None))
    if rank:
        ranks.follow()
        ranks.leave()
        return 0

    async def lead() -> None:
        async with ranks.watched():
            try:
                if steps[0] is None:
                    raise ValueError("nothing to publish")
                await asyncio.to_thread(ranks.call, "step")
                if case != "other_signalled":
                    await asyncio.sleep(COLLECTIVE_LIMIT_S)
            finally:
                await asyncio.to_thread(taken_down.touch)

    with ranks.led(), beating(accelerator, ranks.heartbeat, 2.0):
        asyncio.run(lead())
    return 0


def fork(case: str, rank: int, port: int, folder: Path) -> int:
    """Start one rank; its process id."""
    if child := os.fork():
        return child
    output = os.open(folder / f"{case}_{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = guarded(lambda: rank_of(case, rank, folder / f"{case}_taken_down"))
    os._exit(code)


def main(folder: Path, limit_s: float) -> None:
    """Run every case at once, and write by case the exit codes of both ranks (None: still there) and the seconds."""
    started, waiting, found = time.monotonic(), dict[int, tuple[str, int]](), dict[str, list[int | None]]()
    for case in CASES:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        found[case] = [None, None]
        for rank in range(2):
            waiting[fork(case, rank, port, folder)] = (case, rank)
    while waiting and time.monotonic() - started < limit_s:
        for process in list(waiting):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                case, rank = waiting.pop(process)
                found[case][rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for process in waiting:
        os.kill(process, signal.SIGKILL)
    (folder / "codes.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
