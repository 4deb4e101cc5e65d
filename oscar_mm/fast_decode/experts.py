"""mixture: a mixture of experts for a few rows, each by the experts that its router chooses.

    residual + sum over the chosen k of share_k * (silu(n Wg_k^T) * (n Wu_k^T)) Wd_k^T,  n = norm(x)

The host side of csrc/experts/experts.cu, which reads the chosen experts' weights where they are:
elsewhere they are copied next to each other first, or rows are sorted by expert.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from oscar_mm.fast_decode.linear import (
    AT_ONCE,
    MOST_ROWS,
    PIECE,
    WARPS,
    Norm,
    depth_for,
    in_rows,
    linear,
)
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import (
    ELEMENTS,
    Kernel,
    current_stream,
    load_kernel,
    multiprocessors,
    shared_limit,
    shared_of_one,
    uses_tma,
)
from oscar_mm.kernels.self_check import CheckedKernels

_MOST_CHOSEN, _MOST_EXPERTS = 32, 512
_EARLY = 1
"""Pieces of the second kernel that do not wait for the first."""
_WORST_ERROR = 0.02


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


class Params(ctypes.Structure):
    """``Params`` of csrc/experts/experts.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm", "logits", "weights", "residual")),
        ("output", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("total", "width")),
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


class ExpertKernels:
    """The two kernels of one specialization on one device, compiled when made.

    Attributes:
        key: of their code.
    """

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        tma = uses_tma(device)
        limit = shared_limit(device)
        self.specialization, self._blocks = specialization, multiprocessors(device)
        self._kernels: list[tuple[Kernel, int]] = []
        for down in (False, True):
            macros = specialization.macros(down, limit, tma)
            shared = max(specialization.shared_bytes(macros), shared_of_one(device))
            kernel = load_kernel("experts/experts.cu", macros, device)
            if shared > kernel.shared_limit:
                raise KernelError(
                    f"{specialization.rows} rows of {specialization.chosen} experts take {shared} "
                    f"bytes of shared memory; {device} has {kernel.shared_limit}"
                )
            self._kernels.append((kernel, shared))
        self.key = "".join(kernel.key for kernel, _ in self._kernels)

    def __call__(self, x: torch.Tensor, norm: Norm, experts: Experts) -> torch.Tensor:
        """See ``mixture``."""
        made = self.specialization
        logits = linear(x, [experts.router], norm=norm)
        between = x.new_empty(made.rows, made.chosen, made.between)
        output = torch.empty_like(x)
        stream = current_stream(x.device)
        inward = Params(
            *(x.data_ptr(), norm.weight.data_ptr(), logits.data_ptr()),
            *(experts.gate_and_up.data_ptr(), None, between.data_ptr()),
            *(made.between, made.width, norm.epsilon),
        )
        outward = Params(
            *(between.data_ptr(), None, logits.data_ptr(), experts.down.data_ptr()),
            *(x.data_ptr(), output.data_ptr(), made.width, made.between, 0.0),
        )
        for (kernel, shared), params in zip(self._kernels, (inward, outward), strict=True):
            grid, block = (self._blocks, 1, 1), (WARPS * 32, 1, 1)
            kernel.launch(grid, block, shared, params, stream, dependent=True)
        return output


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
    return TRUSTED.kernel(Specialization(*shape), x.device)


def mixture_of_experts(x: torch.Tensor, norm: Norm, experts: Experts) -> torch.Tensor:
    """A layer's mixture of experts with its norm and the residual stream.

    Args:
        x: (rows, width), a few rows.

    Returns:
        (rows, width).
    """
    kernels = expert_kernels(x, experts)
    if kernels is not None:
        return kernels(x, norm, experts)
    return experts_by_torch(x, norm, experts)


def experts_by_torch(x: torch.Tensor, norm: Norm, experts: Experts) -> torch.Tensor:
    """The same by PyTorch operations, for a few rows: weights are copied."""
    normed = norm(x)
    probabilities = torch_linear(normed, experts.router).softmax(-1, dtype=torch.float32)
    shares, chosen = probabilities.topk(experts.chosen, -1)
    if experts.normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    gates, ups = (experts.gate_and_up[chosen] @ normed[:, None, :, None])[..., 0].chunk(2, -1)
    found = (experts.down[chosen] @ (silu(gates) * ups)[..., None])[..., 0]
    return x + (found * shares.to(x.dtype)[..., None]).sum(1)


def _disagreement(
    specialization: Specialization, kernels: ExpertKernels, device: torch.device
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
    found, expected = (
        (compute(x, norm, experts) - x).double() for compute in (kernels, experts_by_torch)
    )
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


TRUSTED: CheckedKernels[Specialization, ExpertKernels] = CheckedKernels(
    "mixture", ExpertKernels, _disagreement, _WORST_ERROR
)
