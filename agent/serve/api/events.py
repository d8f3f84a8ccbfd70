"""Live figures for whoever watches: server-sent events at /v1/events. No words of conversations are in them.

Kinds of events: `hello` (once: the present figures and the latest history), `response`, `feedback`, `version`,
`learner` (a line of the learner's metrics), `status` (every second). Of a single response or verdict its owner sees
which it was; others see that there was one, and the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from agent.event_stream import COMMENT, EventWriter, SlowClient, encoded
from agent.serve.api.whose import Owner, Viewer

_HISTORY = 512
_QUEUE = 1024
_WINDOW = 128
_KEEPALIVE_S = 15.0
_BUFFER_BYTES = 1 << 18
_MOST_STYLES = 16


class EventHub:
    """Hands every event to every watcher; one that is too slow to read loses its connection, not the server's time."""

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Queue[bytes | None], Viewer] = {}
        self._history: deque[tuple[Owner | None, dict[str, Any], dict[str, Any]]] = deque(maxlen=_HISTORY)

    def publish(
        self,
        kind: str,
        data: dict[str, Any],
        *,
        keep: bool = True,
        owner: Owner | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        """Tell all watchers `data`, and those who may see what is `owner`'s the `details` too.

        With `keep` those who come later get it in their `hello`.
        """
        event = {"kind": kind, "at": time.time(), **data}
        whole = {**event, **(details or {})}
        if keep:
            self._history.append((owner, event, whole))
        text, full = encoded(event, event=kind), None
        for queue, viewer in list(self._watchers.items()):
            told = text
            if owner is not None and viewer.sees(owner):
                told = full = full or encoded(whole, event=kind)
            try:
                queue.put_nowait(told)
            except asyncio.QueueFull:
                self._watchers.pop(queue, None)
                queue.get_nowait()
                queue.put_nowait(None)

    def history(self, viewer: Viewer) -> list[dict[str, Any]]:
        """The latest events as `viewer` may see them."""
        return [whole if owner is not None and viewer.sees(owner) else event for owner, event, whole in self._history]

    async def serve(
        self, request: web.Request, hello: dict[str, Any], *, viewer: Viewer, write_s: float
    ) -> web.StreamResponse:
        """Answer a watcher until it goes or the server stops."""
        writer = EventWriter(request, write_s=write_s, buffer_bytes=_BUFFER_BYTES)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE)
        self._watchers[queue] = viewer
        try:
            await writer.start()
            await writer.send({**hello, "history": self.history(viewer)}, event="hello")
            while True:
                try:
                    texts = [await asyncio.wait_for(queue.get(), _KEEPALIVE_S)]
                except TimeoutError:
                    texts = [COMMENT]
                # All that is there: one at a time would fall behind on a busy loop, however fast the reader is.
                while not queue.empty():
                    texts.append(queue.get_nowait())
                await writer.send_encoded(text for text in texts if text is not None)
                if None in texts:
                    await writer.end(mark=False)
                    break
        except (SlowClient, ConnectionResetError):
            pass  # nobody is there to be told
        finally:
            self._watchers.pop(queue, None)
        return writer.response

    def close(self) -> None:
        """End every watcher's stream."""
        for queue in self._watchers:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)
        self._watchers.clear()


class Figures:
    """Running figures of what was served and said about it; windows are the last 128 feedbacks or a minute.

    `styles`: those that are counted by name; empty: the first ones that come, up to a bound. Others are "other".
    """

    def __init__(self, styles: Sequence[str] = ()) -> None:
        self._named, self._fixed = set(styles), bool(styles)
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
        """A verdict has been accepted. `metadata` is that of somebody who is trusted with everybody's figures: `style`
        counts for the share of styles; `target` (or `phase`), text or a number, names the phase that holds from now
        on."""
        self.feedback += 1
        self._rewards.append(reward)
        if isinstance(style := metadata.get("style"), str):
            self._styles.append((self._name_of(style[:40]), reward))
        phase = metadata.get("target", metadata.get("phase"))
        if isinstance(phase, str | int):
            self._phase = str(phase)[:40]

    def _name_of(self, style: str) -> str:
        if style not in self._named:
            if self._fixed or len(self._named) >= _MOST_STYLES:
                return "other"
            self._named.add(style)
        return style

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
