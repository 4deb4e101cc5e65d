"""Quantization with PyTorch: keys and values to page bytes and back, the kernels' reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import PAGE_TOKENS, KVPolicy
from oscar_mm.quant.basis import Basis, hadamard
from oscar_mm.quant.fit import (
    KEY_RUN,
    VALUE_RUN,
    assign_codes,
    divide_by_norm,
    fit_group,
    fitted_norm,
    lower_score_error,
    score_weights,
    token_rms,
    unbiased_scale,
)

_CHUNK_ELEMENTS = 1 << 22
"""Keys packed at a time; bounds the float32 temporaries of a long prompt to about 200 MB."""


@dataclass(frozen=True)
class Recipe:
    """Parameters by which pages are written; ``KVPolicy`` explains them."""

    page_format: PageFormat
    rotate: bool
    fit: str
    norm: str
    value_scale: str

    @classmethod
    def of(cls, page_format: PageFormat, policy: KVPolicy) -> Recipe:
        """Return the recipe of a policy for pages of a format."""
        how = (policy.rotate, policy.fit, policy.norm, policy.value_scale)
        return cls(page_format, *how)

    @property
    def unbiased_keys(self) -> bool:
        """Whether key scales are corrected by ``unbiased_scale``."""
        return self.fit == "lsq" and self.norm == "unbiased"

    @property
    def lowers_score_error(self) -> bool:
        """Whether a token's key gets the codes of ``lower_score_error`` instead of the nearest
        ones."""
        return self.page_format.by_token and self.rotate and self.unbiased_keys


def quantize(
    keys: torch.Tensor, values: torch.Tensor, recipe: Recipe, sigma: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize whole pages.

    Args:
        keys, values: (pages, KV heads, 128, head_dim), any float dtype.
        recipe: recipe of the pages.
        sigma: (KV heads or 1, head_dim) float32 balancing, with a leading dimension for per-page
            balancing; or None.

    Returns:
        (pages, page_bytes) uint8, and () bool: whether all scales, zeros and norms are finite
        float16 numbers.
    """
    page_format = recipe.page_format
    basis = Basis(page_format.head_dim, recipe.rotate, sigma)
    arrays = _packed_keys(basis.keys_in(keys), recipe)
    arrays |= _packed_values(basis.values_in(values), recipe)
    pages = torch.zeros(len(keys), page_format.page_bytes, dtype=torch.uint8, device=keys.device)
    for name, array in arrays.items():
        page_format.write(pages, name, array)
    finite = [x.half().isfinite().all() for name, x in arrays.items() if "codes" not in name]
    return pages, torch.stack(finite).all()


def quantize_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    centers: torch.Tensor | None,
    recipe: Recipe,
    sigma: torch.Tensor | None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Quantize tokens of stream pages independently of each other.

    Args:
        keys, values: (tokens, KV heads, head_dim), any float dtype.
        centers: (tokens, KV heads, head_dim) float32, center of each token's page in stored
            coordinates; None for formats without a center.
        recipe: recipe of the pages.
        sigma: (KV heads or 1, head_dim) float32 balancing, with a leading dimension for per-token
            balancing; or None.

    Returns:
        Arrays of a page by name, each (tokens, KV heads, d or groups) float32, and () bool: whether
        all scales and zeros are finite float16 numbers.
    """
    page_format = recipe.page_format
    basis = Basis(page_format.head_dim, recipe.rotate, sigma)
    # Basis expects tokens after heads.
    vectors, values = (
        of(x[:, :, None])[:, :, 0] for of, x in ((basis.keys_in, keys), (basis.values_in, values))
    )
    group, bits = page_format.key_group, page_format.bits
    codes, scale, zero, error = _in_codes(
        vectors, bits.keys, group, recipe.fit, recipe.unbiased_keys
    )
    if centers is not None:
        apart = _in_codes(vectors - centers, bits.keys, group, recipe.fit, recipe.unbiased_keys)
        nearer = (apart[3] < error)[..., None]
        codes = torch.where(nearer, apart[0], codes)
        scale = torch.where(nearer, -apart[1], scale)
        zero = torch.where(nearer, apart[2], zero)
        vectors = torch.where(nearer, vectors - centers, vectors)
    if recipe.lowers_score_error:
        plain = None if centers is None else centers @ hadamard(keys.shape[-1], keys.device)
        scales, zeros = (x.repeat_interleave(group, -1) for x in (scale.abs(), zero))
        weights = score_weights(basis.balanced(keys[:, :, None])[:, :, 0], plain)
        codes = lower_score_error(vectors, codes, scales, zeros, weights, bits.keys)
    unbiased, group = recipe.value_scale == "unbiased", page_format.value_group
    of_values = _in_codes(values, bits.values, group, recipe.fit, unbiased)
    arrays = {
        "key_codes": codes,
        "key_scales": scale,
        "key_zeros": zero,
        "value_codes": of_values[0],
        "value_scales": of_values[1],
        "value_zeros": of_values[2],
    }
    finite = [x.half().isfinite().all() for name, x in arrays.items() if "codes" not in name]
    return arrays, torch.stack(finite).all()


def _in_codes(
    vectors: torch.Tensor, bits: int, group: int, fit: str, unbiased: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes (..., d), scale and zero (..., groups), and squared error (...) of vectors."""
    grouped = vectors.unflatten(-1, (-1, group))
    scale, zero = fit_group(grouped, bits, fit, -1)
    codes = assign_codes(grouped, scale, zero, bits)
    if unbiased:
        scale, zero = unbiased_scale(grouped, codes, scale, zero, -1)
    error = (codes * scale + zero - grouped).square().sum((-2, -1))
    return codes.view_as(vectors), scale[..., 0], zero[..., 0], error


