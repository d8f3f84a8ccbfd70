"""Ranks that wait for the main process must not give up because its work takes longer than a collective may."""

from __future__ import annotations

import pytest
from run_tools import run_two_ranks

LIMIT_S, WORK_S = 6.0, 9.0
WORKER = f"""
import time
from datetime import timedelta
from types import SimpleNamespace
import torch
from accelerate import Accelerator
from learner.parallel.collectives import beating, share_result
from learner.parallel.ranks import Ranks

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


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_work_of_the_main_rank_may_take_longer_than_a_collective() -> None:
    """Value rollouts, evaluations and engines that stay away take hours; `collective_timeout_s` is ten minutes."""
    run_two_ranks(["-c", WORKER], within_s=150)
