"""A trace of what one step spends its time on, by torch's own profiler: for Perfetto or chrome://tracing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from learner.config import ProfileConfig

FOLDER = "profile"
"""Where a run's traces lie, in its folder."""


def trace_path(run: Path, step: int, rank: int) -> Path:
    """The trace of a step on a rank."""
    return run / FOLDER / f"step_{step:05d}_rank_{rank}.json.gz"


@contextlib.contextmanager
def traced(target: Path) -> Iterator[None]:
    """Watch the block and write `target` at its end, whole or not at all. Nothing is written where the block fails.

    Begun and ended in one call, so in one thread: the profiler sees no other.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities, record_shapes=True) as watched:
        yield
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}")  # its ending says that it is packed
    watched.export_chrome_trace(str(scratch))
    scratch.replace(target)


def watching(config: ProfileConfig | None, run: Path, step: int, rank: int) -> contextlib.AbstractContextManager[None]:
    """`traced` where the recipe asks for step `step` of this rank, else nothing."""
    if config is None or not config.watches(step) or (rank > 0 and config.ranks == "main"):
        return contextlib.nullcontext()
    return traced(trace_path(run, step, rank))
