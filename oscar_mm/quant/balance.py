"""Compute sigma, the factors that scale a layer's queries and keys per channel, from its weights.

Dividing key channel c by sigma_c and multiplying query channel c by sigma_c leaves every score
unchanged. The rotation spreads a stored key's error evenly over its channels, in proportion to the
key's norm, so a score's squared error grows with
(sum_c rms_q^2 sigma_c^2) (sum_c rms_k^2 / sigma_c^2), which by Cauchy-Schwarz is smallest at
sigma_c = sqrt(rms_k / rms_q). (SmoothQuant, arXiv:2211.10438, scales weights and activations in the
same way.)

Both rms values are computed from weights: the QK norms if a model has them, otherwise the query and
key projections. Neither a prompt nor a calibration text is used, so every cache of a model, in
every process, has the same sigma.

If a page stores what its keys have in common separately, as its center or as the zero points of its
channels, the error does not depend on this common part. The biases of Qwen2's keys on slow rotary
pairs are hundreds of times as large as the differences between tokens; if sigma included the full
bias, it would scale up the queries so much that answers become useless.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oscar_mm.policy import PAGE_TOKENS

_LIMIT = 256.0
"""Maximum sigma, and inverse of the minimum, so that channels in which queries or keys are zero are
not scaled beyond the float range."""
_PROBES = 256
"""Number of random inputs for a projection. The energies have a standard error of 9%, or less if
they are averaged over RoPE pairs and query groups; the standard error of sigma, the fourth root of
their quotient, is at most 3%."""
_GAIN = 64.0
"""Factor by which probes are scaled up, so that their contribution is not lost to rounding next to
a large bias."""
_PROJECTIONS = ("q_proj", "k_proj"), ("qkv_proj", "q_size", "kv_size")
"""Names of the projections in attention modules of transformers and of vLLM."""
_POSITIONS = 4096
"""Number of token positions over which the mixing of channel pairs by RoPE is averaged."""


def sigma_from_rms(rms_keys: Tensor, rms_queries: Tensor) -> Tensor:
    """Return sqrt(rms_k / rms_q), limited to [1/256, 256], and 1 where either is zero.

    The result is rounded such that its reciprocal is a bfloat16 number, so that one exact matrix
    product scales and rotates 16-bit keys. (This changes sigma by at most 0.2%, which increases the
    error by less than 0.002%.)

    Args:
        rms_keys: (..., head_dim): root mean square of each key channel.
        rms_queries: (..., head_dim): root mean square of each query channel.
    """
    sigma = (rms_keys.float() / rms_queries.float()).sqrt()
    used = (rms_keys > 0) & (rms_queries > 0) & sigma.isfinite()
    sigma = torch.where(used, sigma, torch.ones_like(sigma)).clamp(1 / _LIMIT, _LIMIT)
    return 1 / (1 / sigma).bfloat16().float()


def sigmas_of_model(model: Any, *, centered: bool = True) -> dict[int, Tensor]:
    """Return sigma by layer index, (KV heads or 1, head_dim) float32 each.

    Layers with neither separate query and key projections nor QK norms are left out; their keys are
    not scaled.

    Args:
        model: a transformers decoder, or a model that contains one.
        centered: see ``sigma_of_layer`` and ``PageCodec.centers_keys``.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    sigmas = {}
    for layer, attention in attentions(decoder):
        angles = rotary_angles(attention, decoder)
        sigma = sigma_of_layer(layer, attention, attention.head_dim, angles, centered=centered)
        if sigma is not None:
            sigmas.setdefault(attention.layer_idx, sigma)  # Cross-attention comes second.
    return sigmas


