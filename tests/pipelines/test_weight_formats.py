"""FP8 weights, from a checkpoint or made at load, against their dequantized copies."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.fast_decode.quantized_modules import QuantizedExperts, QuantizedLinear
from oscar_mm.modules import modules_of
from oscar_mm.pipelines.decode_path import decode_path
from oscar_mm.pipelines.loading import reader
from oscar_mm.pipelines.plan import Plan, Session, plan
from oscar_mm.pipelines.stored_modules import StoredStack
from oscar_mm.weights.checkpoint_formats import Float8
from oscar_mm.weights.fp8 import dequantized, quantized
from tests.fp8_checkpoints import PRODUCTS, to_fp8
from tests.prompts import REQUESTS

REQUEST = REQUESTS["two images"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {"fp8": 0.05, "int4": 0.2}


@pytest.fixture
def keeps_fp8(monkeypatch) -> None:
    """Make transformers keep FP8 weights where there is no GPU, instead of dequantizing them."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


def answer(model: Path, device: str = "cpu") -> tuple[Any, list[int]]:
    kind = OscarOmniPipeline if reader(model) == "OscarOmniPipeline" else OscarVLPipeline
    pipe = kind(model, device=device, dtype="float32")
    return pipe, REQUEST.ask(pipe, max_new_tokens=12).token_ids


def with_weights(folder: Path, target: Path, weights: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint with some other weights."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors") | weights
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def quantized_products(pipe: OscarVLPipeline) -> int:
    return sum(type(one) is QuantizedLinear for one in modules_of(pipe.model))


@pytest.mark.daily("qwen3_vl-per_tensor", "qwen3_vl_moe-transposed", "qwen3_5_moe")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3_vl", ""),
        ("qwen3_vl", "per_tensor"),
        ("qwen3_vl_moe", ""),
        ("qwen3_vl_moe", "transposed"),
        ("qwen3_vl_moe", "per_tensor"),
        ("qwen3_5_moe", ""),
        ("qwen3_omni", ""),
    ],
)
def test_an_fp8_checkpoint(family, how, request, tmp_path, device) -> None:
    """Experts are stacked in ``qwen3_vl_moe``; in the other families, each has its own tensors."""
    folder = request.getfixturevalue(f"{family}_folder")
    truth = to_fp8(folder, tmp_path / "fp8", **({how: True} if how else {}))
    plain, expected = answer(with_weights(folder, tmp_path / "plain", truth), device)
    pipe, found = answer(tmp_path / "fp8", device)
    assert found == expected
    own = [one for one in modules_of(pipe.model) if type(one) is QuantizedLinear]
    stacked = [one for one in modules_of(pipe.model) if type(one) is QuantizedExperts]
    of_experts = sum(".experts." in name for name in truth)
    if device == "cpu":  # Dequantized at load, since FP8 products take long there.
        assert not own and not stacked and truth
        return
    assert len(own) + of_experts == len(truth) > 0
    each = 2 if family == "qwen3_vl_moe" else 3 * len(stacked[0].down_proj) if stacked else 0
    assert of_experts == each * len(stacked)
    assert bool(stacked) == (family != "qwen3_vl")
    assert supports(pipe.model) == supports(plain.model)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_a_loaded_fp8_model(family, request, tmp_path, keeps_fp8) -> None:
    """A pipeline replaces the modules of transformers, which would download their kernels."""
    folder = request.getfixturevalue(f"{family}_folder")
    truth = to_fp8(folder, tmp_path / "fp8")
    _, expected = answer(with_weights(folder, tmp_path / "plain", truth))
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "fp8", dtype=torch.float32)
    assert any(isinstance(one, FP8Linear) for one in modules_of(loaded))
    pipe = OscarVLPipeline(loaded)
    assert REQUEST.ask(pipe, max_new_tokens=12).token_ids == expected
    assert not any(isinstance(one, FP8Linear | FP8Experts) for one in modules_of(pipe.model))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(family, request, tmp_path, value) -> None:
    name, file = changed_scales(request, family, tmp_path, lambda scales: scales.fill_(value))
    named = name if name.endswith("weight_scale_inv") else name.removesuffix("_scale_inv")
    with pytest.raises(InputError, match=f"{named}.* has NaN or infinite values: download it"):
        OscarVLPipeline(file.parent, device="cpu")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_scales_of_a_wrong_shape(family, request, tmp_path) -> None:
    _, file = changed_scales(
        request, family, tmp_path, lambda scales: scales.repeat_interleave(2, -1)
    )
    with pytest.raises(InputError, match=r"_scale_inv: scales: the shape is .*, but FP8"):
        OscarVLPipeline(file.parent, device="cpu")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_scales_that_are_missing(family, request, tmp_path) -> None:
    name, file = changed_scales(request, family, tmp_path, lambda _: None)
    named = name.removesuffix("_scale_inv")
    with pytest.raises(InputError, match=rf"{named}(_scale_inv is missing| has codes in)"):
        OscarVLPipeline(file.parent, device="cpu")


