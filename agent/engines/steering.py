"""What a caller may ask of an engine beyond `agent.episode.SamplingParams`. No episode keeps it, and none is learned
from: the learner can't reproduce the distribution. Log-probs of more tokens are the exception; they change nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Steering(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Under vLLM's names, with the values that mean nothing. The `local` engine knows all but `structured_outputs`.

    `logit_bias`: token id to what is added to its logit. `structured_outputs`: one of `json`, `json_object`, `regex`,
    `choice`, `grammar`. `top_logprobs`: how many of the likeliest tokens are told beside the sampled one.
    """

    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    structured_outputs: dict[str, Any] | None = None
    top_logprobs: int = 0

    @property
    def params(self) -> dict[str, Any]:
        """The part of vLLM's sampling parameters that says so."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        # One more than is wanted: the sampled token comes first, whether it is one of the likeliest or not.
        if top := params.pop("top_logprobs", 0):
            params["logprobs"] = top + 1
        return params

    @property
    def changes(self) -> bool:
        """Whether tokens are drawn from another distribution than the sampling parameters say."""
        return msgspec.structs.replace(self, top_logprobs=0) != Steering()


NO_STEERING = Steering()
