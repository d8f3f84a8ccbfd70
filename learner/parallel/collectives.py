"""What all ranks do together: share the main one's values, add up numbers. None of these may be skipped by any rank."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from learner.maths.statistics import EVStatistics
from learner.parallel.layout import layout_of

T = TypeVar("T")


def total(accelerator: Accelerator, number: float | Tensor) -> float:
    """The sum of `number` over shares of the batch, in float64; ranks that share rows count once."""
    scalar = torch.tensor([float(number)], dtype=torch.float64, device=accelerator.device)
    return float(accelerator.gather(scalar)[:: layout_of(accelerator).sharers].sum())


def largest(accelerator: Accelerator, count: int) -> int:
    """The largest `count` of any rank."""
    return int(accelerator.gather(torch.tensor([count], device=accelerator.device)).max())


def merged(accelerator: Accelerator, statistics: EVStatistics) -> EVStatistics:
    """Statistics of the global batch from those of the ranks."""
    gathered = accelerator.gather(statistics.to_tensor().to(accelerator.device)[None])
    return EVStatistics.from_tensor(gathered[:: layout_of(accelerator).sharers])


def standard_deviation(accelerator: Accelerator, advantages: Tensor, action_mask: Tensor) -> float:
    """The population's standard deviation over the action tokens of the global batch; 1 where it is 0.

    advantages float[B,T], action_mask bool[B,T]: this rank's rows. One that is not finite is left out.
    """
    chosen = advantages[action_mask].double()
    chosen = chosen[chosen.isfinite()]
    sums = (chosen.numel(), chosen.sum(), chosen.square().sum())
    count, first, squares = (total(accelerator, number) for number in sums)
    variance = squares / count - (first / count) ** 2 if count else 0.0
    return math.sqrt(variance) if variance > 1e-16 else 1.0


def share(accelerator: Accelerator, value: T) -> T:
    """The main process's `value`, on every rank."""
    message: list[Any] = [value if accelerator.is_main_process else None]
    broadcast_object_list(message)
    return message[0]


@contextlib.contextmanager
def beating(accelerator: Accelerator, beat: Callable[[], None], limit_s: float) -> Iterator[None]:
    """Call `beat` from a thread, four times within `limit_s`, while the block runs: what is waited for may take longer.

    `beat` must be a collective that no other thread takes part in at the same time. A single process needs none.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(limit_s / 4):
            beat()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    if accelerator.num_processes > 1:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


def share_result(accelerator: Accelerator, work: Callable[[], T], *, limit_s: float) -> T:
    """What `work`, which only the main process does, gives, on every rank; it may take longer than `limit_s`,
    the limit on a collective. `work` must hold no collective."""
    if accelerator.is_main_process:
        with beating(accelerator, lambda: share(accelerator, None), limit_s):
            result = work()
        share(accelerator, (result,))
        return result
    while (answer := share(accelerator, None)) is None:
        pass
    (result,) = answer
    return result
