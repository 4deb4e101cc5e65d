"""Modules with quantized weights, in place of ``nn.Linear`` and of stacked experts."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from oscar_mm.fast_decode.experts_torch import of_chosen_experts
from oscar_mm.fast_decode.linear import linear
from oscar_mm.weights.fp8 import expanded, quantized
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
        zeros = [] if self.zeros is None else [self.zeros]
        found = linear(rows, [self.weight], [self.bias], scales=[self.scales], zeros=zeros)
        return found.view(*input.shape[:-1], self.out_features)


def _fixed(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


class QuantizedExperts(nn.Module):
    """Stacked experts with FP8 weights and the interface of transformers' experts modules.

    Attributes:
        gate_up_proj: codes, (experts, 2 * between, width), gate outputs first.
        down_proj: codes, (experts, width, between).
        gate_up_scales, down_scales: float32, see ``oscar_mm.weights.fp8.scales_shape``.
        act_fn: activation of the gate.
    """

    def __init__(
        self,
        gate_up: tuple[torch.Tensor, torch.Tensor],
        down: tuple[torch.Tensor, torch.Tensor],
        act_fn: Any,
    ) -> None:
        """
        Args:
            gate_up, down: codes in ``oscar_mm.weights.fp8.CODES``, and scales, see
                ``oscar_mm.weights.fp8.expanded``.
            act_fn: activation of the gate.
        """
        super().__init__()
        (into, into_scales), (out_of, out_of_scales) = gate_up, down
        self.gate_up_proj = nn.Parameter(into, requires_grad=False)
        self.gate_up_scales = nn.Parameter(expanded(into, into_scales), requires_grad=False)
        self.down_proj = nn.Parameter(out_of, requires_grad=False)
        self.down_scales = nn.Parameter(expanded(out_of, out_of_scales), requires_grad=False)
        self.act_fn = act_fn

    @classmethod
    def of(cls, module: Any, device: torch.device) -> Self:
        """Quantize the weights of an experts module, and place the new module on a device."""
        weights = module.gate_up_proj, module.down_proj
        gate_up, down = (quantized(weight.detach().to(device)) for weight in weights)
        return cls(gate_up, down, module.act_fn)

    @property
    def scales(self) -> list[torch.Tensor]:
        """Scales of ``gate_up_proj`` and of ``down_proj``."""
        return [self.gate_up_scales, self.down_scales]

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
            weights = self.gate_up_proj, self.down_proj
            choices = top_k_index, top_k_weights
            return of_chosen_experts(hidden_states, *choices, weights, self.scales, self.act_fn)
        found = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, places = (top_k_index == expert).nonzero(as_tuple=True)
            outputs = self._one(hidden_states[tokens], expert)
            shares = top_k_weights[tokens, places, None].to(outputs.dtype)
            found.index_add_(0, tokens, outputs * shares)
        return found

    def _one(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Run an expert on (rows, width)."""
        into, of_into = self.gate_up_proj[expert], self.gate_up_scales[expert]
        gate, up = linear(rows, [into], scales=[of_into]).chunk(2, -1)
        between = self.act_fn(gate) * up
        return linear(between, [self.down_proj[expert]], scales=[self.down_scales[expert]])
