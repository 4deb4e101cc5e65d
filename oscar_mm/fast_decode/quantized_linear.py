"""A linear module with FP8 weights, which takes the place of ``nn.Linear``."""

from __future__ import annotations

from typing import Self

import torch
from torch import nn

from oscar_mm.fast_decode.linear import linear
from oscar_mm.weights import expanded, quantized


class QuantizedLinear(nn.Linear):
    """y = x W^T + bias with FP8 weights, multiplied in the dtype of x.

    Subclasses ``nn.Linear``, so that PEFT can put adapters around it.

    Attributes:
        weight: codes, (out_features, in_features).
        scales: float32, see ``oscar_mm.weights.scales_shape``.
    """

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """
        Args:
            codes: (outputs, width) in ``oscar_mm.weights.CODES``.
            scales: see ``oscar_mm.weights.expanded``.
            bias: (outputs,), or None.
        """
        nn.Module.__init__(self)
        self.out_features, self.in_features = codes.shape
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(expanded(codes, scales), requires_grad=False)
        own = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", own)

    @classmethod
    def of(cls, module: nn.Linear, device: torch.device) -> Self:
        """Quantize the weights of a module, and place the new module on a device."""
        codes, scales = quantized(module.weight.detach().to(device))
        bias = None if module.bias is None else module.bias.detach().to(device)
        return cls(codes, scales, bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply (..., in_features) by the weights: (..., out_features) in the same dtype."""
        rows = input.reshape(-1, self.in_features).contiguous()
        found = linear(rows, [self.weight], [self.bias], scales=[self.scales])
        return found.view(*input.shape[:-1], self.out_features)
