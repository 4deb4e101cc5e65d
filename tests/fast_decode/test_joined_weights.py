"""Projections whose weights are next to each other: the same model, and one product for three."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from oscar_mm.fast_decode.joined_weights import join_projections
from oscar_mm.fast_decode.linear_torch import (
    LinearArguments,
    joined,
    linear_by_torch,
    linear_on_gpu,
)
from oscar_mm.modules import weights_key
from oscar_mm.pipelines.weight_formats import quantize
from tests.checkpoints import build_decoder

IDS = torch.arange(3, 40)[None]


def projections(model: PreTrainedModel, kind: str = "weight") -> list[list[torch.Tensor]]:
    return [
        [getattr(getattr(layer.self_attn, name), kind) for name in ("q_proj", "k_proj", "v_proj")]
        for layer in model.get_decoder().layers
    ]


def values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    model = build_decoder("qwen3").eval()
    before, logits = values(model), model(IDS).logits
    assert all(joined(weights) is None for weights in projections(model))
    join_projections(model)
    for weights in projections(model):
        whole = joined(weights)
        assert whole is not None and torch.equal(whole, torch.cat(weights))
        assert all(weight.is_leaf and weight.requires_grad for weight in weights)
    assert torch.equal(model(IDS).logits, logits)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for found in (values(model), values(again)):
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], value) for name, value in before.items())


@torch.no_grad()
@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_quantized_weights(weights: Literal["fp8", "int4"]) -> None:
    """Codes and scales in FP8 are moved; those of INT4 are not."""
    model = build_decoder("qwen3", hidden_size=512).eval()
    quantize(model, model.get_decoder(), weights)
    before, logits = values(model), model(IDS).logits
    join_projections(model)
    for parts in projections(model) + projections(model, "scales"):
        whole = joined(parts)
        assert (whole is None) == (weights == "int4")
        assert whole is None or torch.equal(whole.float(), torch.cat(parts).float())
    after = values(model)
    assert all(torch.equal(after[name].float(), value.float()) for name, value in before.items())
    assert torch.equal(model(IDS).logits, logits)


def test_weights_are_moved_once_and_again_after_they_were_replaced() -> None:
    model = build_decoder("qwen3")
    join_projections(model)
    key = weights_key(model)
    join_projections(model)
    assert weights_key(model) == key
    layer = model.get_decoder().layers[0]
    layer.self_attn.k_proj.weight.data = layer.self_attn.k_proj.weight.data + 1
    join_projections(model)
    assert weights_key(model) != key
    assert all(joined(weights) is not None for weights in projections(model))


def test_the_model_can_be_trained_and_adapted_later() -> None:
    model = build_decoder("qwen3")
    with torch.inference_mode():
        join_projections(model)
    model(IDS, labels=IDS).loss.backward()
    assert all(weight.grad is not None for weights in projections(model) for weight in weights)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    join_projections(adapted.get_base_model())
    merged = copy.deepcopy(adapted).merge_and_unload()
    with torch.no_grad():
        assert torch.allclose(merged(IDS).logits, adapted(IDS).logits, atol=1e-5)


def test_layers_with_biases_are_left_alone() -> None:
    model = build_decoder("llama", attention_bias=True)
    key = weights_key(model)
    join_projections(model)
    assert weights_key(model) == key


def test_matrices_that_are_not_adjacent_are_not_joined() -> None:
    whole = torch.randn(12, 8)
    assert joined(whole.split(4)) is not None
    first, second, third = whole.split(4)
    assert joined([first, third]) is None and joined([second, first]) is None
    assert joined([first, second.clone()]) is None
    assert joined(whole.split(4, 1)) is None


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_product_equals_three(residual: bool, device: str) -> None:
    whole = torch.randn(96, 64, dtype=torch.bfloat16, device=device)
    weights = list(whole.split([64, 16, 16]))
    assert joined(weights) is not None
    x, more = (torch.randn(300, n, dtype=torch.bfloat16, device=device) for n in (64, 96))
    arguments = LinearArguments.of(x, weights, residual=more if residual else None)
    found, expected = linear_on_gpu(arguments), linear_by_torch(arguments)
    assert torch.allclose(found.float(), expected.float(), atol=0.25, rtol=0.02)
    apart = linear_on_gpu(arguments._replace(weights=[weight.clone() for weight in weights]))
    assert torch.allclose(found.float(), apart.float(), atol=0.25, rtol=0.02)
