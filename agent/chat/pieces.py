"""Token ids of a rendered chat, piece by piece: what a template writes again and again is encoded once.

Most of what stands around a turn is the same in every turn of every episode: the frames of roles, the tools, what a
template says of itself. A tokenizer looks for its added tokens first and encodes what lies between them piece by piece,
knowing nothing of the others, so a piece that was encoded before has the same ids again.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

KEPT_PIECES, LONGEST_PIECE = 128, 16_384
"""How many pieces are remembered, and how many characters one may have: some 20 MB at most, in practice far less. What
is asked for least goes: frames are met every turn, and what a tool answered only once."""

_WITHOUT_MEMORY = frozenset(
    (
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "Punctuation",
        "Sequence",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    )
)
"""Pre-tokenizers that treat a piece the same wherever in a text it stands. One that is not known here may not."""


class Pieces:
    """Encodes by pieces, with the `encode` of whole texts, which is that of `tokenizer`.

    `apart` says whether that is the same for this tokenizer; where it is not, every text is encoded whole.
    """

    def __init__(self, tokenizer: Tokenizer, encode: Callable[[str], tuple[int, ...]]) -> None:
        # Those that are looked for after normalising are found within a piece.
        added = {t.content: (i, t) for i, t in tokenizer.get_added_tokens_decoder().items() if not t.normalized}
        greedy = any(t.lstrip or t.rstrip or t.single_word for _, t in added.values())  # these look over the border
        self.apart = bool(added) and not greedy and _without_memory(tokenizer.pre_tokenizer)
        self._ids = {content: index for content, (index, _) in added.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._encode, self._remembered = encode, functools.lru_cache(KEPT_PIECES)(encode)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of `text`, which are those that `encode` gives."""
        if not self.apart:
            return self._encode(text)
        ids: list[int] = []
        is_token = False
        for piece in self._added.split(text):
            if is_token:
                ids.append(self._ids[piece])
            elif piece:
                ids += self._remembered(piece) if len(piece) <= LONGEST_PIECE else self._encode(piece)
            is_token = not is_token
        return tuple(ids)


def _without_memory(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return True
    try:
        state = json.loads(pre_tokenizer.__getstate__())
    except (TypeError, ValueError):  # one that is made in Python
        return False
    return all(_is_known(part) for part in _parts(state))


def _parts(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield state
    for part in state.get("pretokenizers", ()):
        yield from _parts(part)


def _is_known(part: dict[str, Any]) -> bool:
    if part["type"] == "Metaspace":  # "first": at the beginning of a text only
        return part.get("prepend_scheme") in ("always", "never")
    return part["type"] in _WITHOUT_MEMORY
