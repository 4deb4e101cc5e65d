"""Weight matrices in FP8 or INT4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from oscar_mm.weights import fp8, int4


class QuantizedMatrix(NamedTuple):
    """Weights of one product, or of one product for each expert.

    Attributes:
        codes: (..., outputs, width) in FP8, or (..., outputs, width / 8) words of INT4 codes.
        scales: see ``oscar_mm.weights.fp8`` and ``oscar_mm.weights.int4``.
        zeros: zero points of INT4; None in FP8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int) -> Self:
        """Quantize (..., outputs, width) weights to FP8 (8 bits) or INT4 (4 bits).

        INT4 groups have 128 columns, or fewer if that does not divide the width.
        """
        if bits == 8:
            return cls(*fp8.quantized(weight))
        if weight.ndim > 2:
            # One after the other, since temporary tensors take four times the weights' memory.
            return cls.stacked([cls.of(one, bits) for one in weight])
        return cls(*int4.quantized(weight, math.gcd(weight.shape[1], 128)))

    @classmethod
    def stacked(cls, matrices: Sequence[Self]) -> Self:
        """Stack matrices of the same format and shape."""
        codes, scales, zeros = zip(*matrices, strict=True)
        return cls(
            torch.stack(codes),
            torch.stack(scales),
            None if zeros[0] is None else torch.stack(zeros),
        )

    def chosen(self, index: int | torch.Tensor) -> Self:
        """Return the matrices of the experts at an index."""
        codes, scales, zeros = self
        return type(self)(codes[index], scales[index], None if zeros is None else zeros[index])

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.zeros is None else 4

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.codes.shape[-1] * (1 if self.zeros is None else 8)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the (..., outputs, width) weights in ``dtype``."""
        if self.zeros is None:
            return fp8.dequantized(self.codes, self.scales, dtype)
        return int4.dequantized(self.codes, self.scales, self.zeros, dtype)

    def check(self) -> None:
        """Check that the tensors fit each other.

        Raises:
            ValueError: if they do not; the message says what is wrong.
        """
        if self.zeros is None:
            fp8.rows_per_scale(self.codes, self.scales)
        else:
            int4.check(self.codes, self.scales, self.zeros)
