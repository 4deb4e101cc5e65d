"""Lengths of the pictures in a tower's batch: read from the GPU once, not in each layer.

Qwen's vision towers concatenate the patches of all pictures, and each layer splits them again for
its attention. For this, each layer reads the lengths three times, and each time the host waits for
the GPU, which then waits for the host.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn

_EDGES = "cu_seqlens"
"""Argument of an attention: (sequences + 1,) indices at which sequences begin and end."""


def read_lengths_once(model: nn.Module) -> None:
    """Make the vision attention of a model split sequences without waiting for the GPU; only the
    first call for a model has an effect.

    Args:
        model: model with or without a tower. Attention other than that of Qwen's towers does not
            change, nor does flash attention, which reads the lengths on the GPU.
    """
    module: Any
    for module in model.modules():
        splits = hasattr(module, "qkv") and _EDGES in signature(module.forward).parameters
        if splits and not hasattr(module, "_oscar_lengths"):
            module._oscar_lengths = True
            module.register_forward_pre_hook(_on_cpu, with_kwargs=True)


def _on_cpu(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a tower's attention, with ``cu_seqlens`` on the CPU."""
    edges: torch.Tensor | None = kwargs.get(_EDGES)
    if edges is None or edges.is_cpu or "flash" in module.config._attn_implementation:
        return None
    # All layers get the same tensor.
    known: dict[str, Any] = vars(edges)
    if "_oscar_on_cpu" not in known:
        known["_oscar_on_cpu"] = edges.cpu()
    return args, kwargs | {_EDGES: known["_oscar_on_cpu"]}
