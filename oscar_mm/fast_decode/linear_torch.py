"""linear by PyTorch operations, and how far its kernels are from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import rms_norm, silu

WORST_ERROR = 0.02
"""Relative error of a kernel that is right: above the rounding of 16 bit, below that of a wrong
row."""
_ALIGNMENT = 16


class Norm(NamedTuple):
    """An RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight, the weight of shape (width,)."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension, in float32 and rounded before the weight comes in."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * scaled.to(x.dtype)

    def at_once(self, x: torch.Tensor) -> torch.Tensor:
        """The same; on a GPU in one launch, where the weight comes in before the rounding."""
        if x.is_cuda:
            return rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return self(x)


class Linear(Protocol):
    """A kernel of ``oscar_mm.fast_decode.linear.linear``, which is gated or not."""

    def __call__(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        norm: Norm | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """As ``linear_by_torch``."""
        ...


def linear_by_torch(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    norm: Norm | None,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    """``oscar_mm.fast_decode.linear.linear``, with a bias or None for each of the weights."""
    x = x if norm is None else norm(x)
    products = [torch_linear(x, *part) for part in zip(weights, biases, strict=True)]
    output = silu(products[0]) * products[1] if gated else torch.cat(products, -1)
    return output if residual is None else residual + output


def in_rows(*tensors: torch.Tensor) -> bool:
    """Whether these are contiguous and begin where they can be copied 16 bytes at a time."""
    return all(x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 for x in tensors)


def disagreement(
    kernel: Linear,
    gated: bool,
    dtype: torch.dtype,
    device: torch.device,
    problems: Iterable[tuple[int, int, tuple[int, ...]]],
) -> float:
    """Largest relative error of a row of a kernel's, with and without norm, bias and residual.

    Args:
        kernel: takes x and weights of ``dtype``.
        problems: rows, width, and outputs of each of the weights.
    """
    generator = torch.Generator(device).manual_seed(0)
    # In the dtype at once: this runs beside a model, and float32 copies would count.
    random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    errors = []
    for rows, width, outputs in problems:
        x = random(rows, width)
        weights = [random(one, width).div_(width**0.5) for one in outputs]
        none = [None] * len(outputs)
        biases = none if gated else [random(one) for one in outputs]
        residual = None if gated else random(rows, sum(outputs))
        for around in ((none, None, None), (biases, Norm(random(width), 1e-5), residual)):
            found = kernel(x, weights, *around).double()
            expected = linear_by_torch(x, weights, *around, gated).double()
            errors.append((found - expected).norm(dim=1) / expected.norm(dim=1))
    # Not Python's max(), which would drop NaN.
    return float(torch.cat(errors).max())
