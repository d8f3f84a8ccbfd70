"""What `extend` appends equals the template applied once, as transformers applies it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.chat.renderer import ChatRenderer
from agent.episode import Episode, SamplingParams, Segment, StopReason, validate

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run code. Prints <b>é</b> & more.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]

contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
# Neither end of an action merges with the template's markup or is trimmed by it; the middle is anything.
spoken = contents.map(lambda text: f"a{text}.")
actions = st.one_of(
    spoken,
    spoken.map(lambda text: text + '\n<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'),
)
thoughts = st.one_of(st.none(), spoken)
tool_turns = st.lists(contents.map(lambda text: {"role": "tool", "content": text}), min_size=1, max_size=3)
user_turns = contents.map(lambda text: [{"role": "user", "content": text}])
openings = st.tuples(st.one_of(st.none(), contents), contents).map(
    lambda pair: (
        ([] if pair[0] is None else [{"role": "system", "content": pair[0]}]) + [{"role": "user", "content": pair[1]}]
    )
)


def play(
    renderer: ChatRenderer,
    opening: list[dict[str, Any]],
    turns: list[tuple[str, bool, list[dict[str, Any]]]],
    tools: list[dict[str, Any]] | None,
) -> tuple[list[dict[str, Any]], list[Segment]]:
    """Run the loop of a rollout: the conversation in messages, and the record in segments.

    A turn is (action text, whether its stop token was sampled, what the environment answers).
    """
    conversation = list(opening)
    prompt = renderer.start(conversation, tools)
    segments = [Segment("prompt", prompt.token_ids, prompt.text)]
    for text, stopped, answer in turns:
        ids = renderer.encode_action(text, closed=stopped)
        filler = tuple(-1.0 for _ in ids)
        segments.append(Segment("action", ids, renderer.decode(ids), filler, tuple(0 for _ in ids)))
        conversation.append({"role": "assistant", "content": renderer.decode(ids)})
        observation = renderer.extend(conversation, ids, answer, tools)
        conversation += answer
        segments.append(Segment("observation", observation.token_ids, observation.text))
    return conversation, segments


def ids_of(segments: list[Segment]) -> list[int]:
    return [index for segment in segments for index in segment.token_ids]


@pytest.fixture
def once(reference_of: Callable[[str], Any]) -> Callable[..., Any]:
    """`once(family, conversation, tools, **options)`: the template applied once by transformers."""

    def apply(
        family: str, conversation: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **options: Any
    ) -> Any:
        options = {"add_generation_prompt": True, "return_dict": False, **options}
        return reference_of(family).apply_chat_template(conversation, tools=tools, **options)

    return apply


@settings(max_examples=25, deadline=None)
@given(opening=openings, with_tools=st.booleans(), text=actions, code=contents, prompt=st.booleans())
def check_one_rendering(
    renderer: ChatRenderer,
    family: str,
    once: Callable[..., Any],
    opening: list[dict[str, Any]],
    with_tools: bool,
    text: str,
    code: str,
    prompt: bool,
) -> None:
    tools = TOOLS if with_tools else None
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
    history = [
        *opening,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": code, "name": "python"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": code},
    ]
    for messages in (opening, history):
        rendering = renderer.render(messages, tools, add_generation_prompt=prompt)
        assert rendering.text == once(family, messages, tools, tokenize=False, add_generation_prompt=prompt)
        assert list(rendering.token_ids) == once(family, messages, tools, add_generation_prompt=prompt)


def test_a_prompt_differs_from_what_transformers_would_send(
    family: str, renderer_of: Callable[..., ChatRenderer], once: Callable[..., Any]
) -> None:
    check_one_rendering(renderer_of(family), family, once)


@settings(max_examples=30, deadline=None)
@given(
    opening=openings,
    turns=st.lists(st.tuples(actions, st.booleans(), st.one_of(tool_turns, user_turns)), min_size=1, max_size=4),
    with_tools=st.booleans(),
)
def check_appending(
    renderer: ChatRenderer, family: str, once: Callable[..., Any], opening: Any, turns: Any, with_tools: bool
) -> None:
    tools = TOOLS if with_tools else None
    conversation, segments = play(renderer, opening, turns, tools)
    assert "".join(s.text + (_end(renderer, s)) for s in segments) == once(family, conversation, tools, tokenize=False)
    assert ids_of(segments) == once(family, conversation, tools)


def _end(renderer: ChatRenderer, segment: Segment) -> str:
    """The stop token that an action's text does not show."""
    stopped = segment.kind == "action" and segment.token_ids[-1:] == (renderer.turn_end_id,)
    return renderer._tokenizer.tokenizer.id_to_token(renderer.turn_end_id) if stopped else ""


def test_appending_drifts_from_the_template_applied_once(
    family: str, renderer_of: Callable[..., ChatRenderer], once: Callable[..., Any]
) -> None:
    check_appending(renderer_of(family), family, once)


