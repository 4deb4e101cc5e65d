"""LoRA adapters around the products of a layer, in two launches for each launch of ``linear``.

y_i = x W_i^T + sum over active adapters of scaling * (x A_i^T) B_i^T

The active adapters are those that PEFT has switched on; they act on all rows. With row adapters
(``oscar_mm.fast_decode.row_adapters``) each row has its own; a third launch leaves the others out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.linear import linear
from oscar_mm.fast_decode.linear_torch import Norm
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

    def add_(self, found: torch.Tensor, x: torch.Tensor, norm: Norm | CenteredNorm | None) -> None:
        """Add what the adapters add to the (rows, total outputs) products of ``linear``."""
        between, idle = linear(x, [self.down], norm=norm), chosen()
        if self.chosen_by and idle is not None:
            silence_(between, idle, self.chosen_by)
        found.addmm_(between, self.up.T)

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
