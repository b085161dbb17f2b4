"""How KV transfers went, in vLLM's log and at its `/metrics`: counts since the last report, summed over an engine's workers."""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTED: Final = {
    "fetched": ("vllm:coral_kv_fetches", "Fetches of a request's KV cache by a worker that arrived whole."),
    "failed": ("vllm:coral_kv_fetches_failed", "Fetches by a worker that failed or were cancelled: its log says why."),
    "bytes": ("vllm:coral_kv_fetched_bytes", "Bytes of KV cache that workers fetched."),
}
"""Of `BlockPuller.counts`: the series of each, and what it says. vLLM takes back series of its own prefix before it makes them anew."""


class TransferCounts(KVConnectorStats):
    """What was counted since the last report."""

    def reset(self) -> None:
        """Nothing counted."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together, here."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For a line of the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class TransferMetrics(KVConnectorPromMetrics):
    """A counter for each of `COUNTED`, with the labels of vLLM's own."""

    def __init__(self, *given: Any) -> None:  # noqa: ANN401 - as vLLM's own
        super().__init__(*given)
        self._counters: dict[str, dict[int, Any]] = {
            name: create_metric_per_engine(
                self._counter_cls(name=series, documentation=text, labelnames=self._labelnames),
                self.per_engine_labelvalues,
            )
            for name, (series, text) in COUNTED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last report."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
