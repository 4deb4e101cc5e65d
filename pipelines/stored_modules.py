"""Modules that hold the quantized tensors of a checkpoint until they are loaded.

Each replaces a module of transformers before loading, takes the tensors with their names in the
checkpoint, and is then ``converted`` to the module that multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from oscar_mm.fast_decode.quantized_modules import QuantizedExperts, QuantizedLinear
from oscar_mm.weights import fp8
from oscar_mm.weights.checkpoint_formats import CheckpointFormat, Tensors, check_shape
from oscar_mm.weights.matrix import QuantizedMatrix

REORDERED_EXPERTS = (
    "the columns are in another order (desc_act, actorder), which experts do not support; use a "
    "checkpoint without it"
)
OFFLOADED = "quantized weights cannot be offloaded; use more or larger GPUs"
CODES = "codes"
"""Name for ``weight`` of an expert's matrix, which transformers would stack with others."""
STACKED = ("gate_up_proj", "down_proj")
"""Names of the stacked matrices of experts in transformers' modules."""
Result = TypeVar("Result")


class StoredLinear(nn.Module):
    """The tensors of a quantized matrix, as a checkpoint has them, and the bias."""

    bias: nn.Parameter | None

    def __init__(
        self,
        stem: str,
        module: nn.Linear,
        formats: Sequence[CheckpointFormat],
        tensors: Tensors,
        codes: str = "weight",
    ) -> None:
        """
        Args:
            stem: name of the module in the checkpoint.
            module: the module to replace.
            formats: formats of the checkpoint, one of which the tensors have.
            tensors: the tensors on the meta device.
            codes: name of the parameter for the tensor ``weight``.

        Raises:
            ValueError: if the tensors are not those of the module.
        """
        super().__init__()
        chosen = max(formats, key=lambda one: len(one.needed & tensors.keys()))
        self._stem, self._format = stem, chosen
        self._shape, self._dtype = (module.out_features, module.in_features), module.weight.dtype
        parts = {name: one for name, one in tensors.items() if name in chosen.dtypes}
        bias = module.bias
        if bias is None and "bias" in tensors:
            # Some GPTQ checkpoints have biases where the model has none.
            bias = torch.empty(module.out_features, dtype=self._dtype, device="meta")
        try:
            chosen.check(parts, *self._shape)
            if bias is not None:
                check_shape("bias", tensors.get("bias", bias), (module.out_features,))
        except ValueError as error:
            raise ValueError(f"{stem}.{error}") from error
        self._names = {name: codes if name == "weight" else name for name in parts}
        for name, tensor in (*parts.items(), ("bias", bias)):
            fixed = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(self._names.get(name, name), fixed)

    def converted(self) -> nn.Linear:
        """Return the module for the loaded tensors: quantized, or not if ``_is_dequantized``.

        Raises:
            ValueError: if values are invalid, or weights are offloaded.
        """
        found = self._quantized()
        if not _is_dequantized(found.matrix):
            return found
        outputs, width = self._shape
        plain = nn.Linear(width, outputs, device="meta")
        plain.weight = nn.Parameter(found.matrix.dequantized(self._dtype))
        plain.bias = found.bias
        return plain

    def _quantized(self) -> QuantizedLinear:
        tensors = {name: getattr(self, own).detach() for name, own in self._names.items()}
        if any(tensor.is_meta for tensor in tensors.values()):
            raise ValueError(f"{self._stem}: {OFFLOADED}")
        try:
            matrix, permutation = self._format.matrix(tensors, *self._shape)
        except ValueError as error:
            raise ValueError(f"{self._stem}.{error}") from error
        if {matrix.scales.dtype, self._dtype} == {torch.float16, torch.bfloat16}:
            # Kernels read scales in the dtype of the activations or, without loss, in float32.
            matrix = matrix._replace(scales=matrix.scales.float())
        bias = None if self.bias is None else self.bias.detach()
        return QuantizedLinear(matrix, bias, permutation)

    def of_expert(self) -> QuantizedMatrix:
        """Convert the loaded tensors to a matrix.

        Raises:
            ValueError: see ``converted``; also if there is a bias, or another order of columns.
        """
        found = self._quantized()
        if found.permutation is not None:
            raise ValueError(f"{self._stem}: {REORDERED_EXPERTS}")
        if found.bias is not None and bool(found.bias.any()):
            raise ValueError(f"{self._stem}.bias: experts with biases are not supported")
        return found.matrix