@torch.inference_mode(False)
@torch.no_grad()
def sigma_of_layer(
    layer: nn.Module | None,
    attention: nn.Module,
    head_dim: int,
    angles: Tensor | None,
    *,
    centered: bool = True,
) -> Tensor | None:
    """Return sigma of a transformers or vLLM layer, from its QK norms or its projections.

    Args:
        layer: module with ``input_layernorm``; if None, or if there is no such norm, inputs are
            assumed to have equal energy in all channels.
        attention: module with per-head ``q_norm`` and ``k_norm``, or with query and key
            projections.
        head_dim: number of channels per head.
        angles: angles of RoPE, see ``rotary_angles``.
        centered: whether to count only the part of the key bias that a page's center does not
            remove.

    Returns:
        (KV heads or 1, head_dim) float32; None if the layer has neither such norms nor such
        projections.
    """
    sigma = sigma_of_norms(attention, head_dim, angles)
    if sigma is None and any(all(hasattr(attention, x) for x in names) for names in _PROJECTIONS):
        sigma = _sigma_from_projections(layer, attention, head_dim, angles, centered)
    return sigma


def sigma_of_norms(
    attention: nn.Module, head_dim: int, angles: Tensor | None = None
) -> Tensor | None:
    """Return sigma from the QK norms of an attention module; None if it has no per-head norms."""
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return sigma_from_norms(q_norm, k_norm, head_dim, angles)


