"""The engine's metrics in Prometheus' form, each with the label `model_name`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from aspire_llm.engine.metrics import Counter, Gauge, Histogram, Metric, Vector

LABEL = "model_name"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MetricsSource = Callable[[], tuple[str, list[Metric]] | None]  # the model's name and its metrics; None: no engine yet


class EngineCollector(Collector):
    """Reads the engine when Prometheus asks; nothing is copied in between."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterable[Family]:
        found = self._source()
        if found is None:
            return
        model, metrics = found
        for _, group in groupby(metrics, key=lambda metric: metric.name):
            yield family(model, list(group))

    def describe(self) -> Iterable[Family]:
        """Nothing to be told before the engine is there."""
        return ()


def family(model: str, metrics: Sequence[Metric]) -> Family:
    """Metrics of one name, which differ in their labels."""
    first = metrics[0]
    labels = [LABEL, *first.labels]
    if isinstance(first, Histogram):
        histogram = HistogramMetricFamily(first.name, first.help, labels=labels)
        for metric in metrics:
            assert isinstance(metric, Histogram)
            histogram.add_metric([model, *metric.labels.values()], list(metric.buckets.items()), metric.sum)
        return histogram
    if isinstance(first, Gauge):
        gauge = GaugeMetricFamily(first.name, first.help, labels=labels)
        for metric in metrics:
            assert isinstance(metric, Gauge)
            gauge.add_metric([model, *metric.labels.values()], metric.value)
        return gauge
    if isinstance(first, Vector):
        vector = CounterMetricFamily(first.name, first.help, labels=[*labels, "position"])
        for metric in metrics:
            assert isinstance(metric, Vector)
            for position, value in enumerate(metric.values):
                vector.add_metric([model, *metric.labels.values(), str(position)], value)
        return vector
    counter = CounterMetricFamily(first.name, first.help, labels=labels)
    for metric in metrics:
        assert isinstance(metric, Counter)
        counter.add_metric([model, *metric.labels.values()], metric.value)
    return counter


class HttpCounts:
    """Requests by path and status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = PrometheusCounter(
            "aspire:http_requests", "HTTP requests answered.", ["method", "path", "status"], registry=registry
        )

    def add(self, method: str, path: str, status: int) -> None:
        known = method if method in ("GET", "POST", "OPTIONS", "HEAD") else "other"
        self._requests.labels(known, path, str(status)).inc()


def make_registry(source: MetricsSource) -> CollectorRegistry:
    """A registry of the server's own: its engine, and this process (memory, file descriptors, CPU time)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(source))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)
