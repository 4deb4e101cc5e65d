"""Fits: codes, the scale and zero of a group of values, and the norm of a key.

A value x of a group is stored as code = round((x - zero) / scale) in 0 .. 2^bits - 1 and read as
scale * code + zero. Scales and zeros are float16 in a page; they are rounded before the codes are
assigned, so each code is the nearest one to the value that will be read. Scale and zero may then be
replaced by others with which the group does not shrink (``unbiased_scale``). The norm of a key
cannot achieve this alone: if most of a key is the mean of its neighbours, as in models without QK
norm, the mean satisfies <K^, K> = |K|^2 while the differences between keys remain shrunk.

Keys are divided by a norm per token ("omni-token scaling" of OScaR): tokens of a key group share
one scale per channel, so a token with a large norm would cost all others their resolution (text and
vision norms differ by a factor of several in some layers). The stored norm is the root mean square
over channels, which float16 can represent for any float16 key.

For keys that are stored token by token, a few codes are not the nearest ones
(``lower_score_error``): they lower the error of the token's scores, at the cost of a larger error
of the key. The error of a score is q.(k^ - k), and queries do not have the same energy in all
directions: balancing leaves queries with as much energy in a channel as keys have
(quant/balance.py), and slow rotary pairs have most of both. So the expected squared error of a
score is e^T H D H e, where e is the error of the stored, rotated key, H the rotation and D the
energy of each channel: errors of channels cancel where queries are large. D is the energy of the
key itself and of its center, added over a pair of RoPE (channels c and c + head_dim / 2), since
positions rotate one into the other. It needs no queries, so a token is stored the same way
regardless of earlier tokens.
"""

from __future__ import annotations

import torch

from oscar_mm.quant.basis import hadamard

LSQ_ROUNDS = 2
"""Rounds of the fit. In whole pages the first one uses only some of the values (``first_apart``).
Three rounds over all values, at twice the cost, have up to 3% less squared error (normal, uniform,
heavy-tailed, skewed groups)."""
MIN_SCALE = 1e-38
"""A group whose scale is not larger is treated as constant: 1 / scale would be infinite in
float32."""
KEY_RUN, VALUE_RUN = 8, 2
"""Tokens of a key group, and channels of a value group, that the first round takes at a time: the
ones that a thread of csrc/pack/pack.cu has in registers together."""


def first_range(bits: int, count: int) -> float:
    """Return the first range of a group's least-squares fit, relative to its min-max range.

    The range of few values is closer to the range that the steps should span than the range of
    many. Starting from 0.75, the few rounds would end worse than min-max at 4 bits (squared error
    on normal groups of 128: 1.12 times it).
    """
    if bits > 2:
        return 0.95 if bits == 4 else 0.85 if count <= 64 else 0.8
    return 0.75 if count <= 32 else 0.7 if count <= 64 else 0.65


def first_apart(count: int) -> int:
    """Return n if the first round uses every n-th run."""
    return 4 if count >= 64 else 2


