"""linear: a few rows times weight matrices, with what a decoder layer has around them.

y = [norm(x) W0^T + b0, norm(x) W1^T + b1, ...] + residual, or silu(norm(x) W0^T) * norm(x) W1^T
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from oscar_mm.fast_decode.linear_kernels import (
    AT_ONCE,
    MOST_COLUMNS,
    MOST_ROWS,
    LinearKernel,
    LinearRowsKernel,
    RowsSpecialization,
    Specialization,
)
from oscar_mm.fast_decode.linear_torch import (
    LinearArguments,
    Norm,
    in_rows,
    linear_by_torch,
    linear_on_gpu,
)
from oscar_mm.kernels.launch import ELEMENTS, uses_tma
from oscar_mm.ops.library import STATES, ArgumentChecker, define

FEW_ROWS = 2
"""Rows with which the kernel for a few is fastest; with four, matrix units take 17% less (H200)."""
_checker = ArgumentChecker("linear")


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Rows times one to three matrices: the operation, called directly, without its checks.

    Args:
        x, weights, biases, norm, residual, gated: as of ``LinearArguments``; no biases for none.

    Returns:
        (rows, outputs of all, or of one if gated).
    """
    return _linear(LinearArguments.of(x, weights, biases, norm, residual, gated))


def kernel_for(arguments: LinearArguments) -> LinearKernel | LinearRowsKernel | None:
    """The kernel to use; None for PyTorch operations."""
    x, has_norm = arguments.x, arguments.norm is not None
    rows, width = x.shape
    if not x.is_cuda or x.dtype not in ELEMENTS or width % AT_ONCE:
        return None
    # The kernels' gate has no biases.
    if arguments.gated and any(bias is not None for bias in arguments.biases):
        return None
    for kernel in _kernels(rows, arguments.gated, x.dtype, x.device):
        if kernel is not None and kernel.takes(width, has_norm) and in_rows(x, *arguments.weights):
            return kernel
    return None


def _kernels(
    rows: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> Iterator[LinearKernel | LinearRowsKernel | None]:
    """The fastest first."""
    if FEW_ROWS < rows <= MOST_COLUMNS and uses_tma(device):
        yield LinearRowsKernel.of(RowsSpecialization.of(rows, gated, dtype), device)
    if rows <= MOST_ROWS:
        yield LinearKernel.of(Specialization(rows, gated, dtype), device)


def _linear(arguments: LinearArguments) -> torch.Tensor:
    kernel = kernel_for(arguments)
    if kernel is not None:
        return kernel(arguments)
    if arguments.norm is not None:
        x = Norm(arguments.norm, arguments.epsilon).at_once(arguments.x)
        arguments = arguments._replace(x=x, norm=None)
    return linear_on_gpu(arguments) if arguments.x.is_cuda else linear_by_torch(arguments)


def _check(arguments: LinearArguments) -> None:
    x, weights, biases, norm, _, residual, gated = arguments
    check, device = _checker.check, x.device
    check("x", x, ("rows", "width"), STATES, device)
    rows, width = x.shape
    if gated and len(weights) != 2:
        _checker.refuse("weights", f"{len(weights)} matrices", "2 with a gate")
    if not 1 <= len(weights) <= 3 or len(biases) != len(weights):
        found = f"{len(weights)} matrices with {len(biases)} biases"
        _checker.refuse("weights", found, "1 to 3, with as many biases")
    for weight, bias in zip(weights, biases, strict=True):
        check("weights", weight, ("outputs", width), x.dtype, device)
        if bias is not None:
            check("biases", bias, weight.shape[:1], x.dtype, device)
    if norm is not None:
        check("norm", norm, (width,), x.dtype, device)
    if residual is not None:
        check("residual", residual, (rows, arguments.total), x.dtype, device)


linear_operation = define("linear", LinearArguments, _check, _linear, "Tensor")
