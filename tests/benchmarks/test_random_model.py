"""Random models have the sizes and buffers of the released ones."""

import pytest
import torch

from benchmarks.random_model import FAMILIES, RELEASED, build

# As the hub counts the safetensors of each; Omni's without talker (its Thinking checkpoint).
BILLIONS = {
    "llava-1.6-vicuna-7b": 7.06,
    "llava-1.6-mistral-7b": 7.57,
    "qwen3-vl-8b": 8.77,
    "qwen3-vl-30b-a3b": 31.1,
    "qwen3-omni-30b-a3b": 31.7,
}


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", BILLIONS)
def test_full_size_has_the_released_number_of_parameters(name: str) -> None:
    model_class, config, _ = FAMILIES[RELEASED[name].family](RELEASED[name])
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=torch.bfloat16)
    count = sum(weight.numel() for weight in model.parameters())
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)


@pytest.mark.parametrize("name", RELEASED)
def test_buffers_are_those_of_a_model_made_the_usual_way(name: str) -> None:
    released = RELEASED[name].with_positions(50000)
    model, _ = build(released.tiny(), CPU, torch.bfloat16)
    assert model.config.get_text_config().max_position_embeddings >= 50000
    usual = type(model)._from_config(model.config, dtype=torch.bfloat16)
    expected = dict(usual.named_buffers())
    assert any("inv_freq" in buffer for buffer in expected)
    for buffer, values in model.named_buffers():
        assert torch.equal(values, expected[buffer]), buffer
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
