"""What is read of a body: what bends the distribution is known by name, and no wish is ignored silently."""

from __future__ import annotations

from typing import Any

import pytest

from agent.engines.steering import NO_STEERING
from agent.wire.errors import ApiError
from agent.wire.request import KEYS
from agent.wire.wishes import NO_WISHES, read_wishes

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def wishes(**raw: Any) -> Any:
    return read_wishes(raw, known=KEYS, most_n=4)


@pytest.mark.parametrize(
    ("key", "value", "sent"),
    [
        ("min_tokens", 3, {"min_tokens": 3}),
        ("presence_penalty", 0.5, {"presence_penalty": 0.5}),
        ("frequency_penalty", -1, {"frequency_penalty": -1}),
        ("repetition_penalty", 1.1, {"repetition_penalty": 1.1}),
        ("logit_bias", {"5": -100}, {"logit_bias": {5: -100}}),
        ("guided_regex", "a+", {"structured_outputs": {"regex": "a+"}}),
        ("guided_choice", ["a", "b"], {"structured_outputs": {"choice": ["a", "b"]}}),
        ("guided_json", {"type": "object"}, {"structured_outputs": {"json": {"type": "object"}}}),
        ("structured_outputs", {"grammar": "x"}, {"structured_outputs": {"grammar": "x"}}),
        ("response_format", {"type": "json_object"}, {"structured_outputs": {"json_object": True}}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}},
            {"structured_outputs": {"json": {"type": "array"}}},
        ),
    ],
)
def test_what_bends_the_distribution_is_named_and_reaches_the_engine(key: str, value: Any, sent: Any) -> None:
    read = wishes(**{key: value})
    assert read.bending == (key,)
    assert read.steering.params == sent
    assert read.steering.changes


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 1, "logprobs": False, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "tools": [LOOK]},
        {"metadata": {"a": "b"}, "store": True, "best_of": 1, "frequency_penalty": None, "unheard_of": None},
    ],
)
def test_what_asks_for_nothing_bends_nothing(body: dict[str, Any]) -> None:
    assert wishes(**body) == NO_WISHES
    assert wishes(**body).steering is NO_STEERING


def test_log_probs_and_several_responses_are_no_other_distribution() -> None:
    read = wishes(n=3, logprobs=True, top_logprobs=2, parallel_tool_calls=False)
    assert (read.n, read.logprobs, read.one_call, read.bending) == (3, True, True, ())
    assert read.steering.params == {"logprobs": 3}, "the sampled one comes first, likely or not"
    assert not read.steering.changes


def test_a_tool_that_must_be_called_is_a_form_that_the_reply_is_held_to() -> None:
    named = wishes(tools=[LOOK], tool_choice={"type": "function", "function": {"name": "look"}})
    assert named.forced == "look"
    assert named.bending == ("tool_choice",)
    assert named.steering.structured_outputs == {"json": LOOK["function"]["parameters"]}  # type: ignore[index]
    any_of = wishes(tools=[LOOK], tool_choice="required", parallel_tool_calls=False)
    assert any_of.forced == "*"
    assert any_of.steering.structured_outputs["json"]["maxItems"] == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"best_of": 3}, "best_of"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"n": 5}, "n"),
        ({"n": 0}, "n"),
        ({"n": "two"}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}, "tools": [LOOK]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [LOOK], "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        wishes(**body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param in refused.value.message
