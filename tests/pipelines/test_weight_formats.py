"""FP8 weights, from a checkpoint or made at load, against their dequantized copies."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.fast_decode.quantized_modules import QuantizedExperts, QuantizedLinear
from oscar_mm.modules import modules_of
from tests.fp8_checkpoints import PRODUCTS, to_fp8
from tests.prompts import REQUESTS

REQUEST = REQUESTS["two images"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {"fp8": 0.05, "int4": 0.2}


@pytest.fixture
def keeps_fp8(monkeypatch) -> None:
    """Make transformers keep FP8 weights where there is no GPU, instead of dequantizing them."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


def answer(model: Path, device: str = "cpu", **arguments) -> tuple[OscarVLPipeline, list[int]]:
    pipe = OscarVLPipeline(model, device=device, dtype="float32", **arguments)
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


@pytest.mark.daily("qwen3_vl_per_tensor", "qwen3_vl_moe")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_per_tensor", "qwen3_vl_moe"])
def test_an_fp8_checkpoint(family, request, tmp_path, keeps_fp8, device) -> None:
    folder = request.getfixturevalue(f"{family.removesuffix('_per_tensor')}_folder")
    truth = to_fp8(folder, tmp_path / "fp8", per_tensor=family.endswith("_per_tensor"))
    _, expected = answer(with_weights(folder, tmp_path / "plain", truth), device)
    pipe, found = answer(tmp_path / "fp8", device)
    assert found == expected
    kinds = [type(one) for one in modules_of(pipe.model)]
    matrices = kinds.count(QuantizedLinear) + 2 * kinds.count(QuantizedExperts)
    assert matrices == len(truth) > 0
    assert not any(issubclass(kind, FP8Linear | FP8Experts) for kind in kinds)
    assert supports(pipe.model)


def test_without_a_gpu_an_fp8_checkpoint_is_dequantized(qwen3_vl_folder, tmp_path) -> None:
    if torch.cuda.is_available():
        pytest.skip("transformers keeps FP8 weights where there is a GPU")
    truth = to_fp8(qwen3_vl_folder, tmp_path / "fp8")
    _, expected = answer(with_weights(qwen3_vl_folder, tmp_path / "plain", truth))
    pipe, found = answer(tmp_path / "fp8")
    assert found == expected and quantized_products(pipe) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(qwen3_vl_folder, tmp_path, keeps_fp8, value) -> None:
    to_fp8(qwen3_vl_folder, tmp_path / "fp8")
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(file)
    name = next(one for one in tensors if one.endswith("weight_scale_inv"))
    tensors[name].view(-1)[0] = value
    save_file(tensors, file, {"format": "pt"})
    module = name.split("layers.")[1]
    with pytest.raises(InputError, match=f"{module} has NaN or infinite scales: download it again"):
        OscarVLPipeline(tmp_path / "fp8", device="cpu")


def test_blocks_of_another_size(qwen3_vl_folder, tmp_path, keeps_fp8) -> None:
    to_fp8(qwen3_vl_folder, tmp_path / "fp8")
    file, config = tmp_path / "fp8" / "model.safetensors", tmp_path / "fp8" / "config.json"
    fields = json.loads(config.read_text())
    fields["quantization_config"]["weight_block_size"] = [16, 16]
    config.write_text(json.dumps(fields))
    tensors = load_file(file)
    for name, codes in list(tensors.items()):
        if f"{name}_scale_inv" in tensors:
            shape = [-(-size // 16) for size in codes.shape]
            tensors[f"{name}_scale_inv"] = torch.ones(shape)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"weight_scale_inv: scales: the shape is .* FP8 weights"):
        OscarVLPipeline(tmp_path / "fp8", device="cpu")


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
