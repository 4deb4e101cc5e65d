"""Metrics: counts, times and KV bytes for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from oscar_mm.apps.serve.conversations import Conversations

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of a server, and its memory at the moment of a request.

    Args:
        conversations: the chats, whose pipeline has the memory.

    Attributes:
        registry: all metrics, for ``prometheus_client.generate_latest``.
    """

    def __init__(self, conversations: Conversations) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "oscar_mm_requests", "Requests by status", ["status"], registry=self.registry
        )
        self.tokens = Counter(
            "oscar_mm_tokens",
            "Tokens by kind: prompt (read), cached (known already), completion",
            ["kind"],
            registry=self.registry,
        )
        self.running = Gauge("oscar_mm_running", "Answers being written", registry=self.registry)
        self.waiting = Gauge("oscar_mm_waiting", "Requests in the queue", registry=self.registry)
        self.first_token_seconds = Histogram(
            "oscar_mm_first_token_seconds",
            "Time to the first token, the queue not included",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.answer_seconds = Histogram(
            "oscar_mm_answer_seconds",
            "Time to the last token, the queue not included",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_MemoryCollector(conversations))


class _MemoryCollector(Collector):
    """Measures memory when Prometheus asks for it."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def collect(self) -> Iterator[GaugeMetricFamily]:
        pipe = self._conversations.pipe
        with pipe.lock:
            by_modality = pipe.store.bytes_by_modality()
            report = pipe.store.memory()
        used = GaugeMetricFamily(
            "oscar_mm_kv_bytes", "KV bytes in use by modality", labels=["modality"]
        )
        for modality, size in by_modality.items():
            used.add_metric([modality], size)
        yield used
        yield GaugeMetricFamily(
            "oscar_mm_kv_pool_bytes", "KV bytes taken, free slots included", report.pool_bytes
        )
        yield GaugeMetricFamily(
            "oscar_mm_conversations", "Conversations kept", len(self._conversations)
        )
