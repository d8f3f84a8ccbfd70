"""`TextEnv`: any asynchronous core as an ordinary, synchronous `gymnasium.Env`."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 (registers its exit hook before ours; see `_register_atexit`)
import os
import sys
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import gymnasium

from envs.core import AsyncEnv, EnvironmentFault
from envs.making import make_core
from envs.spaces import Unicode

T = TypeVar("T")

_CLOSE_LIMIT_S = 60.0


class _Call(Generic[T]):
    """One coroutine on the loop's thread, which the waiting thread can cancel at any time, before its start too."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self.ended = threading.Event()

    async def run(self) -> T:
        try:
            self._task = asyncio.current_task()
            if self._cancelled:
                self._work.close()
                raise asyncio.CancelledError
            return await self._work
        finally:
            self.ended.set()

    def cancel(self) -> None:
        """Called on the loop's thread."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()
        else:
            self.ended.set()


class _LoopThread:
    """An event loop on a thread of its own, shared by the facades of a process.

    One loop and not one an environment: cores that live on the same loop share their sandboxes and graders. It
    starts with the first facade that needs it and ends with the last, so that nothing is running when a process
    that has only made (not reset) environments forks.
    """

    _lock = threading.Lock()
    _current: _LoopThread | None = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sao-envs", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> _LoopThread:
        with cls._lock:
            if cls._current is None:
                cls._current = cls()
            cls._current.users += 1
            return cls._current

    def release(self) -> None:
        with self._lock:
            self.users -= 1
            if self.users:
                return
            if type(self)._current is self:
                type(self)._current = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_LIMIT_S)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it. An interrupt (Ctrl-C) cancels it, and is raised once it has ended."""
        running = _Call(work)
        try:
            return asyncio.run_coroutine_threadsafe(running.run(), self.loop).result()
        except BaseException:
            # An interrupt can strike before the line above has returned a future, so the task is reached by `running`.
            if not running.ended.is_set():
                self.loop.call_soon_threadsafe(running.cancel)
                running.ended.wait(_CLOSE_LIMIT_S)
            raise

    def on_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    @classmethod
    def forget(cls) -> None:
        """In a forked child: the thread did not come along, and the lock may be held by nobody."""
        cls._lock = threading.Lock()
        cls._current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LoopThread.forget)


def _shut_down(core: AsyncEnv, thread: _LoopThread) -> None:
    """Close `core` and leave the loop. Also called by the garbage collector and at interpreter exit."""
    if thread.pid != os.getpid():  # a fork's copy: the parent's processes are not ours to end
        return
    if thread.on_thread():
        # Collected while the loop itself was running: waiting here would wait for ever.
        task = thread.loop.create_task(core.aclose())
        task.add_done_callback(lambda _: thread.release())
        return
    try:
        future = asyncio.run_coroutine_threadsafe(core.aclose(), thread.loop)
        future.result(_CLOSE_LIMIT_S)
    finally:
        thread.release()


_open: weakref.WeakSet[TextEnv] = weakref.WeakSet()
"""The facades whose cores are running."""


def _close_all() -> None:
    for env in list(_open):
        env.close()


# `atexit` (and so `weakref.finalize`) comes too late: executors take no work by then, and cores need them to close.
# The hook that executors themselves use is run before, last registered first. Without it the finalizers remain.
_register_atexit = getattr(threading, "_register_atexit", None)
if _register_atexit is not None:
    _register_atexit(_close_all)


class TextEnv(gymnasium.Env[str, str]):
    """An environment whose actions and observations are text.

    `core` is an environment id (with `kwargs` for its core) or an `AsyncEnv`. Its life:

        made ──reset()──▶ in an episode ──step()*──▶ ended ──reset()──▶ … ──close()──▶ closed

    Making one starts nothing; the first `reset` does, in the process that calls it. `close()` (or the garbage
    collector, or the interpreter's end) gives everything back, and a closed one may be reset again.
    `render_mode="ansi"` makes `render()` return the episode so far as text; "human" prints it as it happens.
    """

    metadata = {"render_modes": ["ansi", "human"], "render_fps": 1}  # noqa: RUF012 (Gymnasium's own shape)

    def __init__(self, core: str | AsyncEnv, render_mode: str | None = None, **kwargs: Any) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode must be one of {self.metadata['render_modes']} or None, not {render_mode!r}")
        self.render_mode = render_mode
        self.core = make_core(core, **kwargs) if isinstance(core, str) else core
        self.action_space = Unicode()
        self.observation_space = Unicode()
        self._thread: _LoopThread | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._transcript: list[str] = []

    @property
    def task_ids(self) -> Any:
        """Every task of this environment, in a fixed order: what `reset(options={"task_id": ...})` takes."""
        return self.core.task_ids

    def _loop(self) -> _LoopThread:
        if self._thread is not None and self._thread.pid != os.getpid():
            raise EnvironmentFault(
                "this environment was started before the process forked, and its sandbox stayed in the parent: "
                "make the environment in the process that uses it"
            )
        if self._thread is None:
            self._thread = _LoopThread.acquire()
            self._finalizer = weakref.finalize(self, _shut_down, self.core, self._thread)
            _open.add(self)
        return self._thread

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode: of `options["task_id"]`, else of a task drawn from this environment's generator."""
        super().reset(seed=seed)
        # Without a seed the next one comes from the generator, so that a seeded environment stays reproducible.
        core_seed = int(self.np_random.integers(2**31)) if seed is None else seed
        observation, info = self._loop().call(self.core.areset(seed=core_seed, options=options))
        self._transcript = []
        for message in info["messages"]:
            self._show(message["role"], message["content"])
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out one action. `EnvironmentFault` means that the episode is void: reset."""
        if not isinstance(action, str):
            raise TypeError(f"an action is a str, not {type(action).__name__}")
        self._show("action", action)
        observation, reward, terminated, truncated, info = self._loop().call(self.core.astep(action))
        if terminated or truncated:
            self._show("end", f"reward {reward:g}, {info.get('truncation', 'terminated')}")
        else:
            self._show("observation", observation)
        return observation, reward, terminated, truncated, info

    def render(self) -> str | None:
        """The episode so far as text with `render_mode="ansi"`; with "human" it is printed already."""
        return "\n".join(self._transcript) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Give everything back. May be called any number of times."""
        _open.discard(self)
        finalizer, self._finalizer, self._thread = self._finalizer, None, None
        if finalizer is not None:
            finalizer()

    def _show(self, who: str, text: str) -> None:
        if self.render_mode is None:
            return
        entry = f"[{who}] {text}"
        self._transcript.append(entry)
        if self.render_mode == "human":
            # A terminal's encoding may not take every character a model writes.
            encoding = sys.stdout.encoding or "utf-8"
            print(entry.encode(encoding, "backslashreplace").decode(encoding), flush=True)
