"""Vision attention that reads the lengths of pictures once: against the same attention as it is."""

import pytest
import torch

from benchmarks.random_model import FAMILIES, RANDOM_MODELS
from oscar_mm.media.sequence_lengths import read_lengths_once


class OnGPU(torch.Tensor):
    """Stands for a tensor on a GPU, which only ``cpu`` may copy to the host."""

    copies = 0
    is_cpu = False

    def cpu(self) -> torch.Tensor:
        OnGPU.copies += 1
        return self.as_subclass(torch.Tensor).clone()

    def __sub__(self, other: object) -> torch.Tensor:
        raise AssertionError("the lengths are computed on the GPU, so the host waits for it")


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "qwen2.5-vl-7b", "qwen3-omni-30b-a3b"])
def test_layers_share_a_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    released = RANDOM_MODELS[name].tiny()
    model_class, config, _ = FAMILIES[released.family](released)
    model = model_class._from_config(config).eval()
    attentions = [x for x in model.modules() if type(x).__name__.endswith("VisionAttention")]
    assert len(attentions) >= 2
    edges = torch.tensor([0, 4, 10, 12], dtype=torch.int32)
    states = torch.randn(12, attentions[0].qkv.in_features)
    angles = torch.randn(12, attentions[0].qkv.in_features // attentions[0].num_heads)
    turns = angles.cos(), angles.sin()

    def outputs(edges: torch.Tensor) -> list[torch.Tensor]:
        return [x(states, cu_seqlens=edges, position_embeddings=turns) for x in attentions]

    expected, on_gpu = outputs(edges), edges.as_subclass(OnGPU)
    with pytest.raises(AssertionError, match="the host waits"):
        outputs(on_gpu)
    read_lengths_once(model)
    read_lengths_once(model)
    monkeypatch.setattr(OnGPU, "copies", 0)
    torch.testing.assert_close(outputs(on_gpu), expected)
    assert OnGPU.copies == 1
    torch.testing.assert_close(outputs(edges), expected)
