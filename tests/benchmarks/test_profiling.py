"""Memory as the allocator counts it, and operations of a step as the profiler lists them."""

import pytest
import torch

from benchmarks.conversation import Call, tensors_on
from benchmarks.profiling import allocated, allocated_since, kernel_launches
from oscar_mm.engine.prompt import Prompt

CPU = torch.device("cpu")


def test_operations_of_a_step() -> None:
    left, right = torch.randn(2, 300, 300)
    report = kernel_launches(lambda: [left @ right for _ in range(3)], torch.device("cpu"))
    kinds = {name: figures for name, *figures in report["most"]}
    count, busy, beyond = kinds["aten::mm"]
    assert count == 3 and beyond > 0 and 0 < busy <= report["busy_ms"]
    assert report["launches"] >= 3
    # Operations on a CPU lie within each other: what they add is the time from begin to end.
    assert sum(figures[2] for figures in kinds.values()) == pytest.approx(report["span_ms"])


def test_what_the_allocator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"requested_bytes.all.current": 1800, "allocated_bytes.all.current": 2500}
    peak = {"requested_bytes.all.peak": 5000}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: now | peak)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    before = {"requested": 1000, "allocated": 1500, "peak": 0}
    inputs = torch.zeros(50)
    elsewhere = torch.zeros(7, device="meta")
    shown = {"a": inputs, "b": inputs[:2], "c": elsewhere}
    calls = [Call(Prompt(shown, inputs, inputs, inputs), inputs)] * 2
    growth = allocated_since(before, allocated(torch.device("cuda")), tensors_on(CPU, calls))
    assert growth == {"requested": 600, "allocated": 800, "activations": 3400}
    assert allocated_since({}, allocated(CPU), []) == {}
