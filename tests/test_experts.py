"""Experts "oscar": few tokens one way, many another, a user's choice untouched."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from oscar_mm import OscarVLPipeline
from oscar_mm.experts import IMPLEMENTATION, MOST_BATCHED, choose_experts, forward


@pytest.mark.parametrize(
    ("tokens", "device", "expected"),
    [
        (1, "meta", "batched_mm"),
        (MOST_BATCHED, "meta", "batched_mm"),
        (MOST_BATCHED + 1, "meta", "grouped_mm"),
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
