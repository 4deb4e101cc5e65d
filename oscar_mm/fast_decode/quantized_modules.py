"""Modules with quantized weights, in place of ``nn.Linear`` and of stacked experts."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from oscar_mm.fast_decode.experts_torch import of_chosen_experts
from oscar_mm.fast_decode.linear import linear
from oscar_mm.weights.matrix import QuantizedMatrix

_MAX_GATHERED = 16
"""Maximum number of tokens for which the weights of each token's experts are gathered: on a GPU
this waits for nothing, but copies them."""


class QuantizedLinear(nn.Linear):
    """y = x W^T + bias with FP8 or INT4 weights, multiplied in the dtype of x.

    Subclasses ``nn.Linear``, so that PEFT can put adapters around it.

    Attributes:
        weight: codes, (out_features, in_features) in FP8, (out_features, in_features / 8) in INT4.
        scales, zeros: see ``oscar_mm.weights.matrix.QuantizedMatrix``.
        permutation: (in_features,) int64: the columns of x in the order of the weights' columns
            (GPTQ with act-order); None if it is the same.
    """

    zeros: nn.Parameter | None
    permutation: torch.Tensor | None
    compute_dtype = torch.float32
    """Dtype in which PEFT keeps adapters, which it would round to the weights' FP8 otherwise."""

    def __init__(
        self,
        matrix: QuantizedMatrix,
        bias: torch.Tensor | None,
        permutation: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            matrix: the weights.
            bias: (outputs,), or None.
            permutation: see above.
        """
        nn.Module.__init__(self)
        self.out_features, self.in_features = len(matrix.codes), matrix.width
        self.weight = nn.Parameter(matrix.codes, requires_grad=False)
        self.scales = nn.Parameter(matrix.scales, requires_grad=False)
        self.register_parameter("zeros", _fixed(matrix.zeros))
        self.register_parameter("bias", _fixed(bias))
        self.register_buffer("permutation", permutation)

    @classmethod
    def of(cls, module: nn.Linear, device: torch.device, bits: int) -> Self:
        """Quantize the weights of a module to 8 or 4 bits, and place the new module on a device."""
        matrix = QuantizedMatrix.of(module.weight.detach().to(device), bits)
        return cls(matrix, None if module.bias is None else module.bias.detach().to(device))

    @property
    def matrix(self) -> QuantizedMatrix:
        """The weights."""
        return QuantizedMatrix(self.weight, self.scales, self.zeros)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply (..., in_features) by the weights: (..., out_features) in the same dtype."""
        rows = input.reshape(-1, self.in_features)
        rows = rows.contiguous() if self.permutation is None else rows[:, self.permutation]
        found = _product(rows, self.matrix, self.bias)
        return found.view(*input.shape[:-1], self.out_features)


def _product(
    rows: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply (rows, width) by a matrix."""
    zeros = [] if matrix.zeros is None else [matrix.zeros]
    return linear(rows, [matrix.codes], [bias], scales=[matrix.scales], zeros=zeros)


def _fixed(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


class QuantizedExperts(nn.Module):
    """Stacked experts with FP8 or INT4 weights and the interface of transformers' experts modules.

    Attributes:
        gate_up_proj: codes of (experts, 2 * between, width), gate outputs first.
        down_proj: codes of (experts, width, between).
        gate_up_scales, down_scales, gate_up_zeros, down_zeros: see
            ``oscar_mm.weights.matrix.QuantizedMatrix``.
        act_fn: activation of the gate.
    """

    gate_up_proj: nn.Parameter
    gate_up_scales: nn.Parameter
    gate_up_zeros: nn.Parameter | None
    down_proj: nn.Parameter
    down_scales: nn.Parameter
    down_zeros: nn.Parameter | None

    def __init__(self, gate_up: QuantizedMatrix, down: QuantizedMatrix, act_fn: Any) -> None:
        """
        Args:
            gate_up, down: the weights, both in FP8 or both in INT4.
            act_fn: activation of the gate.
        """
        super().__init__()
        for name, matrix in (("gate_up", gate_up), ("down", down)):
            self.register_parameter(f"{name}_proj", _fixed(matrix.codes))
            self.register_parameter(f"{name}_scales", _fixed(matrix.scales))
            self.register_parameter(f"{name}_zeros", _fixed(matrix.zeros))
        self.act_fn = act_fn

    @classmethod
    def of(cls, module: Any, device: torch.device, bits: int) -> Self:
        """Quantize the weights of an experts module to 8 or 4 bits, and place the new module on a
        device."""
        weights = module.gate_up_proj, module.down_proj
        gate_up, down = (QuantizedMatrix.of(one.detach().to(device), bits) for one in weights)
        return cls(gate_up, down, module.act_fn)

    @property
    def scales(self) -> list[torch.Tensor]:
        """Scales of ``gate_up_proj`` and of ``down_proj``."""
        return [self.gate_up_scales, self.down_scales]

    @property
    def zeros(self) -> list[torch.Tensor]:
        """Zero points of ``gate_up_proj`` and of ``down_proj`` in INT4; none in FP8."""
        return [one for one in (self.gate_up_zeros, self.down_zeros) if one is not None]

    @property
    def matrices(self) -> list[QuantizedMatrix]:
        """The weights, ``gate_up_proj`` first."""
        return [
            QuantizedMatrix(self.gate_up_proj, self.gate_up_scales, self.gate_up_zeros),
            QuantizedMatrix(self.down_proj, self.down_scales, self.down_zeros),
        ]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the output of a layer's experts.

        Args:
            hidden_states: (tokens, width).
            top_k_index: (tokens, experts per token) integers.
            top_k_weights: (tokens, experts per token) factors for the experts' outputs.

        Returns:
            (tokens, width), in the dtype of the hidden states.
        """
        if len(hidden_states) <= _MAX_GATHERED:
            choices = top_k_index, top_k_weights
            return of_chosen_experts(hidden_states, *choices, self.matrices, self.act_fn)
        found = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, places = (top_k_index == expert).nonzero(as_tuple=True)
            outputs = self._one(hidden_states[tokens], expert)
            shares = top_k_weights[tokens, places, None].to(outputs.dtype)
            found.index_add_(0, tokens, outputs * shares)
        return found

    def _one(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Run an expert on (rows, width)."""
        gate_up, down = (matrix.chosen(expert) for matrix in self.matrices)
        gate, up = _product(rows, gate_up).chunk(2, -1)
        return _product(self.act_fn(gate) * up, down)