@settings(max_examples=40, deadline=None)
@given(
    opening=openings,
    turns=st.lists(
        st.tuples(thoughts, actions, st.booleans(), st.one_of(tool_turns, user_turns)), min_size=1, max_size=5
    ),
)
def check_thinking(renderer: ChatRenderer, family: str, once: Callable[..., Any], opening: Any, turns: Any) -> None:
    spoken_turns = [
        (text if thought is None else f"<think>\n{thought}\n</think>\n\n{text}", stopped, answer)
        for thought, text, stopped, answer in turns
    ]
    conversation, segments = play(renderer, opening, spoken_turns, TOOLS)
    whole = once(family, conversation, TOOLS)
    last_question = max(
        (position for position, turn in enumerate(turns) if turn[3][0]["role"] == "user"), default=-1
    )  # the last turn that a question follows: its thinking and all before it is stripped
    tokenizer = renderer._tokenizer.tokenizer
    blank = tokenizer.encode("\n\n", add_special_tokens=False).ids
    close = tokenizer.token_to_id("</think>")
    expected: list[int] = []
    position = -1
    for segment in segments:
        ids = list(segment.token_ids)
        position += segment.kind == "action"
        if segment.kind == "action" and position <= last_question and turns[position][0] is not None:
            cut = ids.index(close) + 1
            assert ids[cut : cut + len(blank)] == blank
            ids = ids[cut + len(blank) :]
        expected += ids
    assert expected == whole
    if any(thought is not None for thought, *_ in turns[: last_question + 1]):
        assert ids_of(segments) != whole


def test_the_record_loses_thinking_or_anything_else_when_the_template_strips_it(
    thinking_family: str, renderer_of: Callable[..., ChatRenderer], once: Callable[..., Any]
) -> None:
    """Case B1: the difference to the template applied once is exactly the stripped thinking."""
    check_thinking(renderer_of(thinking_family), thinking_family, once)


@settings(max_examples=40, deadline=None)
@given(opening=openings, texts=st.lists(contents, min_size=1, max_size=4), answer=tool_turns)
def check_unusual_tokens(
    renderer: ChatRenderer, once: Callable[..., Any], opening: Any, texts: list[str], answer: Any
) -> None:
    tokenizer = renderer._tokenizer.tokenizer
    conversation = list(opening)
    ids = list(renderer.start(conversation, TOOLS).token_ids)
    for text in texts:
        # One token a byte: ids that no tokenizer would choose for this text, not normalised either.
        action = [tokenizer.token_to_id(_BYTES[byte]) for byte in text.encode()]
        before = len(ids)
        ids += action
        conversation.append({"role": "assistant", "content": renderer.decode(action)})
        assert conversation[-1]["content"] == text
        ids += renderer.extend(conversation, action, answer, TOOLS).token_ids
        assert ids[before : before + len(action)] == action
        conversation += answer
    whole = once("chatml", conversation, TOOLS, tokenize=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", whole)


def _byte_tokens() -> list[str]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


_BYTES = _byte_tokens()


def test_sampled_ids_are_tokenised_again(renderer_of: Callable[..., ChatRenderer], once: Callable[..., Any]) -> None:
    """Case B1: ids that nobody would get from the text stay as they were sampled."""
    check_unusual_tokens(renderer_of("chatml"), once)


def test_a_lone_end_of_thinking_gains_an_empty_think_block(
    thinking_family: str, renderer_of: Callable[..., ChatRenderer]
) -> None:
    """Case B2: what follows a completion of only `</think>` is the end of the turn and the observation."""
    switches: list[dict[str, bool]] = [{}]
    if not thinking_family.startswith("published-"):  # published templates have no such switch
        switches.append({"prefill_think": True})
    for renderer in (renderer_of(thinking_family, **switch) for switch in switches):
        for text in ("</think>", "</think>\n\nfine", "<think>\n\n</think>", ""):
            for stopped in (True, False):
                answer = [{"role": "tool", "content": "4"}]
                _, segments = play(renderer, [{"role": "user", "content": "2+2?"}], [(text, stopped, answer)], None)
                end = "" if stopped else "<|im_end|>"
                assert segments[1].text == text
                assert segments[2].text.startswith(
                    f"{end}\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
                )
                assert "</think>" not in segments[2].text
                record = renderer._tokenizer.tokenizer.decode(ids_of(segments), skip_special_tokens=False)
                assert record.count("</think>") == text.count("</think>")


def test_disabled_thinking_loses_the_block_that_the_generation_prompt_opened(
    renderer_of: Callable[..., ChatRenderer], thinking_family: str
) -> None:
    """Case B1: with `enable_thinking=False` the empty block is in every generation prompt, and stays in the record."""
    renderer = renderer_of(thinking_family, enable_thinking=False)
    answer = [{"role": "user", "content": "sure?"}]
    _, segments = play(
        renderer, [{"role": "user", "content": "2+2?"}], [("4", True, answer), ("5", True, answer)], None
    )
    for segment in (segments[0], segments[2], segments[4]):
        assert segment.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_masks_are_a_prefix_instead_of_following_segments(
    family: str, renderer_of: Callable[..., ChatRenderer]
) -> None:
    """Cases B3, B5: every token belongs to one segment, and what the renderer adds has no log-prob to leak."""
    renderer = renderer_of(family)
    answer = [{"role": "tool", "content": "84"}]
    turns = [("first.", True, answer), ("cut", False, answer), ("", False, answer), ("last.", True, answer)]
    _, segments = play(renderer, [{"role": "user", "content": "12*7?"}], turns, TOOLS)
    episode = Episode("e", "env", "t", tuple(segments), (0.0,) * 4, StopReason.TERMINATED, SamplingParams())
    validate(episode)
    mask = [segment.kind == "action" for segment in segments for _ in segment.token_ids]
    starts = sum(now and not before for before, now in zip([False, *mask], mask, strict=False))
    assert starts == 3  # the empty action has no token
    assert sum(mask) == sum(len(renderer.encode_action(text, closed=stopped)) for text, stopped, _ in turns)
