"""What is free on a device, and what reading a prompt takes at least."""

import json
from pathlib import Path

import pytest
import torch

from oscar_mm.admission.capacity import activation_bytes, free_bytes

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "full_size-nvidia-h200.json"
HIDDEN = {"llava": 4096, "qwen3-vl-8b": 4096, "qwen3-vl-30b-a3b": 2048, "qwen3-omni": 2048}


def test_a_cpu_has_no_bound() -> None:
    assert free_bytes(torch.device("cpu")) is None


def test_less_than_any_model_took() -> None:
    rows = json.loads(RECORD.read_text())["rows"]
    assert len(rows) >= 4
    for row in rows:
        [hidden] = [size for name, size in HIDDEN.items() if row["model"].startswith(name)]
        took = row["held"]["activations"]
        assert took / 5 < activation_bytes(row["prompt_tokens"], hidden, 2) < took


@pytest.mark.gpu
def test_memory_that_torch_keeps_is_free() -> None:
    device = torch.device("cuda", 0)
    before = free_bytes(device)
    held = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    assert free_bytes(device) <= before - held.nbytes // 2
    del held
    assert free_bytes(device) >= before - (1 << 26)
