"""What callers ask beyond temperature: each bends only its own row, as vLLM's formulas say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from agent.engines.local.scheduler import Generation
from agent.engines.local.steered import note_likeliest, steered
from agent.engines.steering import Steering
from agent.engines.wire import generate_body
from agent.episode import SamplingParams

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.0]])


def generation(sampled: tuple[int, ...] = (), **wanted: Any) -> Generation:
    made = Generation.new("g", [3], SamplingParams(), frozenset({0}), 100)
    made.tokens += sampled
    made.steering = Steering(**wanted)
    return made


@pytest.mark.parametrize(
    ("sampled", "wanted", "expected"),
    [
        ((2, 2, 1), {"presence_penalty": 0.5}, [2.0, -1.5, 0.0, 0.0]),
        ((2, 2, 1), {"frequency_penalty": 0.5}, [2.0, -1.5, -0.5, 0.0]),
        ((1, 2), {"repetition_penalty": 2.0}, [2.0, -2.0, 0.25, 0.0]),
        ((), {"logit_bias": {1: 5.0}}, [2.0, 4.0, 0.5, 0.0]),
        ((), {"min_tokens": 1}, [-torch.inf, -1.0, 0.5, 0.0]),
        ((1,), {"min_tokens": 1}, [2.0, -1.0, 0.5, 0.0]),
        ((), {"min_p": 0.2}, [2.0, -torch.inf, 0.5, -torch.inf]),
    ],
)
def test_a_row_is_bent_as_it_asks_and_its_neighbour_is_not(sampled: Any, wanted: Any, expected: list[float]) -> None:
    logits = LOGITS.repeat(2, 1)
    bent = steered(logits, [generation(sampled, **wanted), generation(sampled)])
    torch.testing.assert_close(bent, torch.tensor([expected, LOGITS[0].tolist()]))
    torch.testing.assert_close(logits, LOGITS.repeat(2, 1))


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    assert steered(LOGITS, [generation(top_logprobs=2)]) is LOGITS


def test_the_likeliest_are_told_with_the_drawn_one_first_and_without_what_cannot_be() -> None:
    logprobs = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).log()
    asking = generation(top_logprobs=4)
    note_likeliest(logprobs, [asking], [1])
    assert [token for token, _ in asking.top[0]] == [1, 0, 2]


def test_a_runtimes_request_says_nothing_of_it() -> None:
    plain = generate_body("r", (1,), SamplingParams(), stream=False)
    assert plain == generate_body("r", (1,), SamplingParams(), stream=False, steering=Steering())
    params = msgspec.json.decode(
        generate_body("r", (1,), SamplingParams(), stream=True, steering=Steering(logit_bias={7: 1.0}, top_logprobs=2))
    )["sampling_params"]
    assert (params["logit_bias"], params["logprobs"]) == ({"7": 1.0}, 3)
