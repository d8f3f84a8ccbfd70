"""What callers ask beyond temperature, top-p and top-k: logits bent before a token is drawn, likeliest tokens told."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agent.engines.local.scheduler import Generation
from agent.engines.steering import Steering

MAX_LOGPROBS = 21
"""Of how many tokens log-probs may be asked for: OpenAI's 20, and the sampled one."""


@torch.inference_mode()
def steered(logits: Tensor, generations: Sequence[Generation]) -> Tensor:
    """`logits` float32[R, V] as the row's generation asks for; the same tensor where none asks."""
    if not any(generation.steering.changes for generation in generations):
        return logits
    logits = logits.clone()
    for row, generation in zip(logits, generations, strict=True):
        if generation.steering.changes:
            _steer(row, generation, generation.steering)
    return logits


def _steer(row: Tensor, generation: Generation, wanted: Steering) -> None:
    """Penalties first, then biases, as vLLM does; `row` float32[V] is changed in place."""
    sampled = torch.tensor(generation.sampled, dtype=torch.int64, device=row.device)
    if wanted.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(generation.tokens)), dtype=torch.int64, device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / wanted.repetition_penalty, values * wanted.repetition_penalty)
    counts = torch.bincount(sampled, minlength=row.shape[0])[: row.shape[0]]
    row -= wanted.frequency_penalty * counts + wanted.presence_penalty * (counts > 0)
    for token, bias in wanted.logit_bias.items():
        row[token] += bias
    if len(sampled) < wanted.min_tokens:
        row[list(generation.stop_token_ids)] = -torch.inf
    if wanted.min_p > 0:
        temperature = generation.sampling.temperature or 1.0
        row[row < row.max() + temperature * torch.log(torch.tensor(wanted.min_p))] = -torch.inf


@torch.inference_mode()
def note_likeliest(logprobs: Tensor, generations: Sequence[Generation], tokens: Sequence[int]) -> None:
    """Keep in each generation that asks for it the likeliest tokens of `logprobs` float32[R, V], the drawn one first.

    Those that can't be drawn at all (log-prob minus infinity, which no JSON holds) are left out.
    """
    for row, generation, token in zip(logprobs, generations, tokens, strict=True):
        if count := generation.steering.top_logprobs:
            values, ids = row.topk(min(count, row.shape[0]))
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            others = [(i, p) for i, p in pairs if i != token and p > -float("inf")]
            generation.top.append([(token, float(row[token])), *others])
