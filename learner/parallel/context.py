"""Context parallelism: each of several ranks computes a part of every row's tokens.

All of them hold whole rows of ids, masks and recorded log-probs. A rank runs the model on its own part; around
attention the parts are exchanged for heads (Ulysses, arXiv 2309.14509), and what is one number a token is gathered at
the end. Every rank then has the same loss and adds the terms of its part: a parameter's gradient is the sum over parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad

from learner.parallel.layout import layout_of

PAD = 0
"""The id of tokens behind a row's end; causal attention never sees them from before."""


class Parts:
    """Into how many parts each row's tokens are cut, and which one (`place`) is this rank's.

    A row is padded to a multiple of `size`; part i holds its i-th stretch. `Parts()` is the whole row on one rank.
    """

    def __init__(self, size: int = 1, place: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.size = size
        self.place = place
        self.group = group
        self.apart = size > 1  # False within `together`

    @classmethod
    def of(cls, accelerator: Accelerator) -> Parts:
        """Those of an accelerator's layout. If there are parts, a rank's first call is a collective of all ranks."""
        layout = layout_of(accelerator)
        if layout.context == 1:
            return WHOLE
        if accelerator not in _PARTS:
            limit: timedelta | None = getattr(accelerator.init_handler, "timeout", None)
            group, _ = dist.new_subgroups_by_enumeration(layout.context_groups, timeout=limit)
            _PARTS[accelerator] = cls(layout.context, layout.part(accelerator.process_index), group)
        return _PARTS[accelerator]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within it every rank computes whole rows, as on a rank that has no group."""
        before, self.apart = self.apart, False
        try:
            yield
        finally:
            self.apart = before

    def leave(self) -> None:
        """Let the group of processes go, before it ends."""
        self.group, self.apart = None, False

    def width(self, tokens: int) -> int:
        """How many tokens of a row of `tokens` each part has, those of the padding counted."""
        return -(-tokens // self.size) if self.apart else tokens

    def cut(self, whole: Tensor, fill: int = PAD) -> Tensor:
        """This rank's part [B,t,...] of a tensor [B,T,...] that all ranks of the group hold, padded with `fill`."""
        if not self.apart:
            return whole
        width = self.width(whole.shape[1])
        padded = pad(whole, (0, 0) * (whole.dim() - 2) + (0, width * self.size - whole.shape[1]), value=fill)
        return padded[:, self.place * width : (self.place + 1) * width]

    def inputs(self, input_ids: Tensor) -> dict[str, Tensor]:
        """What a model is called with for this rank's part of `input_ids` [B,T]: ids, and where they stand."""
        own = self.cut(input_ids)
        if not self.apart:
            return {"input_ids": own}
        positions = torch.arange(own.shape[1], device=own.device) + self.place * own.shape[1]
        return {"input_ids": own, "position_ids": positions[None]}

    def gather(self, own: Tensor, tokens: int) -> Tensor:
        """The rows [B,T] of `tokens` each, from every rank's part [B,t].

        Backwards a rank takes the gradient of its own part and no more: the loss on its side is the same on all.
        """
        if not self.apart:
            return own
        gathered: Tensor = _Gather.apply(own, self)
        return gathered[:, :tokens]

    def heads_for_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """[B,H,t,D] of all heads (each its own H and D) become [B,H/size,T,D] of all tokens, in one exchange."""
        pieces = [t.unflatten(1, (self.size, -1)).movedim(1, 0).flatten(1) for t in tensors]
        taken = _Exchange.apply(torch.cat(pieces, 1), self).split([piece.shape[1] for piece in pieces], 1)
        found = []
        for tensor, piece in zip(tensors, taken, strict=True):
            batch, heads, tokens, size = tensor.shape
            by_part = piece.to(tensor.dtype).view(self.size, batch, heads // self.size, tokens, size)
            found.append(by_part.permute(1, 2, 0, 3, 4).flatten(2, 3))
        return found

    def tokens_for_heads(self, tensor: Tensor) -> Tensor:
        """The way back: [B,T,H/size,D] of all tokens become [B,t,H,D] of all heads."""
        by_part = tensor.unflatten(1, (self.size, -1)).movedim(1, 0)
        taken = _Exchange.apply(by_part.flatten(1), self).view(by_part.shape)
        return taken.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def heads_repeated(self, heads: int, key_value_heads: int) -> int:
        """How often each key-value head is repeated, so that every part has those that its query heads look at.

        Raises `ValueError` if the query heads cannot be cut into as many parts.
        """
        if heads % self.size:
            raise ValueError(f"{heads} attention heads cannot be cut into {self.size} parts")
        return self.size // math.gcd(key_value_heads, self.size)


WHOLE = Parts()
"""No parts: what a module starts with."""

_PARTS: WeakKeyDictionary[Accelerator, Parts] = WeakKeyDictionary()


def leave_parts(accelerator: Accelerator) -> None:
    """Let go of the group of an accelerator's parts, if it has any, before the processes' groups end."""
    if accelerator in _PARTS:
        _PARTS.pop(accelerator).leave()


def _exchange(pieces: Tensor, parts: Parts) -> Tensor:
    taken = torch.empty_like(pieces, memory_format=torch.contiguous_format)
    dist.all_to_all_single(taken, pieces.contiguous(), group=parts.group)
    return taken


class _Exchange(torch.autograd.Function):
    """Piece i goes to part i, whose piece for this rank comes in its place; gradients go home the same way."""

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, parts: Parts) -> Tensor:
        ctx.parts = parts
        return _exchange(pieces, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.parts), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, parts: Parts) -> Tensor:
        ctx.stretch = slice(parts.place * own.shape[1], (parts.place + 1) * own.shape[1])
        found = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(parts.size)]
        dist.all_gather(found, own.contiguous(), group=parts.group)
        return torch.cat(found, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][:, ctx.stretch], None


def following(tokens: Tensor) -> Tensor:
    """[B,T] moved one to the left: at t what stands at t+1, and nothing (0, False) at the end."""
    return pad(tokens[:, 1:], (0, 1))


def preceding(tokens: Tensor) -> Tensor:
    """[B,T] moved one to the right: at t what stands at t-1, and 0 at the start."""
    return pad(tokens[:, :-1], (1, 0))
