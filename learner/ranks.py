"""Several processes, one learner: what the main process decides, every rank does.

    accelerate launch --num_processes 2 -m learner.train recipes/tir_tiny.yaml

The main process alone talks to store, engines and runtime. A step is called on all ranks with the whole batch, and
each takes its own rows. One process is a world of size 1 and goes the same way.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list

from agent.episode import Episode
from learner.config import Recipe

if TYPE_CHECKING:
    from learner.learner import Learner

T = TypeVar("T")


def is_main() -> bool:
    """Whether this is the main process, before any accelerator is there."""
    return os.environ.get("RANK", "0") == "0"


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The run's accelerator: CPU without CUDA, the recipe's precision and tracker, a limit on every collective."""
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if recipe.model.computes_in == "bfloat16" else "no",
        log_with=recipe.learner.tracker,
        project_dir=str(recipe.run_dir),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=recipe.learner.collective_timeout_s))],
    )


def share(accelerator: Accelerator, value: T) -> T:
    """The main process's `value`, on every rank."""
    found: list[Any] = [value if accelerator.is_main_process else None]
    broadcast_object_list(found)
    return found[0]


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


def own_rows(episodes: Sequence[Episode], rank: int, world: int) -> list[int]:
    """The rows of a batch that are this rank's: whole groups, dealt in order of length so that ranks are even.

    A group is never split, because its advantages compare its members. Raises `ValueError` if a rank gets none.
    """
    if world == 1:
        return list(range(len(episodes)))
    groups: dict[str, list[int]] = {}
    for row, episode in enumerate(episodes):
        groups.setdefault(episode.group_id or episode.id, []).append(row)
    if len(groups) < world:
        raise ValueError(f"a batch of {len(groups)} prompts cannot be dealt to {world} processes; raise batch_size")

    def tokens(rows: list[int]) -> int:
        return sum(len(segment.token_ids) for row in rows for segment in episodes[row].segments)

    dealt = sorted(groups.values(), key=tokens, reverse=True)[rank::world]
    return sorted(row for rows in dealt for row in rows)


class Ranks:
    """Calls a learner's collective methods on every rank.

    Main: `call("step", episodes)`*, then `dismiss()`. Others: `follow()`, which returns when dismissed.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.accelerator = learner.policy.accelerator
        self._turn = threading.Lock()  # one collective at a time: heartbeats come from a thread

    def call(self, method: str, *arguments: Any) -> Any:
        """Run `learner.method(*arguments)` everywhere; the main process's own result."""
        with self._turn:
            share(self.accelerator, (method, arguments))
            return getattr(self.learner, method)(*arguments)

    def heartbeat(self) -> None:
        """Keep waiting ranks within their time limit while there is no batch."""
        with self._turn:
            share(self.accelerator, ("", ()))

    def dismiss(self) -> None:
        """Let the others go."""
        with self._turn:
            share(self.accelerator, None)

    def follow(self) -> None:
        """Do what the main process says until it says no more."""
        while (message := share(self.accelerator, None)) is not None:
            method, arguments = message
            if method:
                getattr(self.learner, method)(*arguments)
