"""From sampled tokens to the text deltas of a stream: whole characters only, stop strings, tool calls held back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs.tool_formats.reading import THINK_CLOSE, THINK_OPEN

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes a growing sequence of tokens; the deltas joined are the text of the whole.

    A token's text can depend on the one before it, so each delta is the difference between two decodings of a short
    window. A window that ends in a replacement character may end inside a character, and waits for its rest.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window = 0
        self._told = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        self._ids += ids
        return self._delta(final=False)

    def finish(self) -> str:
        """What is left: bytes that never became a character, as replacement characters."""
        return self._delta(final=True)

    def _delta(self, *, final: bool) -> str:
        if self._told == len(self._ids):
            return ""
        before = self._decode(self._ids[self._window : self._told])
        after = self._decode(self._ids[self._window :])
        if not final and after.endswith(_REPLACEMENT):
            return ""
        self._window, self._told = self._told, len(self._ids)
        return after[len(before) :]


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that may be sent. `stopped`: a stop string was met, and the text ends before it."""

    text: str
    stopped: bool = False


class TextFilter:
    """Cuts text at the first stop string, and holds back what may yet turn out to begin one, or a tool call.

    `stops`: stop strings. `opens`: what may begin a tool call; from the first that is not inside `<think>...</think>`
    on, text is kept to the end. Only there it is known whether it is a call, and which thinking the prompt had opened.
    """

    def __init__(self, stops: Sequence[str], *, opens: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._markers = re.compile("|".join(map(re.escape, (*opens, THINK_OPEN)))) if opens else None
        self._holds = (*self._stops, *((*opens, THINK_OPEN) if opens else ()))
        self._scanned = 0
        self._thinking = False
        self._call: int | None = None
        self.text = ""
        """Everything so far, sent or not, without the stop string."""
        self.sent = ""
        """What was given out."""
        self._stopped = False

    def add(self, text: str) -> Delta:
        """Take new text; what may be sent of it."""
        if self._stopped or not text:
            return Delta("", self._stopped)
        overlap = max((len(stop) for stop in self._stops), default=1) - 1
        begin = max(0, len(self.text) - overlap)
        self.text += text
        cuts = [at for stop in self._stops if (at := self.text.find(stop, begin)) >= 0]
        if cuts:
            self._stopped = True
            self.text = self.text[: min(cuts)]
        return Delta(self._release(final=False), self._stopped)

    def finish(self) -> str:
        """What was held back and is no stop string; a tool call stays unsent (see `text` and `sent`)."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        limit = len(self.text)
        if (call := self._possible_call()) is not None:
            limit = call
        elif not final and not self._stopped:
            limit -= _held(self.text, self._holds)
        new = self.text[len(self.sent) : limit] if limit > len(self.sent) else ""
        self.sent += new
        return new

    def _possible_call(self) -> int | None:
        """Where a call may begin; each part of the text is searched once."""
        while self._markers is not None and self._call is None:
            if self._thinking:
                closed = self.text.find(THINK_CLOSE, self._scanned)
                if closed < 0:
                    self._scanned = max(self._scanned, len(self.text) - len(THINK_CLOSE) + 1)
                    break
                self._thinking, self._scanned = False, closed + len(THINK_CLOSE)
            elif (marker := self._markers.search(self.text, self._scanned)) is None:
                longest = max(map(len, self._holds))
                self._scanned = max(self._scanned, len(self.text) - longest + 1)
                break
            elif marker[0] == THINK_OPEN:
                self._thinking, self._scanned = True, marker.end()
            else:
                self._call = marker.start()
        return self._call


def _held(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `markers`."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest
