"""What is published, and the form in which an engine's client takes it: a folder, or a stream of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from agent.engines.vllm.weight_receiver import tensors
from agent.engines.weight_stream import WeightStreamer

Tensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gives every weight's name and tensor, again with each call."""

Weights = Path | Tensors
"""What is published: a snapshot folder, or the tensors that a trainer holds."""

Transfer = Literal["snapshot", "broadcast", "ipc"]
"""How weights reach an engine: `engine.transfer` of a recipe."""

_STREAM_LIMIT_S = 60.0


class Carrier:
    """Turns weights into what an engine's client takes. The trainer's own stream is made once and kept."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._stream: WeightStreamer | None = None

    def pack(self, weights: Weights, *, limit_s: float) -> Path | WeightStreamer:
        """`weights` in the form of `transfer`; a publication may take `limit_s`."""
        if self._transfer == "snapshot":
            assert isinstance(weights, Path), "a trainer's tensors have to be streamed"
            return weights
        if isinstance(weights, Path):
            folder = weights
            return _streamer(lambda: tensors(folder), self._transfer, limit_s)
        if self._stream is None or self._stream.source != weights:
            self._stream = _streamer(weights, self._transfer, limit_s)
        return self._stream


def _streamer(source: Tensors, kind: Literal["broadcast", "ipc"], limit_s: float) -> WeightStreamer:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return WeightStreamer(source, kind=kind, device=device, limit_s=min(limit_s, _STREAM_LIMIT_S))
