"""The verifiers library from here: found or not, an environment of it made and served, and one episode run in it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.adapters.turns import missing_library
from envs.adapters.verifiers.endpoint import Asked, Line, PolicyEndpoint
from envs.arguments import ArgumentError
from envs.core import EnvironmentFault
from envs.shared import SharedByLoop
from sandboxes.cancellation import to_the_end

START_S = 120.0
CLOSE_S = 30.0


def load_environment(taskset: Mapping[str, Any], runtime: Mapping[str, Any], path: Path | None) -> Any:
    """A `SingleAgentEnv` of the library over `taskset` (its `id`, and keys of its config). Blocks: seconds at first.

    Raises `ArgumentError`: no library, no such taskset, wrong keys, or an environment of several agents.
    """
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import environment_class

        from envs.adapters.verifiers import harness
    except ImportError as error:
        raise missing_library("verifiers", "verifiers", error) from error
    if path is not None and str(path) not in sys.path:
        if not path.is_dir():
            raise ArgumentError(f"path: there is no folder {path} with tasksets")
        sys.path.append(str(path))
        importlib.invalidate_caches()
        # The library's tool servers are processes of their own, and import the taskset too.
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{inherited}{os.pathsep}{path}" if inherited else str(path)
    # Where the library looks for harnesses: a module of its own package, or of the top level. Ours is neither.
    sys.modules[f"verifiers.v1.harnesses.{harness.LIBRARY_ID}"] = harness
    try:
        config = vf.SingleAgentEnvConfig.model_validate(
            {
                "taskset": dict(taskset),
                "agent": {"harness": {"id": harness.LIBRARY_ID}, "runtime": dict(runtime), "network_notice": False},
            }
        )
        kind = environment_class(config.taskset.id, "")
        if kind is not vf.SingleAgentEnv:
            raise ArgumentError(
                f"taskset: {config.taskset.id} brings an environment of its own ({kind.__name__}); only environments "
                "of one agent are played"
            )
        return kind(config)
    except ArgumentError:
        raise
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        raise ArgumentError(f"taskset: {taskset.get('id')}: {error}") from error


class Serving:
    """One environment of the library on one event loop: what its episodes share. Get one with `acquire`.

    new ──ready()──▶ serving (its tool servers, its interception, our endpoint) ──close()──▶ closed
    """

    def __init__(self, taskset: Mapping[str, Any], runtime: Mapping[str, Any], path: Path | None) -> None:
        self._arguments = (taskset, runtime, path)
        self.endpoint = PolicyEndpoint()
        self.env: Any = None
        self._tasks: dict[int, Any] = {}
        self._lock = asyncio.Lock()
        self._ended = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None

    async def ready(self) -> None:
        """Load and start, at the first call. Raises `ArgumentError` and `EnvironmentFault`."""
        async with self._lock:
            if self._holder is None or self._started is None:
                self.env = await asyncio.to_thread(load_environment, *self._arguments)
                self._started = asyncio.get_running_loop().create_future()
                # A task of its own: its contexts must be left by the one that entered them.
                self._holder = asyncio.create_task(self._hold(self._started))
            try:
                async with asyncio.timeout(START_S):
                    # Shielded: one episode that is given up must not stop what the others wait for.
                    await asyncio.shield(self._started)
            except Exception as error:
                holder, self._holder = self._holder, None
                holder.cancel()
                await asyncio.gather(holder, return_exceptions=True)
                raise EnvironmentFault(f"verifiers did not start: {error or type(error).__name__}") from error

    async def task(self, index: int) -> Any:
        """Task number `index` of the taskset. Raises `EnvironmentFault` for one that is not there."""
        if index not in self._tasks:

            def find() -> Any:
                return next(itertools.islice(iter(self.env.taskset), index, None), None)

            self._tasks[index] = await asyncio.to_thread(find)
        if self._tasks[index] is None:
            raise EnvironmentFault(f"the taskset {self._arguments[0].get('id')} has no task {index}")
        return self._tasks[index]

    async def close(self) -> None:
        """End the servers."""
        self._ended.set()
        holder, self._holder = self._holder, None
        if holder is not None:
            await asyncio.wait({holder}, timeout=CLOSE_S)
            holder.cancel()
            await asyncio.gather(holder, return_exceptions=True)

    async def _hold(self, started: asyncio.Future[None]) -> None:
        try:
            await self.endpoint.start()
            async with self.env.serving():
                if not started.done():
                    started.set_result(None)
                await self._ended.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            await self.endpoint.close()


class Episode:
    """One episode of the library, run in a task of its own: it asks, and is answered from outside.

    new ──next()──▶ it asks ──next()*──▶ … ──next() is None──▶ ended, with `trace` ──close()──▶ closed
    """

    def __init__(self, serving: Serving, task: Any) -> None:
        self._serving = serving
        self._line: Line = serving.endpoint.line()
        self._run = asyncio.create_task(self._play(task))

    async def next(self) -> Asked | None:
        """What the rollout asks next; None once it has ended. Raises `EnvironmentFault` where it fails."""
        asking = asyncio.ensure_future(self._line.asked.get())
        try:
            await asyncio.wait({asking, self._run}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        self.trace  # noqa: B018 (raises if it failed)
        return None

    @property
    def trace(self) -> Any:
        """The library's trace of the episode, which has ended. Raises `EnvironmentFault` if it failed."""
        try:
            episode = self._run.result()
        except Exception as error:
            raise EnvironmentFault(f"verifiers raised {type(error).__name__}: {error}") from error
        traces = list(episode.traces)
        if not episode.ok or len(traces) != 1:
            errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
            told = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no error was recorded"
            raise EnvironmentFault(f"the verifiers episode failed: {told[:1000]}")
        return traces[0]

    async def close(self) -> None:
        """End it, with its tool servers and its box. Any state, any number of times."""
        self._serving.endpoint.drop(self._line)
        self._run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await to_the_end(_ended(self._run))

    async def _play(self, task: Any) -> Any:
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=self._line.base_url, api_key_var="SAO_VERIFIERS_HAS_NO_KEY")
        return await self._serving.env.run_episode(task, vf.ModelContext(model="policy", client=client))


async def _ended(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task}, timeout=CLOSE_S)


_SHARED: SharedByLoop[str, Serving] = SharedByLoop(close=Serving.close)


def acquire(taskset: Mapping[str, Any], runtime: Mapping[str, Any], path: Path | None) -> Serving:
    """The running loop's environment of these arguments. Pair with one `release`."""
    key = json.dumps([taskset, runtime, str(path)], sort_keys=True, default=str)
    return _SHARED.acquire(key, lambda: Serving(taskset, runtime, path))


async def release(serving: Serving) -> None:
    """Give one use back; the last one ends it."""
    await _SHARED.release(serving)
