"""The spans of an episode, for OpenTelemetry. Nothing of it is imported unless the environment asks for spans.

    episode                     one ticket, from its reset to its record
    ├── reset
    ├── generate                one turn, however many requests it takes
    ├── step                    the environment's answer, and its grading where it ends the episode
    └── grade                   where a limit of the runtime's ends it

Everything is set by OpenTelemetry's own variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_EXPORTER,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_SDK_DISABLED.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

NAME = "sao.runtime"
"""The instrumentation scope of the spans."""

_EXPORTERS = "opentelemetry_traces_exporter"  # the SDK's entry points
_ASKED_FOR = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_FLUSH_S = 3.0


class SpanNotes(Protocol):
    """A span that is open: what it takes while it lasts."""

    def set_attributes(self, attributes: Mapping[str, Any]) -> None: ...


class _NoSpan:
    """A block without a span, and what is noted of it. There is one for all: each turn of each episode enters it."""

    def set_attributes(self, attributes: Mapping[str, Any]) -> None: ...

    def __enter__(self) -> SpanNotes:
        return self

    def __exit__(self, *_: object) -> None: ...


_NO_SPAN = _NoSpan()


class Spans:
    """Opens spans of `tracer`; with None it does nothing."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    def open(
        self, name: str, attributes: Mapping[str, Any] | None = None
    ) -> contextlib.AbstractContextManager[SpanNotes]:
        """A span around the block, under the one that is open in this task. An exception is recorded as its error."""
        if self._tracer is None:
            return _NO_SPAN
        return self._tracer.start_as_current_span(name, attributes=attributes)


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables ask for spans."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return any(environment.get(name) for name in _ASKED_FOR) and environment.get("OTEL_TRACES_EXPORTER") != "none"


@contextlib.contextmanager
def configured_spans() -> Iterator[Spans]:
    """Spans as the environment asks for them; what is buffered is sent at the end, within seconds.

    Without the library they are asked for in vain, which is said once: these variables are not ours alone, so they stop
    nobody.
    """
    if not wanted(os.environ):
        yield Spans()
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("no spans: OTEL_* asks for them, and OpenTelemetry is missing: pip install 'sao-agents[otel]'")
        yield Spans()
        return
    present = trace.get_tracer_provider()
    if isinstance(present, TracerProvider):  # whoever started this process has set one up, opentelemetry-instrument say
        yield Spans(present.get_tracer(NAME))
        return
    provider = TracerProvider(shutdown_on_exit=False)
    for exporter in _exporters(os.environ):
        provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield Spans(provider.get_tracer(NAME))
    finally:
        # A collector that is away must not hold up the end: its own limits are longer than ours.
        flushing = threading.Thread(target=provider.shutdown, name="spans", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_S)


def _exporters(environment: Mapping[str, str]) -> list[SpanExporter]:
    """Those that OTEL_TRACES_EXPORTER names (default: otlp), as far as they are installed."""
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    found = []
    for name in (environment.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        entries = importlib.metadata.entry_points(
            group=_EXPORTERS, name=otlp if name.strip() == "otlp" else name.strip()
        )
        if entries:
            found.append(next(iter(entries)).load()())
        else:
            log.warning("no spans to %s: no such exporter is installed (OTEL_TRACES_EXPORTER)", name.strip())
    return found
