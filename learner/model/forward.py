"""The two forwards of the learner: log-probs of actions under a policy, values under a critic.

Both take rows of whole episodes, padded on the right. Under causal attention a token never sees what stands
behind it, so no attention mask is needed and every attention implementation works. Where rows are `packed` and their
`lengths` given, the body gets them without the padding. Where tokens are cut into parts (`InParts`), body, head and
vocabulary see this rank's part; the answers are whole on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learner.config import RecipeError
from learner.model.attention import attend_in_parts
from learner.model.routing import Routing
from learner.model.tokens import SAME, LastLayer, PackedRows, picked, require_packable
from learner.parallel.context import WHOLE, Parts, following, preceding

_WORKSPACE = {"cpu": 2**19, "other": 2**26}
"""Logits that are looked at together: what fits into a core's cache, and what keeps a GPU busy."""


class _SelectedLogprobs(torch.autograd.Function):
    """Log-probs of `targets` [N] under `logits` [N,V] at a temperature, and their entropy, in one copy of the logits.

    A few rows at a time are worked on, so that no second tensor [N,V] is made. The backward pass writes the gradient
    over the logits that were kept; a second one through the same graph is an error of autograd's own.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, wants_entropy: bool) -> Any:
        log_z = logits.new_empty(len(logits))
        entropy = torch.zeros_like(log_z)
        for rows in _slices(logits):
            part = _tempered(logits[rows], temperature)
            log_z[rows] = torch.logsumexp(part, dim=-1)
            if wants_entropy:
                entropy[rows] = log_z[rows] - torch.softmax(part, dim=-1).mul_(part).sum(-1)
        ctx.save_for_backward(logits, targets, log_z)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        selected = _tempered(logits.gather(-1, targets[:, None]).squeeze(-1), temperature)
        return selected - log_z, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        gradient = gradients[0]
        if gradient is None:
            return None, None, None, None
        logits, targets, log_z = ctx.saved_tensors
        for rows in _slices(logits):
            part = logits[rows]
            if ctx.temperature != 1.0:
                part.div_(ctx.temperature)
            part.sub_(log_z[rows, None]).exp_().mul_(-gradient[rows, None])
        logits.scatter_add_(-1, targets[:, None], gradient[:, None])
        if ctx.temperature != 1.0:
            logits.div_(ctx.temperature)
        return logits, None, None, None


def _slices(logits: Tensor) -> Iterator[slice]:
    size = _WORKSPACE.get(logits.device.type, _WORKSPACE["other"])
    step = max(1, size // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def selected_logprobs(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float = 1.0, wants_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Float32 log-probs [N] of `targets` [N] that `head` gives behind `hidden` [N,H], and entropies [N] (else 0)."""
    return _SelectedLogprobs.apply(head(hidden).float(), targets, temperature, wants_entropy)


