"""Arguments of ``linear``, and its implementation with PyTorch operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self, cast

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import rms_norm, silu

from oscar_mm.fast_decode.dequantize import dequantized
from oscar_mm.fast_decode.gate import gate_
from oscar_mm.fast_decode.parallel import in_parallel
from oscar_mm.weights.matrix import QuantizedMatrix

_ALIGNMENT = 16
_FILLING_ROWS = 256
"""Number of rows from which a product alone keeps a GPU busy. Two in parallel then take longer:
with 512 rows, the gate and its partner take 163 us instead of 140 (4096 to 12288 channels,
H200)."""


class Norm(NamedTuple):
    """An RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight, with a weight of shape (width,)."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension in float32, rounding before multiplying by the weight."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * scaled.to(x.dtype)

    def at_once(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize; on a GPU, this takes one launch and multiplies by the weight before
        rounding."""
        if x.is_cuda:
            return rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return self(x)


def centered_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalize the last dimension in float32, multiply by 1 + weight, and round once."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (scaled * (1.0 + weight.float())).to(x.dtype)


class LinearArguments(NamedTuple):
    """Arguments of ``linear``.

    Attributes:
        x: (rows, width), contiguous.
        weights: one to four matrices, (outputs, width) each, in the dtype of x or in FP8; in INT4
            (outputs, width / 8) words.
        biases: (outputs,) for each matrix, or None.
        norm: (width,): weight of an RMSNorm applied to x before the products; None for no norm.
        epsilon: epsilon of the norm.
        residual: (rows, total outputs) to add, or None.
        gated: whether to return silu(first product) * second product instead of both.
        scales: scales of each matrix in FP8 (``oscar_mm.weights.fp8``) or INT4
            (``oscar_mm.weights.int4``); otherwise none.
        zeros: zero points of each matrix in INT4; otherwise none.
        centered: whether the norm's weight is added to 1, see ``centered_norm``.
    """

    x: torch.Tensor
    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    norm: torch.Tensor | None
    epsilon: float
    residual: torch.Tensor | None
    gated: bool
    scales: list[torch.Tensor]
    zeros: list[torch.Tensor]
    centered: bool = False

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] = (),
        norm: tuple[torch.Tensor, float] | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
        scales: Sequence[torch.Tensor] = (),
        zeros: Sequence[torch.Tensor] = (),
        *,
        centered: bool = False,
    ) -> Self:
        """Create arguments from a norm and from sequences of tensors, which are not copied."""
        weight, epsilon = (None, 0.0) if norm is None else norm
        biases = biases or (None,) * len(weights)
        own, added, by, less = (cast(list, one) for one in (weights, biases, scales, zeros))
        return cls(x, own, added, weight, epsilon, residual, gated, by, less, centered)

    @property
    def normalized(self) -> torch.Tensor:
        """x after its norm, by PyTorch operations."""
        if self.norm is None:
            return self.x
        if self.centered:
            return centered_norm(self.x, self.norm, self.epsilon)
        return Norm(self.norm, self.epsilon)(self.x)

    @property
    def total(self) -> int:
        """Width of the result."""
        if self.gated:
            return self.weights[0].shape[0]
        return sum([weight.shape[0] for weight in self.weights])

    @property
    def weight_bits(self) -> int:
        """Bits of a weight: 16 or 32, 8 (FP8) or 4 (INT4)."""
        return 4 if self.zeros else 8 if self.scales else 8 * self.x.itemsize

    def result(self) -> torch.Tensor:
        """Return an uninitialized (rows, total) tensor for the result."""
        return self.x.new_empty(self.x.shape[0], self.total)

    def split(self, rows: int) -> list[Self]:
        """Split the rows of x and of the residual stream into parts of at most ``rows``."""
        residuals = [None] * -(-len(self.x) // rows)
        if self.residual is not None:
            residuals = self.residual.split(rows)
        parts = zip(self.x.split(rows), residuals, strict=True)
        return [self._replace(x=x, residual=residual) for x, residual in parts]

    def matrices(self) -> list[torch.Tensor]:
        """Return the weight matrices in the dtype of x; quantized weights are dequantized."""
        if not self.scales:
            return self.weights
        zeros = self.zeros or [None] * len(self.weights)
        matrices = map(QuantizedMatrix, self.weights, self.scales, zeros)
        return [dequantized(matrix, self.x.dtype) for matrix in matrices]


def linear_by_torch(arguments: LinearArguments, *, in_place: bool = False) -> torch.Tensor:
    """Run ``linear`` with PyTorch operations and the rounding of transformers' modules."""
    x, biases, residual = arguments.normalized, arguments.biases, arguments.residual
    products = [torch_linear(x, *part) for part in zip(arguments.matrices(), biases, strict=True)]
    output = silu(products[0]) * products[1] if arguments.gated else torch.cat(products, -1)
    if residual is None:
        return output
    return residual.add_(output) if in_place else residual + output


def linear_on_gpu(arguments: LinearArguments, *, in_place: bool = False) -> torch.Tensor:
    """Run ``linear_by_torch`` on a GPU, without a norm, in fewer launches.

    Each product adds its bias or the residual stream before rounding. In a CUDA graph, the first
    product of few rows runs in parallel with the others, since it seldom saturates memory
    bandwidth.
    """
    x, _, biases, _, _, residual, gated, *_ = arguments
    weights = arguments.matrices()
    plain = len(weights) > 1 and not gated and biases.count(None) == len(biases)
    if plain and (one := joined(weights)) is not None:
        weights, biases = [one], [None]
    sizes = [weight.shape[0] for weight in weights]
    if residual is not None and in_place:
        output = residual
    else:
        output = x.new_empty(0 if gated else x.shape[0], sum(sizes))
    # The gate reads contiguous products in half the time.
    parts = [x.new_empty(x.shape[0], n) for n in sizes] if gated else output.split(sizes, 1)
    if residual is None:
        residuals = [None] * len(sizes)
    else:
        residuals = parts if residual is output else residual.split(sizes, 1)
    first, *others = zip(weights, biases, residuals, parts, strict=True)

    def multiply(*products: tuple[Any, ...]) -> None:
        for product in products:
            _product(x, *product)

    if others and len(x) < _FILLING_ROWS:
        in_parallel(x.device, partial(multiply, first), partial(multiply, *others))
    else:
        multiply(first, *others)
    return gate_(*parts) if gated else output


def joined(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return adjacent matrices as one, (total outputs, width); None if they are not adjacent."""
    first = weights[0]
    start = first.untyped_storage().data_ptr()
    if not all(x.is_contiguous() and x.untyped_storage().data_ptr() == start for x in weights):
        return None
    if any(one.data_ptr() + one.nbytes != other.data_ptr() for one, other in pairwise(weights)):
        return None
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    added = residual if bias is None else bias if residual is None else residual + bias
    if added is None:
        torch.mm(x, weight.T, out=output)
    elif added is output:
        output.addmm_(x, weight.T)
    else:
        torch.addmm(added, x, weight.T, out=output)


def in_rows(*tensors: torch.Tensor) -> bool:
    """Return whether all tensors are contiguous and aligned to 16 bytes."""
    return all(x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 for x in tensors)
