"""/metrics for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.serve.config import ServeError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters and histograms of one server, in a registry of its own; `ServeError` without prometheus_client."""

    def __init__(self) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise ServeError("/metrics needs prometheus_client: pip install 'sao-agents[serve]'") from error
        self.registry: CollectorRegistry = prometheus.CollectorRegistry()
        ours: dict[str, Any] = {"registry": self.registry}
        self._render = prometheus.generate_latest
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST
        self.requests = prometheus.Counter("sao_requests", "Answers by route and status", ["route", "status"], **ours)
        self.tokens = prometheus.Counter("sao_completion_tokens", "Tokens sampled for clients", **ours)
        self.feedback = prometheus.Counter("sao_feedback", "Accepted feedback", ["kind"], **ours)
        self.first_token = prometheus.Histogram(
            "sao_time_to_first_token_seconds", "From request to first text", buckets=_SECONDS, **ours
        )
        self.duration = prometheus.Histogram("sao_response_seconds", "Of a whole response", buckets=_SECONDS, **ours)
        self.running = prometheus.Gauge("sao_generations_running", "Generations at this moment", **ours)
        self.version = prometheus.Gauge("sao_policy_version", "The served version", **ours)
        self.pinned = prometheus.Gauge("sao_versions_pinned", "1 while publications are held", **ours)
        self.queue = prometheus.Gauge("sao_conversations", "Conversations by state", ["state"], **ours)
        self.ready = prometheus.Gauge("sao_store_ready", "Episodes ready for the learner", **ours)
        self.learner_up = prometheus.Gauge("sao_learner_running", "1 while the learner runs", **ours)
        self.learner_restarts = prometheus.Gauge("sao_learner_restarts", "Restarts of the learner", **ours)

    def render(self) -> bytes:
        """The page."""
        return self._render(self.registry)
