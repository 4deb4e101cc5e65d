"""Fits: compute the codes, scale and zero of a group of values, and the norm of a key.

A value x of a group is stored as code = round((x - zero) / scale) in 0 .. 2^bits - 1 and read as
scale * code + zero. Scales and zeros are float16 in a page; they are rounded before the codes are
assigned, so each code is the one whose decoded value is nearest. Scale and zero may then be
replaced by others with which the group does not shrink (``unbiased_scale``). The norm of a key
alone cannot achieve this: if most of a key is the mean of its neighbours, as in models without QK
norm, the mean satisfies <K^, K> = |K|^2 while the differences between keys remain shrunk.

Keys are divided by a norm per token (OScaR's "omni-token scaling"). The tokens of a key group share
one scale per channel, so a token with a large norm would reduce the resolution of all other tokens
(in some layers, text and vision norms differ several-fold). The stored norm is the root mean square
over channels, which float16 can represent for any float16 key.

For keys that are stored token by token, a few codes are not the nearest codes
(``lower_score_error``): they reduce the error of the token's scores, at the cost of a larger error
of the key. The error of a score is q.(k^ - k), and queries do not have the same energy in all
directions: after scaling by sigma (quant/balance.py), queries and keys have the same energy in each
channel, and most of the energy is in slow rotary pairs. So the expected squared error of a score is
e^T H D H e, where e is the error of the stored, rotated key, H the rotation and D the energy of
each channel; channel errors are chosen to cancel where queries are large. D is the energy of the
key itself plus that of its center, summed over each RoPE pair (channels c and c + head_dim / 2),
since RoPE rotates one channel of the pair into the other. D needs no queries, so a token is stored
the same way regardless of earlier tokens.
"""

from __future__ import annotations

import torch

from oscar_mm.quant.basis import hadamard

LSQ_ROUNDS = 2
"""Number of rounds of a least-squares fit. In full pages, the first round uses only some of the
values (``first_apart``). Three rounds over all values take twice as long and have up to 3% less
squared error (normal, uniform, heavy-tailed and skewed groups)."""
MIN_SCALE = 1e-38
"""Maximum scale at which a group is treated as constant: 1 / scale would be infinite in float32."""
KEY_RUN, VALUE_RUN = 8, 2
"""Length of the runs (tokens in a key group, channels in a value group) that the first round uses
or skips, which is the number of values that a thread of csrc/pack/pack.cu keeps in registers."""


def first_range(bits: int, count: int) -> float:
    """Return the range from which a group's least-squares fit starts, as a fraction of its min-max
    range.

    The fewer values a group has, the closer its min-max range is to the range that the steps should
    span. At 4 bits, if the few rounds started from 0.75, the result would be worse than min-max
    (1.12 times the squared error on normal groups of 128).
    """
    if bits > 2:
        return 0.95 if bits == 4 else 0.85 if count <= 64 else 0.8
    return 0.75 if count <= 32 else 0.7 if count <= 64 else 0.65


def first_apart(count: int) -> int:
    """Return the number n for which the first round of a fit uses every n-th run of values."""
    return 4 if count >= 64 else 2


def fit_group(
    values: torch.Tensor, bits: int, fit: str, dim: int, run: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero of every group along ``dim`` (kept with size 1), as float32 numbers
    rounded to float16.

    Args:
        values: float32 values to fit, all finite.
        bits: bits per code: 2, 3 or 4.
        fit: "minmax" or "lsq". "lsq" starts from the middle part of the range, then twice assigns
            codes and solves for scale and zero by linear regression.
        dim: dimension of the group.
        run: length of the runs of values that the first round uses; one or three runs are skipped
            between two of these (``first_apart``). None to use all values.
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
    """Return the scale and zero with the least squared error for given codes; if all codes are
    equal, the scale is unchanged."""
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
    """Return the scale and zero to store with given codes, such that a group does not shrink:
    <v^ - mean, v - mean> = |v - mean|^2.

    A least-squares fit shrinks a group towards its mean. Attention averages out the errors of many
    tokens, but not a loss common to all of them. With the scale var(values) / cov(codes, values)
    there is no loss on average, and the restored values have the same mean as the original values.

    Args:
        values: float32 values of the groups, all finite.
        codes: result of ``assign_codes`` with this scale and zero.
        scale, zero: result of ``fit_group``; kept if the codes do not correlate with the values.
            The new scale is within a factor of 2 of the old scale.
        dim: dimension of the group.

    Returns:
        Scale and zero in the same shapes, as float32 numbers rounded to float16.
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
    """Return the root mean square of each token's key, as float32 numbers rounded to float16.

    Args:
        keys: (pages, KV heads, tokens, head_dim) float32.
        scaling: "shared" (over all KV heads) or "per_head".

    Returns:
        (pages, 1 or KV heads, tokens, 1).
    """
    dims = (1, 3) if scaling == "shared" else (3,)
    return keys.square().mean(dims, keepdim=True).sqrt().half().float()


def divide_by_norm(keys: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Return keys / norms, or 0 for tokens with norm 0."""
    return torch.where(norms > 0, keys / norms, torch.zeros_like(keys))


def fitted_norm(
    keys: torch.Tensor, coded: torch.Tensor, norms: torch.Tensor, norm: str, scaling: str
) -> torch.Tensor:
    """Return the norm to store with given codes, such that ``norm * coded`` represents the key.

    "plain" keeps the norm; "refit" minimizes |norm * coded - key|^2; "unbiased" makes
    <norm * coded, key> equal to |key|^2. A least-squares fit shrinks keys towards the middle of the
    group, which flattens attention; "unbiased" undoes this without extra bits. ("unbiased" has the
    lowest KL divergence, "refit" the lowest squared error of keys.)

    Args:
        keys: (pages, KV heads, tokens, head_dim) float32.
        coded: keys decoded from their codes, before the norm; same shape.
        norms: (pages, 1 or KV heads, tokens, 1): norms by which the keys were divided.

    Returns:
        Norms in the shape of ``norms``, within a factor of 2 of them, rounded to float16.
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
    # A key keeps its norm if it barely overlaps with the coded key (norm near zero, coarse group).
    fitted = torch.where((overlap > 0) & fitted.isfinite(), fitted, norms)
    return torch.minimum(torch.maximum(fitted, norms / 2), norms * 2).half().float()


CHANGES = 4
"""Maximum number of codes to change per key. With 3-bit keys, the KL divergence is 0.84, 0.81, 0.77
and 0.77 times that of the nearest codes with 2, 3, 4 and 6 changes."""
FLOOR = 0.1
"""Fraction of a key's mean energy that is added to the energy of each channel."""


def score_weights(keys: torch.Tensor, centers: torch.Tensor | None) -> torch.Tensor:
    """Return D (see the module's docstring) for each key: energies of channels up to a factor.

    Args:
        keys: (..., head_dim) float32, divided by sigma but not rotated.
        centers: centers in the same shape and coordinates; None if keys have no center.

    Returns:
        Weights in the shape of ``keys``.
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
    """Change up to ``CHANGES`` codes of each key by 1 to reduce the error of scores.

    Codes are changed one at a time, each time the code with the largest gain.

    Args:
        vectors: rotated keys, (..., head_dim) float32.
        codes: codes of the keys, float32 integers in the same shape.
        scales, zeros: scales and zeros of the codes, broadcastable to their shape.
        weights: result of ``score_weights``.
        bits: bits per code.
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
