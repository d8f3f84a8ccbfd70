"""Live figures for whoever watches: server-sent events at /v1/events. No words of conversations are in them.

Kinds of events: `hello` (once: the present figures and the latest history), `response`, `feedback`, `version`,
`learner` (a line of the learner's metrics), `status` (every second).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from typing import Any

import msgspec
from aiohttp import web

_HISTORY = 512
_QUEUE = 1024
_WINDOW = 128
_KEEPALIVE_S = 15.0


class EventHub:
    """Hands every event to every watcher; one that is too slow to read loses its connection, not the server's time."""

    def __init__(self) -> None:
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self.history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)

    def publish(self, kind: str, data: dict[str, Any], *, keep: bool = True) -> None:
        """Tell all watchers; with `keep` those who come later get it in their `hello`."""
        event = {"kind": kind, "at": time.time(), **data}
        if keep:
            self.history.append(event)
        text = _event(kind, event)
        for queue in list(self._watchers):
            try:
                queue.put_nowait(text)
            except asyncio.QueueFull:
                self._watchers.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)

    async def serve(self, request: web.Request, hello: dict[str, Any], *, write_s: float) -> web.StreamResponse:
        """Answer a watcher until it goes or the server stops."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE)
        self._watchers.add(queue)
        try:
            await response.prepare(request)
            async with asyncio.timeout(write_s):
                await response.write(_event("hello", {**hello, "history": list(self.history)}))
            while True:
                try:
                    texts = [await asyncio.wait_for(queue.get(), _KEEPALIVE_S)]
                except TimeoutError:
                    texts = [b": still here\n\n"]
                # All that is there: one at a time would fall behind on a busy loop, however fast the reader is.
                while not queue.empty():
                    texts.append(queue.get_nowait())
                async with asyncio.timeout(write_s):
                    await response.write(b"".join(text for text in texts if text is not None))
                if None in texts:
                    break
        except TimeoutError:
            if request.transport is not None:  # else the end of the stream would wait for the reader, for ever
                request.transport.abort()
        except ConnectionResetError:
            pass
        finally:
            self._watchers.discard(queue)
        return response

    def close(self) -> None:
        """End every watcher's stream."""
        for queue in self._watchers:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)
        self._watchers.clear()


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


class Figures:
    """Running figures of what was served and said about it; windows are the last 128 feedbacks or a minute."""

    def __init__(self) -> None:
        self.responses = 0
        self.feedback = 0
        self.tokens = 0
        self._rewards: deque[float] = deque(maxlen=_WINDOW)
        self._styles: deque[tuple[str, float]] = deque(maxlen=_WINDOW)
        self._episodes: deque[float] = deque(maxlen=10_000)
        self._phase: str | None = None

    def served(self, tokens: int) -> None:
        """A response has been served."""
        self.responses += 1
        self.tokens += tokens

    def judged(self, reward: float, metadata: dict[str, Any]) -> None:
        """Feedback has been accepted. `metadata.style` counts for the share of styles; `metadata.target`
        (or `phase`), text or a number, names the phase that holds from now on."""
        self.feedback += 1
        self._rewards.append(reward)
        if isinstance(style := metadata.get("style"), str):
            self._styles.append((style[:40], reward))
        phase = metadata.get("target", metadata.get("phase"))
        if isinstance(phase, str | int):
            self._phase = str(phase)[:40]

    def finished(self) -> None:
        """An episode has had its final feedback."""
        self._episodes.append(time.monotonic())

    def snapshot(self) -> dict[str, Any]:
        """The figures as JSON."""
        since = time.monotonic() - 60.0
        counts, sums = Counter(style for style, _ in self._styles), dict[str, float]()
        for style, reward in self._styles:
            sums[style] = sums.get(style, 0.0) + reward
        return {
            "responses": self.responses,
            "feedback": self.feedback,
            "tokens": self.tokens,
            "reward_mean": sum(self._rewards) / len(self._rewards) if self._rewards else None,
            "style_share": {style: n / len(self._styles) for style, n in counts.most_common(8)},
            "style_reward": {style: sums[style] / n for style, n in counts.most_common(8)},
            "phase": self._phase,
            "episodes_per_minute": sum(at >= since for at in self._episodes),
        }
