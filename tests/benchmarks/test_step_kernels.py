"""What a step launches, as the profiler sees it."""

import torch

from benchmarks.step_kernels import kernels_of


def test_operations_of_a_step() -> None:
    left, right = torch.randn(2, 300, 300)
    found = kernels_of(lambda: [left @ right for _ in range(3)], torch.device("cpu"))
    [name, count, spent] = found["most"][0]
    assert (name, count) == ("aten::mm", 3)
    assert 0 < spent <= found["busy_ms"] and found["launches"] >= 3