def test_experts_without_any_scales(qwen3_vl_moe_folder, tmp_path) -> None:
    to_fp8(qwen3_vl_moe_folder, tmp_path / "fp8")
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(file)
    kept = {x: one for x, one in tensors.items() if ".experts." not in x or "scale" not in x}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"_proj has codes in torch.float8_e4m3fn, but its scales"):
        OscarVLPipeline(tmp_path / "fp8", device="cpu")


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("qwen3_5_moe", "mtp.layers.0.mlp.experts.0.down_proj"),
        ("qwen3_vl", "model.language_model.layers.99.mlp.down_proj"),
    ],
)
def test_quantized_modules_that_a_model_lacks(family, extra, request, tmp_path) -> None:
    """Released checkpoints have a module for drafts, which is loaded only if it is wanted."""
    to_fp8(request.getfixturevalue(f"{family}_folder"), tmp_path / "fp8")
    _, expected = answer(tmp_path / "fp8")
    file = tmp_path / "fp8" / "model.safetensors"
    codes, scales = quantized(torch.randn(64, 32))
    more = {f"{extra}.weight": codes, f"{extra}.weight_scale_inv": scales}
    save_file(load_file(file) | more, file, {"format": "pt"})
    assert answer(tmp_path / "fp8")[1] == expected


@pytest.mark.parametrize(("hidden", "between"), [(128, 64), (128, 128)])
def test_stacked_matrices_of_which_one_is_square(hidden, between) -> None:
    """The other one shows whether both are transposed."""
    shapes = {"gate_up_proj": (2, 2 * between, hidden), "down_proj": (2, hidden, between)}
    for transposed in (False, True):
        module, tensors, truth = nn.Module(), {}, {}
        module.act_fn = nn.SiLU()
        for name, shape in shapes.items():
            module.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
            weight = torch.randn(shape)
            codes, scales = quantized(weight.mT.contiguous() if transposed else weight)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            dense = dequantized(codes, scales, torch.float32)
            truth[name] = dense.mT if transposed else dense
        found = StoredStack("experts", module, Float8(), tensors).converted()
        assert all(torch.equal(getattr(found, name), one) for name, one in truth.items())


def changed_scales(request, family: str, target: Path, change) -> tuple[str, Path]:
    """Change the first scales of an FP8 checkpoint; return their name, and the file."""
    to_fp8(request.getfixturevalue(f"{family}_folder"), target / "fp8")
    file = target / "fp8" / "model.safetensors"
    tensors = load_file(file)
    name = next(x for x in sorted(tensors) if x.endswith("_scale_inv"))
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, file, {"format": "pt"})
    return name, file