def fit_group(
    values: torch.Tensor, bits: int, fit: str, dim: int, run: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero of every group along ``dim`` (kept, of size 1): float32 of float16
    values.

    Args:
        values: float32, finite.
        bits: 2, 3 or 4.
        fit: "minmax" or "lsq". "lsq" starts from a part of the range around its middle and twice
            assigns codes, then solves for scale and zero by linear regression.
        dim: dimension of the group.
        run: consecutive values that the first round takes in turn, leaving out as many or three
            times as many; None for all values.
    """
    low, high = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
    steps = (1 << bits) - 1
    if fit == "minmax":
        scale, zero = (high - low) / steps, low
    elif fit == "lsq":
        part = first_range(bits, values.shape[dim])
        scale = (high - low) * (part / steps)
        zero = (high + low - (high - low) * part) * 0.5
        first = values
        if run is not None:
            count = values.shape[dim]
            runs = torch.arange(count, device=values.device) // run
            taken = (runs % first_apart(count) == 0).nonzero()[:, 0]
            first = values.index_select(dim, taken)
        for seen in (first, *[values] * (LSQ_ROUNDS - 1)):
            scale, zero = _regress(seen, assign_codes(seen, scale, zero, bits), scale, dim)
    else:
        raise ValueError(f"fit={fit!r}: must be 'minmax' or 'lsq'")
    return scale.half().float(), zero.half().float()


def _regress(
    values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return least-squares scale and zero for given codes; the scale is unchanged if all codes are
    equal."""
    mean_code = codes.mean(dim, keepdim=True)
    mean_value = values.mean(dim, keepdim=True)
    spread = codes - mean_code
    variance = spread.square().mean(dim, keepdim=True)
    covariance = (spread * (values - mean_value)).mean(dim, keepdim=True)
    scale = torch.where(variance > 0, covariance / variance.clamp(min=1e-12), scale)
    return scale, mean_value - scale * mean_code


def unbiased_scale(
    values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero to store with known codes, so that <v^ - mean, v - mean> = |v -
    mean|^2.

    A least-squares fit shrinks a group towards its mean. Attention averages out the errors of many
    tokens, but not a loss that all of them share. With the scale var(values) / cov(codes, values)
    there is no loss on average, and the values that are read have the same mean as the original
    ones.

    Args:
        values: float32, finite.
        codes: result of ``assign_codes`` with this scale and zero.
        scale, zero: result of ``fit_group``; kept if the codes do not correlate with the values.
            The new scale is within a factor 2 of the old one.
        dim: dimension of the group.

    Returns:
        The shapes of scale and zero: float32 of float16 values.
    """
    mean_code, mean = codes.mean(dim, keepdim=True), values.mean(dim, keepdim=True)
    apart = values - mean
    covariance = ((codes - mean_code) * apart).mean(dim, keepdim=True) * scale
    factor = (apart.square().mean(dim, keepdim=True) / covariance).clamp(0.5, 2)
    whole = scale * factor
    stored, centred = whole.half().float(), (mean - whole * mean_code).half().float()
    fits = (covariance > 0) & stored.isfinite() & centred.isfinite()
    return torch.where(fits, stored, scale), torch.where(fits, centred, zero)


def assign_codes(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int
) -> torch.Tensor:
    """Return the nearest codes as float32 integers; 0 for a constant group (``MIN_SCALE``)."""
    inverse = torch.where(scale > MIN_SCALE, 1 / scale, torch.zeros_like(scale))
    return ((values - zero) * inverse).round().clamp(0, (1 << bits) - 1)


def token_rms(keys: torch.Tensor, scaling: str) -> torch.Tensor:
    """Return the root mean square of every token's key, float32 rounded to float16 values.

    Args:
        keys: (pages, KV heads, tokens, head_dim) float32.
        scaling: "shared": over all KV heads; "per_head": for each head.

    Returns:
        (pages, 1 or KV heads, tokens, 1).
    """
    dims = (1, 3) if scaling == "shared" else (3,)
    return keys.square().mean(dims, keepdim=True).sqrt().half().float()


def divide_by_norm(keys: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Return keys / norms, 0 for tokens of norm 0."""
    return torch.where(norms > 0, keys / norms, torch.zeros_like(keys))


def fitted_norm(
    keys: torch.Tensor, coded: torch.Tensor, norms: torch.Tensor, norm: str, scaling: str
) -> torch.Tensor:
    """Return the norm to store for known codes, so that ``norm * coded`` represents the key.

    "plain" keeps the norm; "refit" minimizes |norm * coded - key|^2; "unbiased" makes <norm *
    coded, key> = |key|^2. A least-squares fit shrinks keys towards the group's middle, which
    flattens attention: undoing that costs no bits (measured in KL; the squared error of the key
    prefers "refit").

    Args:
        keys: (pages, KV heads, tokens, head_dim) float32.
        coded: keys decoded from their codes, before the norm; same shape.
        norms: (pages, 1 or KV heads, tokens, 1), norms by which the keys were divided.

    Returns:
        The shape of ``norms``, within a factor 2 of it, rounded to float16 values.
    """
    if norm == "plain":
        return norms
    dims = (1, 3) if scaling == "shared" else (3,)
    overlap = (keys * coded).sum(dims, keepdim=True)
    if norm == "refit":
        fitted = overlap / coded.square().sum(dims, keepdim=True)
    elif norm == "unbiased":
        fitted = keys.square().sum(dims, keepdim=True) / overlap
    else:
        raise ValueError(f"norm={norm!r}: must be 'plain', 'refit' or 'unbiased'")
    # A token whose codes barely overlap with it (norm near zero, coarse group) keeps its norm.
    fitted = torch.where((overlap > 0) & fitted.isfinite(), fitted, norms)
    return torch.minimum(torch.maximum(fitted, norms / 2), norms * 2).half().float()


CHANGES = 4
"""Maximum codes of a key that change. Measured in KL with 3-bit keys: 0.84, 0.81, 0.77 and 0.77 of
the KL of nearest codes with 2, 3, 4 and 6."""
FLOOR = 0.1
"""Share of a key's mean energy that every channel gets in addition to its own."""


def score_weights(keys: torch.Tensor, centers: torch.Tensor | None) -> torch.Tensor:
    """Return D of each key, up to a factor.

    Args:
        keys: (..., head_dim) float32, balanced and not rotated.
        centers: same shape and coordinates; None for keys without a center.

    Returns:
        The shape of ``keys``.
    """
    energy = keys.square()
    if centers is not None:
        energy = energy + centers.square()
    energy = energy + energy.roll(keys.shape[-1] // 2, -1)
    return energy + FLOOR * energy.mean(-1, keepdim=True)


def lower_score_error(
    vectors: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    weights: torch.Tensor,
    bits: int,
) -> torch.Tensor:
    """Change up to ``CHANGES`` codes by 1, one at a time, greedily by the largest gain.

    Args:
        vectors: (..., head_dim) float32, rotated.
        codes: same shape, float32 integers.
        scales, zeros: scales and zeros with which the codes are read, broadcastable to their shape.
        weights: result of ``score_weights``.
        bits: bits of a code.
    """
    rotation = hadamard(vectors.shape[-1], vectors.device)
    steps = scales.expand_as(codes)
    gradient = ((codes * steps + zeros - vectors) @ rotation * weights) @ rotation
    curvature = weights @ rotation.square()
    for _ in range(CHANGES):
        signs = torch.where(gradient > 0, -1.0, 1.0)
        changed = codes + signs
        gain = steps * (2 * gradient.abs() - curvature * steps)
        gain = gain.masked_fill((changed < 0) | (changed >= 1 << bits), 0)
        best, channel = gain.max(-1, keepdim=True)
        change = signs.gather(-1, channel).masked_fill(~(best > 0), 0)
        codes = codes.scatter_add(-1, channel, change)
        turned = (rotation[channel[..., 0]] * weights) @ rotation
        gradient = gradient + change * steps.gather(-1, channel) * turned
    return codes
