"""Codes, and what is stored beside them: scale and zero of a group of values, the norm of a key.

A value x of a group is stored as code = round((x - zero) / scale) in 0 .. 2^bits - 1 and read as
scale * code + zero. Scales and zeros are float16 in a page; they are rounded before the codes are
assigned, so a code is the nearest one to what will be read back. Scale and zero may then be
replaced by others, with which the group does not shrink (``unbiased_scale``). The norm stored of a
key cannot do that alone: where most of a key is the mean of its neighbours, as in models without QK
norm, the mean meets <K^, K> = |K|^2 while what tells keys apart stays shrunk.

Keys are divided by a norm per token ("omni-token scaling" of OScaR): tokens of a key group share
one scale per channel, so a token with a large norm would cost all others their resolution (text and
vision norms differ several times in some layers). The norm is stored as the root mean square over
channels, which float16 holds for any float16 key.

Of a token that is stored by itself a few codes of the key are not the nearest ones
(``lower_score_error``): they lower the error of its scores, at the cost of a larger error of the
key. The error of a score is q.(k^ - k), and queries are not alike in all directions: balancing
leaves queries with as much energy in a channel as keys have (quant/balance.py), and slow rotary
pairs have most of both. So the squared error of a score is on average e^T H D H e, where e is the
error of the stored, rotated key, H the rotation and D the energy of each channel: errors of
channels cancel where queries are large. D is the energy of the key itself and of its center, a pair
of RoPE (channels c and c + head_dim / 2) in common, as positions turn one into the other. It needs
no queries, so a token is stored the same way whatever came before it.
"""

from __future__ import annotations

import torch

from oscar_mm.quant.basis import hadamard

LSQ_ROUNDS = 2
"""Rounds of the fit. In whole pages the first one looks at some of the values only
(``first_apart``). Three rounds over all values, at twice the cost, have up to 3% less squared error
(normal, uniform, heavy-tailed, skewed groups)."""
MIN_SCALE = 1e-38
"""A group with no larger scale has no extent: 1 / scale would be infinite in float32."""
KEY_RUN, VALUE_RUN = 8, 2
"""Tokens of a key group, and channels of a value group, that the first round takes at a time: the
ones that the threads of csrc/pack/pack.cu have in hand together."""


def first_range(bits: int, count: int) -> float:
    """First range of the least-squares fit of a group, as a part of its min-max range.

    The range of few values is nearer to what the steps should span than that of many. From 0.75
    the few rounds would end worse than min-max at 4 bits (squared error on normal groups of 128:
    1.12 times it).
    """
    if bits > 2:
        return 0.95 if bits == 4 else 0.85 if count <= 64 else 0.8
    return 0.75 if count <= 32 else 0.7 if count <= 64 else 0.65


def first_apart(count: int) -> int:
    """The first round looks at one of so many runs."""
    return 4 if count >= 64 else 2


def fit_group(
    values: torch.Tensor, bits: int, fit: str, dim: int, run: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero of every group along ``dim`` (kept, of size 1): float32 of float16 values.

    Args:
        values: float32, finite.
        bits: 2, 3 or 4.
        fit: "minmax" or "lsq". "lsq" starts from a part of the range around its middle and twice
            assigns codes, then solves for scale and zero by linear regression on them.
        dim: the dimension of the group.
        run: the first time it takes so many values in turn, and leaves out as many or three times
            as many; None for all of them.
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
    """Least-squares scale and zero for given codes; the scale stays where all codes are equal."""
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
    """Scale and zero to store with codes that are known: <v^ - mean, v - mean> = |v - mean|^2.

    A least-squares fit shrinks a group towards its mean. Attention averages the errors of many
    tokens, but not what all of them lack. With the scale var(values) / cov(codes, values) nothing
    is lacking on average, and the mean of what is read is that of the values.

    Args:
        values: float32, finite.
        codes: of ``assign_codes`` with this scale and zero.
        scale, zero: of ``fit_group``; kept where the codes say nothing about the values. The new
            scale is within a factor 2 of the old one.
        dim: the dimension of the group.

    Returns:
        the shapes of scale and zero: float32 of float16 values.
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
    """Nearest codes, as float32 whole numbers; 0 for a group without extent (``MIN_SCALE``)."""
    inverse = torch.where(scale > MIN_SCALE, 1 / scale, torch.zeros_like(scale))
    return ((values - zero) * inverse).round().clamp(0, (1 << bits) - 1)


def token_rms(keys: torch.Tensor, scaling: str) -> torch.Tensor:
    """Root mean square of every token's key, float32 rounded to float16 values.

    Args:
        keys: (pages, KV heads, tokens, head_dim) float32.
        scaling: "shared": over all KV heads; "per_head": of each.

    Returns:
        (pages, 1 or KV heads, tokens, 1).
    """
    dims = (1, 3) if scaling == "shared" else (3,)
    return keys.square().mean(dims, keepdim=True).sqrt().half().float()


def divide_by_norm(keys: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """keys / norms, 0 for tokens of norm 0."""
    return torch.where(norms > 0, keys / norms, torch.zeros_like(keys))


def fitted_norm(
    keys: torch.Tensor, coded: torch.Tensor, norms: torch.Tensor, norm: str, scaling: str
) -> torch.Tensor:
    """The norm to store once the codes are known, so that ``norm * coded`` stands for the key.

    "plain" keeps the norm; "refit" minimizes |norm * coded - key|^2; "unbiased" makes
    <norm * coded, key> = |key|^2. A least-squares fit shrinks keys towards the group's middle,
    which flattens attention: undoing that costs no bits (measured in KL; the squared error of
    the key prefers "refit").

    Args:
        keys: (pages, KV heads, tokens, head_dim) float32.
        coded: keys as read back from their codes, before the norm; same shape.
        norms: (pages, 1 or KV heads, tokens, 1), the norms that the keys were divided by.

    Returns:
        the shape of ``norms``, within a factor 2 of it, rounded to float16 values.
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
"""Most codes of a key that change. Measured in KL with 3-bit keys: 0.84, 0.81, 0.77 and 0.77 of
that of nearest codes with 2, 3, 4 and 6."""
FLOOR = 0.1
"""Part of a key's mean energy that every channel has besides its own."""


def score_weights(keys: torch.Tensor, centers: torch.Tensor | None) -> torch.Tensor:
    """D of each key, up to a factor.

    Args:
        keys: (..., head_dim) float32, balanced and not rotated.
        centers: the same shape and coordinates; None for keys without.

    Returns:
        the shape of ``keys``.
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
    """Codes of which up to ``CHANGES`` differ by 1, one after the other, each the best choice.

    Args:
        vectors: (..., head_dim) float32, rotated.
        codes: the same shape, float32 whole numbers.
        scales, zeros: with which codes are read, in a shape that broadcasts to theirs.
        weights: of ``score_weights``.
        bits: of a code.
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