def test_blocks_of_another_size(qwen3_vl_folder, tmp_path) -> None:
    to_fp8(qwen3_vl_folder, tmp_path / "fp8")
    config = tmp_path / "fp8" / "config.json"
    fields = json.loads(config.read_text())
    fields["quantization_config"]["weight_block_size"] = [16, 16]
    config.write_text(json.dumps(fields))
    said = r"weight_block_size is \[16, 16\]; supported: None, \[128, 128\]"
    with pytest.raises(InputError, match=said):
        OscarVLPipeline(tmp_path / "fp8", device="cpu")


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_missing_and_misshapen_weights(qwen3_vl_folder, tmp_path, weights) -> None:
    """Random weights in their place would give wrong answers."""
    file = with_weights(qwen3_vl_folder, tmp_path / "bad", {}) / "model.safetensors"
    tensors = load_file(file)
    name = next(x for x in sorted(tensors) if x.endswith("q_norm.weight"))
    save_file(tensors | {name: tensors[name][:-1].clone()}, file, {"format": "pt"})
    with pytest.raises(InputError, match=rf"{name}: the shape is \[63\], must be \[64\]"):
        OscarVLPipeline(file.parent, device="cpu", weights=weights)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match=rf"the checkpoint lacks {name}: download it again"):
        OscarVLPipeline(file.parent, device="cpu", weights=weights)


def test_an_unknown_method(qwen3_vl_folder, tmp_path) -> None:
    folder = with_weights(qwen3_vl_folder, tmp_path / "bad", {})
    config = folder / "config.json"
    fields = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "modelopt"}}
    config.write_text(json.dumps(fields))
    for use in (empty_plan, partial(OscarVLPipeline, device="cpu"), decode_path):
        with pytest.raises(InputError, match="quant_method is 'modelopt', which is not supported"):
            use(folder)


def empty_plan(folder: Path) -> Plan:
    return plan(folder, Session())


@pytest.mark.daily("fp8-qwen3_vl_folder", "int4-llava_next_folder", "int4-qwen3_omni_folder")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("folder", ["qwen3_vl_folder", "llava_next_folder", "qwen3_omni_folder"])
@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_weights_made_at_load(folder, request, weights, device) -> None:
    folder = request.getfixturevalue(folder)
    kind = OscarOmniPipeline if "omni" in str(folder) else OscarVLPipeline
    pipe = kind(folder, device=device, dtype="float32", weights=weights)
    decoder = pipe.model.get_decoder()
    plain = kind(folder, device=device, dtype="float32")
    other = plain.model.get_decoder()
    changed = 0
    for name, module in decoder.named_modules():
        if type(module) is QuantizedLinear:
            assert name.startswith("layers.") and name.split(".")[-1] in PRODUCTS
            weight = other.get_submodule(name).weight
            truth = module.matrix.dequantized(torch.float32)
            assert 0 < (truth - weight).norm() < TOLERANCE[weights] * weight.norm()
            weight.data.copy_(truth)
            changed += 1
        if type(module) is QuantizedExperts:
            for part, matrix in zip(("gate_up_proj", "down_proj"), module.matrices, strict=True):
                weight = getattr(other.get_submodule(name), part)
                truth = matrix.dequantized(torch.float32)
                assert 0 < (truth - weight).norm() < TOLERANCE[weights] * weight.norm()
                weight.data.copy_(truth)
    assert changed == quantized_products(pipe) >= 4 * len(decoder.layers)
    assert supports(pipe.model) == supports(plain.model)
    asked = [REQUEST.ask(one, max_new_tokens=12).token_ids for one in (pipe, plain)]
    assert asked[0] == asked[1]


def test_a_saved_chat_belongs_to_its_weights(qwen3_vl_folder) -> None:
    pipes = [OscarVLPipeline(qwen3_vl_folder, device="cpu", weights=x) for x in (None, "fp8")]
    assert pipes[0].fingerprint != pipes[1].fingerprint


def test_bad_arguments(qwen3_vl_folder, tmp_path) -> None:
    with pytest.raises(InputError, match="weights='int3': must be one of fp8, int4, or left out"):
        OscarVLPipeline(qwen3_vl_folder, device="cpu", weights="int3")
    to_fp8(qwen3_vl_folder, tmp_path / "fp8")
    with pytest.raises(InputError, match="weights='fp8': the checkpoint is already quantized"):
        OscarVLPipeline(tmp_path / "fp8", device="cpu", weights="fp8")
    loaded = OscarVLPipeline(qwen3_vl_folder, device="cpu").model
    with pytest.raises(InputError, match="weights cannot be used with a model that is already"):
        OscarVLPipeline(loaded, weights="fp8")
