"""Which chain a request goes on with: by what was sampled, whatever clients do to it on its way back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness_tools import said, user
from hypothesis import given
from hypothesis import strategies as st

from agent.episode import Segment
from agent.harness.chains import Chain, Turn, key_of, place_of
from agent.wire.request import canonical

CALL = {"id": "call_1", "type": "function", "function": {"name": "python", "arguments": '{"code": "1+1"}'}}


def chain(*messages: dict[str, Any], busy: bool = False, tools: Any = ()) -> Chain:
    """A chain whose assistant's messages were sampled here."""
    made = Chain(Segment("prompt", (1,)), list(tools), list(messages), [key_of(canonical(m)) for m in messages])
    made.busy = busy
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            action = Segment("action", (number,), logprobs=(-1.0,), versions=(0,))
            made.turns.append(Turn(Segment("observation", (9,)) if made.turns else None, action, message, number))
    return made


def keys(*messages: dict[str, Any]) -> list[str]:
    return [key_of(canonical(message)) for message in messages]


TALK = (user("a"), said("b"), user("c"), said("d"))


def test_a_request_that_repeats_all_of_a_chain_goes_on_with_it() -> None:
    known = chain(*TALK)
    place = place_of(keys(*TALK, user("e")), [], [known])
    assert (place.chain, place.turns, place.length, place.extends) == (known, 2, 4, True)


def test_a_request_that_goes_on_from_an_earlier_reply_branches_there() -> None:
    """The tokens up to there are kept; what came after is another chain's."""
    known = chain(*TALK)
    place = place_of(keys(*TALK[:2], user("other")), [], [known])
    assert (place.chain, place.turns, place.length, place.extends) == (known, 1, 2, False)


@pytest.mark.parametrize(
    "changed",
    [
        (user("summary of it all"), user("e")),
        (user("A"), *TALK[1:], user("e")),
        (user("a"), said("b, shortened"), user("e")),
        (user("e"),),
    ],
    ids=["compacted", "another prompt", "another reply", "a talk of its own"],
)
def test_a_rewritten_prompt_begins_afresh(changed: tuple[dict[str, Any], ...]) -> None:
    place = place_of(keys(*changed), [], [chain(*TALK)])
    assert (place.chain, place.length, place.extends) == (None, 0, False)


def test_a_reply_that_nobody_sampled_here_is_not_taken_for_an_observation() -> None:
    place = place_of(keys(*TALK, user("e"), said("of another model"), user("f")), [], [chain(*TALK)])
    assert place.chain is None


def test_a_chain_that_is_being_sampled_is_left_alone() -> None:
    place = place_of(keys(*TALK, user("e")), [], [chain(*TALK, busy=True)])
    assert (place.turns, place.extends) == (2, False)


def test_other_tools_are_another_prompt() -> None:
    tool = {"type": "function", "function": {"name": "python"}}
    assert place_of(keys(*TALK, user("e")), [tool], [chain(*TALK)]).chain is None
    assert place_of(keys(*TALK, user("e")), [tool], [chain(*TALK, tools=[tool])]).extends


def test_of_several_chains_the_longest_is_gone_on_with_and_one_that_can_grow() -> None:
    short, long, busy = chain(*TALK[:2]), chain(*TALK), chain(*TALK, busy=True)
    assert place_of(keys(*TALK, user("e")), [], [short, busy, long]).chain is long
    assert place_of(keys(*TALK[:2], user("x")), [], [long, short]).chain is short


@pytest.mark.parametrize(
    ("sampled", "returned"),
    [
        (said(" b\n"), said("b")),
        (said(""), {"role": "assistant", "content": None}),
        (said("b"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}),
        (
            {**said(""), "tool_calls": [CALL]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{**CALL, "id": "x", "function": {"name": "python", "arguments": '{"code":"1+1"}'}}],
            },
        ),
    ],
    ids=["blanks", "no content", "parts", "arguments written anew"],
)
def test_what_clients_change_of_a_reply_is_the_same_reply(sampled: dict[str, Any], returned: dict[str, Any]) -> None:
    assert key_of(canonical(sampled)) == key_of(canonical(returned))


def test_another_argument_or_another_text_is_another_reply() -> None:
    other = {**CALL, "function": {"name": "python", "arguments": '{"code": "1+2"}'}}
    assert (
        len({key_of(canonical({**said("b"), "tool_calls": calls})) for calls in ([CALL], [other], [], [CALL] * 2)}) == 4
    )


_TEXTS = st.sampled_from(["a", "b", ""])
_TALKS = st.lists(st.tuples(_TEXTS, _TEXTS), min_size=1, max_size=4).map(
    lambda pairs: [message for one, two in pairs for message in (user(one), said(two))]
)


@given(st.lists(_TALKS, max_size=4), _TALKS, _TEXTS)
def test_what_a_place_repeats_is_in_the_request_and_ends_on_a_reply(known: Any, talk: Any, last: str) -> None:
    chains, asked = [chain(*one) for one in known], keys(*talk, user(last))
    place = place_of(asked, [], chains)
    if place.chain is None:
        assert not any(one.keys and asked[:-1] == one.keys for one in chains)
        return
    assert asked[: place.length] == place.chain.keys[: place.length]
    assert json.loads(asked[place.length - 1])[0] == "assistant"
    assert not any(json.loads(key)[0] == "assistant" for key in asked[place.length :])
