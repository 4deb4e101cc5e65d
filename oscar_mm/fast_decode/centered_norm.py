"""Centered norm: the RMSNorm of Qwen3-Next and Qwen3.5, whose weights are stored minus 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from oscar_mm.fast_decode.linear_params import NORM_SOURCE, WIDEST_NORM, norm_macros, normalized
from oscar_mm.fast_decode.linear_torch import centered_norm, in_rows
from oscar_mm.kernels.launch import ELEMENTS, current_stream
from oscar_mm.kernels.self_check import OperationKernel, random_normal, relative_error

_AT_ONCE = 8


class CenteredNorm(NamedTuple):
    """An RMSNorm: x / sqrt(mean(x^2) + epsilon) * (1 + weight), with a weight of shape (width,).

    In 16-bit precision, 1 + weight would lose bits of the weight, so ``Norm`` cannot compute it.
    """

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension in float32, and round once."""
        return centered_norm(x, self.weight, self.epsilon)

    def at_once(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (rows, width); on a GPU, this takes one launch."""
        takes = (
            x.is_cuda
            and x.dtype in ELEMENTS
            and x.dtype == self.weight.dtype
            and x.shape[1] % _AT_ONCE == 0
            and x.shape[1] <= WIDEST_NORM
            and len(x) > 0
            and in_rows(x, self.weight)
        )
        kernel = CenteredNormKernel.of(x.dtype, x.device) if takes else None
        return self(x) if kernel is None else kernel(x, self)


class CenteredNormKernel(OperationKernel[torch.dtype], operation="centered_norm", bound=0.01):
    """CUDA kernel of ``CenteredNorm`` for one dtype."""

    def __init__(self, specialization: torch.dtype, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load(NORM_SOURCE, norm_macros(specialization, centered=True))

    def __call__(self, x: torch.Tensor, norm: CenteredNorm) -> torch.Tensor:
        """Launch the kernel; requires at least one row."""
        return normalized(self._kernel, x, *norm, current_stream(x.device))

    @staticmethod
    def disagreement(
        specialization: torch.dtype,
        kernel: Callable[[torch.Tensor, CenteredNorm], torch.Tensor],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of a row."""
        random = random_normal(specialization, device)
        x, norm = random(5, 4104), CenteredNorm(random(4104), 1e-6)
        return relative_error(kernel(x, norm), norm(x))
