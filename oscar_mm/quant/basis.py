"""The coordinates in which one layer's keys and values are quantized: balanced and rotated.

The rotation is a Hadamard matrix along head_dim ("canalized rotation" of OScaR, the online rotation
of QuaRot).

Balancing moves per-channel scale between keys and queries: dividing key channel c by sigma_c and
multiplying query channel c by it leaves every score as it was. The rotation spreads a stored key's
error evenly over its channels, in proportion to the key's length, so the squared error of a score
grows with
(sum_c rms_q^2 sigma_c^2) (sum_c rms_k^2 / sigma_c^2), which by Cauchy-Schwarz is smallest at
sigma_c = sqrt(rms_k / rms_q). (SmoothQuant, arXiv:2211.10438, balances weights and activations so.)

Where a page stores what its keys have in common apart, as its center or as the zero points of its
channels, the error does not depend on that part, and rms_k is of the keys' deviations from it. The
biases of Qwen2's keys on slow rotary pairs are hundreds of times as large as the deviations; with
the bias in sigma, the queries pay for it and answers break.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import pad

from oscar_mm.pages.layout import PAGE_TOKENS

_CHUNK_TOKENS = 32 * PAGE_TOKENS
"""Tokens at a time: a long prompt's queries are not copied to float32 as a whole."""
_LIMIT = 256.0
"""Largest sigma and inverse of the smallest: a channel with no queries or no keys in the prompt
must not be scaled out of float range for the tokens to come."""


