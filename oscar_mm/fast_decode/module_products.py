"""Products of decoders that run as their own modules: those of few rows run by our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.functional import linear as torch_linear
from torch.overrides import TorchFunctionMode

from oscar_mm.fast_decode.linear import MAX_COLUMNS, kernel_for
from oscar_mm.fast_decode.linear_torch import LinearArguments


class FewRowProducts(TorchFunctionMode):
    """Within it, linear modules multiply up to ``MAX_COLUMNS`` rows by the kernels of ``linear``,
    which read weights at memory bandwidth. Whatever they do not take runs as it was written."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of PyTorch."""
        given = dict(kwargs or {})
        found = _product(*args, **given) if func is torch_linear else None
        return func(*args, **given) if found is None else found


def _product(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Multiply (..., width) by a matrix; None if the kernels do not."""
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.dtype == input.dtype
    casts = torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type)
    if not plain or casts or input.numel() > MAX_COLUMNS * input.shape[-1]:
        return None
    rows = input.reshape(-1, input.shape[-1])
    arguments = LinearArguments.of(rows, [weight], [bias])
    kernel = kernel_for(arguments)
    return None if kernel is None else kernel(arguments).view(*input.shape[:-1], -1)
