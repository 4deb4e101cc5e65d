"""Metrics: request and token counts, times and KV memory for Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from oscar_mm.apps.serve.completed import CompletedAnswer
    from oscar_mm.apps.serve.conversations import Conversations

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120),
)
_BUSY_S = 0.2
"""Maximum seconds to wait for the engine to measure the memory."""
_KEPT = 500
"""A measurement is kept for 500 times the processor time that it took, so that scrapes take at most
0.2% of the engine's time: with 190 conversations of 2,000 tokens, a measurement takes 10 to 20 ms.
Waits do not count: a single one of a second would hide the memory of the next 500 seconds."""


class Metrics:
    """Prometheus metrics of a server: counters, times, and memory measured at each scrape.

    Args:
        conversations: stored chats of the server, whose pipeline is measured.

    Attributes:
        registry: registry of all metrics, for ``prometheus_client.generate_latest``.
    """

    def __init__(self, conversations: Conversations) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "oscar_mm_requests", "Requests by status", ["status"], registry=self.registry
        )
        self.tokens = Counter(
            "oscar_mm_tokens",
            "Tokens by kind: prompt (read), cached (reused), completion (as generated)",
            ["kind"],
            registry=self.registry,
        )
        self.completion_tokens = self.tokens.labels("completion")
        self.drafts = Counter(
            "oscar_mm_drafts",
            "Drafts of tokens by outcome: accepted, rejected",
            ["outcome"],
            registry=self.registry,
        )
        self.running = Gauge("oscar_mm_running", "Requests being answered", registry=self.registry)
        self.waiting = Gauge("oscar_mm_waiting", "Requests in the queue", registry=self.registry)
        self.waiting_clients = Gauge(
            "oscar_mm_waiting_clients", "Clients with requests in the queue", registry=self.registry
        )
        self.realtime = Gauge(
            "oscar_mm_realtime_sessions", "Open realtime sessions", registry=self.registry
        )
        self.refusals = Counter(
            "oscar_mm_refusals",
            "Requests refused for lack of capacity, by reason: in the queue full (no place), "
            "displaced (gave way to a client with fewer requests), slow (would wait too long) or "
            "timeout (waited too long); memory, bodies (too many large requests), "
            "realtime (too many sessions), stopping",
            ["reason"],
            registry=self.registry,
        )

        def times(name: str, text: str) -> TimeHistogram:
            self.registry.register(histogram := TimeHistogram(name, text))
            return histogram

        self.queue_seconds = times(
            "oscar_mm_queue_seconds", "Time that a request waited until it got its slots"
        )
        self.first_token_seconds = times(
            "oscar_mm_first_token_seconds", "Time from the request to the first token"
        )
        self.inter_token_seconds = times(
            "oscar_mm_inter_token_seconds", "Time from one token with text to the next"
        )
        self.answer_seconds = times(
            "oscar_mm_answer_seconds", "Time from the request to the last token"
        )
        self.registry.register(_PipelineCollector(conversations))


class TimeHistogram(Collector):
    """Histogram of times that records equal times in one call.

    prometheus_client's own histogram takes one call for each time; recording the times between
    tokens that way took a fifth of the time in which pieces were sent.

    Args:
        name: name of the metric.
        text: description of the metric.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float, count: int = 1) -> None:
        """Record a time that was observed ``count`` times."""
        with self._lock:
            self._counts[bisect_left(_SECONDS, seconds)] += count
            self._sum += count * seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        with self._lock:
            counts, total = [*accumulate(self._counts)], self._sum
        bounds = [*(str(float(bound)) for bound in _SECONDS), "+Inf"]
        buckets = [*zip(bounds, counts, strict=True)]
        yield HistogramMetricFamily(self._name, self._text, buckets, total)


