"""`BlockingModel`: a model for environments that are no coroutines; `chat` waits for its answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from envs.core import Message, Model


class BlockingModel:
    """`model` of the running event loop, to be asked from other threads than this one."""

    def __init__(self, model: Model) -> None:
        self._model, self._loop = model, asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._waiting = set[Future[str]]()

    def chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The next message of the conversation; `options` are those of `envs.core.Model.chat`.

        Raises `EnvironmentFault` when there is no answer, `CancelledError` once `give_up` was called.
        """
        if threading.get_ident() == self._thread:
            raise RuntimeError("a BlockingModel is for other threads; on its event loop ask an envs.core.Model")
        answer = asyncio.run_coroutine_threadsafe(self._model.chat(messages, **options), self._loop)
        with self._lock:
            self._waiting.add(answer)
        try:
            return answer.result()
        finally:
            with self._lock:
                self._waiting.discard(answer)

    def give_up(self) -> None:
        """Cancel what is being asked: nobody waits for it any more."""
        with self._lock:
            waiting = list(self._waiting)
        for answer in waiting:
            answer.cancel()
