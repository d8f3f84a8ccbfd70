"""A batch is cut into micro-batches of like length, and what is computed of them becomes whole again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from learner.data.batch import Batch
from learner.maths.tensors import scan_dtype
from learner.parallel.collectives import largest

Piece = Mapping[str, Tensor | float]
"""What was computed of one micro-batch, by name: a number a token [b,t] or an episode [b], or one to be added up."""


@dataclass(frozen=True)
class Buckets:
    """One rank's part of a batch, as micro-batches of the rows `rows[0]`, `rows[1]`, ...

        logprobs = buckets.map(lambda part, rows: {"logprobs": policy(part.input_ids, part.action_mask)})["logprobs"]

    A micro-batch is a `Batch` as wide as its longest row; `whole[rows, : part.width]` is its part of a tensor [B,T].
    Every rank has `count` of them, so that no collective is skipped (under sharded weights each forward is one): where
    rows have run out, two tokens without an action take their place. They weigh nothing, use every parameter, and what
    is computed of them is not kept. The batch of a rank that was dealt no row is `Batch.blank`.
    """

    batch: Batch
    rows: list[list[int]]
    count: int

    @classmethod
    def of(
        cls,
        batch: Batch,
        accelerator: Accelerator,
        *,
        max_tokens: int | None,
        max_padding: float,
        packed: bool = False,
    ) -> Buckets:
        """Cut `batch` by length, each row up to its last action, and have it on the accelerator's device.

        `max_tokens`: of a micro-batch; None: as many as suit the device. `packed`: rows of any length share a
        micro-batch (see `fill_with_rows`), else those of like length (see `bucket_by_length`).
        """
        batch = batch.up_to_last_actions() if batch.size else Batch.blank()
        limit, lengths = micro_batch_tokens(max_tokens, accelerator.device.type), batch.lengths.tolist()
        if packed:
            rows = fill_with_rows(lengths, max_tokens=limit)
        else:
            rows = bucket_by_length(lengths, max_tokens=limit, max_padding=max_padding)
        return cls(batch.to(accelerator.device), rows, largest(accelerator, len(rows)))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Batch, list[int]]]:
        """Each micro-batch, and the rows of the batch that it holds."""
        for rows in self.rows:
            yield self.batch.rows(rows), rows
        for _ in range(self.count - len(self.rows)):
            yield self.batch.dummy(), [0]

    def map(self, function: Callable[[Batch, list[int]], Piece]) -> dict[str, Tensor]:
        """`function(part, rows)` of every micro-batch, put together by `assemble`."""
        return self.assemble(function(part, rows) for part, rows in self)

    def assemble(self, pieces: Iterable[Piece]) -> dict[str, Tensor]:
        """One tensor a name from a piece for each micro-batch, in order, on the device of the pieces.

        Pieces [b,t] and [b] become [B,T] and [B], 0 where no micro-batch reaches; numbers are added up in float64.
        """
        whole: dict[str, Tensor] = {}
        for number, piece in enumerate(pieces):
            rows = self.rows[number] if number < len(self.rows) else None
            for name, part in piece.items():
                value = torch.as_tensor(part)
                if value.dim() == 0:
                    wide = value.to(scan_dtype(value.device))
                    whole[name] = whole[name] + wide if name in whole else wide
                    continue
                if name not in whole:
                    shape = (self.batch.size, self.batch.width)[: value.dim()]
                    whole[name] = value.new_zeros(shape)
                if rows is not None and value.dim() == 1:
                    whole[name][rows] = value
                elif rows is not None:
                    whole[name][rows, : value.shape[1]] = value
        return whole


def micro_batch_tokens(given: int | None, device: str) -> int:
    """`learner.micro_batch_tokens`, or what suits a device ("cpu", "cuda"...): on CPUs activations that caches hold,
    elsewhere enough to keep the device busy."""
    if given is not None:
        return given
    return 4_096 if device == "cpu" else 16_384


def bucket_by_length(lengths: Sequence[int], *, max_tokens: int, max_padding: float) -> list[list[int]]:
    """Group row indices into micro-batches of like length.

    Sorted by length and cut greedily: a bucket holds at most `max_tokens` tokens with padding (an episode longer
    than that gets a bucket of its own), and padding is at most the share `max_padding` of it. Every index appears
    exactly once.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    used = 0
    for i in order:
        if buckets:
            longest, count = lengths[buckets[-1][0]], len(buckets[-1]) + 1
            padded = longest * count
            if padded <= max_tokens and padded - used - lengths[i] <= max_padding * padded:
                buckets[-1].append(i)
                used += lengths[i]
                continue
        buckets.append([i])
        used = lengths[i]
    return buckets


def fill_with_rows(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Group row indices into micro-batches of at most `max_tokens` tokens, the longest first, each where it fits.

    Padding is not counted. An episode longer than that gets one of its own; every index appears exactly once.
    """
    filled: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((n for n, free in enumerate(room) if lengths[i] <= free), len(filled))
        if place == len(filled):
            filled.append([])
            room.append(max_tokens)
        filled[place].append(i)
        room[place] -= lengths[i]
    return filled


def padding_share(lengths: Sequence[int], buckets: Sequence[Sequence[int]]) -> float:
    """The share of tokens in the buckets' rectangles that is padding."""
    padded = sum(max(lengths[i] for i in bucket) * len(bucket) for bucket in buckets if bucket)
    return 1.0 - sum(lengths) / padded if padded else 0.0
