"""A text has the same ids whether it is encoded whole or by pieces that were met before."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from agent.chat import pieces
from agent.chat.pieces import Pieces
from agent.chat.renderer import ChatRenderer
from agent.chat.template import _tojson
from agent.chat.tokenizer import ChatTokenizer

MARKERS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|x|><|y|>", "<|x|>"]
CORPUS = ["a tool said: the answer is 42,  and\n\nmore user assistant ▁ blanks", '{"name": "look"}', *MARKERS]
texts = st.lists(
    st.one_of(st.sampled_from([*MARKERS, "<|im", "_end|>", " ", "\n", "user\n", "  a", "▁"]), st.text(max_size=6)),
    max_size=12,
).map(lambda parts: "".join(parts).encode(errors="replace").decode())

BYTE_LEVEL = lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)  # noqa: E731
QWEN = lambda: pre_tokenizers.Sequence(  # noqa: E731
    [
        pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
KINDS: dict[str, tuple[Callable[[], Any], Any, bool]] = {
    "byte level": (BYTE_LEVEL, None, True),
    "byte level with a blank before": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=True), None, True),
    "split": (QWEN, normalizers.NFC(), True),
    "metaspace everywhere": (lambda: pre_tokenizers.Metaspace(prepend_scheme="always"), None, True),
    "metaspace at first": (lambda: pre_tokenizers.Metaspace(prepend_scheme="first"), None, False),
    "no pre-tokenizer": (
        lambda: None,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        True,
    ),
}


def trained(kind: str, **flags: bool) -> Tokenizer:
    make, normalizer, _ = KINDS[kind]
    tokenizer = Tokenizer(models.BPE())
    if (pre := make()) is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder, tokenizer.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens(
        [AddedToken(m, special=i < 2, normalized=False, **flags) for i, m in enumerate(MARKERS)]
        + [AddedToken("assistant", normalized=True)]
    )
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_ids_of_the_whole(kind: str) -> None:
    tokenizer = trained(kind)
    both = ChatTokenizer(tokenizer)
    found = Pieces(tokenizer, both._whole)
    assert found.apart == KINDS[kind][2]

    @settings(max_examples=60, deadline=None)
    @given(text=texts)
    def check(text: str) -> None:
        whole = both._whole(text)
        assert found.encode(text) == found.encode(text) == whole  # the second time from memory

    check()


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_a_token_that_looks_over_its_border_is_not_taken_apart(flag: str) -> None:
    assert not ChatTokenizer(trained("split", **{flag: True}))._pieces.apart


def test_what_is_not_met_again_is_forgotten_and_what_is_too_long_never_kept() -> None:
    tokenizer = trained("split")
    encoded: list[str] = []

    def encode(text: str) -> tuple[int, ...]:
        encoded.append(text)
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    found = Pieces(tokenizer, encode)
    for number in range(3 * pieces.KEPT_PIECES):
        found.encode(f"<|im_start|>user\n<|im_end|>{number}")
    assert encoded.count("user\n") == 1
    found.encode("0")
    assert encoded.count("0") == 2
    long = "a" * (pieces.LONGEST_PIECE + 1)
    for _ in range(2):
        found.encode(long)
    assert encoded.count(long) == 2


def test_frames_and_tools_are_encoded_once_for_all_episodes(renderer_of: Callable[..., ChatRenderer]) -> None:
    renderer = renderer_of("qwen3")
    assert renderer._tokenizer._pieces.apart
    encoded: list[str] = []
    whole = renderer._tokenizer._whole

    def encode(text: str) -> tuple[int, ...]:
        encoded.append(text)
        return whole(text)

    renderer._tokenizer._pieces = Pieces(renderer._tokenizer.tokenizer, encode)
    tools = [{"type": "function", "function": {"name": "look", "description": "d" * 500, "parameters": {}}}]
    for number in range(3):
        prompt = [{"role": "user", "content": f"question {number}"}]
        renderer.start(prompt, tools)
        action = {"role": "assistant", "content": "said"}
        renderer.extend([*prompt, action], (), [{"role": "tool", "content": f"answer {number}"}], tools)
    assert sum("d" * 500 in text for text in encoded) == 1
    assert len(encoded) == len(set(encoded))
    assert sum("question" in text for text in encoded) == sum("answer" in text for text in encoded) == 3


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(value=values)
def test_json_that_is_remembered_is_what_json_says(value: Any) -> None:
    want = json.dumps(value, ensure_ascii=False)
    assert _tojson(value) == _tojson(value) == want
    assert _tojson(value, indent=0) == json.dumps(value, ensure_ascii=False, indent=0)


def test_json_of_what_only_seems_equal_is_not_mixed_up() -> None:
    alike: list[Any] = [1, 1.0, True, "1", [1], (1.0,), {"a": 1}, {"a": 1.0}, {"a": True}, {1: 1}, {"1": 1.0}]
    for one, other in itertools.permutations(alike, 2):
        assert _tojson(one) == json.dumps(one)
        assert _tojson(other) == json.dumps(other)
    with pytest.raises(TypeError):
        _tojson({"a": object()})
    with pytest.raises(TypeError):
        _tojson({"a": b"bytes"})
