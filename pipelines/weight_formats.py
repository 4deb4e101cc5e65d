"""Quantized weights: made from 16-bit weights while a model is loaded, or of a loaded FP8 model.

transformers loads FP8 checkpoints into modules of its own, which download their kernels at the
first call. If a pipeline is given such a model, ``adopt_fp8`` replaces these modules by our own,
which share their tensors. Checkpoints that a pipeline loads itself are read by
``quantized_checkpoints``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

from oscar_mm.errors import InputError
from oscar_mm.fast_decode.quantized_modules import QuantizedExperts, QuantizedLinear
from oscar_mm.tensor_parallel import is_dtensor
from oscar_mm.weights.fp8 import expanded
from oscar_mm.weights.matrix import QuantizedMatrix

FORMATS = {"fp8": 8, "int4": 4}
"""Formats that ``quantize`` makes, with the bits of a weight."""


def adopt_fp8(model: PreTrainedModel) -> None:
    """Replace the FP8 modules of transformers by our own; other modules are left alone.

    Raises:
        InputError: if scales are not finite or have an unknown shape, or if the weights are
            divided among processes.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, FP8Linear) and module.weight.itemsize == 1:
            own = QuantizedLinear(QuantizedMatrix(*_checked(name, module, "weight")), module.bias)
        elif isinstance(module, FP8Experts) and module.down_proj.itemsize == 1:
            gate_up, down = (
                QuantizedMatrix(*_checked(name, module, x)) for x in ("gate_up_proj", "down_proj")
            )
            own = QuantizedExperts(gate_up, down, module.act_fn)
        else:
            continue
        model.set_submodule(name, own)


def _checked(path: str, module: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the scales of a module of transformers.

    Raises:
        InputError: see ``adopt_fp8``.
    """
    codes, scales = getattr(module, name), getattr(module, f"{name}_scale_inv").detach()
    if is_dtensor(codes):
        raise InputError(
            f"tp_plan: {path} has FP8 weights, which cannot be divided among processes; pass "
            "device_map='auto', or use a checkpoint with 16-bit weights"
        )
    if not bool(torch.isfinite(scales.float()).all()):
        raise InputError(f"{path}.{name}_scale_inv has NaN or infinite scales: download it again")
    try:
        return codes.detach(), expanded(codes, scales)
    except ValueError as error:
        raise InputError(f"{path}.{name}_scale_inv: {error}") from error


def check_format(weights: str, tp_plan: object = None) -> None:
    """Check that weights can be quantized to a format.

    Raises:
        InputError: if the format is unknown, or if the weights are to be divided among processes.
    """
    if weights not in FORMATS:
        raise InputError(f"weights={weights!r}: must be one of {', '.join(FORMATS)}, or left out")
    if tp_plan is not None:
        raise InputError(
            f"weights={weights!r} cannot be combined with tp_plan: leave one of them out"
        )


def already_quantized(weights: str) -> InputError:
    """Return the error for the argument ``weights`` with a checkpoint that is quantized already."""
    return InputError(
        f"weights={weights!r}: the checkpoint is already quantized; leave the argument out"
    )


def quantize(
    model: nn.Module, decoder: nn.Module, weights: str, device: torch.device | None = None
) -> None:
    """Quantize the products of a decoder's layers, one matrix after the other.

    Embeddings, norms, routers, towers and the output layer stay as they are.

    Args:
        model: model with 16-bit or 32-bit weights.
        decoder: the part of it whose layers are quantized.
        weights: a key of ``FORMATS``.
        device: device for the quantized weights; None leaves them where they are.

    Raises:
        InputError: if weights are offloaded.
    """
    bits = FORMATS[weights]
    names = {id(module): name for name, module in model.named_modules()}
    for module, parameters in _quantized_modules(decoder):
        if any(weight.is_meta for weight in parameters):
            raise InputError(
                f"weights={weights!r}: the model's weights are offloaded; use more or larger "
                "GPUs, or leave the argument out"
            )
        kind = QuantizedLinear if isinstance(module, nn.Linear) else QuantizedExperts
        own = kind.of(module, device or parameters[0].device, bits)
        model.set_submodule(names[id(module)], own)


def quantized_bytes(model: nn.Module, decoder: nn.Module, weights: str) -> int:
    """Return the bytes that a model's weights take after ``quantize``.

    Weights that ``quantize`` leaves as they are count 16 bits each. Only the shapes are used, so
    the weights may be on the meta device.

    Args:
        model, decoder, weights: see ``quantize``.
    """

    @cache
    def saved_bytes(shape: torch.Size) -> int:
        weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        made = QuantizedMatrix.of(weight, FORMATS[weights])
        return weight.nbytes - sum(tensor.nbytes for tensor in made if tensor is not None)

    total = sum(2 * weight.numel() for weight in model.parameters())
    shapes = (w.shape for _, matrices in _quantized_modules(decoder) for w in matrices)
    return total - sum(map(saved_bytes, shapes))


def _quantized_modules(decoder: nn.Module) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """Yield the modules of a decoder's layers that ``quantize`` replaces, and their matrices."""
    for layer in decoder.get_submodule("layers").children():
        for module in list(layer.modules()):
            parameters = dict(module.named_parameters(recurse=False))
            if type(module) is nn.Linear:
                yield module, [module.weight]
            elif parameters.keys() == {"gate_up_proj", "down_proj"}:
                yield module, list(parameters.values())
