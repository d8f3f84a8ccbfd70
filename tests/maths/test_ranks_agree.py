"""Two real processes: their averaged gradients and merged statistics are those of the whole batch."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from learner.losses import dis_policy_loss
from learner.maths.statistics import EVStatistics

# Row 0 goes to rank 0 and row 1, whose every token is gated, to rank 1.
INPUTS = torch.tensor([[[1.0], [1.0]], [[1.0], [1.0]]], dtype=torch.float64)
ROLLOUT = torch.tensor([[-1.0, -1.2], [8.0, 8.0]], dtype=torch.float64)
RETURNS = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
VALUES = torch.tensor([[0.5, 0.7], [0.9, 0.4]], dtype=torch.float64)


def model() -> torch.nn.Linear:
    """log pi is the weight times the input: -1 for every token, and its gradient the sum over tokens."""
    linear = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(linear.weight, -1.0)
    return linear


def loss_of(logprobs: Tensor, rows: slice, normalizer: float) -> Tensor:
    ones = torch.ones_like(logprobs)
    return dis_policy_loss(logprobs, ROLLOUT[rows], ones, ones, eps_low=0.3, eps_high=5.0, normalizer=normalizer).loss


def one_rank(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    rows = slice(rank, rank + 1)
    own = model()
    loss_of(own(INPUTS[rows]).squeeze(-1), rows, normalizer=4 / 2).backward()
    gradient = own.weight.grad
    assert gradient is not None
    dist.all_reduce(gradient)  # would wait in vain for a rank whose loss had no gradient
    gradient /= 2
    mine = EVStatistics.of(RETURNS[rows], VALUES[rows], torch.ones(1, 2)).to_tensor()
    gathered = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(gathered, mine)
    torch.save((gradient, EVStatistics.from_tensor(torch.stack(gathered)).value()), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_a_rank_whose_tokens_are_all_gated_takes_part_and_the_gradient_is_the_whole_batchs(tmp_path: Path) -> None:
    """Cases A4 and A16."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(one_rank, args=(port, str(tmp_path)), nprocs=2)
    whole = model()
    loss_of(whole(INPUTS).squeeze(-1), slice(2), normalizer=4).backward()
    assert whole.weight.grad is not None
    assert whole.weight.grad.item() == pytest.approx(-0.555351, abs=1e-6)
    for rank in range(2):
        gradient, explained = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(gradient, whole.weight.grad)
        assert explained == pytest.approx(0.403333, abs=1e-6)
