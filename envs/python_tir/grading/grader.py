"""Grading a final answer in killable worker processes.

    grader = Grader(workers=2, timeout_s=5.0)
    reward = float(await grader.grade("So it is \\boxed{\\frac12}.", "0.5"))   # or grade_sync(...)
    await grader.close()

A worker's life: absent ──first answer──▶ ready ──answer──▶ busy ──reply──▶ ready
                                            ▲                 └─clock, crash─▶ killed ─▶ absent
`close()` ends every worker; so does the death of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from envs.core import EnvironmentFault
from envs.python_tir.grading.answers import extract_answer, normalize
from envs.python_tir.grading.rules import REASONING_GYM, TYPED, Rules
from envs.said import Counted, said

MAX_ANSWER_CHARS = 10_000
"""A longer answer is wrong unless it equals the gold answer as written: no gold answer is a book."""

START_TIMEOUT_S = 60.0
_LOG = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("worker.py")


def _kind(rules: Rules) -> str:
    """What of the item decides about loading: the family, not which of its items it is."""
    return str(json.loads(rules.item).get("family", "")) if rules.scorer == REASONING_GYM else ""


class _WorkerDied(Exception):
    """The worker left without a reply."""


class _TimedOut(Exception):
    """The worker did not reply in time."""


class _Worker:
    """One worker process, used by one thread at a time."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        self._pending = b""
        self._reaped = False
        self._prepared: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd="/",
            )
        except OSError:
            self._errors.close()
            raise
        try:
            self._read(START_TIMEOUT_S)
        except (_TimedOut, _WorkerDied) as failure:
            self._errors.seek(0)
            tail = self._errors.read()[-2000:].decode(errors="replace").strip()
            self.kill()
            raise _WorkerDied(tail or repr(failure)) from failure

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One request and its reply; `_TimedOut` or `_WorkerDied` when there is none. The worker is then useless."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as failure:
            raise _WorkerDied(str(failure)) from failure
        return self._read(timeout_s)

    def prepare(self, rules: Rules) -> None:
        """Import the rules' scorer, off an answer's clock. Raises `EnvironmentFault` where it can't be."""
        if rules.scorer is None or (rules.scorer, _kind(rules)) in self._prepared:
            return
        path = [os.path.abspath(entry) for entry in sys.path]
        try:
            reply = self.ask({"prepare": rules.scorer, "item": rules.item, "path": path}, START_TIMEOUT_S)
        except _TimedOut:
            raise EnvironmentFault(
                f"the scorer {rules.scorer} took longer than {START_TIMEOUT_S:g} s to load"
            ) from None
        if "failed" in reply:
            raise EnvironmentFault(f"the scorer {rules.scorer} cannot be used: {reply['failed']}")
        self._prepared.add((rules.scorer, _kind(rules)))

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()  # select() refuses descriptors above 1023, and many sandboxes are open beside this
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise _TimedOut
            chunk = os.read(descriptor, 65536)
            if not chunk:
                raise _WorkerDied("the grading worker ended without a reply")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def interrupt(self) -> None:
        """Kill the process group from any thread; the thread that waits for a reply wakes up. Safe after `kill`."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process group, reap it and close its pipes. By the owning thread, or once that has ended."""
        self.interrupt()
        with self._lock:
            self._process.wait()
            self._reaped = True
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


