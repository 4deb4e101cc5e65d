"""Quantized checkpoints as they are released, against plain transformers with their weights
dequantized number by number."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AwqConfig

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.fast_decode.quantized_modules import QuantizedExperts, QuantizedLinear
from oscar_mm.modules import modules_of
from tests.languages import CHATML, build_language_model
from tests.prompts import REQUESTS, Reference
from tests.quantized_checkpoints import (
    AWQ,
    FP8,
    GPTQ,
    INT4,
    awq,
    compressed_tensors,
    float_quantized,
    gptq,
    pack_quantized,
    quantize_folder,
)

REQUEST = REQUESTS["two images"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = {
    "int4": (compressed_tensors(INT4, "pack-quantized"), pack_quantized),
    "int4 asymmetric": (
        compressed_tensors(INT4 | {"symmetric": False}, "pack-quantized"),
        partial(pack_quantized, symmetric=False),
    ),
    "int4 channel": (
        compressed_tensors(INT4 | {"strategy": "channel"}, "pack-quantized"),
        partial(pack_quantized, group=None),
    ),
    "int4 act_order": (
        compressed_tensors(INT4 | {"actorder": "group"}, "pack-quantized"),
        partial(pack_quantized, act_order=True),
    ),
    "fp8 tensor": (
        compressed_tensors(FP8 | {"strategy": "tensor"}, "float-quantized"),
        partial(float_quantized, strategy="tensor"),
    ),
    "fp8 channel": (
        compressed_tensors(FP8 | {"strategy": "channel"}, "float-quantized"),
        partial(float_quantized, strategy="channel"),
    ),
    "fp8 block": (
        compressed_tensors(
            FP8 | {"strategy": "block", "block_structure": [128, 128]}, "float-quantized"
        ),
        partial(float_quantized, strategy="block"),
    ),
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq act_order": (GPTQ | {"desc_act": True}, partial(gptq, act_order=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(gptq, version=2)),
}
FAMILIES = ["llava_next", "llava_next_vicuna", "qwen3_vl", "qwen2_5_vl"]
CASES = [
    *((name, "qwen2_5_vl") for name in FORMATS),
    *((name, family) for name in ("int4", "awq") for family in FAMILIES[:3]),
    *((name, "qwen3_vl_moe") for name in FORMATS if not name.endswith("act_order")),
]


def reference(folder: Path, truth: dict[str, torch.Tensor]) -> Reference:
    """Plain transformers with the weights of a checkpoint replaced by those of ``truth``."""
    found = Reference(folder)
    copy_into(found.model, truth)
    return found


def copy_into(model: torch.nn.Module, truth: dict[str, torch.Tensor]) -> None:
    """Replace weights of a model of transformers, whose experts are stacked."""
    state = model.state_dict()
    for name, weight in truth.items():
        end = name.split("layers.")[1]
        expert = re.fullmatch(r"(.+experts)\.(\d+)\.(\w+).weight", end)
        if expert:
            stacked = "down_proj" if expert[3] == "down_proj" else "gate_up_proj"
            end = f"{expert[1]}.{stacked}"
        (own,) = (x for x in state if x.endswith(f"layers.{end}") and "vis" not in x)
        target = state[own][int(expert[2])] if expert else state[own]
        if expert and expert[3] != "down_proj":
            target = target.chunk(2)[expert[3] == "up_proj"]
        target.copy_(weight)


@pytest.mark.daily("qwen2_5_vl", "awq-llava_next", "int4 channel-qwen3_vl_moe", "awq-qwen3_vl_moe")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "family"), CASES)
def test_answers(name, family, request, tmp_path, monkeypatch, device) -> None:
    # Convolutions of the towers, which a GPU computes in TF32 by default.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    folder = request.getfixturevalue(f"{family}_folder")
    config, make = FORMATS[name]
    truth = quantize_folder(folder, tmp_path / "stored", config, make)
    plain = reference(folder, truth)
    inputs = plain.inputs([REQUEST])
    expected = plain.generate(inputs, max_new_tokens=6)[0]
    pipe = OscarVLPipeline(tmp_path / "stored", device=device, dtype="float32", policy="bf16")
    answer = REQUEST.ask(pipe, max_new_tokens=6)
    assert answer.token_ids[: len(expected)] == expected
    own = [one for one in modules_of(pipe.model) if type(one) is QuantizedLinear]
    stacked = [one for one in modules_of(pipe.model) if type(one) is QuantizedExperts]
    if name.startswith("fp8") and device == "cpu":  # Dequantized at load.
        assert not own and not stacked and truth
    else:
        assert len(own) + 3 * sum(len(one.down_proj) for one in stacked) == len(truth) > 0
        assert bool(stacked) == family.endswith("moe")
    assert supports(pipe.model) == (not name.endswith("act_order"))
    pipe.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = pipe.model(**inputs.to(device)).logits.cpu()
        torch.testing.assert_close(
            logits, plain.model(**inputs.to("cpu")).logits, atol=1e-3, rtol=1e-3
        )


@pytest.mark.parametrize(
    ("name", "family"), [("int4 channel", "qwen3_omni"), ("int4 channel", "qwen3_omni_talker")]
)
def test_experts_of_thinker_and_talker(name, family, request, tmp_path) -> None:
    """In files, experts of thinker and talker have other names than in the model."""
    folder = request.getfixturevalue(f"{family}_folder")
    truth = quantize_folder(folder, tmp_path / "stored", *FORMATS[name])
    plain = shutil.copytree(folder, tmp_path / "plain")
    altered(plain, lambda tensors: tensors.update(truth))
    pipes = [
        OscarOmniPipeline(folder, device="cpu", dtype="float32", policy="bf16")
        for folder in (plain, tmp_path / "stored")
    ]
    expected, found = (REQUEST.ask(one, max_new_tokens=6).token_ids for one in pipes)
    assert found == expected
    of_experts = sum(".experts." in one for one in truth)
    modules = modules_of(pipes[1].family.outer_model)
    stacked = [one for one in modules if type(one) is QuantizedExperts]
    assert 3 * sum(len(one.down_proj) for one in stacked) == of_experts > 0


def stored(name: str, folder: Path, target: Path, shards: int = 1) -> Path:
    """Copy a quantized checkpoint, which is made once, into a new folder."""
    made = folder.with_name(f"{folder.name} {name} {shards}")
    if not made.exists():
        quantize_folder(folder, made, *FORMATS[name], shards=shards)
    return shutil.copytree(made, target)


def altered(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint with one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, file, {"format": "pt"})


def first(part: str, tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(tensors) if name.endswith(f"0.self_attn.q_proj.{part}"))


BAD = [
    ("awq", "qzeros", None, "qzeros is missing"),
    ("gptq act_order", "g_idx", None, "g_idx is missing"),
    ("int4 asymmetric", "weight_zero_point", None, "weight_zero_point is missing"),
    ("int4 act_order", "weight_g_idx", None, "weight_g_idx is missing"),
    ("int4", "weight_packed", None, "weight_packed is missing"),
    ("fp8 channel", "weight", None, "weight is missing"),
    ("fp8 channel", "weight_scale", None, "weight has codes in torch.float8_e4m3fn, but its scal"),
    ("awq", "scales", lambda x: x * float("nan"), "scales has NaN or infinite values: download"),
    ("int4", "weight_scale", lambda x: x / 0, "weight_scale has NaN or infinite values"),
    ("fp8 tensor", "weight_scale", lambda x: x * float("inf"), "weight_scale has NaN or infinite"),
    ("gptq", "g_idx", lambda x: x + 1, "g_idx has groups outside of 0 to 7"),
    ("gptq", "g_idx", lambda x: x - 2, "g_idx has groups outside of 0 to 7"),
    ("gptq", "g_idx", lambda x: x * 0, "g_idx: each group must have 32 columns"),
    ("gptq", "g_idx", lambda x: x[1:], r"g_idx: the shape is \[255\], must be \[256\]"),
    ("awq", "qweight", lambda x: x[:, 1:], r"qweight: the shape is \[256, 31\], must be \[256, 32"),
    ("awq", "scales", lambda x: x[:7], r"scales: the shape is \[7, 256\], which does not divide"),
    ("awq", "scales", lambda x: x[0], r"scales: the shape is \[256\], which does not divide"),
    ("awq", "scales", lambda x: x[:0], r"scales: the shape is \[0, 256\], which does not divide"),
    ("awq", "qweight", lambda x: x.float(), "qweight: the dtype is torch.float32, must be torch.i"),
    ("int4", "weight_shape", lambda x: x + 1, r"weight_shape is \[257, 257\], must be \[256, 256"),
    ("fp8 block", "weight_scale", lambda x: x[:1], "weight_scale: scales: the shape is"),
    ("awq", "bias", lambda x: x[1:], r"bias: the shape is \[255\], must be \[256\]"),
]


@pytest.mark.parametrize(("name", "part", "change", "message"), BAD)
def test_bad_tensors(qwen2_5_vl_folder, tmp_path, name, part, change, message) -> None:
    folder = stored(name, qwen2_5_vl_folder, tmp_path / "bad")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        key = first(part, tensors)
        tensors[key] = tensors.pop(key) if change is None else change(tensors[key])
        if change is None:
            del tensors[key]

    altered(folder, spoil)
    where = r"model .*bad: model\.layers\.0\.self_attn\.q_proj\."
    with pytest.raises(InputError, match=where + message):
        OscarVLPipeline(folder, device="cpu")


@pytest.mark.parametrize("part", ["input_layernorm.weight", "self_attn.q_proj"])
def test_a_missing_module(qwen2_5_vl_folder, tmp_path, part) -> None:
    folder = stored("awq", qwen2_5_vl_folder, tmp_path / "bad")
    altered(
        folder,
        lambda tensors: [tensors.pop(x) for x in list(tensors) if f"layers.1.{part}" in x],
    )
    with pytest.raises(InputError, match=rf"the checkpoint lacks .*layers\.1\.{part}"):
        OscarVLPipeline(folder, device="cpu")


def test_a_plain_tensor_of_another_shape(qwen2_5_vl_folder, tmp_path) -> None:
    folder = stored("awq", qwen2_5_vl_folder, tmp_path / "bad")
    altered(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(InputError, match=r"model.norm.weight: the shape is \[7\], must be \[256\]"):
        OscarVLPipeline(folder, device="cpu")


def test_shards(qwen3_vl_folder, tmp_path) -> None:
    whole = stored("awq", qwen3_vl_folder, tmp_path / "whole")
    parts = stored("awq", qwen3_vl_folder, tmp_path / "parts", shards=3)
    asked = [
        REQUEST.ask(OscarVLPipeline(x, device="cpu"), max_new_tokens=8).token_ids
        for x in (whole, parts)
    ]
    assert asked[0] == asked[1]
    (parts / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match="model-00002-of-00003"):
        OscarVLPipeline(parts, device="cpu")


def test_a_file_that_is_cut(qwen3_vl_folder, tmp_path) -> None:
    folder = stored("awq", qwen3_vl_folder, tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model .*cut: "):
        OscarVLPipeline(folder, device="cpu")


@pytest.mark.parametrize("name", ["int4", "fp8 channel"])
def test_experts_that_transformers_stacks_while_loading(tmp_path, name) -> None:
    """Its rules for names match those of quantized experts too."""
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = build_language_model("qwen3_moe", tmp_path / "plain", seed=0, template=CHATML, **few)
    config, make = FORMATS[name]
    truth = quantize_folder(folder, tmp_path / "stored", config, make)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    copy_into(plain, truth)
    model = OscarVLPipeline(tmp_path / "stored", device="cpu", dtype="float32").model
    model.set_attn_implementation("sdpa")
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)


BAD_EXPERTS = [
    ("awq", "0.gate_proj", "scales", lambda x: x / 0, "scales has NaN or infinite values"),
    (
        "int4",
        "3.down_proj",
        "weight_scale",
        lambda x: x * float("nan"),
        "weight_scale has NaN or in",
    ),
    (
        "fp8 channel",
        "1.up_proj",
        "weight_scale",
        lambda x: x / 0,
        "weight_scale has NaN or infinite",
    ),
    ("awq", "2.up_proj", "qzeros", None, "qzeros is missing"),
    ("gptq act_order", "0.gate_proj", "g_idx", lambda x: x, "the columns are in another order"),
]


@pytest.mark.parametrize(("name", "matrix", "part", "change", "message"), BAD_EXPERTS)
def test_bad_experts(qwen3_vl_moe_folder, tmp_path, name, matrix, part, change, message) -> None:
    folder = stored(name, qwen3_vl_moe_folder, tmp_path / "bad")
    stem = f"model.language_model.layers.1.mlp.experts.{matrix}"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop(f"{stem}.{part}")
        if change is not None:
            tensors[f"{stem}.{part}"] = change(tensor)

    altered(folder, spoil)
    with pytest.raises(InputError, match=r"experts\.\d\.\w+(: |\.)" + message) as error:
        OscarVLPipeline(folder, device="cpu")
    assert name == "gptq act_order" or stem in str(error.value)


def without(path: str, tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if path in name]:
        del tensors[name]


def renumbered(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".experts.3." in name]:
        tensors[name.replace(".experts.3.", ".experts.4.")] = tensors.pop(name)


def regrouped(tensors: dict[str, torch.Tensor]) -> None:
    """An expert whose groups are half as wide as those of the others."""
    for name in [name for name in tensors if ".experts.2.down_proj." in name]:
        if name.endswith(("scales", "qzeros")):
            tensors[name] = tensors[name].repeat_interleave(2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (partial(without, ".experts.2."), r"experts\.2\.gate_proj is not quantized, but matrices"),
        (partial(without, ".experts.2.up"), r"experts\.2\.up_proj is not quantized, but matrices"),
        (renumbered, r"experts\.4 is quantized, but the model has 4 experts"),
        (regrouped, r"mlp\.experts: the experts have different formats"),
    ],
)
def test_incomplete_experts(qwen3_vl_moe_folder, tmp_path, change, message) -> None:
    folder = stored("awq", qwen3_vl_moe_folder, tmp_path / "bad")
    altered(folder, change)
    with pytest.raises(InputError, match=message):
        OscarVLPipeline(folder, device="cpu")


def test_experts_of_an_unknown_name(qwen3_vl_moe_folder, tmp_path) -> None:
    folder = stored("awq", qwen3_vl_moe_folder, tmp_path / "experts")
    stem = "model.language_model.layers.0.mlp.experts.0.w1"
    words = torch.zeros(64, 12, dtype=torch.int32)
    altered(folder, lambda tensors: tensors.update({f"{stem}.qweight": words}))
    with pytest.raises(InputError, match=r"experts.0.w1 is quantized, but is no gate_proj, up"):
        OscarVLPipeline(folder, device="cpu")


def test_only_linear_modules_are_supported(qwen3_vl_folder, tmp_path) -> None:
    folder = stored("awq", qwen3_vl_folder, tmp_path / "embedding")
    name = "model.language_model.embed_tokens.qweight"
    words = torch.zeros(64, 12, dtype=torch.int32)
    altered(folder, lambda tensors: tensors.update({name: words}))
    with pytest.raises(
        InputError, match="embed_tokens is quantized, but only Linear is supported, and not Em"
    ):
        OscarVLPipeline(folder, device="cpu")


def test_an_unsupported_kind(qwen3_vl_folder, tmp_path) -> None:
    quantize_folder(qwen3_vl_folder, tmp_path / "eight", GPTQ | {"bits": 8}, gptq)
    with pytest.raises(
        InputError, match=r"model .*eight: quantization_config.bits is 8; supported"
    ):
        OscarVLPipeline(tmp_path / "eight", device="cpu")


def test_a_bias_that_the_model_has_not(qwen3_vl_folder, tmp_path) -> None:
    """AutoGPTQ writes a bias of zeros for each matrix; others must not be lost."""
    folder = stored("gptq", qwen3_vl_folder, tmp_path / "bias")
    bias = torch.arange(256) / 256

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[first("bias", {first("qweight", tensors).replace("qweight", "bias"): bias})] = bias

    altered(folder, add)
    decoder = OscarVLPipeline(folder, device="cpu").model.get_decoder()
    assert torch.equal(decoder.layers[0].self_attn.q_proj.bias, bias)
    assert decoder.layers[1].self_attn.q_proj.bias is None


def test_dtypes(qwen3_vl_folder, tmp_path) -> None:
    folder = stored("awq", qwen3_vl_folder, tmp_path / "dtypes")
    for dtype, of_scales in (
        ("float32", torch.float16),
        ("float16", torch.float16),
        ("bfloat16", torch.float32),
    ):
        decoder = OscarVLPipeline(folder, device="cpu", dtype=dtype).model.get_decoder()
        assert decoder.norm.weight.dtype == getattr(torch, dtype)
        assert decoder.layers[0].mlp.up_proj.scales.dtype == of_scales


def test_conflicting_arguments(qwen3_vl_folder, tmp_path, monkeypatch) -> None:
    folder = stored("awq", qwen3_vl_folder, tmp_path / "awq")
    with pytest.raises(InputError, match="weights='fp8': the checkpoint is already quantized"):
        OscarVLPipeline(folder, device="cpu", weights="fp8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        InputError, match=r"weights in INT4 .AWQ. cannot be divided among processes"
    ):
        OscarVLPipeline(folder, tp_plan="auto")


def test_a_saved_chat_belongs_to_its_checkpoint(qwen3_vl_folder, tmp_path) -> None:
    folder = stored("awq", qwen3_vl_folder, tmp_path / "awq")
    pipes = [OscarVLPipeline(x, device="cpu") for x in (qwen3_vl_folder, folder)]
    assert pipes[0].fingerprint != pipes[1].fingerprint


@pytest.mark.parametrize(
    "places",
    [{"": "disk"}, {"": "cpu", "lm_head": "meta"}],
    ids=["disk", "cpu beside another device"],
)
def test_offloaded_weights_are_refused(qwen3_vl_folder, tmp_path, places) -> None:
    folder = stored("awq", qwen3_vl_folder, tmp_path / "awq")
    with pytest.raises(InputError, match="device_map: quantized weights cannot be offloaded; use"):
        OscarVLPipeline(folder, device_map=places)


def reconfigured(folder: Path, change: Callable[[dict], object]) -> None:
    fields = json.loads((folder / "config.json").read_text())
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields))


def test_names_of_a_newer_transformers(qwen2_5_vl_folder, tmp_path) -> None:
    """Its modules have other names than in the checkpoints that were released."""
    folder = stored("awq", qwen2_5_vl_folder, tmp_path / "old")
    expected = REQUEST.ask(OscarVLPipeline(folder, device="cpu"), max_new_tokens=8).token_ids
    newer = {"model.": "model.language_model.", "visual.": "model.visual."}

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            for old, new in newer.items():
                if name.startswith(old):
                    tensors[name.replace(old, new, 1)] = tensors.pop(name)
                    break

    altered(folder, rename)
    found = REQUEST.ask(OscarVLPipeline(folder, device="cpu"), max_new_tokens=8).token_ids
    assert found == expected


def test_a_configuration_of_the_text_model(qwen3_vl_folder, tmp_path) -> None:
    folder = stored("awq", qwen3_vl_folder, tmp_path / "awq")
    reconfigured(
        folder,
        lambda fields: fields["text_config"].update(
            quantization_config=fields.pop("quantization_config")
        ),
    )
    model = OscarVLPipeline(folder, device="cpu").model
    assert any(type(one) is QuantizedLinear for one in modules_of(model))
    assert model.config.quantization_config == AWQ


def test_an_output_layer_that_is_tied(qwen3_vl_folder, tmp_path) -> None:
    folder = stored("awq", qwen3_vl_folder, tmp_path / "tied")
    reconfigured(folder, lambda fields: fields.update(tie_word_embeddings=True))

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        parts, _ = awq(tensors.pop("lm_head.weight")[:496])
        tensors |= {f"lm_head.{part}": tensor for part, tensor in parts.items()}

    altered(folder, quantize)
    with pytest.raises(InputError, match="lm_head is quantized, but the configuration ties it"):
        OscarVLPipeline(folder, device="cpu")


def test_columns_without_groups(qwen3_vl_folder, tmp_path) -> None:
    """compressed-tensors stores -1 for each column where it has not changed the order."""
    folder = stored("int4", qwen3_vl_folder, tmp_path / "int4")
    expected = REQUEST.ask(OscarVLPipeline(folder, device="cpu"), max_new_tokens=8).token_ids
    none = {
        name.replace("weight_packed", "weight_g_idx"): torch.full((8 * one.shape[1],), -1)
        for name, one in load_file(folder / "model.safetensors").items()
        if name.endswith("weight_packed")
    }
    altered(folder, lambda tensors: tensors.update(none))
    found = REQUEST.ask(OscarVLPipeline(folder, device="cpu"), max_new_tokens=8).token_ids
    assert found == expected


def test_a_quantization_that_the_user_chose(qwen3_vl_folder, tmp_path) -> None:
    """It is transformers' to load: AWQ needs a package there."""
    folder = stored("awq", qwen3_vl_folder, tmp_path / "awq")
    with pytest.raises(InputError, match="gptqmodel"):
        OscarVLPipeline(
            folder, device="cpu", model_kwargs={"quantization_config": AwqConfig(group_size=32)}
        )
