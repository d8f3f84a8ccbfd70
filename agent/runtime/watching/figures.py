"""What `/metrics` of a runtime says, read from its progress and its engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import Metric

from agent.episode import StopReason
from agent.metrics_page import counter, gauge
from agent.runtime.progress import FAULTS, NOT_KEPT, Progress
from agent.runtime.watching.board import Board


def runtime_figures(
    progress: Progress, board: Board, engines: Sequence[tuple[str, int, bool, int]]
) -> Iterable[Metric]:
    """The figures of docs/runtime.md. `engines`: see `agent.engines.pool.EnginePool.states`."""
    counters = progress.counters
    yield gauge("sao_runtime_uptime_seconds", "Since the start", progress.uptime_s)
    yield gauge("sao_runtime_slots", "Episode slots by what they do", progress.states(), "state")
    yield gauge("sao_runtime_busy_share", "Share of the slots' time with a ticket", progress.busy_share())
    yield counter("sao_runtime_tickets", "Tickets that a slot has taken", counters["tickets"])
    ends = {reason.value: counters[reason.value] for reason in StopReason}
    yield counter("sao_runtime_episodes", "Delivered episodes by stop reason", ends, "stop_reason")
    yield counter("sao_runtime_faults", "Failed tickets", {kind: counters[kind] for kind in FAULTS}, "kind")
    lost = {answer: counters[answer] for answer in NOT_KEPT}
    yield counter("sao_runtime_not_kept", "Episodes that the store did not keep", lost, "answer")
    yield counter("sao_runtime_store_retries", "Messages that the store did not hear", counters["store_retries"])
    yield counter("sao_runtime_sampled_tokens", "Action tokens, whatever became of them", board.sampled_tokens)
    yield counter("sao_runtime_action_tokens", "Action tokens of delivered episodes", counters["action_tokens"])
    yield counter("sao_runtime_turns", "Turns of delivered episodes", counters["turns"])
    mean = progress.reward / max(1, counters["episodes"])
    yield gauge("sao_runtime_mean_reward", "Of delivered episodes", mean)
    yield counter("sao_runtime_generate_seconds", "In engines, of delivered episodes", progress.generate_s)
    yield counter("sao_runtime_environment_seconds", "In environments, of delivered episodes", progress.environment_s)
    yield gauge("sao_runtime_engine_episodes", "Episodes at an engine", {e[0]: e[1] for e in engines}, "engine")
    yield gauge("sao_runtime_engine_sound", "1: it is given requests", {e[0]: e[2] for e in engines}, "engine")
    yield gauge("sao_runtime_engine_version", "Its policy version", {e[0]: e[3] for e in engines}, "engine")
