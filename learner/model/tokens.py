"""Which tokens a body computes: none of padding where rows are packed, and in its last layer only those that are read.

Both leave every number that is read what it was, up to the order of sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from learner.config import RecipeError
from learner.model.attention import ATTENDS_TO_TOKENS, DEPENDS_ON_THE_LONGEST

SAME = 0.05
"""By how much of their mean size hidden states may differ and be the same: bfloat16 is far below, a fault far above."""


class _Picked(torch.autograd.Function):
    """The rows `places` [n] of [N,D], each at most once: so that backwards they are put, not added up."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(tokens)
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return _put(gradients[0], places, ctx.count), None


class _Placed(torch.autograd.Function):
    """The way back: [n,D] at the rows `places` of [N,D], and 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        return _put(tokens, places, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0].index_select(0, places), None, None


def _put(tokens: Tensor, places: Tensor, count: int) -> Tensor:
    return tokens.new_zeros(count, tokens.shape[1]).index_copy_(0, places, tokens)


def picked(tokens: Tensor, places: Tensor) -> Tensor:
    """The rows `places` [n] of [N,D], each at most once."""
    found: Tensor = _Picked.apply(tokens, places)
    return found


class LastLayer:
    """The MLP (or experts) of a body's last layer, computed for the tokens that are read alone.

    No token sees another behind the last attention, so what the MLP makes of a token that nobody reads is work for
    nothing. Those have 0 in its place.
    """

    def __init__(self, mlp: Any) -> None:
        self.places: Tensor | None = None  # among all tokens of the forward; None: all of them
        mlp.forward = partial(self._forward, mlp.forward)

    @classmethod
    def of(cls, body: Any) -> LastLayer | None:
        """Change `body` so, where it can be; None where it stays as it is: layers that are computed again in the
        backward pass, or no MLP that looks at one token at a time, which is tried on one short row."""
        layer = next(reversed(getattr(body, "layers", None) or [None]))
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, nn.Module) or "forward" in vars(layer) or "forward" in vars(mlp):
            return None
        found = cls(mlp)
        device = next(body.parameters()).device
        row = torch.arange(1, 7, device=device)[None] % body.config.get_text_config().vocab_size
        places = torch.tensor([1, 4], device=device)
        try:
            with torch.no_grad():
                whole = body(input_ids=row, use_cache=False).last_hidden_state[0, places].float()
                found.places = places
                own = body(input_ids=row, use_cache=False).last_hidden_state[0, places].float()
        except (RuntimeError, TypeError, ValueError, IndexError):  # an MLP that wants more than hidden states [1,n,D]
            own, whole = torch.ones(1), torch.zeros(1)
        found.places = None
        if not float((own - whole).abs().mean()) <= SAME * float(whole.abs().mean()):
            del mlp.forward
            return None
        return found

    def _forward(self, forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.places is None:
            return forward(hidden, *args, **kwargs)
        tokens = hidden.flatten(0, -2)
        found = forward(picked(tokens, self.places)[None], *args, **kwargs)
        first, rest = (found, None) if isinstance(found, Tensor) else (found[0], found[1:])
        placed = _Placed.apply(first.flatten(0, -2), self.places, len(tokens)).view(hidden.shape)
        return placed if rest is None else (placed, *rest)


class PackedRows:
    """Rows [B,T] of `lengths` [B] as one row of S tokens without padding, and the way back.

    Each begins at position 0. From that transformers knows where rows end: its flash attention takes them by `varlen`,
    the others get masks of blocks along the diagonal.
    """

    def __init__(self, lengths: Tensor, width: int, device: torch.device) -> None:
        self.lengths = lengths.to(device)
        self.positions = torch.arange(width, device=device).expand(len(lengths), width)
        self.within = self.positions < self.lengths[:, None]

    def pack(self, rows: Tensor) -> Tensor:
        """[S,...] of [B,T,...]."""
        return rows[self.within]

    def unpack(self, packed: Tensor) -> Tensor:
        """[B,T] of [S], 0 where a row has ended."""
        return packed.new_zeros(self.within.shape).masked_scatter(self.within, packed)

    def inputs(self, input_ids: Tensor) -> dict[str, Any]:
        """What a model is called with for `input_ids` [B,T]."""
        ends = pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)
        longest = int(self.lengths.max())
        return {
            "input_ids": self.pack(input_ids)[None],
            "position_ids": self.pack(self.positions)[None],
            # The same once more as flash attention wants it, or each layer would look for it.
            **{"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest},
        }


def require_packable(body: Any) -> None:
    """Raise `RecipeError`, naming the key, for a model of which a row would see others packed before it."""
    config, key = body.config.get_text_config(), "learner.packing: packed"
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENDS_TO_TOKENS
    if kinds:
        raise RecipeError(
            f"{key}: the model has layers of {', '.join(sorted(kinds))}, whose state would run from one row into the "
            "next. Write learner.packing=buckets"
        )
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") in DEPENDS_ON_THE_LONGEST:
        raise RecipeError(
            f"{key}: the model's positions depend on how long its input is, and rows of any length share one. Write "
            "learner.packing=buckets"
        )


def packs_rows(packing: str | None, attention: str) -> bool:
    """Whether rows are packed under `learner.packing`; None: where `attention` (transformers' name) knows where rows
    end. Elsewhere it would look at every pair of tokens of a micro-batch, to mask those of different rows."""
    return attention.startswith("flash_attention") if packing is None else packing == "packed"
