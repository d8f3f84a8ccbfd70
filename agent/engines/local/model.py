"""The `local` engine's model: a transformers causal LM that reads and writes keys and values in numbered slots.

One forward takes single tokens of many sequences and chunks of others together: all tokens lie in one row, every
per-token layer is transformers' own, and only attention knows which token belongs to which slot. So a model that
goes through transformers' attention interface works unchanged, and admitting a prompt costs no extra forward.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from agent.engines import adapters
from agent.engines.base import EngineFault

_names = itertools.count()
_INITIAL_LENGTH = 256


class ModelError(ValueError):
    """A model folder that this engine can't serve; the message says why."""


@dataclass(slots=True)
class Chunk:
    """Tokens `tokens` of one sequence, at positions `start`, `start + 1`, … of slot `slot`."""

    slot: int
    start: int
    tokens: Sequence[int]


@dataclass(slots=True)
class _Layout:
    """Where the N tokens of a forward lie. The first `singles` are one a sequence, the rest are chunks."""

    slot_of: Tensor  # int64[N]
    position_of: Tensor  # int64[N]
    singles: int
    low: int  # the single tokens' slots lie in [low, high)
    high: int
    dense: bool  # they are exactly low, low+1, …, high-1 in this order
    length: int  # keys of the single tokens' slots that can be seen
    single_mask: Tensor | None  # float[high-low, 1, 1, length]
    chunk_slots: Tensor | None  # int64[P]
    chunk_row: Tensor | None  # int64[N-singles]: chunk of each token
    chunk_column: Tensor | None  # int64[N-singles]: place inside the chunk
    chunk_mask: Tensor | None  # float[P, 1, Q, K]


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: float[slots, kv_heads, length, head_dim], `length` grows by doubling."""

    def __init__(self, owner: SlotModel) -> None:
        super().__init__()
        self._owner = owner
        self.store: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        layout = self._owner.layout
        if self.store is None or self.store[0].shape[2] < self._owner.length:
            self.store = (self._grown(0, key_states), self._grown(1, value_states))
        for target, new in zip(self.store, (key_states, value_states), strict=True):
            target[layout.slot_of, :, layout.position_of] = new[0].transpose(0, 1)
        return self.store

    def _grown(self, which: int, like: Tensor) -> Tensor:
        shape = (self._owner.slots, like.shape[1], self._owner.length, like.shape[3])
        # Zeros, not uninitialised memory: masked positions are multiplied by 0, and 0 * NaN is NaN.
        grown = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if self.store is not None:
            old = self.store[which]
            grown[:, :, : old.shape[2]] = old
        return grown

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._owner.max_context


class SlotModel:
    """A causal LM with a slotted cache.

    Raises `ModelError` for a folder that can't be loaded or a model whose attention the slots can't express.
    """

    def __init__(self, path: Path, *, slots: int, max_context: int, device: str = "cpu") -> None:
        self.slots = slots
        self.length = min(_INITIAL_LENGTH, max_context)
        self.device = torch.device(device)
        try:
            self._config = AutoConfig.from_pretrained(_base(path))
        except (OSError, ValueError) as error:
            raise ModelError(f"no model in {path}: {error}") from error
        trained = getattr(self._config, "max_position_embeddings", None) or max_context
        self.max_context = min(max_context, trained)
        _check_supported(self._config, self.max_context)
        self._attention = f"slots_{next(_names)}"
        AttentionInterface.register(self._attention, self._attend)
        AttentionMaskInterface.register(self._attention, lambda *args, **kwargs: None)
        self.layout: _Layout
        self._model = self.read(path)
        self.vocabulary: int = self._config.get_text_config().vocab_size
        self.eos_token_ids = _eos(self._model)
        # transformers renamed the argument in 5.x.
        self._cache_argument = (
            "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        )
        self._cache = Cache(layers=[_SlotLayer(self) for _ in range(self._config.num_hidden_layers)])
        # A mask with four dimensions is handed through as it is; the attention below makes its own.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)

    def read(self, path: Path) -> PreTrainedModel:
        """Load a snapshot (`model.safetensors`, Hugging Face names; `config.json` optional) beside the present weights,
        or an adapter's folder on its base.

        Raises `ModelError` if a parameter is missing or has another shape.
        """
        if not path.is_dir():
            raise ModelError(f"no such folder: {path}")
        base = _base(path)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                base,
                config=self._config,
                dtype=torch.float32 if self.device.type == "cpu" else None,
                attn_implementation=self._attention,
                output_loading_info=True,
            )
        except Exception as error:  # the loaders raise anything; nothing that is served has been touched yet
            raise ModelError(f"cannot read weights from {path}: {error}") from error
        model: PreTrainedModel
        model, report = loaded
        bad = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "mismatched_keys") if report.get(kind)}
        if bad:
            raise ModelError(f"the snapshot {base} does not fit the model: {bad}")
        if base != path:
            _put_on(model, path)
        torch.nn.Module.to(model, self.device)  # transformers' own `to` is wrapped and loses its types
        return model.eval().requires_grad_(False)

    def swap(self, model: PreTrainedModel) -> None:
        """Serve the weights that `read` returned. The caller decides whether every sequence is computed again."""
        self._model = model

    @torch.inference_mode()
    def forward(self, singles: Sequence[tuple[int, int, int]], chunks: Sequence[Chunk], ends: Sequence[bool]) -> Tensor:
        """Logits float32[R, vocabulary] after each single token (slot, position, token), then after each chunk whose
        `ends` is true. Keys and values of all of them are in their slots afterwards."""
        self.layout, tokens, rows = self._lay_out(singles, chunks, ends)
        out = self._model(
            input_ids=tokens,
            position_ids=self.layout.position_of[None],
            attention_mask=self._no_mask,
            use_cache=True,
            logits_to_keep=rows,
            **{self._cache_argument: self._cache},
        )
        return out.logits[0].float()

    def _lay_out(
        self, singles: Sequence[tuple[int, int, int]], chunks: Sequence[Chunk], ends: Sequence[bool]
    ) -> tuple[_Layout, Tensor, Tensor]:
        n = len(singles)
        lengths = np.array([len(c.tokens) for c in chunks], dtype=np.int64)
        table = np.empty((3, n + int(lengths.sum())), dtype=np.int64)
        if n:
            table[:, :n] = np.array(singles, dtype=np.int64).T
        rows = np.arange(n)
        chunk_slots = chunk_row = chunk_column = chunk_mask = None
        if chunks:
            chunk_row = np.repeat(np.arange(len(chunks)), lengths)
            starts = np.array([c.start for c in chunks], dtype=np.int64)
            offsets = np.cumsum(lengths) - lengths
            chunk_column = np.arange(int(lengths.sum())) - offsets[chunk_row]
            chunk_slots = np.array([c.slot for c in chunks], dtype=np.int64)
            table[0, n:] = chunk_slots[chunk_row]
            table[1, n:] = starts[chunk_row] + chunk_column
            table[2, n:] = np.fromiter(itertools.chain.from_iterable(c.tokens for c in chunks), dtype=np.int64)
            rows = np.concatenate([rows, (n + offsets + lengths - 1)[np.array(ends, dtype=bool)]])
            visible = (
                starts[:, None] + np.arange(lengths.max())[None, :]
            )  # padded queries see a little too much: unread
            chunk_mask = np.arange(int((starts + lengths).max()))[None, None, None, :] <= visible[:, None, :, None]
        slot_of, position_of, tokens = torch.from_numpy(table).to(self.device)
        self._make_room(int(table[1].max()) + 1)
        low = high = length = 0
        dense, single_mask = True, None
        if n:
            used, seen = table[0, :n], table[1, :n] + 1
            low, high, length = int(used.min()), int(used.max()) + 1, int(seen.max())
            dense = high - low == n and bool((used[1:] > used[:-1]).all())
            reach = np.ones(high - low, dtype=np.int64)
            reach[used - low] = seen
            single_mask = np.arange(length)[None, None, None, :] < reach[:, None, None, None]
        layout = _Layout(
            slot_of=slot_of,
            position_of=position_of,
            singles=n,
            low=low,
            high=high,
            dense=dense,
            length=length,
            single_mask=self._additive(single_mask),
            chunk_slots=self._index(chunk_slots),
            chunk_row=self._index(chunk_row),
            chunk_column=self._index(chunk_column),
            chunk_mask=self._additive(chunk_mask),
        )
        return layout, tokens[None], torch.from_numpy(rows).to(self.device)

    def _make_room(self, length: int) -> None:
        if length > self.max_context:
            raise ValueError(f"position {length - 1} is beyond the context of {self.max_context}")
        while self.length < length:
            self.length = min(2 * self.length, self.max_context)

    def _index(self, values: np.ndarray | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values).to(self.device)

    def _additive(self, visible: np.ndarray | None) -> Tensor | None:
        if visible is None:
            return None
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))
        return torch.from_numpy(mask).to(self.device, self._model.dtype)

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of all tokens of a step: `query` float[1, heads, N, head_dim]; `key`, `value` a layer's slots."""
        layout, n = self.layout, self.layout.singles
        heads, size = query.shape[1], query.shape[3]
        kv_heads = key.shape[1]
        tokens = query[0].transpose(0, 1)  # [N, heads, head_dim]
        parts = []
        if n:
            # The heads that share a key are queries of one attention row: no key is repeated in memory.
            rows = tokens[:n].reshape(n, kv_heads, heads // kv_heads, size)
            row_of = layout.slot_of[:n] - layout.low
            if not layout.dense:
                by_slot = rows.new_zeros(layout.high - layout.low, *rows.shape[1:])
                by_slot[row_of] = rows
                rows = by_slot
            k = key[layout.low : layout.high, :, : layout.length]
            v = value[layout.low : layout.high, :, : layout.length]
            out = scaled_dot_product_attention(rows, k, v, attn_mask=layout.single_mask, scale=scaling)
            parts.append((out if layout.dense else out[row_of]).reshape(n, heads, -1))
        if layout.chunk_mask is not None:
            row, column = layout.chunk_row, layout.chunk_column
            p, _, longest, seen = layout.chunk_mask.shape
            padded = tokens.new_zeros(p, longest, heads, size)
            padded[row, column] = tokens[n:]
            k = key[layout.chunk_slots, :, :seen]
            v = value[layout.chunk_slots, :, :seen]
            out = scaled_dot_product_attention(
                padded.transpose(1, 2), k, v, attn_mask=layout.chunk_mask, scale=scaling, enable_gqa=heads != kv_heads
            )
            parts.append(out.transpose(1, 2)[row, column])
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


@torch.inference_mode()
def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor | None, top_k: Tensor | None, uniform: Tensor
) -> tuple[list[int], list[float]]:
    """`draw` from `logprobs_of` the logits: one token a row, and its log-prob."""
    return draw(logprobs_of(logits, temperature, top_p, top_k), temperature, uniform)


