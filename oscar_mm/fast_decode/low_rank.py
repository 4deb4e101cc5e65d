"""LoRA adapters around the products of a layer.

y_i = x W_i^T + sum over active adapters of scaling * (x A_i^T) B_i^T

The active adapters are those that PEFT has switched on; they act on all rows. With row adapters
(``oscar_mm.fast_decode.row_adapters``) each row has its own.

With up to 16 rows, as in decode steps, the products with A are part of the launch of ``linear``,
unless its weights are quantized, and ``LowRankKernel`` does the rest in one launch. With more
rows, PyTorch operations do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import silu

from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.linear import linear
from oscar_mm.fast_decode.linear_params import MAX_MATRICES
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.fast_decode.low_rank_kernel import STEP, LowRankArguments, LowRankKernel
from oscar_mm.fast_decode.row_adapters import AdaptedLinear, chosen, silence_

_HOME = "peft.tuners.lora.layer"


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


class LowRank(NamedTuple):
    """Matrices of the adapters of one launch. All modules of the launch have the same number of
    ranks, even those without adapters, whose matrices are zeros.

    Attributes:
        down: (modules * ranks, width): matrices A.
        up: (total outputs, ranks): matrices B times their scaling.
        sizes: number of outputs of each module.
        by_row: whether rows choose adapters; otherwise, the adapters act on all rows.
    """

    down: torch.Tensor
    up: torch.Tensor
    sizes: tuple[int, ...]
    by_row: bool = False

    @property
    def acts(self) -> bool:
        """Whether any row of the current pass uses the adapters."""
        return not self.by_row or chosen() is not None

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
        in_place: bool = False,
    ) -> torch.Tensor:
        """Compute ``linear`` with what the adapters add; the arguments are those of ``linear``."""
        kernel = LowRankKernel.for_rows(x, self.up, self.sizes, gated)
        fused = kernel is not None
        of_launch = {"norm": norm, "residual": None if fused else residual, "in_place": in_place}
        if fused and not scales and len(weights) < MAX_MATRICES:
            # A and the weights have the same format, so one launch computes both.
            both = linear(x, [*weights, self.down], [*biases, None], **of_launch)
            found, between = both.split([len(self.up), len(self.down)], 1)
        else:
            found = linear(x, weights, biases, scales=scales, zeros=zeros, **of_launch)
            between = linear(x, [self.down], norm=norm)
        idle = chosen() if self.by_row else None
        if kernel is not None:
            return kernel(LowRankArguments(found, between, self.up, self.sizes, idle, residual))
        if idle is not None:
            silence_(between, idle, len(self.sizes))
        ups = self.up.split(self.sizes)
        parts = found.split(self.sizes, 1), between.chunk(len(ups), 1), ups
        for part, of_part, up in zip(*parts, strict=True):
            part.addmm_(of_part, up.T)
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
        adapters = [list(_active(one)) if is_lora(one) else [] for one in modules]
        largest = max(sum(len(x.down.weight) for x in own) for own in adapters)
        if not largest:
            return None
        device = next(own for own in adapters if own)[0].down.weight.device
        made = cls._empty(modules, -(-largest // STEP) * STEP, dtype, device)
        for own, (down, up) in zip(adapters, made._by_module(), strict=True):
            after = 0
            for adapter in own:
                before, after = after, after + len(adapter.down.weight)
                down[before:after] = adapter.down.weight
                up[:, before:after] = adapter.up.weight.float() * adapter.scaling
        return made

    @classmethod
    def _of_rows(cls, modules: Sequence[Any]) -> LowRank:
        """Join the stacks of modules with row adapters, once: decoders of all batch sizes share the
        result, and the modules' own stacks become parts of it."""
        first = next(module for module in modules if isinstance(module, AdaptedLinear))
        if first.launch is None:
            first.launch = made = cls._empty(
                modules, len(first.down), first.down.dtype, first.down.device, by_row=True
            )
            for module, (down, up) in zip(modules, made._by_module(), strict=True):
                if isinstance(module, AdaptedLinear):
                    module.down, module.up = down.copy_(module.down), up.copy_(module.up)
        return first.launch

    @classmethod
    def _empty(
        cls,
        modules: Sequence[Any],
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        by_row: bool = False,
    ) -> LowRank:
        """Return matrices of zeros.

        Args:
            modules: modules of one launch.
            ranks: number of ranks of each module.
            dtype, device: dtype and device of the matrices.
            by_row: see ``LowRank``.
        """
        bases = [base_of(module) for module in modules]
        sizes, zeros = tuple(one.out_features for one in bases), partial(torch.zeros, dtype=dtype)
        down = zeros(len(bases) * ranks, bases[0].in_features, device=device)
        return cls(down, zeros(sum(sizes), ranks, device=device), sizes, by_row)

    def _by_module(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.down.chunk(len(self.sizes)), self.up.split(self.sizes), strict=True))
