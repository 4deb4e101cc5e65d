"""Arguments of ``mixture``, its implementation in PyTorch, and a measure of kernel errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear, silu

from oscar_mm.fast_decode.dequantize import dequantized
from oscar_mm.fast_decode.linear_params import UNQUANTIZED, WeightFormat
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.kernels.self_check import relative_error
from oscar_mm.weights.matrix import QuantizedMatrix


class Experts(NamedTuple):
    """Weights of a mixture of experts.

    Attributes:
        router: (experts, width).
        gate_and_up: (experts, 2 * between, width), gate outputs first.
        down: (experts, width, between).
        chosen: number of experts per row.
        normalized: whether the shares of a row's experts are normalized to add up to 1.
        scales, zeros: scales of ``gate_and_up`` and of ``down``, and with INT4 zero points, see
            ``QuantizedMatrix``; empty unless both have the same quantized format.
    """

    router: torch.Tensor
    gate_and_up: torch.Tensor
    down: torch.Tensor
    chosen: int
    normalized: bool
    scales: list[torch.Tensor] = []  # noqa: RUF012 never changed
    zeros: list[torch.Tensor] = []  # noqa: RUF012 never changed

    @property
    def matrices(self) -> list[QuantizedMatrix]:
        """``gate_and_up`` and ``down`` if they are quantized; otherwise none."""
        weights, zeros = (self.gate_and_up, self.down), self.zeros or [None, None]
        return [QuantizedMatrix(*one) for one in zip(weights, self.scales, zeros, strict=False)]

    def dequantized(self, dtype: torch.dtype) -> Experts:
        """Return experts whose weights are in ``dtype`` if these are quantized, otherwise these."""
        if not self.scales:
            return self
        gate_and_up, down = (dequantized(matrix, dtype) for matrix in self.matrices)
        return self._replace(gate_and_up=gate_and_up, down=down, scales=[], zeros=[])


class MixtureArguments(NamedTuple):
    """Arguments of ``mixture``; the result is (rows, width).

    Attributes:
        x: (rows, width), contiguous.
        norm: (width,): weight of the RMSNorm applied to x; None if x is normalized.
        epsilon: epsilon of the norm.
        router, gate_and_up, down, chosen, normalized, scales, zeros: see ``Experts``.
        residual: (rows, width), contiguous: what the experts' outputs are added to; None for x.
        logits: (rows, experts), contiguous: the router's logits; None to compute them.
    """

    x: torch.Tensor
    norm: torch.Tensor | None
    epsilon: float
    router: torch.Tensor
    gate_and_up: torch.Tensor
    down: torch.Tensor
    chosen: int
    normalized: bool
    scales: list[torch.Tensor]
    zeros: list[torch.Tensor]
    residual: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    @property
    def experts(self) -> Experts:
        """Weights of the router and the experts."""
        return Experts(*self[3:10])

    @property
    def stream(self) -> torch.Tensor:
        """What the experts' outputs are added to."""
        return self.x if self.residual is None else self.residual

    @property
    def of_norm(self) -> Norm | None:
        """The norm, if x is not normalized."""
        return None if self.norm is None else Norm(self.norm, self.epsilon)

    @property
    def at_once(self) -> torch.Tensor:
        """x after its norm, see ``Norm.at_once``."""
        return self.x if self.of_norm is None else self.of_norm.at_once(self.x)

    def result(self) -> torch.Tensor:
        """Return an uninitialized (rows, width) tensor for the result."""
        return torch.empty_like(self.x)


class Choice(NamedTuple):
    """Compile-time parameters of the routing (csrc/experts/choice.cuh)."""

    experts: int
    chosen: int
    normalize: bool
    dtype: torch.dtype


def experts_by_torch(arguments: MixtureArguments) -> torch.Tensor:
    """Run ``mixture`` with PyTorch operations; only for a few rows, since it copies weights."""
    x, _, _, router, gate_and_up, down, count, normalized, *_ = arguments
    normed = x if arguments.of_norm is None else arguments.of_norm(x)
    logits = linear(normed, router) if arguments.logits is None else arguments.logits
    shares, chosen = _choices(logits, count, normalized)
    weights = arguments.experts.matrices or (gate_and_up, down)
    return arguments.stream + of_chosen_experts(normed, chosen, shares, weights, silu)


