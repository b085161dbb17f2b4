"""The gateway's Prometheus metrics. Labels are models and instances of the table, and words from fixed lists: bounded.

All figures are measured. A request for a model that is not served here has the model `""`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from coral_core.serving.table import RoutingTable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each one, that nobody reads


class _Now(Collector):
    """What is so at this moment, read from the table when somebody asks."""

    def __init__(self, table: RoutingTable) -> None:
        self._table = table

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Waiting requests by model; readiness, weight and requests in flight by instance."""
        waiting = GaugeMetricFamily(
            "coral_gateway_waiting_requests", "Requests that have no first token yet.", labels=("model", "for")
        )
        for name, pool in self._table.pools.items():
            waiting.add_metric((name, "first_token"), pool.unheard)
            waiting.add_metric((name, "decode"), pool.handing)
        yield waiting
        labels = ("model", "instance", "phase")
        gauges = [
            GaugeMetricFamily("coral_gateway_instance_ready", "1: it answers and gets requests.", labels=labels),
            GaugeMetricFamily("coral_gateway_instance_weight", "T(tau) that it is routed by.", labels=labels),
            GaugeMetricFamily("coral_gateway_instance_in_flight_requests", "Requests it is at work on.", labels=labels),
        ]
        for one in self._table.members:
            values = (float(one.takes_requests), one.routed_weight, float(one.in_flight))
            for gauge, value in zip(gauges, values, strict=True):
                gauge.add_metric((one.spec.model, one.spec.name, one.spec.phase), value)
        yield from gauges


class GatewayMetrics:
    """Counts and times of requests, in a registry of its own."""

    def __init__(self, table: RoutingTable) -> None:
        self._table = table
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Now(table))
        self._requests = self._counter("requests", "Requests answered, by status; cut: broken off.", "model", "status")
        self._tokens = self._counter("tokens", "Tokens of finished requests.", "model", "instance", "direction")
        self._retries = self._counter("retries", "Requests tried once more elsewhere.", "model")
        self._failures = self._counter("instance_failures", "Requests that failed there.", "instance", "cause")
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first event.", _TTFT_S)
        self._tpot = self._histogram("time_per_output_token_seconds", "Mean of a request, after the first.", _TPOT_S)

    def ended(self, model: str, status: str) -> None:
        """A request has been answered."""
        self._requests.labels(model, status).inc()

    def first_token(self, model: str, instance: str, duration_s: float) -> None:
        """A stream has begun."""
        if self._table.find(instance):
            self._ttft.labels(model, instance).observe(duration_s)

    def finished(
        self, model: str, instance: str, input_tokens: int, output_tokens: int, decode_s: float | None
    ) -> None:
        """An answer is complete; `decode_s` from its first event to its last, where it was a stream."""
        if not self._table.find(instance):
            return
        self._tokens.labels(model, instance, "input").inc(input_tokens)
        self._tokens.labels(model, instance, "output").inc(output_tokens)
        if decode_s is not None and output_tokens > 1:
            self._tpot.labels(model, instance).observe(decode_s / (output_tokens - 1))

    def retried(self, model: str) -> None:
        """A request goes elsewhere."""
        self._retries.labels(model).inc()

    def failed(self, instance: str, cause: str) -> None:
        """An instance has failed a request."""
        if self._table.find(instance):
            self._failures.labels(instance, cause).inc()

    def forget(self, instance: str) -> None:
        """An instance is gone for good: its series end, also where requests of it still run."""
        for metric in (self._failures, self._tokens, self._ttft, self._tpot):
            metric.remove_by_labels({"instance": instance})

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"coral_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"coral_gateway_{name}", text, ("model", "instance"), registry=self.registry, buckets=buckets)
