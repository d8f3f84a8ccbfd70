"""Ranks that wait for the main process must not give up because its work takes longer than a collective may."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from run_tools import ROOT

LIMIT_S, WORK_S = 6.0, 9.0
WORKER = f"""
import time
from datetime import timedelta
from types import SimpleNamespace
import torch
from accelerate import Accelerator
from learner.ranks import Ranks, beating, share_result

accelerator = Accelerator(cpu=True)
accelerator.wait_for_everyone()
torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds={LIMIT_S}))

def work():
    time.sleep({WORK_S})
    return "rollouts"

# The limit is that of the collectives, the rate of the beats one that a busy machine keeps.
assert share_result(accelerator, work, limit_s=1.0) == "rollouts"

called = []
learner = SimpleNamespace(policy=SimpleNamespace(accelerator=accelerator), step=called.append)
ranks = Ranks(learner)
if accelerator.is_main_process:
    with beating(accelerator, ranks.heartbeat, 1.0):
        work()
        ranks.call("step", 7)
    ranks.dismiss()
else:
    ranks.follow()
assert called == [7]
torch.distributed.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_work_of_the_main_rank_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    """Value rollouts, evaluations and engines that stay away take hours; `collective_timeout_s` is ten minutes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(text[-3000:] for text in said)
