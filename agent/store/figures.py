"""What `/metrics` of the store says, read from its status."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.metrics_core import Metric

from agent.metrics_page import counter, gauge
from agent.store.protocol import StoreStatus

_QUANTILES = {
    "consumed_lag": ("sao_store_consumed_lag_versions", "Versions between an episode's oldest token and its claim"),
    "issued_tokens": ("sao_store_issued_tokens", "Action tokens of an episode, as finished"),
    "consumed_tokens": ("sao_store_consumed_tokens", "Action tokens of an episode, as claimed"),
    "issued_latency_s": ("sao_store_issued_latency_seconds", "From lease to delivery, as finished"),
    "consumed_latency_s": ("sao_store_consumed_latency_seconds", "From lease to delivery, as claimed"),
    "queue_wait_s": ("sao_store_queue_wait_seconds", "From delivery to claim"),
    "running_age_s": ("sao_store_running_age_seconds", "Age of the tickets that are leased now"),
}


@dataclass(slots=True)
class Traffic:
    """What has crossed HTTP since this process began: requests by route and status, bytes of bodies."""

    requests: dict[tuple[str, int], int] = field(default_factory=dict)
    received: int = 0
    sent: int = 0

    def count(self, route: str, status: int, received: int, sent: int) -> None:
        """One request that was answered."""
        self.requests[route, status] = self.requests.get((route, status), 0) + 1
        self.received += received
        self.sent += sent


def file_bytes(path: Path) -> int:
    """The size of the store's file, with what is in its log and not yet in it."""
    return sum(part.stat().st_size for part in (path, path.with_name(f"{path.name}-wal")) if part.exists())


def store_figures(status: StoreStatus, traffic: Traffic, size: int) -> Iterable[Metric]:
    """The figures of docs/store.md. `size`: bytes of the store's file."""
    metrics = status.metrics
    yield gauge("sao_store_policy_version", "As last announced", status.version)
    yield gauge("sao_store_epoch", "Of the training tasks", status.epoch)
    yield gauge(
        "sao_store_tickets",
        "Tickets that are waiting to be leased or leased",
        {
            "train_waiting": metrics["waiting"],
            "train_leased": status.leased,
            "evaluate_waiting": metrics["evaluate_waiting"],
            "evaluate_leased": metrics["evaluate_leased"],
        },
        "state",
    )
    yield gauge(
        "sao_store_episodes",
        "Training episodes by state",
        {"ready": status.ready, "claimed": status.claimed, "set_aside": status.set_aside},
        "state",
    )
    yield gauge("sao_store_outstanding", "Training episodes that hold a slot of the budget", metrics["outstanding"])
    yield gauge("sao_store_capacity", "Slots of the staleness budget", metrics["capacity"])
    yield gauge("sao_store_workers", "Workers that are heard of", len(metrics["workers"]))
    yield counter("sao_store_events", "Since the run began", status.counters, "event")
    for key, (name, help_text) in _QUANTILES.items():
        if metrics.get(key):
            found = {at: value for at, value in metrics[key].items() if at != "count"}
            yield gauge(name, f"{help_text}; of the last ones", found, "at")
    yield counter("sao_store_requests", "Answers by route and status", traffic.requests, "route", "status")
    yield counter("sao_store_received_bytes", "Bodies of requests", traffic.received)
    yield counter("sao_store_sent_bytes", "Bodies of answers", traffic.sent)
    yield gauge("sao_store_file_bytes", "The file and its log", size)