def sigma_from_norms(
    q_norm: Any, k_norm: Any, head_dim: int, angles: Tensor | None = None
) -> Tensor | None:
    """Return sigma of a layer, computed from its QK-norm weights; None unless the norms are per
    head.

    RoPE mixes channels c and c + n, so both get the pair's rms and the same sigma. (After an RMS
    norm the rms of a channel is its weight.)

    Args:
        q_norm, k_norm: norms of queries and keys.
        head_dim: number of channels per head.
        angles: angles of the n pairs of channels, see ``rotary_angles``; None if all channels are
            rotated. The channels after these pairs are not mixed.

    Returns:
        (1, head_dim) float32, shared by all KV heads, or None.
    """
    rms, rotated = [], head_dim if angles is None else min(head_dim, 2 * len(angles))
    for norm in (q_norm, k_norm):
        weight = getattr(norm, "weight", None)
        if weight is None or weight.numel() != head_dim or head_dim % 2:
            return None
        # Applied to a vector of ones, a norm returns its effective weight, whether the module
        # multiplies by weight or by 1 + weight.
        with torch.no_grad():
            effective = norm(_as_weight(torch.ones(1, head_dim), weight))
        energy = effective.float().square()[0]
        pairs = energy[:rotated].view(2, rotated // 2).mean(dim=0)
        rms.append(torch.cat([pairs, pairs, energy[rotated:]]).sqrt())
    rms_queries, rms_keys = rms
    return sigma_from_rms(rms_keys, rms_queries)[None]


def rotary_angles(attention: Any, decoder: Any = None) -> Tensor | None:
    """Return the angles in radians by which RoPE rotates channel pairs from one token to the next.

    Returns:
        (n,) float32, where entry c belongs to the pair (c, c + n) of the first 2 n channels; None
        if there is no RoPE.
    """
    for owner in (attention, decoder):
        embedding = getattr(owner, "rotary_emb", None)
        if (table := getattr(embedding, "cos_sin_cache", None)) is not None:  # vLLM
            cos, sin = table[1].float().chunk(2)
            return torch.atan2(sin, cos).abs()
        for name in ("original_inv_freq", "inv_freq"):
            angles = getattr(embedding, name, None)
            if angles is not None and not angles.is_meta:
                return angles.float()
    return None


def attentions(decoder: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield each layer of a decoder and its attention module."""
    for layer in decoder.modules():
        for attention in layer.children():
            if hasattr(attention, "layer_idx") and hasattr(attention, "head_dim"):
                yield layer, attention


def _sigma_from_projections(
    layer: nn.Module | None,
    attention: Any,
    head_dim: int,
    angles: Tensor | None,
    centered: bool,
) -> Tensor | None:
    """Compute sigma from the energies of the projections' outputs for random inputs.

    This calls the projections, so the dtype and the device of their weights do not matter.
    """
    inputs = probes(layer, attention)
    responses = [projected(attention, x) for x in (_GAIN * inputs, torch.zeros_like(inputs[:1]))]
    energies = []
    for answers, bias in zip(*responses, strict=True):
        if answers.shape[-1] % head_dim:
            return None
        heads = ((answers.float() - bias.float()) / _GAIN).unflatten(-1, (-1, head_dim))
        energies.append((heads / _PROBES**0.5, bias.float().view(1, -1, head_dim)))
    queries, keys = energies
    pairs = keys[0].new_empty(0) if angles is None else angles.to(keys[0].device)
    kept = _share_beyond_center(pairs, head_dim) if centered else torch.ones_like(keys[1][0, 0])
    of_keys = _mixed(torch.cat([keys[0], keys[1] * kept.sqrt()]), pairs)
    of_queries = _mixed(torch.cat(queries), pairs)
    # Energies are summed over the query heads of a group instead of averaged, because a constant
    # factor of sigma affects only the stored norms.
    grouped = of_queries.view(len(of_keys), -1, head_dim).sum(1)
    return sigma_from_rms(of_keys.sqrt(), grouped.sqrt())


def probes(layer: nn.Module | None, attention: Any) -> Tensor:
    """Return random inputs for the projections, (probes, channels).

    The inputs are signs, the same on every machine, after the layer's input norm.
    """
    norm = getattr(layer, "input_layernorm", None)
    weight = getattr(norm, "weight", None)
    if weight is None:
        norm, weight = None, next(attention.parameters())
        channels = attention.config.hidden_size
    else:
        channels = weight.numel()
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (_PROBES, channels), generator=generator).mul_(2).sub_(1)
    signs = _as_weight(signs, weight)
    return signs if norm is None else norm(signs)


def projected(attention: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries and keys of the inputs, (inputs, heads * head_dim) each, before RoPE."""
    if hasattr(attention, "k_proj"):
        queries, keys = attention.q_proj(inputs), attention.k_proj(inputs)
    else:  # vLLM
        together, _ = attention.qkv_proj(inputs)
        queries, keys, _ = together.split([attention.q_size, *[attention.kv_size] * 2], dim=-1)
    return _normed(attention, "q_norm", queries), _normed(attention, "k_norm", keys)


def _normed(attention: Any, name: str, x: Tensor) -> Tensor:
    """Apply a norm over all heads if there is one (OLMo 2)."""
    norm = getattr(attention, name, None)
    weight = None if norm is None else getattr(norm, "weight", None)
    return x if weight is None or norm is None or weight.numel() != x.shape[-1] else norm(x)


def _share_beyond_center(angles: Tensor, head_dim: int) -> Tensor:
    """Return the fraction of a bias's energy that RoPE rotates away from a page's center, for each
    channel.

    The center is the mean of the page's first tokens, so the fraction is the mean of (n angle)^2
    over the page's tokens n, but at most 1.
    """
    share = (PAGE_TOKENS * angles).square().div(3).clamp(max=1)
    return torch.cat([share, share, share.new_zeros(head_dim - 2 * len(share))])


def _mixed(columns: Tensor, angles: Tensor) -> Tensor:
    """Return the energies, (heads, head_dim), that (n, heads, head_dim) columns have after RoPE."""
    turned = torch.arange(_POSITIONS, device=angles.device)[:, None] * angles
    cos_square, cos_sin = turned.cos().square().mean(0), (turned.cos() * turned.sin()).mean(0)
    one, other, rest = columns.split(
        [len(angles), len(angles), columns.shape[-1] - 2 * len(angles)], -1
    )
    energy, energy_of_other, product = (
        x.sum(0) for x in (one.square(), other.square(), one * other)
    )
    moved = (energy_of_other - energy) * (1 - cos_square) - 2 * product * cos_sin
    return torch.cat([energy + moved, energy_of_other - moved, rest.square().sum(0)], -1)


def _as_weight(x: Tensor, weight: Tensor) -> Tensor:
    """Return a tensor in a weight's dtype and on its device.

    If the weight is offloaded, the result is on the CPU, and accelerate's hook moves it to the
    computing device.
    """
    return x.to("cpu" if weight.is_meta else weight.device, weight.dtype)
