"""Floating-point operations of a step, counted from the shapes of a model's parameters. Pure functions.

    one row ─▶ forward ─▶ what its backward pass takes more, where a gradient flows ─▶ a step: a sum of passes

Counted are matrix products, a multiply-add as two: those of weights, of attention, of the vocabulary. Causal attention
counts the pairs that a token may see, and padding counts nothing: what a kernel does beyond that is not the model's.
`tests/learner/model/test_flops.py` holds the count against torch's own counter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from learner.model.critic import parameter_kind

_LAYER = re.compile(r"\.(\d+)\.")
_LAST = re.compile(r"\.(o_proj|out_proj|c_proj|down_proj|w2|wo|dense_4h_to_h)\b")
_BEFORE_LAYERS, _BEHIND_LAYERS = (-1, 0), (10**9, 0)


@dataclass(frozen=True)
class Product:
    """Matrix products of one place of a model: multiply-adds a token, and which of its three passes are needed.

    `trained`: its weight has a gradient. `reached`: so has its input, since something before it is trained. `last`:
    nothing in its layer needs its result for a gradient, so it is not made again where the layer is.
    """

    size: float
    trained: bool
    reached: bool
    last: bool = False

    @property
    def backward(self) -> float:
        """Multiply-adds a token of its backward pass."""
        return self.size * (self.trained + self.reached)


@dataclass(frozen=True)
class Attention:
    """Attention proper of one layer: multiply-adds for each pair of tokens; see `Product`. `window`: how far back a
    token sees, None: to the row's start."""

    size: float
    reached: bool
    window: int | None

    @property
    def backward(self) -> float:
        """Multiply-adds for each pair of its backward pass: two products for each of the forward's."""
        return 2 * self.size * self.reached


@dataclass(frozen=True)
class Work:
    """What a module computes: the products of its layers, their attention, and those of its head.

    The head of a policy sees the tokens that are actions, and that of a critic every token.
    """

    products: tuple[Product, ...]
    attention: tuple[Attention, ...]
    head: Product

    @classmethod
    def of(cls, module: nn.Module, config: Any) -> Work:
        """Of a `PolicyForward` or a `CriticForward` as it is trained, over a model of this transformers configuration.

        Weights may be cut over ranks, or have no memory (the meta device): only shapes are read.
        """
        text = config.get_text_config()
        places: dict[tuple[int, int], list[tuple[float, bool, bool]]] = {}
        first_trained, head = _BEHIND_LAYERS, 0.0
        head_trained = False
        for name, parameter in module.named_parameters():
            kind, place = _kind(name), _place(name)
            if parameter.requires_grad:
                first_trained = min(first_trained, place)
            if parameter.dim() < 2:
                continue
            if kind == "head" or (kind == "embedding" and _is_tied(text, module)):
                head, head_trained = float(parameter.shape.numel()), parameter.requires_grad
            elif kind != "embedding":
                size = _multiply_adds(name, parameter, text) if kind == "experts" else float(parameter.shape.numel())
                places.setdefault(place, []).append((size, parameter.requires_grad, kind == "mlp" and place[1] == 3))
        products = [
            Product(size, trained, reached=first_trained < place, last=last)
            for place, found in sorted(places.items())
            for size, trained, last in found
        ]
        attention = []
        for layer in range(text.num_hidden_layers):
            reached = first_trained < (layer, 1)  # by what stands before it, its own projections among them
            if pairs := _attention_size(text, layer):
                attention.append(replace(pairs, reached=reached))
        return cls(tuple(products), tuple(attention), Product(head, head_trained, first_trained < _BEHIND_LAYERS))

    def forward(self, lengths: Sequence[int], actions: Sequence[int]) -> float:
        """Operations of a forward over rows of these lengths, of whose tokens `actions` reach the head."""
        per_token = sum(product.size for product in self.products)
        pairs = sum(layer.size * _pairs(lengths, layer.window) for layer in self.attention)
        return 2.0 * (per_token * sum(lengths) + pairs + self.head.size * sum(actions))

    def backward(self, lengths: Sequence[int], actions: Sequence[int]) -> float:
        """Operations of a backward pass behind it, without a forward that is made again."""
        per_token = sum(product.backward for product in self.products)
        pairs = sum(layer.backward * _pairs(lengths, layer.window) for layer in self.attention)
        return 2.0 * (per_token * sum(lengths) + pairs + self.head.backward * sum(actions))

    def layers_forward(self, lengths: Sequence[int]) -> float:
        """Operations of what is made again of a forward where layers keep their inputs only."""
        last = sum(product.size for product in self.products if product.last)
        return self.forward(lengths, [0] * len(lengths)) - 2.0 * last * sum(lengths)


