"""The counters behind the server's /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters and histograms of one server, in a registry of its own; `agent.metrics_page` renders it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ours: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("sao_requests", "Answers by route and status", ["route", "status"], **ours)
        self.tokens = Counter("sao_completion_tokens", "Tokens sampled for clients", **ours)
        self.feedback = Counter("sao_feedback", "Accepted feedback", ["kind"], **ours)
        self.first_token = Histogram(
            "sao_time_to_first_token_seconds", "From request to first text", buckets=_SECONDS, **ours
        )
        self.duration = Histogram("sao_response_seconds", "Of a whole response", buckets=_SECONDS, **ours)
        self.running = Gauge("sao_generations_running", "Generations at this moment", **ours)
        self.version = Gauge("sao_policy_version", "The served version", **ours)
        self.pinned = Gauge("sao_versions_pinned", "1 while publications are held", **ours)
        self.queue = Gauge("sao_conversations", "Conversations by state", ["state"], **ours)
        self.ready = Gauge("sao_store_ready", "Episodes ready for the learner", **ours)
        self.learner_up = Gauge("sao_learner_running", "1 while the learner runs", **ours)
        self.learner_restarts = Gauge("sao_learner_restarts", "Restarts of the learner", **ours)
        self.connections = Gauge("sao_connections", "Connections to the public port", **ours)
        self.connections_refused = Gauge(
            "sao_connections_refused", "Connections that were one too many, or were dropped for another one", **ours
        )
