"""`doctor MODEL` reports what the loaded checkpoint does."""

from __future__ import annotations

import json

import pytest

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.cli import run
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.pipelines.decode_path import decode_path
from tests.checkpoints import build_decoder
from tests.fp8_checkpoints import to_fp8
from tests.lora import save_adapter
from tests.pipelines.test_quantized_checkpoints import FORMATS
from tests.quantized_checkpoints import AWQ, awq, quantize_folder

CAPTURED = "captured as CUDA graphs"
TITLES = {"int4": "INT4 (compressed-tensors)", "fp8": "FP8 (compressed-tensors)"}


@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        ("qwen3_vl_folder", "Qwen3-VL"),
        ("qwen3_vl_moe_folder", "Qwen3-VL"),
        ("llava_next_folder", "LLaVA-NeXT"),
        ("qwen3_5_folder", "Qwen3.5"),
        ("qwen3_5_moe_folder", "Qwen3.5"),
    ],
)
def test_families(fixture: str, name: str, request) -> None:
    folder = request.getfixturevalue(fixture)
    found = decode_path(folder)
    assert (found.family, found.weights, found.steps) == (
        name,
        "16-bit",
        f"fused layers, {CAPTURED}",
    )
    assert supports(OscarVLPipeline(folder, device="cpu").model)


@pytest.mark.daily("int4", "fp8 block", "awq", "gptq act_order")
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights(name: str, qwen2_5_vl_folder, tmp_path) -> None:
    fields, make = FORMATS[name]
    quantize_folder(qwen2_5_vl_folder, tmp_path / "made", fields, make)
    found = decode_path(tmp_path / "made")
    assert found.weights == TITLES.get(name.split()[0], f"INT4 ({name.split()[0].upper()})")
    assert found.fused == supports(OscarVLPipeline(tmp_path / "made", device="cpu").model)
    assert found.fused == ("act_order" not in name)


@pytest.mark.parametrize("name", ["gptq act_order", "int4 act_order"])
def test_experts_with_columns_in_another_order(name: str, qwen3_vl_moe_folder, tmp_path) -> None:
    fields, make = FORMATS[name]
    quantize_folder(qwen3_vl_moe_folder, tmp_path / "made", fields, make)
    words = r"the columns are in another order \(desc_act, actorder\), which experts do not support"
    for find in (decode_path, OscarVLPipeline):
        with pytest.raises(InputError, match=rf"^model {tmp_path}/made: .*{words}; use"):
            find(tmp_path / "made")


def test_fp8_as_transformers_stores_it(qwen3_vl_folder, tmp_path) -> None:
    to_fp8(qwen3_vl_folder, tmp_path / "fp8")
    found = decode_path(tmp_path / "fp8")
    assert (found.weights, found.fused) == ("FP8", True)


@pytest.mark.parametrize(
    ("name", "fields", "steps"),
    [
        ("llama", {}, f"fused layers, {CAPTURED}"),
        ("gemma", {}, f"the model's own modules, {CAPTURED}"),
        ("mistral", {"sliding_window": 16}, f"the model's own modules, {CAPTURED}"),
        ("gpt_oss", {}, "the model's own modules, one operation at a time, because layers have"),
    ],
)
def test_language_models(name: str, fields: dict, steps: str, tmp_path) -> None:
    model = build_decoder(name, num_hidden_layers=1, **fields)
    model.save_pretrained(tmp_path)
    found = decode_path(tmp_path)
    assert found.family == name and found.steps.startswith(steps)
    assert found.fused == supports(model)


def test_the_command(qwen3_vl_folder, tmp_path, capsys) -> None:
    pytest.importorskip("peft")
    quantize_folder(qwen3_vl_folder, tmp_path / "awq", AWQ, awq)
    adapter = save_adapter(qwen3_vl_folder, tmp_path / "lora", target_modules=["q_proj"])
    assert run(["doctor", str(adapter), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["model"]
    assert found["name"] == str(adapter) and found["fused"] and found["captured"]
    assert run(["doctor", str(tmp_path / "awq")]) == 0
    said = capsys.readouterr().out
    assert "  family        Qwen3-VL\n  weights       INT4 (AWQ)\n  decode steps  fused la" in said
    assert run(["doctor", "no/such-model"]) == 2
    assert capsys.readouterr().err.startswith("oscar-mm: error: model no/such-model: not on this")
    quantize_folder(qwen3_vl_folder, tmp_path / "eight", AWQ | {"bits": 8}, awq)
    with pytest.raises(InputError, match=r"quantization_config.bits is 8"):
        decode_path(tmp_path / "eight")