@torch.inference_mode()
def logprobs_of(logits: Tensor, temperature: Tensor, top_p: Tensor | None, top_k: Tensor | None) -> Tensor:
    """The distribution that a row is drawn from, float32[R, V].

    logits float32[R, V]; temperature, top_p float32[R]; top_k int64[R] (< 1: off). It is tempered, and renormalised
    over what top-k and top-p leave. Of temperature 0 it is that of temperature 1, since the distribution that the
    largest logit is drawn from says nothing.
    """
    greedy = temperature == 0
    logits = logits / torch.where(greedy, 1.0, temperature)[:, None]
    if top_p is not None or top_k is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        drop = torch.zeros_like(ordered, dtype=torch.bool)
        if top_k is not None:
            keep = torch.where(top_k < 1, ordered.shape[-1], top_k)
            drop |= torch.arange(ordered.shape[-1], device=logits.device)[None] >= keep[:, None]
        if top_p is not None:
            mass = ordered.masked_fill(drop, -torch.inf).softmax(dim=-1)
            # The token that crosses the threshold stays: what lies before it must be less than top_p.
            drop |= mass.cumsum(dim=-1) - mass >= top_p[:, None]
        drop[:, 0] = False
        drop &= ~greedy[:, None]
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    return logits.log_softmax(dim=-1)


