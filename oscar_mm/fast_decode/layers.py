"""Fast layers: a decoder layer's arithmetic in few launches, for one token per row or for prompts.

Two norms, the gate and both residual sums are fused into the matrix products next to them
(``oscar_mm.fast_decode.linear``). The weights and mixtures of experts still belong to
transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from oscar_mm.attention import attend
from oscar_mm.cache.cache import OscarCache
from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.dequantize import dequantized
from oscar_mm.fast_decode.experts import expert_kernels
from oscar_mm.fast_decode.experts_torch import Experts, MixtureArguments
from oscar_mm.fast_decode.linear import linear
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.fast_decode.low_rank import LowRank, base_of
from oscar_mm.fast_decode.quantized_modules import QuantizedExperts, QuantizedLinear
from oscar_mm.fast_decode.rope import rope_
from oscar_mm.fast_decode.shared_gate import shared_gate
from oscar_mm.tensor_parallel import TPGroup, is_dtensor, local_shard


def is_sharded(module: nn.Module, dimension: int | None = None) -> bool:
    """Return whether a rank has only a part of a module's weights.

    Args:
        dimension: dimension along which the weights are divided; None for any.
    """
    # Only a DTensor has placements.
    placements = getattr(module._parameters.get("weight"), "placements", ())
    return any(one.is_shard(dimension) for one in placements)


class Product(NamedTuple):
    """Weights of one launch of ``linear``.

    Attributes:
        weights, biases, scales, zeros: see ``linear``; the local shards if there are several ranks.
        ranks: group of ranks that divide the inputs and sum the outputs.
        low_rank: what LoRA adapters add; None without adapters.
    """

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    scales: tuple[torch.Tensor, ...] = ()
    zeros: tuple[torch.Tensor, ...] = ()
    ranks: TPGroup = TPGroup()
    low_rank: LowRank | None = None

    @classmethod
    def of(cls, *adapted: Any, dtype: torch.dtype) -> Product:
        """Collect the weights of modules.

        Args:
            adapted: linear modules, perhaps with LoRA around them.
            dtype: dtype of the activations.
        """
        modules = [base_of(module) for module in adapted]
        weights, biases = (
            tuple(local_shard(getattr(one, kind)) for one in modules) for kind in ("weight", "bias")
        )
        own = [one for one in modules if isinstance(one, QuantizedLinear)]
        scales = tuple(one.scales for one in own)
        zeros = tuple(one.zeros for one in own if one.zeros is not None)
        ranks = TPGroup.of(modules[0]) if is_sharded(modules[0], 1) else TPGroup()
        return cls(weights, biases, scales, zeros, ranks, LowRank.of(adapted, dtype))

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | CenteredNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
        in_place: bool = False,
    ) -> torch.Tensor:
        """Compute ``linear``; if the weights are divided by input, without norm and gate."""
        if isinstance(norm, CenteredNorm) and self.low_rank is not None:
            x, norm = norm.at_once(x), None
        weights, biases, scales, zeros, *_ = self
        if self.ranks.count == 1:
            around = {"norm": norm, "residual": residual, "in_place": in_place}
            around |= {"scales": scales, "zeros": zeros}
            if self.low_rank is None or not self.low_rank.acts:
                return linear(x, weights, biases, gated=gated, **around)
            return self.low_rank.product(x, weights, biases, gated=gated, **around)
        if self.ranks.rank == 0:
            found = linear(x, weights, biases, residual=residual, in_place=in_place)
        else:
            found = linear(x, weights)
        self.ranks.all_reduce(found)
        return found


class SharedExpert(NamedTuple):
    """The expert of a mixture that all tokens use, scaled by a share of its own.

    Attributes:
        first: products with the expert's gate and up matrices, and unless there is a second launch
            with the router and with the weight of the share.
        choosing: the router and the weight of the share, if the expert's weights are quantized.
        down: the expert's last product; this rank's part, without the sum over ranks.
        ranks: ranks that divide the expert.
    """

    first: Product
    choosing: Product | None
    down: Product
    ranks: TPGroup

    @classmethod
    def of(cls, mlp: Any, dtype: torch.dtype) -> SharedExpert | None:
        """Collect the weights of a mixture's shared expert; None if they have biases or adapters,
        if gate and up differ in format, or if only a part of them is divided.

        Args:
            mlp: module of the mixture.
            dtype: dtype of the activations.
        """
        expert, of_share = mlp.shared_expert, mlp.shared_expert_gate
        products = expert.gate_proj, expert.up_proj, expert.down_proj
        if any(base_of(one) is not one or one.bias is not None for one in (*products, of_share)):
            return None
        bits = {isinstance(one, QuantizedLinear) and one.matrix.bits for one in products[:2]}
        divided = {is_sharded(one, by) for one, by in zip(products, (0, 0, 1), strict=True)}
        if len(bits) > 1 or len(divided) > 1 or is_sharded(of_share):
            return None
        share = of_share.weight
        if isinstance(of_share, QuantizedLinear):
            share = dequantized(of_share.matrix, dtype)
        choosing: Product | None = Product((mlp.gate.weight, share), (None, None))
        first, down = (Product.of(*one, dtype=dtype) for one in (products[:2], products[2:]))
        if not first.scales:
            first = first._replace(weights=first.weights + choosing.weights, biases=(None,) * 4)
            choosing = None
        return cls(first, choosing, down._replace(ranks=TPGroup()), down.ranks)

    def __call__(
        self, x: torch.Tensor, rows: torch.Tensor, experts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the expert.

        Args:
            x: (tokens, hidden size): normalized rows.
            rows: (tokens, hidden size).
            experts: number of experts of the router.

        Returns:
            ``rows`` plus the expert's output, which may overwrite ``rows``; if ranks divide the
            expert, their results add up to this. And the router's logits.
        """
        inner = self.first(x)
        if self.choosing is None:
            outer = inner[:, -experts - 1 :]
            inner = inner[:, : -experts - 1]
        else:
            outer = self.choosing(x)
        between, logits = shared_gate(inner, outer)
        if self.ranks.rank > 0:
            return self.down(between), logits
        return self.down(between, residual=rows, in_place=True), logits


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Weights of the second half of a decoder layer: an MLP or a mixture of experts."""

    mlp_norm: Norm | CenteredNorm
    mlp: nn.Module
    gate_and_up: Product | None
    down: Product | None
    experts: Experts | None
    """Weights of a mixture; None if it runs as its own module: if it is divided without a shared
    expert, or has one that ``SharedExpert`` does not take."""
    shared: SharedExpert | None
    """The mixture's shared expert, if it has one."""
    agreed: dict[int, bool] = field(default_factory=dict)
    """Whether all ranks that divide the mixture have kernels for it, by number of rows."""

    @staticmethod
    def parts(layer: Any) -> dict[str, Any]:
        """Collect the fields from a transformers layer."""
        mlp, dtype = layer.mlp, layer.input_layernorm.weight.dtype
        product, dense = partial(Product.of, dtype=dtype), hasattr(mlp, "gate_proj")
        has_shared = hasattr(mlp, "shared_expert")
        shared = SharedExpert.of(mlp, dtype) if has_shared else None
        return {
            "mlp_norm": norm_of(layer.post_attention_layernorm),
            "mlp": mlp,
            "gate_and_up": product(mlp.gate_proj, mlp.up_proj) if dense else None,
            "down": product(mlp.down_proj) if dense else None,
            "experts": None if dense or (has_shared and shared is None) else _experts(mlp, shared),
            "shared": shared,
        }

    def feed_forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the (tokens, hidden size) output of the MLP or mixture of experts, which may
        overwrite ``rows``: they are what attention has just made."""
        if self.gate_and_up is None or self.down is None:
            return self._by_experts(rows)
        between = self.gate_and_up(rows, norm=self.mlp_norm, gated=True)
        return self.down(between, residual=rows, in_place=True)

    def _by_experts(self, rows: torch.Tensor) -> torch.Tensor:
        experts, shared = self.experts, self.shared
        # The kernels normalize neither by centered norms nor for the shared expert.
        has_norm = shared is None and isinstance(self.mlp_norm, Norm)
        kernels = None if experts is None else self._kernels(rows, experts, has_norm=has_norm)
        if experts is None or kernels is None:
            return rows + self.mlp(self.mlp_norm.at_once(rows)[None])[0]
        if has_norm:
            return kernels(MixtureArguments(rows, *self.mlp_norm, *experts))
        x = self.mlp_norm.at_once(rows)
        if shared is None:
            return kernels(MixtureArguments(x, None, 0.0, *experts, residual=rows))
        rows, logits = shared(x, rows, len(experts.router))
        found = kernels(MixtureArguments(x, None, 0.0, *experts, residual=rows, logits=logits))
        shared.ranks.all_reduce(found)
        return found

    def _kernels(
        self, rows: torch.Tensor, experts: Experts, *, has_norm: bool
    ) -> Callable[[MixtureArguments], torch.Tensor] | None:
        """Return ``expert_kernels``; None if another rank that divides the mixture has none."""
        kernels = expert_kernels(rows, experts, has_norm=has_norm)
        if self.shared is None or self.shared.ranks.count == 1:
            return kernels
        # Without kernels, the module runs, whose all-reduces differ: if a kernel failed its
        # self-check on one rank only, the ranks would wait for each other forever.
        if len(rows) not in self.agreed:
            has_kernels = kernels is not None
            self.agreed[len(rows)] = self.shared.ranks.all(has_kernels, rows.device)
        return kernels if self.agreed[len(rows)] else None


@dataclass(frozen=True, kw_only=True)
class FastLayer(FeedForward):
    """Weights of a decoder layer, and its forward pass in few launches."""

    attention: Any
    attention_norm: Norm | CenteredNorm
    projections: Product
    heads: tuple[int, ...]
    """Numbers of query, key and value heads of this rank."""
    head_norms: tuple[Any, Any] | None
    """Norms of queries and keys, both of the same kind as the other norms."""
    output: Product

    @classmethod
    def of(cls, layer: Any) -> Self:
        """Collect the weights of a transformers layer that ``supports`` accepts."""
        attention = layer.self_attn
        head_norms = None
        if hasattr(attention, "q_norm"):
            head_norms = norm_of(attention.q_norm), norm_of(attention.k_norm)
        product = partial(Product.of, dtype=layer.input_layernorm.weight.dtype)
        projections = product(attention.q_proj, attention.k_proj, attention.v_proj)
        return cls(
            attention=attention,
            attention_norm=norm_of(layer.input_layernorm),
            projections=projections,
            heads=tuple(weight.shape[0] // attention.head_dim for weight in projections.weights),
            head_norms=head_norms,
            output=product(attention.o_proj),
            **cls.parts(layer),
        )

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """Indices of the layers of the cache that store keys and values."""
        return (self.attention.layer_idx,)

    def __call__(
        self, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, cache: OscarCache
    ) -> torch.Tensor:
        """Run the layer on one token per row, (rows, hidden size); may overwrite ``rows``."""
        attended = self.attended(rows, len(rows), cosine, sine, cache, in_place=True)
        return self.feed_forward(attended)

    def attended(
        self,
        rows: torch.Tensor,
        batch: int,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: OscarCache,
        mask: torch.Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> torch.Tensor:
        """Return the (tokens, hidden size) output of the attention block.

        Args:
            rows: (tokens, hidden size) hidden states, one sequence after the other.
            batch: number of sequences.
            cosine, sine: (tokens, head_dim).
            cache: cache that stores the tokens' keys and values.
            mask: see ``oscar_mm.attention.attend``.
            in_place: whether the output may overwrite ``rows``; by default it is a new tensor.
        """
        heads = self.projected(rows)
        self.turn_(heads, cosine, sine)
        found = self.attend(heads, batch, cache, mask)
        return self.output(found, residual=rows, in_place=in_place)

    def projected(self, rows: torch.Tensor) -> torch.Tensor:
        """Project (tokens, hidden size) to (tokens, query, key and value heads, head_dim)."""
        states = self.projections(rows, norm=self.attention_norm)
        return states.view(len(rows), -1, self.attention.head_dim)

    def turn_(self, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """Apply norms and RoPE to query and key heads, in place."""
        queries, keys, _ = self.heads
        rope_(heads[:, : queries + keys], queries, cosine, sine, self.head_norms)

    def attend(
        self,
        heads: torch.Tensor,
        batch: int,
        cache: OscarCache,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output, (tokens, query heads * head_dim); see ``attended``."""
        return self.attend_to(heads.split(self.heads, 1), batch, cache, mask)

    def attend_to(
        self,
        sides: Sequence[torch.Tensor],
        batch: int,
        cache: OscarCache,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output, see ``attend``.

        Args:
            sides: queries, keys and values, (tokens, heads, head_dim) each.
        """
        attention = self.attention
        query, key, value = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in sides)
        key, value = cache.update(key, value, attention.layer_idx)
        found, _ = attend(attention, query, key, value, mask, scaling=attention.scaling)
        return found.reshape(len(sides[0]), -1)


def norm_of(module: Any) -> Norm | CenteredNorm:
    """Return the norm of a transformers module."""
    weight = local_shard(module.weight)
    if hasattr(module, "variance_epsilon"):
        return Norm(weight, module.variance_epsilon)
    return CenteredNorm(weight, module.eps)


def _experts(mlp: Any, shared: SharedExpert | None) -> Experts | None:
    """Return the weights of a mixture, this rank's part of each expert if ranks divide them like
    the shared expert; None if they divide anything else."""
    router, experts = mlp.gate, mlp.experts
    whole = router.weight, experts.gate_up_proj, experts.down_proj
    ranks = 1 if shared is None else shared.ranks.count
    if [is_dtensor(one) for one in whole] != [False, ranks > 1, ranks > 1]:
        return None
    gate_and_up, down = map(local_shard, whole[1:])
    if down.shape[2] * ranks != whole[2].shape[2]:
        return None  # A rank has some of the experts.
    normalized = getattr(router, "norm_topk_prob", True)
    formats = (experts.scales, experts.zeros) if isinstance(experts, QuantizedExperts) else ()
    return Experts(router.weight, gate_and_up, down, router.top_k, normalized, *formats)