class AnswerTimes:
    """Counts an answer's tokens, and measures the times between them.

    Args:
        metrics: metrics of the server.
        arrival: ``perf_counter()`` when the request arrived.

    Attributes:
        count: number of tokens whose text has arrived.
    """

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics, self._arrival, self._last = metrics, arrival, arrival
        self.count = 0

    def note(self, written: int | None = None) -> None:
        """Record new tokens, as if they had come at even intervals since the last call.

        Args:
            written: number of tokens of the answer whose text has arrived; by default, one more.
        """
        metrics, now = self._metrics, perf_counter()
        written = self.count + 1 if written is None else written
        if not self.count:
            metrics.first_token_seconds.observe(now - self._arrival)
            self.count, self._last = 1, now
        # An earlier call may have counted the tokens of this text.
        if (tokens := written - self.count) <= 0:
            return
        metrics.inter_token_seconds.observe((now - self._last) / tokens, tokens)
        # Not called for tokens without text, so ``end`` counts the rest.
        metrics.completion_tokens.inc(tokens)
        self.count, self._last = written, now

    def end(self, completed: CompletedAnswer) -> None:
        """Record the tokens and the total time of the complete answer."""
        metrics = self._metrics
        metrics.requests.labels("200").inc()
        metrics.answer_seconds.observe(perf_counter() - self._arrival)
        metrics.tokens.labels("cached").inc(completed.cached_tokens)
        metrics.tokens.labels("prompt").inc(completed.prompt_tokens - completed.cached_tokens)
        accepted = completed.answer.accepted_drafts
        metrics.drafts.labels("accepted").inc(accepted)
        metrics.drafts.labels("rejected").inc(completed.answer.drafts - accepted)
        counted = max(0, self.count - 1)
        metrics.completion_tokens.inc(max(0, len(completed.answer.token_ids) - counted))


class _PipelineCollector(Collector):
    """Collector that measures the pipeline at each scrape.

    The memory is measured less often if that takes long, or while the engine is busy; in between,
    the last measurement is reported.
    """

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._memory: list[GaugeMetricFamily] = []
        self._kept_until = 0.0

    def collect(self) -> Iterator[Metric]:
        pipe = self._conversations.pipe
        if perf_counter() >= self._kept_until:
            with suppress(TimeoutError):
                self._memory = pipe.engine.call(self._measure, timeout=_BUSY_S)
        yield from self._memory
        yield GaugeMetricFamily(
            "oscar_mm_conversations", "Stored conversations", len(self._conversations)
        )
        yield GaugeMetricFamily(
            "oscar_mm_realtime_kept",
            "Realtime sessions without a connection, to which clients may return",
            len(self._conversations.sessions),
        )
        engine = pipe.engine
        yield GaugeMetricFamily("oscar_mm_decoding", "Answers in the batch", engine.running)
        yield GaugeMetricFamily(
            "oscar_mm_prompts_waiting", "Prompts waiting for prefill", engine.waiting
        )
        if (prefixes := pipe.prefixes) is not None:
            for name, text, value in (
                ("hits", "Prompts with a cached prefix", prefixes.hits),
                ("misses", "Prompts without a cached prefix", prefixes.misses),
                (
                    "tokens_saved",
                    "Prompt tokens reused from the prefix cache",
                    prefixes.tokens_saved,
                ),
            ):
                yield CounterMetricFamily(f"oscar_mm_prefix_{name}", text, value)

    def _measure(self) -> list[GaugeMetricFamily]:
        begin, store = thread_time(), self._conversations.pipe.store
        report = store.memory()
        used = GaugeMetricFamily(
            "oscar_mm_kv_bytes", "KV bytes in use by modality, and states", labels=["modality"]
        )
        used.add_metric(["states"], report.state_bytes)
        for modality, size in store.bytes_by_modality().items():
            used.add_metric([modality], size)
        if self._conversations.pipe.family.talker is not None:
            used.add_metric(["speech"], self._conversations.pipe.engine.speech_bytes)
        taken = GaugeMetricFamily(
            "oscar_mm_kv_pool_bytes",
            "KV bytes allocated, including free slots and states",
            report.pool_bytes + report.state_bytes,
        )
        self._kept_until = perf_counter() + _KEPT * (thread_time() - begin)
        return [used, taken]
