"""The `local` engine's thread: everything that touches the model happens here, one thing after another.

The event loop hands commands over and awaits their results; the thread carries commands out between two steps. So a
weight swap, an abort or a pause never meets a forward half done, and a forward never blocks the server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from agent.engines.local.model import Chunk, ModelError, SlotModel, draw, logprobs_of
from agent.engines.local.scheduler import Generation, Scheduler, Step
from agent.engines.local.steered import note_likeliest, steered

T = TypeVar("T")
_log = logging.getLogger(__name__)


class LoopDead(RuntimeError):
    """The model thread has ended, by `stop` or by a fault; nothing will run any more."""


class ModelLoop:
    """Owns the model, the scheduler and the policy version.

    Life: new ──start()──▶ running ◀──pause()/resume()──▶ paused ──stop()──▶ dead. A fault in a forward leads to dead
    as well: every waiting caller gets `LoopDead`, and `fault` holds the cause. The async methods may be called from
    one event loop.
    """

    def __init__(
        self, model: SlotModel, *, version: int, max_sequences: int, prefill_budget: int = 512, seed: int | None = None
    ) -> None:
        self.model = model
        self.version = version
        self.paused = False
        self.fault: BaseException | None = None
        self.tokens_generated = 0
        self.prompt_tokens = 0
        self.reused_tokens = 0
        self.steps = 0
        self.busy_s = 0.0
        self.scheduler = Scheduler(max_sequences=max_sequences, slots=model.slots, prefill_budget=prefill_budget)
        self._staged: PreTrainedModel | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._futures: dict[Generation, asyncio.Future[Generation]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs, and will go on running."""
        return self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        """Start the thread; must be called inside the event loop that will use it."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the present step; unfinished callers get `LoopDead`. Blocks for at most `timeout_s`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    async def generate(self, generation: Generation) -> Generation:
        """Run a generation to its end. Cancelling aborts it and frees its slot."""
        assert self._loop is not None
        future: asyncio.Future[Generation] = self._loop.create_future()

        def submit() -> None:
            self._futures[generation] = future
            self.prompt_tokens += generation.prompt_length
            self.scheduler.submit(generation)

        self._send(submit)
        try:
            return await future
        except asyncio.CancelledError:
            if self.alive:
                self._send(lambda: self._abort([generation]))
            raise

    async def abort(self, generations: Iterable[Generation]) -> None:
        """End these with "abort"; their `generate` returns with the tokens so far."""
        wanted = list(generations)
        await self._call(lambda: self._abort(wanted))

    async def pause(self) -> None:
        """No step runs from the return of this call until `resume`; generations keep their place ("keep")."""
        await self._call(lambda: setattr(self, "paused", True))

    async def resume(self) -> None:
        """Let steps run again."""
        await self._call(lambda: setattr(self, "paused", False))

    async def stage(self, path: Path) -> None:
        """Read a snapshot beside the served weights. Raises `ModelError`, and then nothing has changed."""

        # In the model thread although it stalls decoding: loading sets process-wide torch state (the default dtype).
        def read() -> None:
            self._staged = self.model.read(path)

        await self._call(read)

    async def commit(self, version: int, *, keep_cache: bool = False) -> None:
        """Serve what `stage` read, as `version`, from the next step on. Raises `ModelError` without a `stage`.

        With `keep_cache` the keys and values of the old weights are read on, those of idle slots too.
        """

        def swap() -> None:
            if self._staged is None:
                raise ModelError("no weights were staged: call /update_weights before /finish_weight_update")
            self.model.swap(self._staged)
            self._staged = None
            self.version = version
            if not keep_cache:
                self.scheduler.forget()

        await self._call(swap)

    async def relabel(self, version: int) -> None:
        """Call the present weights `version`."""
        await self._call(lambda: setattr(self, "version", version))

    async def forget(self) -> None:
        """Drop every key and value; running generations compute theirs again."""
        await self._call(self.scheduler.forget)

    def _send(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping or self.fault is not None:
                raise LoopDead(f"the engine has stopped: {self.fault or 'shut down'}")
            self._commands.append(command)
            self._wake.notify()

    async def _call(self, function: Callable[[], T]) -> T:
        assert self._loop is not None
        loop, future = self._loop, self._loop.create_future()

        def command() -> None:
            try:
                result = function()
            except ModelError as error:
                loop.call_soon_threadsafe(_settle, future, None, error)
            except BaseException as error:
                loop.call_soon_threadsafe(_settle, future, None, LoopDead(f"the engine has failed: {error}"))
                raise
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._send(command)
        result: T = await future
        return result

    def _abort(self, generations: list[Generation]) -> None:
        finished = [g for g in dict.fromkeys(generations) if g in self._futures]  # one may be named twice
        for generation in finished:
            self.scheduler.abort(generation)
        self._deliver(finished)

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._commands or self._stopping or self._runnable()):
                        self._wake.wait()
                    if self._stopping:
                        return
                    commands = list(self._commands)
                    self._commands.clear()
                for command in commands:
                    command()
                if self._runnable() and (step := self.scheduler.plan()):
                    self._step(step)
        except BaseException as error:
            self.fault = error
            _log.exception("the model thread has failed")
        finally:
            self._bury()

    def _runnable(self) -> bool:
        return not self.paused and bool(self.scheduler.running or self.scheduler.waiting)

    def _step(self, step: Step) -> None:
        began = time.perf_counter()
        logits = self.model.forward(
            [(g.slot, g.computed, g.tokens[-1]) for g in step.decode],
            [Chunk(g.slot, start, g.tokens[start:end]) for g, start, end in step.prefill],
            [end == len(g.tokens) for g, _, end in step.prefill],
        )
        sampled = step.sampling
        tokens, logprobs = _draw(logits, sampled) if sampled else ([], [])
        finished = self.scheduler.advance(step, tokens, logprobs, self.version)
        self.steps += 1
        self.tokens_generated += len(tokens)
        self.busy_s += time.perf_counter() - began
        if finished:
            self._deliver(finished)
        if listeners := [g.on_token for g in sampled if g.on_token is not None and not g.finish_reason]:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_call_all, listeners)

    def _deliver(self, finished: list[Generation]) -> None:
        assert self._loop is not None
        pairs = [(self._futures.pop(g), g) for g in finished]
        self.reused_tokens += sum(g.reused for g in finished)
        self._loop.call_soon_threadsafe(_settle_all, pairs)

    def _bury(self) -> None:
        """Tell everyone who waits; no one may hang on a thread that is gone."""
        assert self._loop is not None
        with self._wake:
            self._stopping = True
            commands = list(self._commands)
            self._commands.clear()
        dead = LoopDead(f"the engine has stopped: {self.fault or 'shut down'}")
        for command in commands:  # a submit registers its future, which is settled below; the rest answers by itself
            try:
                command()
            except BaseException:
                _log.exception("a command failed after the model thread had ended")
        try:
            for future in self._futures.values():
                self._loop.call_soon_threadsafe(_settle, future, None, dead)
        except RuntimeError:
            _log.debug("the event loop closed first")
        self._futures.clear()


def _draw(logits: torch.Tensor, generations: list[Generation]) -> tuple[list[int], list[float]]:
    params = [g.sampling for g in generations]
    device = logits.device
    top_p = top_k = None
    if any(p.top_p < 1 for p in params):
        top_p = torch.tensor([p.top_p for p in params], device=device)
    if any(p.top_k > 0 for p in params):
        top_k = torch.tensor([p.top_k for p in params], device=device)
    temperature = torch.tensor([p.temperature for p in params], device=device)
    uniform = torch.tensor([g.uniform() for g in generations], dtype=torch.float64, device=device)
    distribution = logprobs_of(steered(logits, generations), temperature, top_p, top_k)
    tokens, logprobs = draw(distribution, temperature, uniform)
    note_likeliest(distribution, generations, tokens)
    return tokens, logprobs


def _call_all(listeners: list[Callable[[], None]]) -> None:
    for listener in listeners:
        listener()


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # its caller was cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _settle_all(pairs: list[tuple[asyncio.Future[Generation], Generation]]) -> None:
    for future, generation in pairs:
        _settle(future, generation, None)
