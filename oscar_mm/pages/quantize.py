"""Conversion of keys and values to page bytes and back with PyTorch: the kernels' reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from oscar_mm.pages.codecs.base import Fitting
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import PAGE_TOKENS, KVPolicy
from oscar_mm.quant.basis import Basis

_CHUNK_ELEMENTS = 1 << 22
"""Number of key elements to pack at a time; limits the float32 temporaries of a long prompt to
about 200 MB."""


@dataclass(frozen=True)
class Recipe(Fitting):
    """Parameters for writing pages: how values are fitted, and the format of the pages."""

    page_format: PageFormat

    @classmethod
    def of(cls, page_format: PageFormat, policy: KVPolicy) -> Recipe:
        """Return a policy's recipe for pages of a format."""
        how = (policy.rotate, policy.fit, policy.norm, policy.value_scale)
        return cls(*how, page_format)


def quantize(
    keys: torch.Tensor, values: torch.Tensor, recipe: Recipe, sigma: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize full pages of 128 tokens.

    Args:
        keys, values: (pages, KV heads, 128, head_dim), any float dtype.
        recipe: recipe of the pages.
        sigma: (KV heads or 1, head_dim) float32 balancing vectors, with a leading dimension if
            each page has its own; None for no balancing.

    Returns:
        The pages, (pages, page_bytes) uint8, and a () bool: whether all scales, zeros and norms are
        finite in their dtypes.
    """
    page_format = recipe.page_format
    basis = Basis(page_format.head_dim, recipe.rotate, sigma)
    arrays = page_format.codec.encode(keys, values, page_format, recipe, basis)
    pages = torch.zeros(len(keys), page_format.page_bytes, dtype=torch.uint8, device=keys.device)
    for name, array in arrays.items():
        page_format.write(pages, name, array)
    return pages, _are_finite(arrays, page_format)


def quantize_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    centers: torch.Tensor | None,
    recipe: Recipe,
    sigma: torch.Tensor | None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Quantize tokens independently of each other, for formats that append tokens.

    Args:
        keys, values: (tokens, KV heads, head_dim), any float dtype.
        centers: (tokens, KV heads, head_dim) float32, the center of each token's page in stored
            coordinates; None for formats without a center.
        recipe: recipe of the pages.
        sigma: (KV heads or 1, head_dim) float32 balancing vectors, with a leading dimension if
            each token has its own; None for no balancing.

    Returns:
        The arrays by name, each (tokens, KV heads, elements), and a () bool: whether all numbers
        are finite in their dtypes.
    """
    page_format = recipe.page_format
    basis = Basis(page_format.head_dim, recipe.rotate, sigma)
    # Each token is encoded like a page with a single token.
    sides = keys[:, :, None], values[:, :, None]
    arrays = page_format.codec.encode(*sides, page_format, recipe, basis, centers)
    finite = _are_finite(arrays, page_format)
    return {name: array[:, :, 0] for name, array in arrays.items()}, finite


def _are_finite(arrays: Mapping[str, torch.Tensor], page_format: PageFormat) -> torch.Tensor:
    """Return a () bool: whether all numbers except codes are finite in their arrays' dtypes."""
    fields = page_format.fields
    finite = [
        array.to(fields[name].dtype).float().isfinite().all()
        for name, array in arrays.items()
        if not fields[name].is_codes
    ]
    # A format may have no numbers except codes.
    some = next(iter(arrays.values()))
    return torch.stack(finite).all() if finite else some.new_ones((), dtype=torch.bool)


def parts_of(pages: int, page_format: PageFormat) -> Iterator[slice]:
    """Yield slices that split ``pages`` pages into parts small enough to limit temporaries."""
    step = max(1, _CHUNK_ELEMENTS // (page_format.kv_heads * PAGE_TOKENS * page_format.head_dim))
    return (slice(start, start + step) for start in range(0, pages, step))


def unpack_stored(
    pages: torch.Tensor, page_format: PageFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack pages to keys and values in stored coordinates (balanced, rotated, norms applied).

    Args:
        pages: (n, page_bytes) uint8.
        page_format: format of the pages.

    Returns:
        Keys and values, each (n, KV heads, 128, head_dim) float32.
    """
    arrays = {array.name: page_format.read(pages, array.name) for array in page_format.arrays}
    return page_format.codec.decode(arrays, page_format)


def unpack_by_torch(
    pages: torch.Tensor, page_format: PageFormat, basis: Basis, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack pages to keys and values in the model's coordinates and the given dtype, (n, KV heads,
    128, head_dim) each."""
    keys, values = unpack_stored(pages, page_format)
    return basis.keys_out(keys).to(dtype), basis.values_out(values).to(dtype)
