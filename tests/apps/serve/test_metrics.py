"""How often scrapes measure the memory."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("prometheus_client", reason="needs prometheus-client")

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from oscar_mm.apps.serve.metrics import _SECONDS, AnswerTimes, Metrics, TimeHistogram


class Store:
    """Store whose measurement takes a time, and reports how many there were."""

    def __init__(self, *, computes: float = 0.0, waits: float = 0.0) -> None:
        self._computes, self._waits, self.measured = computes, waits, 0

    def memory(self) -> Any:
        self.measured += 1
        time.sleep(self._waits)
        end = time.thread_time() + self._computes
        while time.thread_time() < end:
            pass
        return SimpleNamespace(state_bytes=0, pool_bytes=self.measured)

    def bytes_by_modality(self) -> dict[str, int]:
        return {}


class Conversations(list):
    def __init__(self, store: Store) -> None:
        engine = SimpleNamespace(running=0, waiting=0, call=lambda function, timeout: function())
        family = SimpleNamespace(talker=None)
        self.pipe = SimpleNamespace(store=store, engine=engine, family=family, prefixes=None)


def test_times_are_those_of_a_usual_histogram(monkeypatch) -> None:
    monkeypatch.setattr("prometheus_client.metrics._use_created", False)
    usual, ours = CollectorRegistry(), CollectorRegistry()
    expected = Histogram("waits", "Waits", buckets=_SECONDS, registry=usual)
    ours.register(times := TimeHistogram("waits", "Waits"))
    for seconds, count in ((0.0, 1), (0.001, 3), (0.0625, 2), (1.0, 1), (120.5, 4)):
        times.observe(seconds, count)
        for _ in range(count):
            expected.observe(seconds)
    assert generate_latest(ours) == generate_latest(usual)


def test_a_token_that_was_counted_before_its_text_came() -> None:
    metrics = Metrics(cast(Any, Conversations(Store())))
    times = AnswerTimes(metrics, time.perf_counter())
    for written in (1, 1, 4, 4, 5):
        times.note(written)
    counts = [
        metrics.registry.get_sample_value(f"oscar_mm_{name}_token_seconds_count")
        for name in ("first", "inter")
    ]
    assert counts == [1, 4] and times.count == 5


def pool_bytes(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("oscar_mm_kv_pool_bytes")


def test_a_measurement_that_computes_for_long_is_kept() -> None:
    metrics = Metrics(cast(Any, Conversations(store := Store(computes=0.05))))
    before = pool_bytes(metrics)
    time.sleep(0.1)
    assert pool_bytes(metrics) == store.measured == before == 1


def test_a_measurement_that_was_held_up_is_not_kept_for_longer() -> None:
    metrics = Metrics(cast(Any, Conversations(store := Store(waits=0.05))))
    before = pool_bytes(metrics)
    time.sleep(0.5)
    assert before and pool_bytes(metrics) == store.measured > before
