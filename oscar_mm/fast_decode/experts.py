"""mixture: a mixture of experts for a few rows, each by the experts that its router chooses.

    residual + sum over the chosen k of share_k * (silu(n Wg_k^T) * (n Wu_k^T)) Wd_k^T,  n = norm(x)

The host side of csrc/experts/experts.cu, which reads the chosen experts' weights where they are:
elsewhere they are copied next to each other first, or rows are sorted by expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from oscar_mm.fast_decode.linear import linear
from oscar_mm.fast_decode.linear_kernels import AT_ONCE, MOST_ROWS, PIECE, WARPS, depth_for
from oscar_mm.fast_decode.linear_torch import Norm, in_rows
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import (
    ELEMENTS,
    Kernel,
    addresses,
    current_stream,
    ints,
    multiprocessors,
    pointers,
    shared_limit,
    shared_of_one,
    uses_tma,
)
from oscar_mm.kernels.self_check import OperationKernel, relative_error
from oscar_mm.ops.library import STATES, ArgumentChecker, define

_MOST_CHOSEN, _MOST_EXPERTS = 32, 512
_EARLY = 1
"""Pieces of the second kernel that do not wait for the first."""
_checker = ArgumentChecker("mixture")


class Experts(NamedTuple):
    """Weights of a mixture.

    Attributes:
        router: (experts, width).
        gate_and_up: (experts, 2 * between, width), the gates' outputs first.
        down: (experts, width, between).
        chosen: experts of a row.
        normalized: whether the shares of a row's experts add up to 1.
    """

    router: torch.Tensor
    gate_and_up: torch.Tensor
    down: torch.Tensor
    chosen: int
    normalized: bool


class MixtureArguments(NamedTuple):
    """Arguments of ``mixture``; the result is (rows, width).

    Attributes:
        x: (rows, width), contiguous.
        norm: (width,), weight of the RMSNorm of x.
        epsilon: of the norm.
        router, gate_and_up, down, chosen, normalized: as of ``Experts``.
    """

    x: torch.Tensor
    norm: torch.Tensor
    epsilon: float
    router: torch.Tensor
    gate_and_up: torch.Tensor
    down: torch.Tensor
    chosen: int
    normalized: bool

    def result(self) -> torch.Tensor:
        """(rows, width) without data."""
        return torch.empty_like(self.x)


class Params(ctypes.Structure):
    """``Params`` of csrc/experts/experts.cu, field for field."""

    _fields_ = (
        *pointers("x", "norm", "logits", "weights", "residual", "output"),
        *ints("total", "width"),
        ("epsilon", ctypes.c_float),
    )


@dataclass(frozen=True)
class Specialization:
    """What the two kernels are compiled for."""

    rows: int
    experts: int
    chosen: int
    normalized: bool
    width: int
    between: int
    dtype: torch.dtype

    def macros(self, down: bool, limit: int, tma: bool) -> dict[str, str | int]:
        """Macros that csrc/experts/experts.cu is compiled with.

        Args:
            down: of the second kernel.
            limit: bytes of shared memory that a thread block may have.
            tma: copies by TMA.
        """
        piece = min(PIECE, self.between if down else self.width)
        return {
            "DOWN": int(down),
            "CHOSEN": self.chosen,
            "EXPERTS": self.experts,
            "NORMALIZE": int(self.normalized),
            "ROWS": self.rows,
            "ELEMENT": ELEMENTS[self.dtype],
            "WARPS": WARPS,
            "DEPTH": depth_for(limit),
            "EARLY": _EARLY,
            "PIECE": piece,
            "USE_TMA": int(tma),
        }

    def shared_bytes(self, macros: dict[str, str | int]) -> int:
        """Of a thread block: pieces, then rows of x, then the norm's weight."""
        pieces = WARPS * int(macros["DEPTH"]) * int(macros["PIECE"])
        if macros["DOWN"]:
            return 2 * (pieces + self.rows * self.chosen * self.between)
        return 2 * (pieces + (self.rows + 1) * self.width)


