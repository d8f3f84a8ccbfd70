"""`/metrics`: the page that Prometheus reads, the same way for every server of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Values = float | Mapping[Any, float]


def counter(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    """A sum that only grows; the page adds `_total` to `name`.

    `values` is one, or a mapping from the value of the label (or a tuple, of the labels) to one.
    """
    if not isinstance(values, Mapping):
        return CounterMetricFamily(name, help_text, value=values)
    return _filled(CounterMetricFamily(name, help_text, labels=labels), values)


def gauge(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    """What is so now; `values` as in `counter`."""
    if not isinstance(values, Mapping):
        return GaugeMetricFamily(name, help_text, value=values)
    return _filled(GaugeMetricFamily(name, help_text, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([str(part) for part in (key if isinstance(key, tuple) else (key,))], value)
    return family


def metrics_page(figures: CollectorRegistry | Iterable[Metric]) -> web.Response:
    """The page with `figures`: a registry of counters that are kept, or figures that are read at this moment."""
    registry = figures if isinstance(figures, CollectorRegistry) else _of(figures)
    return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _of(figures: Iterable[Metric]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(list(figures)))
    return registry


class _Once(Collector):
    def __init__(self, figures: list[Metric]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        return self._figures
