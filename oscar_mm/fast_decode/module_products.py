"""Decoders that run as transformers' own modules: faster products of few rows, and RMSNorms in one
launch.

A graph of such a decoder launches each operation of its modules, eight for an RMSNorm. Products of
few rows take as long as reading the weights, which the kernels of ``linear`` do faster than cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear as torch_linear
from torch.overrides import TorchFunctionMode

from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.linear import MAX_COLUMNS, kernel_for
from oscar_mm.fast_decode.linear_torch import LinearArguments, Norm
from oscar_mm.modules import modules_of, run_as_written

_SAME = 0.02
"""Maximum relative difference of a norm's output from an RMSNorm's, above the rounding error of
16-bit precision."""


def rms_norms(model: Any) -> list[nn.Module]:
    """Return the modules of a model's decoder whose output is that of an RMSNorm, by a comparison
    for each class. Gemma's norms, whose weights are stored minus 1, are among them."""
    norms = [
        one
        for one in modules_of(model.get_decoder())
        if _may_be_rms_norm(one) and run_as_written([one])
    ]
    same = {kind: _is_rms_norm(one) for kind, one in {type(one): one for one in norms}.items()}
    return [one for one in norms if same[type(one)]]


@torch.no_grad()
def _is_rms_norm(norm: Any) -> bool:
    weight = norm.weight
    x = torch.linspace(-1, 3, len(weight), dtype=weight.dtype, device=weight.device)[None]
    found, expected = norm(x).float(), _norm_of(norm)(x).float()
    return bool((found - expected).norm() <= _SAME * expected.norm())


def _may_be_rms_norm(module: Any) -> bool:
    """Return whether a module has the fields of a norm with a weight for each channel."""
    weight = getattr(module, "weight", None)
    named = hasattr(module, "variance_epsilon") or isinstance(getattr(module, "eps", None), float)
    return named and isinstance(weight, torch.Tensor) and weight.ndim == 1


def _norm_of(norm: Any) -> Norm | CenteredNorm:
    if hasattr(norm, "variance_epsilon"):
        return Norm(norm.weight, norm.variance_epsilon)
    # Gemma's norms have ``eps``; ``_is_rms_norm`` rejects others with this field.
    return CenteredNorm(norm.weight, norm.eps)


@contextmanager
def in_fewer_launches(norms: Iterable[Any]) -> Iterator[None]:
    """Within the block, norms and products of linear modules take one launch each.

    Args:
        norms: see ``rms_norms``.
    """
    changed = list(norms)
    try:
        for norm in changed:
            norm.forward = partial(_normalized, norm)
        with FewRowProducts():
            yield
    finally:
        for norm in changed:
            vars(norm).pop("forward", None)


def _normalized(norm: Any, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
    casts = norm.weight.dtype != x.dtype or torch.is_autocast_enabled(x.device.type)
    if casts or more or named:  # A gate, for example.
        return type(norm).forward(norm, x, *more, **named)
    return _norm_of(norm).at_once(x.reshape(-1, x.shape[-1])).view(x.shape)


class FewRowProducts(TorchFunctionMode):
    """Mode in which the kernels of ``linear``, which read weights at memory bandwidth, multiply up
    to ``MAX_COLUMNS`` rows for linear modules. Whatever they do not take runs as it was written."""

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
    """Return the product of (..., width) activations and a matrix; None if no kernel takes them."""
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.dtype == input.dtype
    casts = torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type)
    if not plain or casts or not 0 < input.numel() <= MAX_COLUMNS * input.shape[-1]:
        return None
    rows = input.reshape(-1, input.shape[-1])
    arguments = LinearArguments.of(rows, [weight], [bias])
    kernel = kernel_for(arguments)
    return None if kernel is None else kernel(arguments).view(*input.shape[:-1], -1)
