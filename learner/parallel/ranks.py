"""Several processes, one learner: what the main process decides, every rank does.

    accelerate launch --num_processes 2 -m learner.train recipes/tir_tiny.yaml

The main process alone talks to store, engines and runtime. A step is called on all ranks with the whole batch, and
each takes its own rows. One process is a world of size 1 and goes the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn

from learner.config import Recipe
from learner.faults import LearnerFault
from learner.parallel.collectives import share
from learner.parallel.context import leave_parts
from learner.parallel.environment import check_environment
from learner.parallel.layout import LaidOutAccelerator, Layout, layout_of
from learner.parallel.lifeline import describe, tie_ranks

_NEWS_S = 2.0  # a broken collective and the news of why race


def is_main() -> bool:
    """Whether this is the main process, before any accelerator is there."""
    return os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    """How many processes were started, before any accelerator is there."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_accelerator(recipe: Recipe) -> LaidOutAccelerator:
    """The run's accelerator: CPU without CUDA, the recipe's layout, precision and tracker, a limit on every collective.

    From here on a rank that fails takes the others with it at once (`learner.parallel.lifeline`). Raises `RecipeError`
    for what `learner.parallel.environment` refuses, and where the layout is for another number of processes.
    """
    check_environment(recipe)
    layout = Layout.of(recipe.hardware, world_size())
    accelerator = LaidOutAccelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if recipe.model.computes_in == "bfloat16" else "no",
        log_with=recipe.learner.tracker,
        project_dir=str(recipe.run_dir),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=recipe.learner.collective_timeout_s))],
    )
    accelerator.layout = layout
    tie_ranks(accelerator)
    return accelerator


class ForwardOnAllRanks(nn.Module):
    """A policy's forward, without gradients, that every rank takes part in; called on the main process only."""

    def __init__(self, own: Any, ranks: Ranks) -> None:
        super().__init__()
        self.own = own
        self.ranks = ranks
        self.temperature: float = own.temperature

    @property
    def model(self) -> Any:
        """The causal LM below."""
        return self.own.model

    def forward(self, input_ids: Tensor, action_mask: Tensor) -> Any:
        """Log-probs and entropy, as the policy's own forward gives them."""
        return self.ranks.call("score", input_ids.cpu(), action_mask.cpu(), self.temperature)


class Ranks:
    """Calls collective methods of `learner`, which each rank has one of, on every rank.

    Main: `call("step", episodes)`*, then `dismiss()`. Others: `follow()`, which returns when dismissed. Once a rank has
    failed there are no more collectives: the others may be in the middle of one, or gone.
    """

    def __init__(self, learner: Any) -> None:
        self.learner = learner
        self.accelerator: Accelerator = learner.policy.accelerator
        self._line = tie_ranks(self.accelerator)
        self._failed = False
        self._turn = threading.Lock()  # one collective at a time: heartbeats come from a thread

    def call(self, method: str, *arguments: Any) -> Any:
        """Run `learner.method(*arguments)` everywhere; the main process's own result."""
        with self._turn:
            try:
                share(self.accelerator, (method, arguments))
                return getattr(self.learner, method)(*arguments)
            except BaseException as error:
                self._give_up(error)
                raise

    @property
    def policy(self) -> Any:
        """The policy's forward for whoever asks it something on the main process alone, as probes do.

        Where weights are cut no rank can answer by itself: then the question goes to all of them.
        """
        own = self.learner.policy.unwrapped
        return ForwardOnAllRanks(own, self) if layout_of(self.accelerator).cut else own

    def weights(self, as_trained: bool = False) -> Iterator[tuple[str, Any]]:
        """The learner's weights, gathered layer by layer on all ranks, each layer a call of its own.

        So several may read at once, from threads of their own, and one that fails or stops in the middle leaves no rank
        waiting for the rest.
        """
        for index in range(self.learner.layers):
            yield from self.call("layer", index, as_trained)

    def heartbeat(self) -> None:
        """Keep waiting ranks within their time limit while there is no batch."""
        # What breaks here breaks the next call too, which says so.
        with self._turn, contextlib.suppress(RuntimeError):
            if not self._failed and not self._line.failure:
                share(self.accelerator, ("", ()))

    def dismiss(self) -> None:
        """Let the others go."""
        with self._turn:
            if self._line.failure and not self._failed:
                self._failed = True
                raise self._fault()
            if not self._failed:
                share(self.accelerator, None)

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """What the main process does in between: the others are let go at its end, and end at once where it fails."""
        try:
            yield
            self.dismiss()
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self.leave()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Cancel the block once another rank has failed, whatever it waits for, and raise `LearnerFault` instead."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def lost() -> None:
            if not self._failed:  # else the block is ending already
                self._failed = True
                task.cancel()

        self._line.on_failure = lambda: loop.call_soon_threadsafe(lost)
        try:
            if self._line.failure:
                raise self._fault()
            yield
        except asyncio.CancelledError as error:
            if not self._line.failure:
                raise
            raise self._fault() from error
        finally:
            self._line.on_failure = None

    def follow(self) -> None:
        """Do what the main process says until it says no more.

        Launchers hand Ctrl-C and SIGTERM on to every rank. When it ends is the main one's to decide, as after the step
        in hand; so they are ignored here, as long as the main one can be heard.
        """
        if self._line.tied and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        try:
            while (message := share(self.accelerator, None)) is not None:
                method, arguments = message
                if method:
                    getattr(self.learner, method)(*arguments)
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Tell the others; where one of them has failed first, it is what is told of and raised."""
        if self._failed or self.accelerator.num_processes == 1:
            return
        self._failed = True
        # What torch raises where a collective breaks.
        if isinstance(error, RuntimeError) and not isinstance(error, LearnerFault):
            self._line.reason_within(_NEWS_S)
        if self._line.failure:
            raise self._fault() from error
        self._line.fail(describe(error))

    def _fault(self) -> LearnerFault:
        return LearnerFault(f"{self._line.failure}. Run the same command to go on from the last checkpoint")

    def leave(self) -> None:
        """End the group of processes, after everything that belongs to it.

        A `DistributedDataParallel` that outlives all other holders of a gloo group joins the group's threads without
        giving the interpreter up, and one of them may be waiting for it to free its last tensor: the process hangs.
        After a failure nothing is ended here: that waits for others too. The process ends without (`guarded`).
        """
        if self._failed:
            return
        self.learner.release()
        leave_parts(self.accelerator)
        self.accelerator.free_memory()
        gc.collect()
        self._line.leave()
        self.accelerator.end_training()