class Grader:
    """Grades answers in at most `workers` processes, each answer within `timeout_s` seconds of wall clock.

    Usable from any thread and any event loop. An answer that runs out of time or memory, or crashes its worker, is
    wrong, and costs nobody else: its worker is replaced. Waiting for a free worker is not on the clock.
    """

    def __init__(self, workers: int = 1, timeout_s: float = 5.0) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(f"Grader needs workers >= 1 and timeout_s > 0, got {workers} and {timeout_s}.")
        self._timeout_s = timeout_s
        # Each thread owns one worker, which also keeps the parent-death signal true: it follows the *thread*.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")
        self._local = threading.local()
        self._lock = threading.Lock()
        self._alive: set[_Worker] = set()
        self._closed = False
        self._complained: set[str | None] = set()

    async def grade(self, action_text: str, gold: str, rules: Rules = TYPED, *, counted: Counted = "said") -> bool:
        """Return whether the final answer of `action_text` means `gold`. No answer is False.

        Only what is said counts, outside thinking and tool calls, unless `counted` is "everything". Raises
        `EnvironmentFault` when no worker can be started, or the rules' scorer not be loaded.
        """
        return await self.score(action_text, gold, rules, counted=counted) >= rules.solved_at

    async def score(self, action_text: str, gold: str, rules: Rules = TYPED, *, counted: Counted = "said") -> float:
        """`grade` as the number from 0 to 1 that it rests on; 0 or 1 without a scorer."""
        decided = self._shortcut(action_text, gold, rules, counted)
        if isinstance(decided, bool):
            return float(decided)
        return await asyncio.wrap_future(self._submit(decided, gold, rules))

    def grade_sync(self, action_text: str, gold: str, rules: Rules = TYPED, *, counted: Counted = "said") -> bool:
        """`grade` for callers without an event loop, from any thread."""
        decided = self._shortcut(action_text, gold, rules, counted)
        if isinstance(decided, bool):
            return decided
        return self._submit(decided, gold, rules).result() >= rules.solved_at

    async def close(self) -> None:
        """End every worker. Answers being graded come back as a fault; any number of calls."""
        await asyncio.to_thread(self.close_sync)

    def close_sync(self) -> None:
        """`close` for callers without an event loop."""
        with self._lock:
            self._closed = True
            workers = list(self._alive)
        for worker in workers:
            worker.interrupt()
        self._threads.shutdown(wait=True)  # answers in the queue run, see that it is closed, and raise the fault
        for worker in list(self._alive):
            worker.kill()
        self._alive.clear()

    def _shortcut(self, action_text: str, gold: str, rules: Rules, counted: Counted) -> bool | str:
        """Decide what needs no mathematics; otherwise return the answer to grade."""
        answer = extract_answer(said(action_text) if counted == "said" else action_text)
        if answer is None:
            return False
        if rules.scorer is not None:
            return len(answer) <= MAX_ANSWER_CHARS and answer
        if answer == gold.strip():
            return True
        if len(answer) > MAX_ANSWER_CHARS:
            return False
        return normalize(answer) == normalize(gold) or answer

    def _submit(self, answer: str, gold: str, rules: Rules) -> Future[float]:
        with self._lock:
            if self._closed:
                raise EnvironmentFault("The grader is closed; make a new one.")
            return self._threads.submit(self._work, answer, gold, rules)

    def _work(self, answer: str, gold: str, rules: Rules) -> float:
        request: dict[str, Any] = {"answer": answer, "gold": gold, "form": rules.answer_form}
        if rules.scorer is not None:
            request = {"scorer": rules.scorer, "item": rules.item, "answer": answer}
        for attempt in (1, 2):
            worker = self._worker()
            try:
                worker.prepare(rules)
                reply = worker.ask(request, self._timeout_s)
            except EnvironmentFault:
                self._drop(worker)
                raise
            except _TimedOut:
                self._drop(worker)
                return 0.0
            except _WorkerDied:
                self._drop(worker)
                # Out of memory or a crash: once more, in case another process took the memory; then it is the answer.
                if attempt == 2 and not self._closed:
                    return 0.0
            else:
                if "raised" in reply and rules.scorer not in self._complained:
                    self._complained.add(rules.scorer)
                    _LOG.warning("the scorer %s raised, which counts as 0: %s", rules.scorer, reply["raised"])
                return float(reply["score"])
        raise EnvironmentFault("The grader was closed while it worked.")

    def _worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is not None:
            return worker
        for attempt in (1, 2):
            if self._closed:
                raise EnvironmentFault("The grader was closed while it worked.")
            try:
                worker = _Worker()
                break
            except (OSError, _WorkerDied) as failure:
                if attempt == 2:
                    raise EnvironmentFault(f"No grading worker can be started: {failure}") from failure
        assert worker is not None
        with self._lock:
            closed = self._closed
            if not closed:
                self._alive.add(worker)
        if closed:
            worker.kill()
            raise EnvironmentFault("The grader was closed while it worked.")
        self._local.worker = worker
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self._local.worker = None
        with self._lock:
            self._alive.discard(worker)