class ExpertKernels(OperationKernel[Specialization], operation="mixture", bound=0.02):
    """The two kernels of a mixture."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        limit, self._blocks = shared_limit(device), multiprocessors(device)
        self._kernels: list[tuple[Kernel, int]] = []
        for down in (False, True):
            macros = specialization.macros(down, limit, uses_tma(device))
            shared = max(specialization.shared_bytes(macros), shared_of_one(device))
            kernel = self._load("experts/experts.cu", macros)
            if shared > kernel.shared_limit:
                raise KernelError(
                    f"{specialization.rows} rows of {specialization.chosen} experts take {shared} "
                    f"bytes of shared memory; {device} has {kernel.shared_limit}"
                )
            self._kernels.append((kernel, shared))

    def __call__(self, arguments: MixtureArguments) -> torch.Tensor:
        """Launch."""
        x, weight, epsilon, router, gate_and_up, down, *_ = arguments
        made = self.specialization
        logits = linear(x, [router], norm=Norm(weight, epsilon))
        between = x.new_empty(made.rows, made.chosen, made.between)
        output = arguments.result()
        inward = Params(
            *addresses(x, weight, logits, gate_and_up, None, between),
            *(made.between, made.width, epsilon),
        )
        outward = Params(
            *addresses(between, None, logits, down, x, output), made.width, made.between, 0.0
        )
        stream = current_stream(x.device)
        for (kernel, shared), params in zip(self._kernels, (inward, outward), strict=True):
            grid, block = (self._blocks, 1, 1), (WARPS * 32, 1, 1)
            kernel.launch(grid, block, shared, params, stream, dependent=True)
        return output

    @staticmethod
    def disagreement(
        specialization: Specialization,
        kernel: Callable[[Any], torch.Tensor],
        device: torch.device,
    ) -> float:
        """Largest relative error of a row that chooses clearly, without the residual stream."""
        made, dtype = specialization, specialization.dtype
        generator = torch.Generator(device).manual_seed(0)
        # In the dtype at once: this runs beside a model, and float32 copies would count.
        random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
        x, norm = random(1, made.width).repeat(made.rows, 1), Norm(random(made.width), 1e-5)
        # Logits far apart, so that rounding does not change which are the largest.
        direction = norm(x)[:1].float()
        steps = torch.randperm(made.experts, generator=generator, device=device).float()
        experts = Experts(
            (steps[:, None] * direction / direction.square().sum() / 2).to(dtype),
            random(made.experts, 2 * made.between, made.width).div_(made.width**0.5),
            random(made.experts, made.width, made.between),
            *(made.chosen, made.normalized),
        )
        arguments = MixtureArguments(x, *norm, *experts)
        return relative_error(kernel(arguments) - x, experts_by_torch(arguments) - x)


def expert_kernels(x: torch.Tensor, experts: Experts) -> ExpertKernels | None:
    """The kernels for (rows, width) x; None where there are none, or for more than a few rows."""
    rows, width = x.shape
    count, both, _ = experts.gate_and_up.shape
    if not x.is_cuda or rows > MOST_ROWS or x.dtype not in ELEMENTS:
        return None
    if width % AT_ONCE or both // 2 % AT_ONCE:
        return None
    if experts.chosen > _MOST_CHOSEN or count > _MOST_EXPERTS:
        return None
    if not in_rows(x, experts.gate_and_up, experts.down):
        return None
    shape = (rows, count, experts.chosen, experts.normalized, width, both // 2, x.dtype)
    return ExpertKernels.of(Specialization(*shape), x.device)


def mixture_of_experts(x: torch.Tensor, norm: Norm, experts: Experts) -> torch.Tensor:
    """A layer's mixture of experts with its norm and the residual stream, for a few rows.

    This is the operation, called directly, without its checks.

    Args:
        x: (rows, width).

    Returns:
        (rows, width).
    """
    return (expert_kernels(x, experts) or experts_by_torch)(MixtureArguments(x, *norm, *experts))


def experts_by_torch(arguments: MixtureArguments) -> torch.Tensor:
    """``mixture`` by PyTorch operations, for a few rows: weights are copied."""
    x, weight, epsilon, router, gate_and_up, down, count, normalized = arguments
    normed = Norm(weight, epsilon)(x)
    probabilities = torch_linear(normed, router).softmax(-1, dtype=torch.float32)
    shares, chosen = probabilities.topk(count, -1)
    if normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    gates, ups = (gate_and_up[chosen] @ normed[:, None, :, None])[..., 0].chunk(2, -1)
    outputs = (down[chosen] @ (silu(gates) * ups)[..., None])[..., 0]
    return x + (outputs * shares.to(x.dtype)[..., None]).sum(1)


def _check(arguments: MixtureArguments) -> None:
    x, norm, _, router, gate_and_up, down, chosen, _ = arguments
    check, dtype, device = _checker.check, x.dtype, x.device
    check("x", x, ("rows", "width"), STATES, device)
    width = x.shape[1]
    check("norm", norm, (width,), dtype, device)
    check("router", router, ("experts", width), dtype, device)
    check("gate_and_up", gate_and_up, (len(router), "2 * between", width), dtype, device)
    check("down", down, (len(router), width, gate_and_up.shape[1] // 2), dtype, device)
    if not 1 <= chosen <= len(router):
        _checker.refuse("chosen", chosen, f"1 to {len(router)}, the experts")


def _mixture(arguments: MixtureArguments) -> torch.Tensor:
    norm = Norm(arguments.norm, arguments.epsilon)
    return mixture_of_experts(arguments.x, norm, Experts(*arguments[3:]))


mixture_operation = define("mixture", MixtureArguments, _check, _mixture, "Tensor")
