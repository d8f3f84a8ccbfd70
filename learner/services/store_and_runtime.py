"""Store and runtimes as children of the learner: how they are started, watched and ended.

Children live in sessions of their own: Ctrl-C reaches the learner only, which takes them down in order. They also end
by themselves when the learner dies, by SIGKILL too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Any, Literal

from agent.child_processes import log_tail, start_child, start_service, stop_child
from agent.doors.door import KEY_VARIABLE
from agent.runtime.settings import EvaluationSettings
from learner.config import Recipe
from learner.faults import LearnerFault

STOP_LIMIT_S = 15.0
RUNTIME = "runtime"
"""The first runtime of training; further ones are runtime-2, runtime-3, ..."""
_OWN_ENGINES_KEPT_S = 60.0  # those that are started here keep idle connections for longer
_OTHER_ENGINES_KEPT_S = 2.0  # vLLM as it comes closes them after 5 s
_START_LIMIT_S = 120.0


class Children:
    """The children by name; `folder` gets their logs, their ports and the store's file. They share `key`.

    children = Children(folder, key)
    url = await children.start_store({"tasks": 100})
    children.check()                             # LearnerFault once one of them has ended
    await children.stop("store", STOP_LIMIT_S)
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        self._processes: dict[str, tuple[Process, Path]] = {}

    def check(self) -> None:
        """Raise `LearnerFault`, with the end of its log, if a child has ended."""
        for name, (process, log) in self._processes.items():
            if process.returncode is not None:
                raise LearnerFault(
                    f"the {name} ended with code {process.returncode}. The end of its log, {log}:\n{log_tail(log)}\n"
                    "Run the same command again to go on from the last checkpoint"
                )

    async def start_store(self, config: dict[str, Any]) -> str:
        """Start a store with the keys of `config` that are not None; its URL. `LearnerFault` if it ends at once."""
        folder = self._folder
        command = ["-m", "agent.store", "--path", str(folder / "episodes.sqlite"), "--exit-with-parent"]
        words = [f"{key}={json.dumps(value)}" for key, value in config.items() if value is not None]
        log = folder / "store.log"
        process, port = await start_service(
            *(sys.executable, *command, *words),
            name="the store",
            log=log,
            env=self._environment(),
            limit_s=_START_LIMIT_S,
            fault=LearnerFault,
        )
        self._processes["store"] = (process, log)
        return f"http://127.0.0.1:{port}"

    async def start_runtimes(
        self,
        recipe: Recipe,
        model: Path,
        *,
        store: str,
        engines: tuple[str, ...],
        tickets: Literal["all", "train", "evaluate"] = "all",
    ) -> None:
        """Start `runtime.count` runtimes, as `start_runtime` does. Each has a worker's name and a spool of its own."""
        shares = recipe.runtime.shares
        names = [RUNTIME, *(f"{RUNTIME}-{number}" for number in range(2, len(shares) + 1))]
        await asyncio.to_thread(_adopt_spools, self._folder, set(names))
        for name, share in zip(names, shares, strict=True):
            await self.start_runtime(
                recipe, model, store=store, engines=engines, tickets=tickets, name=name, concurrency=share
            )

    async def start_runtime(
        self,
        recipe: Recipe,
        model: Path,
        *,
        store: str,
        engines: tuple[str, ...],
        tickets: Literal["all", "train", "evaluate"] = "all",
        name: str = RUNTIME,
        concurrency: int | None = None,
    ) -> None:
        """Start a runtime of the recipe for these addresses; `model` has tokenizer and chat template.

        `tickets`: the kind that it runs. `name`: of the child. `concurrency`: its own (None: all of the recipe's).
        Raises `LearnerFault` if there is no `runtime.python`.
        """
        section = recipe.runtime
        kept_s = _OTHER_ENGINES_KEPT_S if recipe.engine.urls else _OWN_ENGINES_KEPT_S
        config = {
            "store": store,
            "engines": list(engines),
            "model": str(model),
            "env": recipe.env.model_dump(mode="json"),
            "environments": {one.name: one.env.model_dump(mode="json") for one in recipe.environments},
            "evaluations": {
                one.name: one.model_dump(mode="json", include=set(EvaluationSettings.model_fields))
                for one in recipe.held_out_sets
            },
            "tickets": tickets,
            "worker": f"{recipe.name}-0" if name == RUNTIME else f"{recipe.name}-{name}",
            "spool": str(_spool(self._folder, name)),
            **section.model_dump(mode="json", exclude={"launch", "python", "count"}),
            "concurrency": concurrency or section.concurrency,
            "engine_keepalive_s": section.engine_keepalive_s or kept_s,
            "port_file": str(self._folder / f"{name}.port"),
        }
        await asyncio.to_thread((self._folder / f"{name}.port").unlink, missing_ok=True)
        if section.metrics_port and name != RUNTIME:
            config["metrics_port"] = 0  # the one that was chosen is taken by the runtime of training
        words = ["-m", "agent.runtime" if section.harness is None else "agent.harness", "--exit-with-parent"]
        try:
            process = await self._spawn(name, words, stdin=PIPE, python=section.python)
        except OSError as error:
            raise LearnerFault(f"runtime.python: cannot start {section.python}: {error.strerror or error}") from error
        assert process.stdin is not None
        process.stdin.write(json.dumps(config).encode())
        await process.stdin.drain()
        process.stdin.close()

    async def stop(self, name: str, grace_s: float) -> None:
        """End a child and wait for it; nothing if it was never started."""
        # Shielded: a second Ctrl-C must not leave a child behind; SIGKILL cannot, see the children's own watch.
        if name in self._processes:
            process, _ = self._processes[name]
            await asyncio.shield(asyncio.ensure_future(stop_child(process, grace_s=grace_s)))

    async def stop_all(self, first: str, grace_s: float) -> None:
        """End the child `first` and those named after it (`first`-2, ...), all at once."""
        names = [name for name in self._processes if name == first or name.startswith(f"{first}-")]
        await asyncio.gather(*(self.stop(name, grace_s) for name in names))

    async def _spawn(self, name: str, words: list[str], *, stdin: int = DEVNULL, python: Path | None = None) -> Process:
        log = self._folder / f"{name}.log"
        command = (str(python or sys.executable), *words)
        process = await start_child(*command, log=log, env=self._environment(), stdin=stdin)
        self._processes[name] = (process, log)
        return process

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", KEY_VARIABLE: self._key}


def _spool(folder: Path, name: str) -> Path:
    return folder / ("undelivered" if name == RUNTIME else f"undelivered-{name}")


def _adopt_spools(folder: Path, names: set[str]) -> None:
    """Give the first runtime what runtimes of a session before had to keep, if there are fewer of them now."""
    own = _spool(folder, RUNTIME)
    for left in folder.glob(f"undelivered-{RUNTIME}-*"):
        if left.name.removeprefix("undelivered-") in names:
            continue
        own.mkdir(exist_ok=True)
        for episode in left.glob("*.episode"):
            episode.replace(own / episode.name)