def rotation_blocks(head_dim: int) -> tuple[int, ...]:
    """Sizes of the diagonal blocks: the powers of two that add up to head_dim, largest first."""
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim}: must be positive")
    return tuple(
        1 << bit for bit in range(head_dim.bit_length() - 1, -1, -1) if head_dim >> bit & 1
    )


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared, so also by callers that need gradients
def hadamard(head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Normalized Hadamard matrix, block-diagonal where head_dim is no power of two.

    Built by Sylvester's doubling [[H, H], [H, -H]] / sqrt(2), so it is symmetric, orthonormal and
    its own inverse.

    Returns:
        (head_dim, head_dim) float32 on ``device``. Shared between callers: do not write to it.
    """
    blocks = []
    for size in rotation_blocks(head_dim):
        block = torch.ones(1, 1, dtype=torch.float64)
        while block.shape[0] < size:
            block = torch.cat([torch.cat([block, block], dim=1), torch.cat([block, -block], dim=1)])
        blocks.append(block / size**0.5)
    return torch.block_diag(*blocks).to(device=device, dtype=torch.float32)


@dataclass(frozen=True)
class Basis:
    """Balancing (sigma) and rotation (H) of one layer.

    Keys are stored as (k / sigma) H and values as v H; with queries as (q sigma) H the scores are
    unchanged, and the attention output comes back by one more H (H is its own inverse).

    Attributes:
        head_dim: channels of a head.
        rotate: whether H is the Hadamard matrix (else the identity).
        sigma: (..., KV heads or 1, head_dim) float32, or None for no balancing. Leading dimensions
            are those of the keys and queries, as where each row has its own.
    """

    head_dim: int
    rotate: bool
    sigma: torch.Tensor | None = None

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        return x @ hadamard(self.head_dim, x.device) if self.rotate else x

    def keys_in(self, keys: torch.Tensor) -> torch.Tensor:
        """(..., KV heads, tokens, head_dim) any float dtype -> the same shape, float32."""
        return self._rotated(self.balanced(keys))

    def balanced(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys divided by sigma, not rotated: the same shape, float32, and the same norms."""
        keys = keys.float()
        return keys if self.sigma is None else keys / self.sigma.unsqueeze(-2)

    def keys_out(self, keys: torch.Tensor) -> torch.Tensor:
        """Inverse of ``keys_in``: float32 to float32."""
        keys = self._rotated(keys)
        return keys if self.sigma is None else keys * self.sigma.unsqueeze(-2)

    def queries_in(self, queries: torch.Tensor) -> torch.Tensor:
        """(..., KV heads, n, head_dim) -> float32, so that scores with stored keys hold."""
        queries = queries.float()
        return self._rotated(queries if self.sigma is None else queries * self.sigma.unsqueeze(-2))

    def values_in(self, values: torch.Tensor) -> torch.Tensor:
        """(..., tokens, head_dim) any float dtype -> float32."""
        return self._rotated(values.float())

    def values_out(self, values: torch.Tensor) -> torch.Tensor:
        """Inverse of ``values_in``; also takes the attention output back."""
        return self._rotated(values)


def sigma_from_rms(rms_keys: torch.Tensor, rms_queries: torch.Tensor) -> torch.Tensor:
    """sqrt(rms_k / rms_q), 1 where either is zero, within [1/256, 256].

    Its reciprocal is a bfloat16 number: then keys of 16 bits are balanced and rotated by one exact
    matrix product. (Off the optimum by 0.2% at most, which raises the error by less than 0.002%.)

    Args:
        rms_keys: (..., head_dim), root mean square of each key channel.
        rms_queries: the same for queries.
    """
    sigma = (rms_keys.float() / rms_queries.float()).sqrt()
    used = (rms_keys > 0) & (rms_queries > 0) & sigma.isfinite()
    sigma = torch.where(used, sigma, torch.ones_like(sigma)).clamp(1 / _LIMIT, _LIMIT)
    return 1 / (1 / sigma).bfloat16().float()


def sigma_from_prompt(
    queries: torch.Tensor,
    keys: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    centered: bool = True,
) -> torch.Tensor:
    """Sigma of one layer from the queries and keys of a prompt, after RoPE.

    Args:
        queries: (batch, query heads, tokens, head_dim).
        keys: (batch, KV heads, tokens, head_dim).
        tokens: (batch, tokens) bool, which ones count (not padding); all by default.
        centered: take a key channel's deviation from its mean over each run of as many tokens as a
            page has, instead of its rms; see ``KVPolicy.centers_keys``. Not from its mean over the
            prompt: in a long prompt a key bias turns with the position, within a page it hardly
            does.

    Returns:
        (KV heads, head_dim) float32.
    """
    batch, kv_heads, length, head_dim = keys.shape
    grouped = queries.reshape(batch, kv_heads, -1, length, head_dim)
    counted = keys.new_ones(batch, length, dtype=torch.bool) if tokens is None else tokens
    sums = keys.new_zeros(3, kv_heads, head_dim, dtype=torch.float64)
    for start in range(0, length, _CHUNK_TOKENS):
        part = slice(start, start + _CHUNK_TOKENS)
        key, query = keys[:, :, part].double(), grouped[:, :, :, part].float()
        if tokens is not None:
            # Not a product with 0: padding may hold NaN.
            unused = ~tokens[:, None, part, None]
            key, query = key.masked_fill(unused, 0), query.masked_fill(unused[:, None], 0)
        square = key.square().sum((0, 2))
        sums[0] += square
        sums[1] += square - _square_of_means(key, counted[:, part])
        sums[2] += query.square().sum((0, 2, 3))
    square, spread, query_square = sums / counted.sum().clamp(min=1)
    if centered:
        # Up to rounding: what is left of a constant channel is none of its size.
        square = torch.where(spread > 1e-12 * square, spread, torch.zeros_like(spread))
    # Of the queries a sum over the heads of a group: a constant factor of sigma changes nothing
    # that is stored but the norms.
    return sigma_from_rms(square.sqrt(), query_square.sqrt())


def _square_of_means(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sum over all tokens of the squared mean of the run that each is in.

    Args:
        keys: (batch, KV heads, tokens, head_dim), 0 where a token does not count.
        tokens: (batch, tokens) bool, which ones count.

    Returns:
        (KV heads, head_dim), dtype of ``keys``.
    """
    rest = -keys.shape[2] % PAGE_TOKENS
    sums = pad(keys, (0, 0, 0, rest)).unflatten(2, (-1, PAGE_TOKENS)).sum(3)
    counts = pad(tokens, (0, rest)).unflatten(1, (-1, PAGE_TOKENS)).sum(2).clamp(min=1)
    return (sums.square() / counts[:, None, :, None]).sum((0, 2))


def sigma_from_norms(q_norm: Any, k_norm: Any, head_dim: int) -> torch.Tensor | None:
    """Sigma of one layer from its QK-norm weights; None where they do not act on one head.

    After an RMS norm the rms of a channel is its weight; RoPE mixes channels c and
    c + head_dim / 2, so both get the pair's rms and sigma is the same for both.

    Returns:
        (1, head_dim) float32, the same for all KV heads, or None.
    """
    rms = []
    for norm in (q_norm, k_norm):
        weight = getattr(norm, "weight", None)
        if weight is None or weight.numel() != head_dim or head_dim % 2:
            return None
        # The norm of a vector of ones is its weight, whichever way the module applies it
        # (weight, or 1 + weight).
        # A hook of accelerate brings offloaded weights, and the ones to them.
        device = "cpu" if weight.is_meta else weight.device
        with torch.no_grad():
            effective = norm(torch.ones(1, head_dim, dtype=weight.dtype, device=device))
        pairs = effective.float().square().view(2, head_dim // 2).mean(dim=0).sqrt()
        rms.append(pairs.repeat(2))
    rms_queries, rms_keys = rms
    return sigma_from_rms(rms_keys, rms_queries)[None]


def sigma_of_weights(module: Any, head_dim: int) -> torch.Tensor | None:
    """(1, head_dim) balancing from the QK-norm weights of an attention module; None without."""
    if not (hasattr(module, "q_norm") and hasattr(module, "k_norm")):
        return None
    return sigma_from_norms(module.q_norm, module.k_norm, head_dim)


def sigmas_of_model(model: Any) -> dict[int, torch.Tensor]:
    """Sigma by layer of a model whose attention normalizes queries and keys; else empty."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    sigmas = {}
    for module in decoder.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "head_dim"):
            sigma = sigma_of_weights(module, module.head_dim)
            if sigma is not None:
                sigmas[module.layer_idx] = sigma
    return sigmas
