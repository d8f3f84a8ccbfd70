"""The figures that a run reports: of a step, of the services around it. Pure functions.

A flat dict of floats; names are `section/figure`, and docs/learner.md says what they mean. NaN means undefined (an
explained variance of constant returns), never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from agent.engines.base import EngineHealth
from agent.episode import Episode
from agent.store.protocol import Claim, StoreStatus
from learner.data.batch import Batch, stopped_by
from learner.sao import StepResult

QUANTILES = (0.01, 0.5, 0.99)
MOST_OWN = 50
_OF_THE_RUNTIME = ("turns", "generate_s", "environment_s")
# The store leaves out counters that never counted; a fault count of 0 is a figure too.
_NO_FAULTS = dict.fromkeys(("retried", "given_up", "dropped", "stale", "aborted"), 0)


def step_figures(
    claim: Claim, episodes: Sequence[Episode], batch: Batch, result: StepResult, version: int
) -> dict[str, float]:
    """Of a step on `episodes`; `version` is the one that it began from."""
    figures = dict(result.figures) | episode_metrics(episodes)
    figures |= {"critic/discarded": result.critic_discarded, "policy/discarded": result.policy_discarded}
    figures |= lag_metrics(batch.versions, batch.action_mask, batch.turn_ids, version)
    return figures | quantiles([f["claimed_at"] - f["finished_at"] for f in claim.facts], "queue/wait_s")


def service_figures(status: StoreStatus, healths: Sequence[EngineHealth]) -> dict[str, float]:
    """Queue length, counters, issued against consumed; tokens/s and idle share of the engines."""
    uptime = sum(h.uptime_s for h in healths) or math.nan
    figures: dict[str, float] = {
        "queue/ready": status.ready,
        "queue/leased": status.leased,
        "engine/tokens_per_s": sum(h.tokens_generated for h in healths) / (uptime / max(len(healths), 1)),
        "engine/idle": 1.0 - sum(h.busy_s for h in healths) / uptime,
    }
    figures |= {f"count/{name}": float(n) for name, n in (_NO_FAULTS | status.counters).items()}
    return figures | {f"queue/{name}": value for name, value in _flat(status.metrics).items()}


def _flat(metrics: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested figures with their names joined by "_"."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}_")
        elif isinstance(value, int | float):
            flat[prefix + name] = float(value)
    return flat


def quantiles(values: Iterable[float], name: str, points: Sequence[float] = QUANTILES) -> dict[str, float]:
    """`{name}_p1`, `_p50`, `_p99` of a sample; empty gives nothing."""
    sample = torch.as_tensor(list(values) if not isinstance(values, Tensor) else values, dtype=torch.float64)
    if sample.numel() == 0:
        return {}
    cuts = torch.quantile(sample[:: max(1, sample.numel() // 100_000)], torch.tensor(points, dtype=torch.float64))
    return {f"{name}_p{round(100 * p)}": float(q) for p, q in zip(points, cuts, strict=True)}


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
    figures |= environment_metrics(episodes) | own_metrics(episodes)
    figures |= {f"stop/{reason}": n / count for reason, n in stopped_by(episodes).items() if n}
    return figures


def own_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What environments report themselves, `env/{name}`: the mean over the episodes that have it.

    Numbers only, of at most `MOST_OWN` names: a tracker has to carry them all.
    """
    found: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            if name not in _OF_THE_RUNTIME and isinstance(value, bool | int | float) and math.isfinite(value):
                found.setdefault(name, []).append(float(value))
    return {f"env/{name}": sum(found[name]) / len(found[name]) for name in sorted(found)[:MOST_OWN]}


def environment_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of each environment of a mixture: its share of the batch, reward, success, lengths, turns; {} without one."""
    found: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.environment:
            found.setdefault(episode.environment, []).append(episode)
    figures: dict[str, float] = {}
    for name, own in sorted(found.items()):
        figures |= {
            f"rollout/{name}/share": len(own) / len(episodes),
            f"rollout/{name}/reward": sum(e.reward for e in own) / len(own),
            f"rollout/{name}/success": sum(e.reward > 0 for e in own) / len(own),
            f"rollout/{name}/action_tokens": sum(e.action_tokens for e in own) / len(own),
            f"rollout/{name}/turns": sum(len(e.actions) for e in own) / len(own),
            f"rollout/{name}/truncated": sum(e.stop_reason.truncated for e in own) / len(own),
        }
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


def finite(record: dict[str, Any]) -> dict[str, float]:
    """The entries a tracker can take: numbers that are finite."""
    return {k: float(v) for k, v in record.items() if isinstance(v, int | float) and math.isfinite(v)}
