"""Where weights go: what contradicts itself, and what is divided among ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.models import bundled
from oscar_mm.pipelines.llava_next import LlavaNext
from oscar_mm.pipelines.placement import Placement, on_meta, tensor_plan
from oscar_mm.pipelines.qwen3_omni import Qwen3Omni
from oscar_mm.pipelines.qwen3_vl import Qwen3VL


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "cpu", "device_map": "auto"}, "device and device_map"),
        ({"device": "cpu", "tp_plan": "auto"}, "device and tp_plan"),
        ({"device_map": {"": "cpu"}, "tp_plan": "auto"}, "device_map and tp_plan"),
        ({"tp_plan": "all"}, "tp_plan='all': must be 'auto'"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used"),
        ({"device": ["cpu"]}, "device ['cpu'] cannot be used"),
    ],
)
def test_what_contradicts_itself(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        Placement(**arguments)


def test_places() -> None:
    assert Placement("cpu").target == torch.device("cpu") and Placement("cpu").on_cpu
    assert Placement(device_map="auto").target is None


def test_a_loaded_model_stays_as_it_is(qwen3_vl_folder) -> None:
    loaded = OscarVLPipeline(qwen3_vl_folder, device="cpu").model
    with pytest.raises(InputError, match="device_map is for a model that is loaded here"):
        OscarVLPipeline(loaded, device_map="auto")


def plan_of(family: Any, folder: Path, count: int = 2) -> dict[str, str]:
    model = on_meta(family.auto_class, AutoConfig.from_pretrained(folder))
    return tensor_plan(model, count)


def divided(plan: dict[str, str]) -> set[str]:
    """Last names of what is not left whole."""
    return {name.split(".")[-1] for name, style in plan.items() if "replicated" not in style}


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(("family", "name"), [(Qwen3VL, "pocket-vl"), (LlavaNext, "pocket-llava")])
def test_dense_decoders(family, name) -> None:
    plan = plan_of(family, bundled(name))
    assert divided(plan) == {*ATTENTION, *MLP, "lm_head"}
    assert plan["model.language_model.layers.*.self_attn.k_proj"] == "colwise"
    assert not any("vis" in place for place in plan)


def test_experts() -> None:
    plan = plan_of(Qwen3Omni, bundled("pocket-omni"))
    assert divided(plan) == {*ATTENTION, "experts", "gate_up_proj", "down_proj", "lm_head"}


def test_experts_that_cannot_be_cut(qwen3_vl_moe_folder) -> None:
    assert divided(plan_of(Qwen3VL, qwen3_vl_moe_folder)) == {*ATTENTION, "lm_head"}


def test_the_talker_stays_whole(qwen3_omni_talker_folder) -> None:
    plan = plan_of(Qwen3Omni, qwen3_omni_talker_folder)
    talking = {name: style for name, style in plan.items() if not name.startswith("thinker.")}
    assert talking and not divided(talking)
    assert "k_proj" in divided(plan)


def test_an_output_layer_that_cannot_be_divided(qwen3_vl_folder) -> None:
    # 500 tokens.
    assert "lm_head" in divided(plan_of(Qwen3VL, qwen3_vl_folder, 2))
    assert "lm_head" not in divided(plan_of(Qwen3VL, qwen3_vl_folder, 3))
