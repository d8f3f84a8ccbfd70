"""Figures of one step, from tensors and episodes to a flat dict of floats. Pure functions; nothing is written here.

Names are `section/figure`; NaN means undefined (an explained variance of constant returns), never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from agent.episode import Episode
from learner.batch import stopped_by

QUANTILES = (0.01, 0.5, 0.99)


def quantiles(values: Iterable[float], name: str, points: Sequence[float] = QUANTILES) -> dict[str, float]:
    """`{name}_p1`, `_p50`, `_p99` of a sample; empty gives nothing."""
    sample = torch.as_tensor(list(values) if not isinstance(values, Tensor) else values, dtype=torch.float64)
    if sample.numel() == 0:
        return {}
    found = torch.quantile(sample[:: max(1, sample.numel() // 100_000)], torch.tensor(points, dtype=torch.float64))
    return {f"{name}_p{round(100 * p)}": float(q) for p, q in zip(points, found, strict=True)}


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Reward, success, lengths, turns, truncation of a batch (a success is a positive total reward)."""
    if not episodes:
        return {}
    count = len(episodes)
    rewards = [e.reward for e in episodes]
    lengths = [e.action_tokens for e in episodes]
    figures = {
        "rollout/reward": sum(rewards) / count,
        "rollout/success": sum(r > 0 for r in rewards) / count,
        "rollout/turns": sum(len(e.actions) for e in episodes) / count,
        "rollout/action_tokens": sum(lengths) / count,
        "rollout/latency_s": sum(e.timings.finished_at - e.timings.issued_at for e in episodes) / count,
        "rollout/truncated": sum(e.stop_reason.truncated for e in episodes) / count,
        "rollout/distinct_tasks": len({e.task_id for e in episodes}) / count,
    }
    figures |= quantiles([float(n) for n in lengths], "rollout/action_tokens")
    figures |= {f"stop/{reason}": n / count for reason, n in stopped_by(episodes).items() if n}
    return figures


def lag_metrics(versions: Tensor, action_mask: Tensor, turn_ids: Tensor, version: int) -> dict[str, float]:
    """Policy lag per token at consumption: learner's version minus the token's. versions, masks int/bool[B,T].

    The time in the queue is in it, because both versions are read at their own moments. `lag/spanning_share`: action
    tokens of episodes that were sampled under two or more versions; `lag/spanning_actions`: actions of that kind.
    """
    mask = action_mask.bool()
    if not mask.any():
        return {}
    lag = (version - versions)[mask].double()
    figures = {
        "lag/min": float(lag.min()),
        "lag/mean": float(lag.mean()),
        "lag/max": float(lag.max()),
        "lag/stale_share": float((lag >= 1).double().mean()),
    }
    spans = [row[m].unique().numel() > 1 for row, m in zip(versions, mask, strict=True)]
    tokens = mask.sum(-1).double()
    figures["lag/spanning_share"] = float((torch.tensor(spans).double() * tokens).sum() / tokens.sum())
    moved = [
        row[m & (turn == number)].unique().numel() > 1
        for row, m, turn in zip(versions, mask, turn_ids, strict=True)
        for number in turn[m].unique()
    ]
    figures["lag/spanning_actions"] = sum(moved) / len(moved)
    turns = turn_ids[mask]
    for turn in range(min(int(turns.max()) + 1, 8)):
        at = lag[turns == turn]
        if at.numel():
            figures[f"lag/turn_{turn}"] = float(at.mean())
    return figures


def ratio_metrics(logprobs: Tensor, rollout_logprobs: Tensor, action_mask: Tensor) -> dict[str, float]:
    """Quantiles and mean of the importance ratio pi/mu, and the mean of log mu - log pi (an estimate of KL)."""
    mask = action_mask.bool()
    if not mask.any():
        return {}
    log_ratio = (logprobs - rollout_logprobs)[mask].double()
    log_ratio = log_ratio[log_ratio.isfinite()].clamp(-20, 20)
    if log_ratio.numel() == 0:
        return {}
    return quantiles(log_ratio.exp(), "ratio/value") | {
        "ratio/mean": float(log_ratio.exp().mean()),
        "ratio/kl": float((log_ratio.exp() - 1 - log_ratio).mean()),
    }


def wilson_interval(successes: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's confidence interval of a proportion; (nan, nan) without trials."""
    if trials == 0:
        return (math.nan, math.nan)
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return (max(0.0, centre - half), min(1.0, centre + half))


def finite(record: dict[str, Any]) -> dict[str, float]:
    """The entries a tracker can take: numbers that are finite."""
    return {k: float(v) for k, v in record.items() if isinstance(v, int | float) and math.isfinite(v)}