@torch.inference_mode()
def draw(logprobs: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[list[int], list[float]]:
    """Draw one token a row by inverting the cumulative distribution at `uniform`, float64[R] in [0, 1).

    Temperature 0 takes the likeliest. Returns the tokens and their log-probs.
    """
    greedy = temperature == 0
    # In float64, or the tail of a large vocabulary is lost in the sum.
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    best = logprobs.argmax(dim=-1)
    drawn = torch.where(greedy | (drawn >= logprobs.shape[-1]), best, drawn)
    return drawn.tolist(), logprobs.gather(-1, drawn[:, None])[:, 0].tolist()


def _eos(model: PreTrainedModel) -> frozenset[int]:
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset()


def _base(path: Path) -> Path:
    """Where the whole weights are: `path`, or the base that its adapter names."""
    try:
        return adapters.base_of(path) or path
    except EngineFault as error:
        raise ModelError(str(error)) from error


def _put_on(model: PreTrainedModel, adapter: Path) -> None:
    try:
        report = model.load_adapter(str(adapter))
    except Exception as error:  # as above
        raise ModelError(f"cannot read the adapter {adapter}: {error}") from error
    if report.missing_keys or report.unexpected_keys or report.mismatched_keys:
        raise ModelError(f"the adapter {adapter} does not fit the model: {report}")


def _check_supported(config: Any, max_context: int) -> None:
    """Refuse what the slots would compute wrongly."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"layers of type {sorted(kinds)} are not supported; serve this model with vLLM")
    if window is not None and window < max_context and ("sliding_attention" in kinds or not config.layer_types):
        raise ModelError(f"a sliding window of {window} below the context of {max_context} is not supported")
    if getattr(config, "attn_logit_softcapping", None):
        raise ModelError("attention with soft-capped logits is not supported; serve this model with vLLM")
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        raise ModelError("rotary embeddings that depend on the batch's longest sequence are not supported")
