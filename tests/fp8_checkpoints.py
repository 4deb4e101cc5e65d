"""Write FP8 checkpoints as they are released: e4m3 codes and scales in the safetensors files."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from oscar_mm.weights.fp8 import dequantized, quantized

PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ("gate_up_proj", "down_proj")


def to_fp8(
    folder: Path, target: Path, *, per_tensor: bool = False, transposed: bool = False
) -> dict[str, torch.Tensor]:
    """Quantize the decoder's products of a checkpoint folder.

    Args:
        folder: checkpoint with 16-bit or 32-bit weights in one file.
        target: folder that is made.
        per_tensor: one scale for each matrix, instead of one for each block of 128 x 128.
        transposed: stacked matrices of experts are transposed, as in Qwen3-VL's checkpoints.

    Returns:
        The dequantized weights in float32, by name.
    """
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    truth, written = {}, {}
    for name, weight in tensors.items():
        parts = name.split(".")
        is_product = parts[-1] == "weight" and parts[-2] in PRODUCTS and "visual" not in name
        if not is_product and parts[-1] not in EXPERTS:
            written[name] = weight
            continue
        turns = transposed and parts[-1] in EXPERTS
        if turns:
            weight = weight.transpose(1, 2).contiguous()
        if per_tensor:
            scale = weight.float().abs().max() / 448
            codes, scales = (weight.float() / scale).to(torch.float8_e4m3fn), scale
            truth[name] = codes.float() * scale
        else:
            codes, scales = quantized(weight)
            truth[name] = dequantized(codes, scales, torch.float32)
        if turns:
            truth[name] = truth[name].transpose(1, 2).contiguous()
        written[name], written[f"{name}_scale_inv"] = codes, scales
    save_file(written, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    kept = sorted(
        name.removesuffix(".weight")
        for name, weight in tensors.items()
        if name.endswith(".weight") and name not in truth and weight.ndim == 2
    )
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": None if per_tensor else [128, 128],
        "modules_to_not_convert": [*kept, "lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config))
    return truth
