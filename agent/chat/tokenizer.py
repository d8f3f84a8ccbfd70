"""Text to token ids for chats: the template's own special tokens are parsed, those inside content are plain text.

Content is marked before the template sees it: a private-use character that occurs nowhere in the conversation is put
inside each control token found there, so that `<|im_end|>` in a tool's output no longer reads as one. After
rendering, the stretches between the template's own tokens are encoded as the tokenizer does it; a stretch that holds
a mark loses it and goes through normaliser, pre-tokenizer and model only, where added tokens do not exist.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from agent.chat.pieces import Pieces
from agent.chat.template import ChatTemplateError

_LONG = 20_000  # characters
_BLANKS = " \t\r\n\u2581"
SURROGATES = re.compile("[\ud800-\udfff]")
"""Halves of characters, which no tokenizer encodes: they become replacement characters."""
_MARKS = [chr(code) for code in range(0xE000, 0xF900)]


def load_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of `folder`, without padding or truncation, with the added tokens that only `config` names."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ChatTemplateError(
            f"{path} does not exist: give the folder of a model in Hugging Face format "
            "(tokenizer.json, tokenizer_config.json, chat template)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise ChatTemplateError(f"{path} is no tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    known = tokenizer.get_added_tokens_decoder()
    for key, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if int(key) in known:
            continue
        fields = {name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
        token = AddedToken(entry["content"], special=entry.get("special", False), **fields)
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(entry["content"]) != int(key):
            raise ChatTemplateError(f"{folder}: tokenizer_config.json and tokenizer.json disagree on the id of {token}")
    return tokenizer


class ChatTokenizer:
    """Encodes rendered chats. `control` are the added tokens that content must not be able to spell."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # It leaves out where in the text a token was; with the library's threads on, handing over costs more than that.
        self._batches = os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0", "no", "off")
        self._pieces = Pieces(tokenizer, self._whole)
        self._ids = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
        # Also those not flagged special: `<tool_call>` and `<think>` often are not. Runs of blanks, which some
        # tokenizers add too, are ordinary text, and one character cannot be broken (no template builds on one).
        self.control = frozenset(content for content in self._ids if len(content) > 1 and content.strip(_BLANKS))
        self._added = _alternatives(self._ids)
        self._forbidden = self.ids_of(self.control)
        self._patterns: dict[frozenset[str], re.Pattern[str]] = {}

    def choose_mark(self, values: Any) -> str:
        """A character that occurs nowhere in `values` (nested lists and dicts of strings), raw or JSON-escaped."""
        first = _MARKS[0]
        with contextlib.suppress(TypeError, ValueError):  # what is no JSON, or no text, is looked at below
            data = msgspec.json.encode(values)
            if first.encode() not in data and _escaped(first)[1:].encode() not in data.lower():
                return first  # nearly always, and quick to see
        text = "\0".join(_strings(values))
        lower = text.lower()
        for mark in _MARKS:
            if mark not in text and _escaped(mark) not in lower:
                return mark
        raise ChatTemplateError("a conversation that holds every private-use character cannot be rendered")

    def mark_content(self, value: Any, mark: str, tokens: frozenset[str]) -> Any:
        """`value` with `mark` put inside every occurrence of one of `tokens`, in strings at any depth.

        Lone surrogates, which no tokenizer can encode, become replacement characters on the way.
        """
        if isinstance(value, str):
            value = SURROGATES.sub("\ufffd", value)
            pattern = self._patterns.get(tokens)
            if pattern is None:
                pattern = self._patterns[tokens] = _alternatives(tokens)
            # Again until nothing matches: what is left of one token can be another.
            while pattern.search(value):
                value = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
            return value
        if isinstance(value, dict | Mapping):  # the first of them is quicker to ask for
            return {key: self.mark_content(item, mark, tokens) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark_content(item, mark, tokens) for item in value]
        return value

    def encode(self, text: str, mark: str | None = None) -> tuple[int, ...]:
        """Token ids of `text`: added tokens are parsed unless `mark` is inside them; nothing is added around it."""
        marks = None if mark is None or not _may_hold(text, mark) else _marks(mark)
        if marks is None or not marks.search(text):
            return self._pieces.encode(text)
        ids: list[int] = []
        run: list[str] = []  # consecutive pieces without a mark, encoded in one go so that the result is the usual one
        for piece in self._added.split(text):
            if not marks.search(piece):
                run.append(piece)
                continue
            ids += self.encode("".join(run))
            run.clear()
            ids += self._encode_plain(marks.split(piece))
        ids += self.encode("".join(run))
        return tuple(ids)

    def _whole(self, text: str) -> tuple[int, ...]:
        # A long one in a thread must not hold the interpreter, as `encode` does to its end.
        if self._batches or len(text) > _LONG:
            return tuple(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def strip_marks(self, text: str, mark: str) -> str:
        """`text` as it reads without marks."""
        return _marks(mark).sub("", text) if _may_hold(text, mark) else text

    def leading_controls(self, text: str) -> list[int]:
        """The ids of all control tokens in `text`, in order, if it starts with one (blanks aside); else none."""
        controls = [self._ids[match[0]] for match in self._added.finditer(text) if match[0] in self.control]
        first = self._added.match(text.lstrip())
        return controls if first and first[0] in self.control else []

    def ids_of(self, tokens: Collection[str]) -> set[int]:
        """The ids of those of `tokens` that are added tokens."""
        return {self._ids[token] for token in tokens if token in self._ids}

    def _encode_plain(self, parts: Sequence[str]) -> list[int]:
        """Ids of the joined `parts` with no added token in it; the borders of parts are inside control tokens."""
        ids = self._model_ids("".join(parts))
        if self._forbidden.isdisjoint(ids):
            return ids
        # A model that takes whole words from its vocabulary can find the token there; apart, its halves cannot be it.
        ids = [index for part in parts for index in self._model_ids(part)]
        if self._forbidden.isdisjoint(ids):
            return ids
        raise ChatTemplateError("this tokenizer's model spells a special token from plain text; it cannot be used")

    def _model_ids(self, text: str) -> list[int]:
        if self.tokenizer.normalizer is not None:
            text = self.tokenizer.normalizer.normalize_str(text)
        words = [text]
        if self.tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in self.tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words if word for token in self.tokenizer.model.tokenize(word)]


def _alternatives(tokens: Collection[str]) -> re.Pattern[str]:
    """Matches any of `tokens`, the longest first, in a group (so that `split` keeps them); nothing if there is none."""
    choices = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token)
    return re.compile(f"({choices or '(?!)'})")


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


@functools.cache
def _marks(mark: str) -> re.Pattern[str]:
    """`mark`, raw or JSON-escaped."""
    return re.compile(f"{mark}|{re.escape(_escaped(mark))}", re.IGNORECASE)


def _may_hold(text: str, mark: str) -> bool:
    return mark in text or "\\" in text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
