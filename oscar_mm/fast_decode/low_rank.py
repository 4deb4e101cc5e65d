"""LoRA adapters around the products of a layer, in two launches for each launch of ``linear``.

y_i = x W_i^T + sum over active adapters of scaling * (x A_i^T) B_i^T
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

_HOME = "peft.tuners.lora.layer"


def is_lora(module: nn.Module) -> bool:
    """Return whether a module is PEFT's LoRA around a linear module."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == (_HOME, "Linear")


def base_of(module: Any) -> Any:
    """Return the module within LoRA, or the module itself."""
    return module.base_layer if is_lora(module) else module


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
    """

    down: torch.Tensor
    up: torch.Tensor

    @classmethod
    def of(cls, modules: Sequence[Any], dtype: torch.dtype) -> LowRank | None:
        """Collect the active adapters of modules; None if there are none.

        Args:
            modules: modules of one launch, in the order of its outputs.
            dtype: dtype of the activations.
        """
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
