"""Experts "oscar": few tokens one way, many another, a user's choice untouched."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import (
    ALL_FP8_EXPERTS_FUNCTIONS,
    replace_with_fp8_linear,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from oscar_mm import OscarVLPipeline
from oscar_mm.moe_switch import IMPLEMENTATION, MAX_BATCHED, choose_experts, forward


@pytest.mark.parametrize(
    ("tokens", "device", "expected"),
    [
        (1, "meta", "batched_mm"),
        (MAX_BATCHED, "meta", "batched_mm"),
        (MAX_BATCHED + 1, "meta", "grouped_mm"),
        (1, "cpu", "grouped_mm"),
    ],
)
def test_chooses_by_tokens(
    tokens: int, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("batched_mm", "grouped_mm"):
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, name, lambda *given, name=name: (name, given))
    given = (torch.nn.Identity(), torch.zeros(tokens, 4, device=device), "index", "weights")
    assert forward(*given) == (expected, given)


def implementations(model: torch.nn.Module) -> set[str]:
    experts = [one for one in model.modules() if type(one).__name__.endswith("Experts")]
    return {one.config._experts_implementation for one in experts}


def test_a_pipeline_takes_it(qwen3_vl_moe_folder: Path, tmp_path: Path) -> None:
    model = OscarVLPipeline(qwen3_vl_moe_folder, device="cpu").model
    assert implementations(model) == {IMPLEMENTATION}
    ids = torch.arange(3, 12)[None]
    logits = []
    for name in (IMPLEMENTATION, "eager"):
        model.set_experts_implementation(name)
        with torch.inference_mode():
            logits.append(model(input_ids=ids).logits)
    torch.testing.assert_close(*logits)
    model.set_experts_implementation(IMPLEMENTATION)
    model.save_pretrained(tmp_path)
    assert IMPLEMENTATION not in (tmp_path / "config.json").read_text()


def test_a_choice_stays(qwen3_vl_moe_folder: Path, qwen3_vl_folder: Path) -> None:
    load = AutoModelForImageTextToText.from_pretrained
    chosen = load(qwen3_vl_moe_folder, experts_implementation="batched_mm")
    choose_experts(chosen)
    assert implementations(chosen) == {"batched_mm"}
    dense = load(qwen3_vl_folder)
    choose_experts(dense)
    assert implementations(dense) == set()


def test_quantized_experts_keep_theirs(
    qwen3_vl_moe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' FP8 experts choose among functions of their own."""
    model = AutoModelForImageTextToText.from_pretrained(qwen3_vl_moe_folder)
    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith(".experts")
    ]
    replace_with_fp8_linear(model, others, FineGrainedFP8Config())
    assert any(type(one).__name__ == "FP8Experts" for one in model.modules())
    model.to_empty(device="cpu")
    taken = []

    def experts(module: torch.nn.Module, states: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        taken.append(type(module).__name__)
        return torch.zeros_like(states)

    monkeypatch.setitem(ALL_FP8_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", experts)
    choose_experts(model)
    with torch.inference_mode():
        model(input_ids=torch.arange(3, 12)[None])
    assert set(taken) == {"FP8Experts"}