def _with_entropy_gradient(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same, where the entropy is part of the loss: with all the copies that its gradient takes."""
    logits = head(hidden).float() / temperature
    log_z = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
    entropy = log_z - (torch.softmax(logits, dim=-1) * logits).sum(-1)
    return logprobs, entropy


class InParts(nn.Module):
    """A forward that may be one rank's part of a whole (see `learner.parallel.context`), or of packed rows."""

    parts: Parts = WHOLE
    packed = False  # whether a forward that is told the rows' lengths packs them

    def _body(self) -> Any:
        raise NotImplementedError

    def _try(self, input_ids: Tensor, lengths: Tensor | None = None) -> None:
        """One forward of no consequence, as anyone calls it."""
        raise NotImplementedError

    def _rows(self, input_ids: Tensor, lengths: Tensor | None) -> PackedRows | None:
        """How the rows [B,T] are packed, None where they are not."""
        if not self.packed or lengths is None:
            return None
        return PackedRows(lengths, input_ids.shape[1], input_ids.device)

    def _hidden(self, input_ids: Tensor, rows: PackedRows | None = None) -> Tensor:
        """The body's last hidden states [B,t,D] of this rank's part of the rows [B,T], or [1,S,D] of packed ones."""
        inputs = self.parts.inputs(input_ids) if rows is None else rows.inputs(input_ids)
        hidden: Tensor = self._body()(**inputs, use_cache=False).last_hidden_state
        return hidden

    def pack_rows(self) -> None:
        """Pack rows from now on, wherever their lengths are given.

        Raises `RecipeError`, naming the key, if the model does not compute the same so: it is tried on two short rows.
        """
        require_packable(self._body())
        device = next(self.parameters()).device
        ids = torch.arange(1, 13, device=device).view(2, 6) % self._body().config.get_text_config().vocab_size
        lengths = torch.tensor([6, 4])
        seen: list[Tensor] = []
        watch = self._body().register_forward_hook(lambda *call: seen.append(call[-1].last_hidden_state.detach()))
        with torch.no_grad(), watch:
            self._try(ids)
            self.packed = True
            self._try(ids, lengths)
        alone, packed = PackedRows(lengths, 6, device).pack(seen[0]).float(), seen[1][0].float()
        difference = float((packed - alone).abs().mean() / alone.abs().mean())
        if not difference < SAME:
            self.packed = False
            raise RecipeError(
                f"learner.packing: packed, {type(self._body()).__name__} computes something else of a row than alone "
                f"(hidden states differ by {difference:.2g} of their size). Write learner.packing=buckets"
            )

    def cut_into(self, parts: Parts) -> None:
        """Compute only this rank's part of every row's tokens from now on; a collective of the group of `parts`.

        Raises `RecipeError`, naming the key, if the model does not compute the same so: it is tried on one short row.
        """
        attend_in_parts(self._body(), parts)
        self.parts = parts
        device = next(self.parameters()).device
        row = torch.arange(1, 4 * parts.size, device=device)[None] % self._body().config.get_text_config().vocab_size
        seen: list[Tensor] = []
        watch = self._body().register_forward_hook(lambda *call: seen.append(call[-1].last_hidden_state.detach()))
        with torch.no_grad(), watch:
            self._try(row)
            with parts.together():
                self._try(row)
            own, whole = parts.gather(seen[0], row.shape[1]).float(), seen[1].float()
        difference = float((own - whole).abs().mean() / whole.abs().mean())
        if not difference < SAME:
            raise RecipeError(
                f"hardware.context: cut into {parts.size} parts, {type(self._body()).__name__} computes something else "
                f"than on whole rows (hidden states differ by {difference:.2g} of their size). Write hardware.context=1"
            )


class PolicyForward(InParts):
    """A causal LM seen as a policy: `forward` gives the log-prob of every action token.

    Only positions that predict an action reach the vocabulary, in chunks of `chunk` positions whose logits are
    computed again in the backward pass: memory is bounded by chunk x vocabulary, whatever the length.
    """

    def __init__(
        self, model: Any, *, temperature: float = 1.0, chunk: int = 8192, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        self.entropy_gradient = entropy_gradient
        self.model: Any = model
        self.temperature = temperature
        self.chunk = chunk
        self.routing: Routing | None = None
        self.last_layer: LastLayer | None = None

    def _body(self) -> Any:
        return self.model.base_model

    def _try(self, input_ids: Tensor, lengths: Tensor | None = None) -> None:
        self(input_ids, torch.zeros_like(input_ids, dtype=torch.bool), lengths=lengths)

    def forward(
        self,
        input_ids: Tensor,
        action_mask: Tensor,
        experts: Tensor | None = None,
        *,
        entropy: bool = True,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (logprobs[B,T], entropy[B,T]) in float32; both are 0 off the mask. Entropy has a gradient where
        `entropy_gradient` asks for one.

        `logprobs[b,t]` scores token t given the tokens before it, at the rollout's temperature. `experts`: see
        `Batch.experts`; only a model whose `routing` is watched reads them. With `entropy=False` the second is 0
        everywhere, and costs nothing. `lengths` [B] of the rows: see `packed`.
        """
        # A position scores the token after it. A first token has nothing before it and is never an action.
        chosen, after = self.parts.cut(following(action_mask)), self.parts.cut(following(input_ids))
        rows, places = self._rows(input_ids, lengths), _places(chosen)
        among = places if rows is None else _places(rows.pack(chosen))  # the tokens that the body has
        head = self.model.get_output_embeddings()
        with self._routed(action_mask, experts, rows), self._reading(among):
            hidden = self._hidden(input_ids, rows)
        selected, targets = picked(hidden.flatten(0, 1), among), after.flatten()[places]
        pieces, entropies = [], []
        # Rows without an action reach the head too, with no position: no rank may skip a weight that is cut or shared.
        for start in range(0, max(len(places), 1), self.chunk):
            part = slice(start, start + self.chunk)
            arguments: tuple[Any, ...] = (selected[part], head, targets[part], self.temperature)
            score: Callable[..., tuple[Tensor, Tensor]] = _with_entropy_gradient
            if not self.entropy_gradient:
                score, arguments = selected_logprobs, (*arguments, entropy)
            if torch.is_grad_enabled() and len(places) > self.chunk:
                found = checkpoint(score, *arguments, use_reentrant=False)
            else:
                found = score(*arguments)
            pieces.append(found[0])
            entropies.append(found[1])
        nothing, width = torch.zeros(chosen.numel(), dtype=torch.float32, device=input_ids.device), input_ids.shape[1]
        whole = (nothing.index_copy(0, places, torch.cat(found)).view(chosen.shape) for found in (pieces, entropies))
        scores, entropy_rows = (preceding(self.parts.gather(found, width)) for found in whole)
        return scores, entropy_rows

    def _routed(
        self, action_mask: Tensor, experts: Tensor | None, rows: PackedRows | None
    ) -> contextlib.AbstractContextManager[None]:
        if self.routing is None:
            return contextlib.nullcontext()
        recorded = None if experts is None else self.parts.cut(experts.to(action_mask.device), fill=-1)
        counts = self.parts.cut(action_mask)
        if rows is not None:
            recorded, counts = None if recorded is None else rows.pack(recorded)[None], rows.pack(counts)[None]
        return self.routing.of(recorded, counts)

    @contextlib.contextmanager
    def _reading(self, places: Tensor) -> Iterator[None]:
        """Within it the last layer computes these places alone, or one where there is none: no weight is skipped.

        Not where its router is watched or told what to choose, token by token.
        """
        if self.last_layer is None or self.routing is not None:
            yield
            return
        self.last_layer.places = places if len(places) else torch.zeros(1, dtype=torch.int64, device=places.device)
        try:
            yield
        finally:
            self.last_layer.places = None


def _places(chosen: Tensor) -> Tensor:
    return torch.nonzero(chosen.flatten()).squeeze(1)


class CriticForward(InParts):
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

    def _body(self) -> Any:
        return self.body

    def _try(self, input_ids: Tensor, lengths: Tensor | None = None) -> None:
        self(input_ids, lengths=lengths)

    def forward(self, input_ids: Tensor, *, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (values[B,T], next_values[B,T]); `next_values[b,t]` is the value of the state after token t.

        `lengths` [B] of the rows: see `packed`; what stands behind a packed row's end is 0.
        """
        rows = self._rows(input_ids, lengths)
        hidden = self._hidden(input_ids, rows)
        with torch.autocast(hidden.device.type, enabled=False):
            after = self.head(hidden.float()).squeeze(-1)
        after = self.parts.gather(after, input_ids.shape[1]) if rows is None else rows.unpack(after[0])
        return preceding(after), after
