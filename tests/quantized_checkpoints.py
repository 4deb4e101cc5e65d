"""Write INT4 and FP8 checkpoints as they are released, from the descriptions of their formats.

Codes are chosen at random; the weights that they stand for are computed number by number.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.fp8_checkpoints import EXPERTS, PRODUCTS

Stored = dict[str, torch.Tensor]
"""Tensors of one matrix, by the last part of their names."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(codes: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight numbers of an axis into a word: number ``order[i]`` in bits 4i to 4i + 3."""
    moved = np.moveaxis(codes, axis, -1)
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % 8)])
    eights = moved.reshape(*moved.shape[:-1], -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:-1], np.uint32)
    for place, number in enumerate(order):
        words |= eights[..., number] << np.uint32(4 * place)
    return torch.from_numpy(np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32).copy())


class Matrix:
    """Codes 0 to 15 with zero points and scales for groups of columns, that resemble weights."""

    def __init__(
        self, weight: torch.Tensor, group: int, groups: np.ndarray | None, zero: int | None
    ):
        """
        Args:
            weight: (outputs, width).
            group: columns per group.
            groups: (width,) group of each column; None if groups are neighbours.
            zero: zero point of all groups; None for different ones.
        """
        dense = weight.double().numpy()
        outputs, width = dense.shape
        self.groups = np.arange(width) // group if groups is None else groups
        rng = np.random.default_rng(width)
        count = width // group
        self.zeros = np.full((outputs, count), zero if zero is not None else 0)
        if zero is None:
            self.zeros = rng.integers(1, 16, (outputs, count))
        scales = np.abs(dense).max() / 7 * rng.uniform(0.8, 1.2, (outputs, count))
        self.scales = torch.from_numpy(scales).to(torch.float16)
        zeros, scales = (x[:, self.groups] for x in (self.zeros, self.scales.double().numpy()))
        self.codes = np.clip(np.rint(dense / scales) + zeros, 0, 15).astype(np.int64)
        self.dense = torch.from_numpy((self.codes - zeros) * scales).float()


def pack_quantized(
    weight: torch.Tensor, *, group: int | None = 32, symmetric: bool = True, act_order: bool = False
) -> tuple[Stored, torch.Tensor]:
    """compressed-tensors: signed numbers plus 8, packed along the width; one group if None."""
    width = weight.shape[1]
    groups = mixed(width, group or width) if act_order else None
    matrix = Matrix(weight, group or width, groups, 8 if symmetric else None)
    stored = {
        "weight_packed": packed(matrix.codes, 1),
        "weight_scale": matrix.scales.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = packed(matrix.zeros, 0)
    if groups is not None:
        stored["weight_g_idx"] = torch.from_numpy(groups).int()
    return stored, _with_scales(matrix, stored["weight_scale"])


def awq(weight: torch.Tensor, *, group: int = 32) -> tuple[Stored, torch.Tensor]:
    """AWQ, gemm: transposed, packed along the outputs in an order of its own."""
    matrix = Matrix(weight, group, None, None)
    stored = {
        "qweight": packed(matrix.codes.T, 1, AWQ_ORDER),
        "qzeros": packed(matrix.zeros.T, 1, AWQ_ORDER),
        "scales": matrix.scales.T.contiguous(),
    }
    return stored, matrix.dense


def gptq(
    weight: torch.Tensor, *, group: int = 32, version: int = 1, act_order: bool = False
) -> tuple[Stored, torch.Tensor]:
    """GPTQ: transposed, packed along the width; version 1 has zero points less one."""
    width = weight.shape[1]
    groups = mixed(width, group) if act_order else np.arange(width) // group
    matrix = Matrix(weight, group, groups, None)
    stored = {
        "qweight": packed(matrix.codes.T, 0),
        "qzeros": packed(matrix.zeros.T - (version == 1), 1),
        "scales": matrix.scales.T.contiguous(),
        "g_idx": torch.from_numpy(groups).int(),
    }
    return stored, matrix.dense


def float_quantized(weight: torch.Tensor, *, strategy: str) -> tuple[Stored, torch.Tensor]:
    """compressed-tensors: e4m3 codes, a scale for the matrix, each row, or each 128 x 128."""
    rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1])}.get(
        strategy, (128, 128)
    )
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    codes, dense = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (
                slice(row * rows, (row + 1) * rows),
                slice(column * columns, (column + 1) * columns),
            )
            scale = (weight[block].abs().max() / 448).to(torch.bfloat16).float()
            scales[row, column] = scale
            codes[block] = (weight[block] / scale).clamp(-448, 448).to(codes.dtype)
            dense[block] = codes[block].float() * scale
    scales = scales.to(torch.bfloat16)
    stored = {"weight": codes, "weight_scale": scales[0] if strategy == "tensor" else scales}
    return stored | {"input_scale": torch.tensor([0.5])}, dense


def mixed(width: int, group: int) -> np.ndarray:
    """Groups of columns in an order such as that of the activations' sizes."""
    return np.random.default_rng(width).permutation(np.arange(width) // group)


def _with_scales(matrix: Matrix, scales: torch.Tensor) -> torch.Tensor:
    signed = torch.from_numpy(matrix.codes - matrix.zeros[:, matrix.groups]).double()
    return (signed * scales.double()[:, matrix.groups]).float()


def compressed_tensors(weights: dict[str, Any], kind: str, **fields: Any) -> dict[str, Any]:
    """The configuration of a checkpoint of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*vision_tower.*", "re:.*visual.*", "re:.*projector.*"],
        "kv_cache_scheme": None,
    } | fields


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": ["visual"],
}


def quantize_folder(
    folder: Path,
    target: Path,
    config: dict[str, Any],
    make: Callable[[torch.Tensor], tuple[Stored, torch.Tensor]],
    *,
    shards: int = 1,
) -> dict[str, torch.Tensor]:
    """Quantize the decoder's products of a checkpoint folder.

    Args:
        folder: checkpoint with float32 weights in one file.
        target: folder that is made.
        config: its ``quantization_config``.
        make: makes the tensors of a matrix, and the weights that they stand for.
        shards: number of files.

    Returns:
        The dequantized weights in float32, by name; those of each expert by themselves.
    """
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    truth, written = {}, {}
    for name, weight in unstacked(load_file(folder / "model.safetensors")).items():
        stem, _, last = name.rpartition(".")
        is_product = last == "weight" and stem.rpartition(".")[2] in PRODUCTS
        if not is_product or "vis" in name:
            written[name] = weight
            continue
        stored, truth[name] = make(weight.float())
        written |= {f"{stem}.{part}": tensor for part, tensor in stored.items()}
    _save(target, written, shards)
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return truth


def unstacked(tensors: Stored) -> Stored:
    """The tensors of a checkpoint with the matrices of each expert by themselves, as quantized
    checkpoints have them, instead of stacked."""
    found = {}
    for name, weight in tensors.items():
        path, _, last = name.rpartition(".")
        if last not in EXPERTS or not path.endswith(".experts"):
            found[name] = weight
            continue
        for number, one in enumerate(weight):
            parts = one.chunk(2) if last == "gate_up_proj" else [one]
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for part, matrix in zip(names, parts, strict=True):
                found[f"{path}.{number}.{part}.weight"] = matrix.contiguous()
    return found


def _save(target: Path, tensors: Stored, shards: int) -> None:
    if shards == 1:
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        return
    names, places = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, target / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