def of_chosen_experts(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    weights: Sequence[torch.Tensor | QuantizedMatrix],
    act_fn: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the (rows, width) sum of each row's experts; copies their weights, and waits for
    nothing.

    Args:
        rows: (rows, width).
        chosen, shares: (rows, count) indices and factors of each row's experts.
        weights: ``gate_and_up`` and ``down``, see ``Experts``.
        act_fn: activation of the gate.
    """
    inward, outward = (
        one.chosen(chosen).dequantized(rows.dtype)
        if isinstance(one, QuantizedMatrix)
        else one[chosen]
        for one in weights
    )
    gates, ups = (inward @ rows[:, None, :, None])[..., 0].chunk(2, -1)
    outputs = (outward @ (act_fn(gates) * ups)[..., None])[..., 0]
    return (outputs * shares.to(rows.dtype)[..., None]).sum(1)


def _choices(
    logits: torch.Tensor, count: int, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the shares (float32) and indices (int64) of the chosen experts, (rows, count) each."""
    shares, chosen = logits.softmax(-1, dtype=torch.float32).topk(count, -1)
    return shares / shares.sum(-1, keepdim=True) if normalized else shares, chosen


def clear_choices(
    kinds: Sequence[int],
    choice: Choice,
    width: int,
    between: int,
    device: torch.device,
    weights: WeightFormat = UNQUANTIZED,
    *,
    has_norm: bool = True,
) -> MixtureArguments:
    """Return a mixture of random experts with unambiguous routing: rounding does not change which
    logits are largest.

    Args:
        kinds: kind of each row; rows of the same kind are equal.
        choice: routing parameters and dtype.
        width: width of a row.
        between: inner width of an expert.
        weights: format of the experts' weights.
        has_norm: whether the rows are normalized by the mixture; otherwise they are normalized
            here, and the outputs are added to other rows.
    """
    count, dtype = choice.experts, choice.dtype
    generator = torch.Generator(device).manual_seed(0)
    # Numbers are drawn in this dtype, because float32 copies would take extra memory next to a
    # loaded model.
    random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    norm, different = Norm(random(width), 1e-5), max(kinds) + 1
    # Kinds have nonzero elements in disjoint places.
    own = torch.arange(width, device=device) * different // width
    rows = random(different, width) * (own == torch.arange(different, device=device)[:, None])
    directions = norm(rows).float()
    directions /= directions.square().sum(1, keepdim=True)
    # The top logits have the smallest magnitude, so they are rounded least.
    steps = -torch.stack(
        [torch.randperm(count, generator=generator, device=device) for _ in range(different)]
    )
    gate_and_up = random(count, 2 * between, width).div_(width**0.5)
    down, scales, zeros = random(count, width, between), [], []
    if weights.weight_bits != 16:
        matrices = [weights.quantized(one) for one in (gate_and_up, down)]
        (gate_and_up, down), scales, zeros = map(list, zip(*matrices, strict=True))
        # Different enough that a kernel's error shows if it reads another scale.
        factors = [random(*one.shape).float().sigmoid().add(0.5) for one in scales]
        scales = [(one * by).to(one) for one, by in zip(scales, factors, strict=True)]
        zeros = zeros if weights.weight_bits == 4 else []
    of_kinds = torch.tensor(kinds, device=device)
    made = MixtureArguments(
        rows[of_kinds],
        *norm,
        (steps.T.float() / 2 @ directions).to(dtype),
        *(gate_and_up, down, choice.chosen, choice.normalize, scales, zeros),
    )
    if has_norm:
        return made
    normed, others = norm(rows)[of_kinds], random(len(kinds), width)
    return made._replace(x=normed, norm=None, epsilon=0.0, residual=others)


def error_of(kernel: Callable[[Any], torch.Tensor], arguments: MixtureArguments) -> float:
    """Return the largest relative error of any row, not counting the residual stream."""
    x = arguments.stream
    return relative_error(kernel(arguments) - x, experts_by_torch(arguments) - x)
