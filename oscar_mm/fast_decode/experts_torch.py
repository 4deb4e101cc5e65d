"""Arguments of mixture, mixture by PyTorch operations, and how far kernels are from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import linear, silu

from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.kernels.self_check import relative_error


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


class Choosing(Protocol):
    """How rows choose their experts, of a specialization of kernels."""

    @property
    def experts(self) -> int:
        """How many there are."""
        ...

    @property
    def chosen(self) -> int:
        """Experts of a row."""
        ...

    @property
    def normalized(self) -> bool:
        """Whether the shares of a row's experts add up to 1."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of rows and weights."""
        ...


def experts_by_torch(arguments: MixtureArguments) -> torch.Tensor:
    """``mixture`` by PyTorch operations, for a few rows: weights are copied."""
    x, weight, epsilon, router, gate_and_up, down, count, normalized = arguments
    normed = Norm(weight, epsilon)(x)
    shares, chosen = _choices(linear(normed, router), count, normalized)
    gates, ups = (gate_and_up[chosen] @ normed[:, None, :, None])[..., 0].chunk(2, -1)
    outputs = (down[chosen] @ (silu(gates) * ups)[..., None])[..., 0]
    return x + (outputs * shares.to(x.dtype)[..., None]).sum(1)


def _choices(
    logits: torch.Tensor, count: int, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, count) float32 shares and int64 numbers of the experts that a router chooses."""
    shares, chosen = logits.softmax(-1, dtype=torch.float32).topk(count, -1)
    return shares / shares.sum(-1, keepdim=True) if normalized else shares, chosen


def clear_choices(
    kinds: Sequence[int],
    made: Choosing,
    width: int,
    between: int,
    device: torch.device,
) -> MixtureArguments:
    """A mixture of random experts whose router's logits are far apart, so that rounding does not
    change which are the largest.

    Args:
        kinds: of each row; those of a kind are the same.
        made: how rows choose, and the dtype.
        width: of a row.
        between: width between an expert's matrices.
    """
    dtype = made.dtype
    generator = torch.Generator(device).manual_seed(0)
    # In the dtype at once: this runs beside a model, and float32 copies would count.
    random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    norm, different = Norm(random(width), 1e-5), max(kinds) + 1
    # Kinds have elements in places of their own.
    own = torch.arange(width, device=device) * different // width
    rows = random(different, width) * (own == torch.arange(different, device=device)[:, None])
    directions = norm(rows).float()
    directions /= directions.square().sum(1, keepdim=True)
    # The largest are the smallest numbers, which are rounded least.
    steps = -torch.stack(
        [torch.randperm(made.experts, generator=generator, device=device) for _ in range(different)]
    )
    return MixtureArguments(
        rows[torch.tensor(kinds, device=device)],
        *norm,
        (steps.T.float() / 2 @ directions).to(dtype),
        random(made.experts, 2 * between, width).div_(width**0.5),
        random(made.experts, width, between),
        *(made.chosen, made.normalized),
    )


def error_of(kernel: Callable[[Any], torch.Tensor], arguments: MixtureArguments) -> float:
    """Largest relative error of a row, without the residual stream."""
    x = arguments.x
    return relative_error(kernel(arguments) - x, experts_by_torch(arguments) - x)
