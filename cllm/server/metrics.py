"""`GET /metrics`: what the engine counts, in Prometheus' text format. It knows names
and types, and counts nothing itself.

Names and buckets are vLLM's under `cllm:` (`cllm.stats`); `cllm:stage_seconds` sums the time of each stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from ..stats import Histogram
from .service import Service

# Stages that the engine times for each request.
_ENGINE_STAGES = {
    "queue": "cllm:request_queue_time_seconds",
    "prefill": "cllm:request_prefill_time_seconds",
    "decode": "cllm:request_decode_time_seconds",
}


async def metrics(request: Request) -> Response:
    """`GET /metrics`. 503 while the model loads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServiceCollector(request.app.state.service))
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class _ServiceCollector(Collector):
    """One scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._found = service.llm.metrics()

    def collect(self) -> Iterator[Metric]:
        label = {"model_name": self._service.model_id}
        for name, value in self._found.items():
            yield _family(name, value, label)
        yield self._stages(label)

    def _stages(self, label: dict[str, str]) -> Metric:
        words = "time of each stage of a request"
        family = SummaryMetricFamily("cllm:stage_seconds", words, labels=[*label, "stage"])
        for stage, (seconds, count) in self._service.stages.items():
            family.add_metric([*label.values(), stage], int(count), seconds)
        for stage, name in _ENGINE_STAGES.items():
            histogram = self._found[name]
            family.add_metric([*label.values(), stage], histogram.count, histogram.total)
        return family


def _family(name: str, value: Any, label: dict[str, str]) -> Metric:
    words, names, values = name.partition(":")[2].replace("_", " "), [*label], [*label.values()]
    if isinstance(value, Histogram):
        histogram, buckets, below = HistogramMetricFamily(name, words, labels=names), [], 0
        for bound, count in zip([*map(str, value.bounds), "+Inf"], value.counts, strict=True):
            below += count
            buckets.append((bound, below))
        histogram.add_metric(values, buckets, value.total)
        return histogram
    if isinstance(value, dict):
        reasons = CounterMetricFamily(name, words, labels=[*names, "finished_reason"])
        for reason, count in value.items():
            reasons.add_metric([*values, reason], count)
        return reasons
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, words, labels=names)
    family.add_metric(values, value)
    return family
