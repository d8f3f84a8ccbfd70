"""Stop strings: whether the text of what was sampled has just completed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

_MORE = 8
"""Tokens looked at beyond the longest stop string's bytes: some tokens spell nothing."""


class StopStrings:
    """The tokenizer of a model folder, read when the first request with stop strings comes."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._tokenizer: Tokenizer | None = None

    def watch(self, stops: Sequence[str]) -> Callable[[list[int]], bool]:
        """A function that says, of all tokens with the newest last, whether their end completes one of `stops`.

        Raises `ValueError` where there is no tokenizer to read text with.
        """
        tokenizer = self._tokenizer = self._tokenizer or self._read()
        window = max(len(stop.encode()) for stop in stops) + _MORE

        def met(sampled: list[int]) -> bool:
            text = tokenizer.decode(sampled[-window:], skip_special_tokens=False)
            return any(stop in text for stop in stops)

        return met

    def _read(self) -> Tokenizer:
        path = None if self._folder is None else self._folder / "tokenizer.json"
        if path is None or not path.is_file():
            raise ValueError("stop strings need a tokenizer.json in the folder that this engine was started with")
        return Tokenizer.from_file(str(path))