@dataclass(frozen=True)
class Passes:
    """How often a step goes through a module: `updates` with a backward pass each, and `reads` without."""

    updates: int
    reads: int


@dataclass(frozen=True)
class StepFlops:
    """Operations of one step over the whole batch. `model`: what the method asks for; `again`: what is computed a
    second time to save memory, in layers or before the vocabulary."""

    model: float = 0.0
    again: float = 0.0

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(self.model + other.model, self.again + other.again)


def module_flops(
    work: Work,
    passes: Passes,
    lengths: Sequence[int],
    actions: Sequence[int],
    *,
    recompute_layers: bool = False,
    logits_again: int = 0,
) -> StepFlops:
    """Of one module in a step. `actions`: tokens of each row that reach the head (all of them, for a critic), of which
    `logits_again` do so once more in the backward pass."""
    forward = work.forward(lengths, actions)
    model = (passes.updates + passes.reads) * forward + passes.updates * work.backward(lengths, actions)
    again = passes.updates * (work.layers_forward(lengths) * recompute_layers + 2.0 * work.head.size * logits_again)
    return StepFlops(model, again)


def _kind(name: str) -> str:
    own = name.removeprefix("body.").removeprefix("model.")
    return parameter_kind(own.replace(".base_layer.", "."))  # what adapters were put on


def _place(name: str) -> tuple[int, int]:
    """Where in a forward a parameter stands: its layer, and in there 0 (before attention), 1 (behind it), 2 and 3 (the
    MLP's first and last matrices)."""
    kind, layer = _kind(name), _LAYER.search(name)
    if kind == "head":
        return _BEHIND_LAYERS
    if layer is None:
        return _BEHIND_LAYERS if kind == "norm" else _BEFORE_LAYERS
    last = bool(_LAST.search(name))
    behind = 2 if kind in ("mlp", "experts", "router") or "post_attention" in name else 0
    return int(layer.group(1)), behind + last


def _is_tied(text: Any, module: nn.Module) -> bool:
    """Whether the embedding is the head too: a policy's only, whose head is then no parameter of its own."""
    return bool(getattr(text, "tie_word_embeddings", False)) and not hasattr(module, "head")


def _multiply_adds(name: str, parameter: nn.Parameter, text: Any) -> float:
    """Of one token, in experts: only those that it goes to."""
    shape = parameter.shape
    if "shared_expert" in name:
        return float(shape.numel())
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    if len(shape) == 3:  # all experts in one tensor, of which a rank may see its own only
        return float(chosen * shape[1] * shape[2])
    return float(shape.numel() * chosen / experts)


def _attention_size(text: Any, layer: int) -> Attention | None:
    kinds = getattr(text, "layer_types", None)
    kind = kinds[layer] if kinds else "full_attention"
    if "linear" in kind or "attention" not in kind:
        return None  # its products are counted, its state is small
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    queries = getattr(text, "qk_head_dim", None) or head_dim
    values = getattr(text, "v_head_dim", None) or head_dim
    window = getattr(text, "sliding_window", None) if "sliding" in kind else None
    return Attention(float(text.num_attention_heads * (queries + values)), reached=False, window=window)


def _pairs(lengths: Sequence[int], window: int | None) -> float:
    """Pairs of a token and one that it sees, itself included."""
    if window is None:
        return sum(n * (n + 1) / 2 for n in lengths)
    return sum(min(n, window) * (min(n, window) + 1) / 2 + max(n - window, 0) * window for n in lengths)
