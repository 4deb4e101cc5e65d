"""LoRA adapters around the products of a layer.

y_i = x W_i^T + sum over active adapters of scaling * (x A_i^T) B_i^T

The active adapters are those that PEFT has switched on; they act on all rows. With row adapters
(``oscar_mm.fast_decode.row_adapters``) each row has its own.

With up to 16 rows, as in decode steps, the products with A are part of the launch of ``linear``,
unless its weights are quantized, and csrc/linear/low_rank.cu does the rest in one launch. With more
rows, PyTorch operations do it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import silu

from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.linear import linear
from oscar_mm.fast_decode.linear_params import MAX_MATRICES
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.fast_decode.row_adapters import AdaptedLinear, chosen, silence_
from oscar_mm.kernels.launch import ELEMENTS, addresses, current_stream, ints, pointers
from oscar_mm.kernels.macros import macros_of
from oscar_mm.kernels.self_check import OperationKernel, random_normal, relative_error

_HOME = "peft.tuners.lora.layer"
_ROWS = (1, 2, 4, 8, 16)
"""Numbers of rows for which ``low_rank`` is compiled."""
THREADS, _AT_ONCE = 64, 8
"""Threads of a thread block of ``low_rank``, and ranks that a thread reads at once."""
_MOST_SHARED = 48 << 10
"""Maximum bytes of the factors of all rows and ranks."""


def is_lora(module: nn.Module) -> bool:
    """Return whether a module is PEFT's LoRA around a linear module."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == (_HOME, "Linear")


def base_of(module: Any) -> Any:
    """Return the module within LoRA, or the module itself."""
    return module.base_layer if is_lora(module) or isinstance(module, AdaptedLinear) else module


def computes_as_known(lora: Any) -> bool:
    """Return whether a LoRA module runs its own code, and its active adapters are plain ones:
    without DoRA or other variants, biases, or dropout."""
    own = vars(lora)
    return (
        type(lora).forward.__module__ == _HOME
        and not any(own[name] for name in ("_forward_hooks", "_forward_pre_hooks"))
        and "forward" not in own
        and not lora.fan_in_fan_out
        and isinstance(lora.base_layer, nn.Linear)
        and all(map(_is_plain, _active(lora)))
    )


class _Adapter(NamedTuple):
    down: Any
    up: Any
    scaling: float
    variant: Any
    dropout: nn.Module


def _is_plain(adapter: _Adapter) -> bool:
    products = adapter.down, adapter.up
    return (
        all(type(one) is nn.Linear and one.bias is None for one in products)
        and adapter.variant is None
        and (isinstance(adapter.dropout, nn.Identity) or not adapter.dropout.training)
    )


def _active(lora: Any) -> Iterator[_Adapter]:
    """Yield the adapters that add to the result of a LoRA module."""
    for name in () if lora.disable_adapters or lora.merged else lora.active_adapters:
        if name in lora.lora_A:
            yield _Adapter(
                *(lora.lora_A[name], lora.lora_B[name], lora.scaling[name]),
                *(lora.lora_variant.get(name), lora.lora_dropout[name]),
            )


class LowRankArguments(NamedTuple):
    """Arguments of ``LowRankKernel``.

    Attributes:
        products: (rows, total outputs): products without adapters, perhaps columns of wider rows.
        between: (rows, ranks): products with the matrices A, perhaps columns of wider rows.
        up: (total outputs, ranks), see ``LowRank``.
        idle: (rows or 1, ranks of a module) bool: ranks to leave out, see ``choosing``; or None.
        residual: (rows, outputs) to add, or None.
    """

    products: torch.Tensor
    between: torch.Tensor
    up: torch.Tensor
    idle: torch.Tensor | None
    residual: torch.Tensor | None


class LowRankParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/linear/low_rank.cu, field for field."""

    _fields_ = (
        *pointers("products", "between", "up", "idle", "residual", "output"),
        *((f"{name}_stride", ctypes.c_int64) for name in ("products", "between", "idle")),
        *ints("rows", "outputs", "ranks", "mask_ranks"),
    )


class LowRankSpecialization(NamedTuple):
    """Compile-time parameters of ``low_rank``."""

    rows: int
    """Rows of x, rounded up to one of ``_ROWS``."""
    gated: bool
    dtype: torch.dtype


class LowRankKernel(OperationKernel[LowRankSpecialization], operation="low_rank", bound=0.02):
    """CUDA kernel that adds the products with B, for up to 16 rows, and then does what follows a
    product: it adds the residual stream or applies the gate."""

    def __init__(self, specialization: LowRankSpecialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load("linear/low_rank.cu", macros_of(specialization))

    @classmethod
    def for_rows(cls, x: torch.Tensor, added: LowRank, gated: bool) -> LowRankKernel | None:
        """Return the kernel for the rows of x; None if PyTorch operations must be used."""
        rows, ranks = len(x), added.up.shape[1]
        if not x.is_cuda or x.dtype not in ELEMENTS or rows > _ROWS[-1] or ranks % _AT_ONCE:
            return None
        made = LowRankSpecialization(next(most for most in _ROWS if rows <= most), gated, x.dtype)
        kernel = cls.of(made, x.device)
        fits = kernel is not None and kernel._shared_bytes(ranks) <= _MOST_SHARED
        return kernel if fits else None

    def _shared_bytes(self, ranks: int) -> int:
        return self.specialization.rows * ranks * 4

    def __call__(self, arguments: LowRankArguments) -> torch.Tensor:
        """Launch the kernel."""
        products, between, up, idle, residual = arguments
        rows, outputs = len(products), products.shape[1] // (1 + self.specialization.gated)
        output = products.new_empty(rows, outputs)
        idle_stride = 0 if idle is None or len(idle) == 1 else idle.stride(0)
        params = LowRankParams(
            *addresses(products, between, up, idle, residual, output),
            *(products.stride(0), between.stride(0), idle_stride),
            *(rows, outputs, up.shape[1], 1 if idle is None else idle.shape[1]),
        )
        grid, block = (-(-outputs // THREADS), 1, 1), (THREADS, 1, 1)
        shared, stream = self._shared_bytes(up.shape[1]), current_stream(products.device)
        self._kernel.launch(grid, block, shared, params, stream, dependent=True)
        return output

    @staticmethod
    def disagreement(
        specialization: LowRankSpecialization,
        kernel: Callable[[LowRankArguments], torch.Tensor],
        device: torch.device,
    ) -> float:
        """Return the largest relative error of a row, with different adapters in each row."""
        rows, gated, dtype = specialization
        random, outputs, ranks = random_normal(dtype, device), 200, 24
        both, up = random(rows, outputs + 2 * ranks), random(outputs, 2 * ranks)
        products, between = both.split([outputs, 2 * ranks], 1)
        idle = torch.arange(rows * ranks, device=device).view(rows, ranks) % 3 == 0
        residual = None if gated else random(rows, outputs)
        found = kernel(LowRankArguments(products, between, up, idle, residual))
        exact = products.float() + (between.float() * ~idle.repeat(1, 2)) @ up.float().T
        gates, ups = exact.chunk(2, 1)
        expected = exact if residual is None else exact + residual.float()
        return relative_error(found, silu(gates) * ups if gated else expected)


class LowRank(NamedTuple):
    """What the adapters of one launch add.

    Attributes:
        down: (ranks, width): matrices A of all adapters.
        up: (total outputs, ranks): matrices B times their scaling, each at the outputs of its
            module; 0 elsewhere.
        chosen_by: number of modules with row adapters; 0 if the adapters act on all rows.
    """

    down: torch.Tensor
    up: torch.Tensor
    chosen_by: int = 0

    @property
    def acts(self) -> bool:
        """Whether any row of the current pass uses the adapters."""
        return not self.chosen_by or chosen() is not None

    def product(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        *,
        norm: Norm | CenteredNorm | None,
        residual: torch.Tensor | None,
        gated: bool,
        scales: Sequence[torch.Tensor],
        zeros: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Compute ``linear`` with what the adapters add; the arguments are those of ``linear``."""
        kernel = LowRankKernel.for_rows(x, self, gated)
        fused = kernel is not None
        of_launch = {"norm": norm, "residual": None if fused else residual}
        if fused and not scales and len(weights) < MAX_MATRICES:
            # A and the weights have the same format, so one launch computes both.
            both = linear(x, [*weights, self.down], [*biases, None], **of_launch)
            found, between = both.split([both.shape[1] - len(self.down), len(self.down)], 1)
        else:
            found = linear(x, weights, biases, scales=scales, zeros=zeros, **of_launch)
            between = linear(x, [self.down], norm=norm)
        idle = chosen() if self.chosen_by else None
        if kernel is not None:
            return kernel(LowRankArguments(found, between, self.up, idle, residual))
        if idle is not None:
            silence_(between, idle, self.chosen_by)
        found.addmm_(between, self.up.T)
        if not gated:
            return found
        gate, up = found.chunk(2, 1)
        return silu(gate).mul_(up)

    @classmethod
    def of(cls, modules: Sequence[Any], dtype: torch.dtype) -> LowRank | None:
        """Collect the active adapters of modules; None if there are none.

        Args:
            modules: modules of one launch, in the order of its outputs.
            dtype: dtype of the activations.
        """
        if any(isinstance(module, AdaptedLinear) for module in modules):
            return cls._of_rows(modules)
        sizes = [base_of(module).out_features for module in modules]
        downs, ups, before = [], [], 0
        for module, size in zip(modules, sizes, strict=True):
            after = sum(sizes) - before - size
            for adapter in _active(module) if is_lora(module) else ():
                up = adapter.up.weight.float() * adapter.scaling
                ups.append(nn.functional.pad(up, (0, 0, before, after)))
                downs.append(adapter.down.weight)
            before += size
        if not downs:
            return None
        return cls(torch.cat(downs).to(dtype), torch.cat(ups, 1).to(dtype))

    @classmethod
    def _of_rows(cls, modules: Sequence[Any]) -> LowRank:
        """Join the stacks of modules with row adapters, once: decoders of all batch sizes share the
        result, and the modules' own stacks become parts of it."""
        own = [module for module in modules if isinstance(module, AdaptedLinear)]
        if own[0].launch is None:
            own[0].launch = cls._joined(modules, own)
        return own[0].launch

    @classmethod
    def _joined(cls, modules: Sequence[Any], own: Sequence[AdaptedLinear]) -> LowRank:
        down = torch.cat([module.down for module in own])
        up = down.new_zeros(sum(base_of(module).out_features for module in modules), len(down))
        downs, outputs = iter(down.chunk(len(own))), iter(up.chunk(len(own), 1))
        before = 0
        for module in modules:
            after = before + base_of(module).out_features
            if isinstance(module, AdaptedLinear):
                part = next(outputs)[before:after]
                part.copy_(module.up)
                module.down, module.up = next(downs), part
            before = after
        return cls(down, up, len(own))