def stacked_format(
    formats: Sequence[CheckpointFormat], tensors: Tensors
) -> CheckpointFormat | None:
    """Return the format of tensors that are stacked matrices of experts; None for other tensors."""
    for one in formats:
        suffix = one.stacked_scales
        scales = {f"{name}{suffix}" for name in STACKED} if suffix else set[str]()
        if scales & tensors.keys():
            return one
    return None


class StoredStack(nn.Module):
    """Tensors of the stacked matrices of a layer's experts, with the names of a checkpoint.

    Codes have the shape [experts, outputs, columns]; in Qwen3-VL's checkpoints they are transposed,
    [experts, columns, outputs], with their scales.
    """

    def __init__(self, stem: str, module: Any, chosen: CheckpointFormat, tensors: Tensors) -> None:
        """
        Args:
            stem: name of the module in the checkpoint.
            module: the module to replace, with the stacked weights of experts.
            chosen: format of the matrices.
            tensors: the tensors on the meta device.

        Raises:
            ValueError: if the tensors are not those of the module.
        """
        super().__init__()
        self._stem, self._format, self._replaced = stem, chosen, [module]
        self._shapes = {name: tuple(getattr(module, name).shape) for name in STACKED}
        for name in STACKED:
            for part in (name, f"{name}{chosen.stacked_scales}"):
                if part not in tensors:
                    raise ValueError(f"{stem}.{part} is missing: download the checkpoint again")
                self.register_parameter(part, nn.Parameter(tensors[part], requires_grad=False))
        # If one kind of matrices is square, the other one is not.
        self._is_transposed = any(
            tuple(tensors[name].shape) == (count, width, outputs) != (count, outputs, width)
            for name, (count, outputs, width) in self._shapes.items()
        )
        for name in STACKED:
            self._each(name, chosen.check)

    def converted(self) -> nn.Module:
        """Return the module for the loaded tensors, see ``_experts``.

        Raises:
            ValueError: if values are invalid, or weights are offloaded.
        """
        if any(tensor.is_meta for tensor in self.parameters()):
            raise ValueError(f"{self._stem}: {OFFLOADED}")
        gate_up, down = (
            QuantizedMatrix.stacked([one for one, _ in self._each(name, self._format.matrix)])
            for name in STACKED
        )
        return _experts(self._replaced[0], gate_up, down)

    def _each(self, name: str, apply: Callable[[Tensors, int, int], Result]) -> list[Result]:
        """Apply a function to the matrix of each expert.

        Args:
            name: name of the stacked matrices.
            apply: function of a matrix's tensors, of its outputs and of its columns.

        Raises:
            ValueError: if the shape is neither that of the model's matrices nor that of their
                transposes, or if ``apply`` raises it; the message names the matrices.
        """
        path, scales = f"{self._stem}.{name}", f"{name}{self._format.stacked_scales}"
        codes, given = getattr(self, name).detach(), getattr(self, scales).detach()
        count, outputs, width = self._shapes[name]
        if self._is_transposed and codes.ndim == 3:
            codes, given = codes.mT, given.mT if given.ndim == 3 else given
        if tuple(codes.shape) != (count, outputs, width):
            shape = [count, outputs, width]
            raise ValueError(f"{path}: the shape is {list(codes.shape)}, must be {shape}")
        if given.ndim == 0 or len(given) == 1:
            given = given.expand(count, *given.shape[1:])
        if len(given) != count:
            shape = list(given.shape)
            raise ValueError(f"{self._stem}.{scales}: the shape is {shape}, for {count} experts")
        found = []
        for number in range(count):
            tensors = {"weight": codes[number].contiguous(), self._format.scales: given[number]}
            try:
                found.append(apply(tensors, outputs, width))
            except ValueError as error:
                # The message begins with "weight", or with the name of its scales.
                fault = f"{name}{str(error).removeprefix('weight')}"
                raise ValueError(f"{self._stem}.{fault} (expert {number})") from error
        return found


