"""The two forwards of the learner: log-probs of actions under a policy, values under a critic.

Both take rows of whole episodes, padded on the right. Under causal attention a token never sees what stands
behind it, so no attention mask is needed and every attention implementation works.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def _selected_logprobs(hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature
    log_z = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
    with torch.no_grad():
        probabilities = torch.softmax(logits, dim=-1)
        entropy = log_z - (probabilities * logits).sum(-1)
    return logprobs, entropy


class PolicyForward(nn.Module):
    """A causal LM seen as a policy: `forward` gives the log-prob of every action token.

    Only positions that predict an action reach the vocabulary, in chunks of `chunk` positions whose logits are
    computed again in the backward pass: memory is bounded by chunk x vocabulary, whatever the length.
    """

    def __init__(self, model: Any, *, temperature: float = 1.0, chunk: int = 8192) -> None:
        super().__init__()
        self.model: Any = model
        self.temperature = temperature
        self.chunk = chunk

    def forward(self, input_ids: Tensor, action_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (logprobs[B,T], entropy[B,T]) in float32; both are 0 off the mask, entropy has no gradient.

        `logprobs[b,t]` scores token t given the tokens before it, at the rollout's temperature.
        """
        body, head = self.model.base_model, self.model.get_output_embeddings()
        hidden = body(input_ids=input_ids, use_cache=False).last_hidden_state
        # A first token has nothing before it and is never an action.
        rows, columns = torch.nonzero(action_mask[:, 1:], as_tuple=True)
        selected, targets = hidden[rows, columns], input_ids[rows, columns + 1]
        pieces, entropies = [], []
        for start in range(0, len(rows), self.chunk):
            part = slice(start, start + self.chunk)
            arguments = (selected[part], head, targets[part], self.temperature)
            recompute = torch.is_grad_enabled() and len(rows) > self.chunk
            if recompute:
                logprobs, entropy = checkpoint(_selected_logprobs, *arguments, use_reentrant=False)
            else:
                logprobs, entropy = _selected_logprobs(*arguments)
            pieces.append(logprobs)
            entropies.append(entropy)
        flat = torch.cat(pieces) if pieces else hidden.new_zeros(0, dtype=torch.float32)
        result = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)
        result = result.index_put((rows, columns + 1), flat)
        spread = torch.zeros_like(result)
        if entropies:
            spread = spread.index_put((rows, columns + 1), torch.cat(entropies))
        # Keeps an empty micro-batch in the graph, so that no rank skips a collective.
        return result + 0.0 * hidden.sum().float(), spread


class CriticForward(nn.Module):
    """The policy's body under a float32 head that gives one number a token.

    `forward` returns values[B,T]: `values[b,t]` is the value of the state in which token t was chosen, i.e. the
    head's output at t-1, so that the first action of a turn has seen the observation before it. `values[:,0]` is 0.
    """

    def __init__(self, body: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (values[B,T], next_values[B,T]); `next_values[b,t]` is the value of the state after token t."""
        hidden = self.body(input_ids=input_ids, use_cache=False).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            after = self.head(hidden.float()).squeeze(-1)
        return torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], dim=1), after
