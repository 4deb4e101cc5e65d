"""What a step launches, as the profiler sees it."""

import pytest
import torch

from benchmarks.step_kernels import kernels_of


def test_operations_of_a_step() -> None:
    left, right = torch.randn(2, 300, 300)
    found = kernels_of(lambda: [left @ right for _ in range(3)], torch.device("cpu"))
    kinds = {name: figures for name, *figures in found["most"]}
    count, busy, added = kinds["aten::mm"]
    assert count == 3 and added > 0 and 0 < busy <= found["busy_ms"]
    assert found["launches"] >= 3
    # Operations on a CPU lie within each other: what they add is the time from begin to end.
    assert sum(figures[2] for figures in kinds.values()) == pytest.approx(found["span_ms"])