class StoredExperts(nn.Module):
    """Tensors of all matrices of a layer's experts, with the names of a checkpoint."""

    def __init__(
        self,
        path: str,
        module: Any,
        formats: Sequence[CheckpointFormat],
        stored: Mapping[tuple[int, str], Tensors],
    ) -> None:
        """
        Args:
            path: name of the module in the checkpoint.
            module: the module to replace, with the stacked weights of experts.
            formats: formats of the checkpoint.
            stored: tensors on the meta device, by number of the expert and name of the matrix.

        Raises:
            ValueError: if the tensors are not those of all experts.
        """
        super().__init__()
        self._path, self._replaced = path, [module]
        self._count, width, between = module.down_proj.shape
        like = {"bias": False, "device": "meta", "dtype": module.down_proj.dtype}
        inward, outward = nn.Linear(width, between, **like), nn.Linear(between, width, **like)
        if (last := max(number for number, _ in stored)) >= self._count:
            raise ValueError(f"{path}.{last} is quantized, but the model has {self._count} experts")
        for number in range(self._count):
            expert = nn.Module()
            for name in ("gate_proj", "up_proj", "down_proj"):
                stem = f"{path}.{number}.{name}"
                if (number, name) not in stored:
                    raise ValueError(f"{stem} is not quantized, but matrices of other experts are")
                shape = outward if name == "down_proj" else inward
                part = StoredLinear(stem, shape, formats, stored[number, name], CODES)
                expert.add_module(name, part)
            self.add_module(str(number), expert)

    @property
    def gate_up_proj(self) -> torch.Tensor:
        """Empty tensor in place of weights that transformers initializes in some families."""
        return torch.empty(0)

    down_proj = gate_up_proj

    def converted(self) -> nn.Module:
        """Stack the loaded tensors of all experts, and return their module, see ``_experts``.

        Raises:
            ValueError: if values are invalid, weights are offloaded, or experts differ in format.
        """
        experts: Any = [self.get_submodule(str(number)) for number in range(self._count)]
        inward = [
            _joined(one.gate_proj.of_expert(), one.up_proj.of_expert(), f"{self._path}.{number}")
            for number, one in enumerate(experts)
        ]
        outward = [one.down_proj.of_expert() for one in experts]
        return _experts(self._replaced[0], self._stacked(inward), self._stacked(outward))

    def _stacked(self, matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
        if len(set(map(_kind, matrices))) > 1:
            raise ValueError(f"{self._path}: the experts have different formats")
        return QuantizedMatrix.stacked(matrices)


def _experts(module: Any, gate_up: QuantizedMatrix, down: QuantizedMatrix) -> nn.Module:
    """Return a module with these weights of experts: a quantized one, or ``module`` with the
    dequantized weights if ``_is_dequantized``."""
    if not _is_dequantized(gate_up):
        return QuantizedExperts(gate_up, down, module.act_fn)
    for name, matrix in zip(STACKED, (gate_up, down), strict=True):
        weight = matrix.dequantized(getattr(module, name).dtype)
        setattr(module, name, nn.Parameter(weight, requires_grad=False))
    return module


def _is_dequantized(matrix: QuantizedMatrix) -> bool:
    """Return whether the weights are dequantized once they are loaded: FP8 on a CPU, where a
    product with FP8 weights takes 50 times as long."""
    return matrix.bits == 8 and matrix.codes.device.type == "cpu"


def _kind(matrix: QuantizedMatrix) -> tuple[Any, ...]:
    codes, scales, _ = matrix
    return codes.dtype, codes.shape, scales.dtype, scales.shape


def _joined(gate: QuantizedMatrix, up: QuantizedMatrix, path: str) -> QuantizedMatrix:
    """Concatenate two matrices of the same shape along their outputs.

    Raises:
        ValueError: if the matrices have different formats.
    """
    if _kind(gate) != _kind(up):
        raise ValueError(f"{path}: gate_proj and up_proj have different formats")
    if gate.zeros is None and len(gate.codes) % fp8.BLOCK:
        # A block of gate_proj would end within a block of both, so each row gets its own scales.
        gate, up = (one._replace(scales=fp8.by_row(one.codes, one.scales)) for one in (gate, up))
    zeros = None
    if gate.zeros is not None and up.zeros is not None:
        zeros = torch.cat((gate.zeros, up.zeros))
    codes, scales = torch.cat((gate.codes, up.codes)), torch.cat((gate.scales, up.scales))
    return QuantizedMatrix(codes, scales, zeros)