def parts_of(pages: int, page_format: PageFormat) -> Iterator[slice]:
    """Yield slices of pages that bound the size of temporaries."""
    step = max(1, _CHUNK_ELEMENTS // (page_format.kv_heads * PAGE_TOKENS * page_format.head_dim))
    return (slice(start, start + step) for start in range(0, pages, step))


def _packed_keys(keys: torch.Tensor, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the arrays of a page for ``PageFormat.write`` from (pages, heads, 128, d) float32
    keys."""
    page_format = recipe.page_format
    unit, norms, scaling = keys, None, page_format.token_scaling
    if scaling is not None:
        norms = token_rms(keys, scaling)
        unit = divide_by_norm(keys, norms)
    dim = 3  # of (pages, heads, groups, tokens, d)
    grouped = unit.unflatten(2, (-1, page_format.key_group))
    scale, zero = fit_group(grouped, page_format.bits.keys, recipe.fit, dim, KEY_RUN)
    codes = assign_codes(grouped, scale, zero, page_format.bits.keys)
    if recipe.unbiased_keys:
        scale, zero = unbiased_scale(grouped, codes, scale, zero, dim)
    arrays = {
        "key_codes": codes.view_as(keys),
        "key_scales": scale.squeeze(dim),
        "key_zeros": zero.squeeze(dim),
    }
    if scaling is not None and norms is not None:
        coded = (codes * scale + zero).view_as(keys)
        norms = fitted_norm(keys, coded, norms, recipe.norm, scaling)
        arrays["norms"] = norms[..., 0]
        if scaling == "shared":
            arrays["norms"] = norms[:, 0, :, 0]
    return arrays


def _packed_values(values: torch.Tensor, recipe: Recipe) -> dict[str, torch.Tensor]:
    page_format = recipe.page_format
    grouped = values.unflatten(3, (-1, page_format.value_group))
    scale, zero = fit_group(grouped, page_format.bits.values, recipe.fit, 4, VALUE_RUN)
    codes = assign_codes(grouped, scale, zero, page_format.bits.values)
    if recipe.value_scale == "unbiased":
        scale, zero = unbiased_scale(grouped, codes, scale, zero, 4)
    return {
        "value_codes": codes.view_as(values),
        "value_scales": scale.squeeze(4),
        "value_zeros": zero.squeeze(4),
    }


def unpack_stored(
    pages: torch.Tensor, page_format: PageFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in stored coordinates: balanced and rotated, with norms applied.

    Args:
        pages: (n, page_bytes) uint8.

    Returns:
        Keys and values, each (n, KV heads, 128, head_dim) float32.
    """
    split = 3 if page_format.by_token else 2
    scales = page_format.read(pages, "key_scales")
    centered = scales.signbit()
    sizes = scales.abs() if page_format.center else scales
    keys = _decoded(pages, page_format, "key", split, page_format.key_group, sizes)
    if page_format.center:
        centers = page_format.read(pages, "center")[:, :, None]
        keys = torch.where(centered[..., :1], keys + centers, keys)
    if page_format.token_scaling is not None:
        norms = page_format.read(pages, "norms")
        keys = keys * (norms[:, None, :, None] if norms.ndim == 2 else norms[..., None])
    value_scales = page_format.read(pages, "value_scales")
    return keys, _decoded(pages, page_format, "value", 3, page_format.value_group, value_scales)


def unpack_by_torch(
    pages: torch.Tensor, page_format: PageFormat, basis: Basis, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in the model's coordinates and a dtype, (n, KV heads, 128, head_dim)
    each."""
    keys, values = unpack_stored(pages, page_format)
    return basis.keys_out(keys).to(dtype), basis.values_out(values).to(dtype)


def _decoded(
    pages: torch.Tensor,
    page_format: PageFormat,
    side: str,
    split: int,
    group: int,
    scales: torch.Tensor,
) -> torch.Tensor:
    """Return scale * code + zero, with groups of ``group`` along dimension ``split``."""
    codes = page_format.read(pages, f"{side}_codes").float()
    scale = scales.unsqueeze(split + 1)
    zero = page_format.read(pages, f"{side}_zeros").unsqueeze(split + 1)
    return (codes.unflatten(split, (-1, group)) * scale + zero).view_as(codes)
