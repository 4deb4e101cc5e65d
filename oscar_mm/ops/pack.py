"""pack: 16-bit keys and values of whole pages -> page bytes."""

from __future__ import annotations

import torch

from oscar_mm.cache.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import KVPolicy
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.fit import assign_codes, fit_group
from oscar_mm.quant.scaling import divide_by_norm, fitted_norm, token_rms

_CHUNK_ELEMENTS = 1 << 22
"""Keys packed at a time: bounds the float32 temporaries of a long prompt to about 200 MB."""


def pack(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_format: PageFormat,
    policy: KVPolicy,
    basis: Basis,
) -> torch.Tensor:
    """Quantize whole pages.

    Args:
        keys: (pages, KV heads, 128, head_dim), float32, bfloat16 or float16, after RoPE; any
            stride.
        values: the same shape and dtype.
        page_format: layout of the pages.
        policy: fit, norm and token scaling.
        basis: balancing and rotation of the layer.

    Returns:
        (pages, page_bytes) uint8.

    Raises:
        FloatingPointError: a scale, zero or norm is NaN, infinite or beyond float16 (65504), which
            is so exactly where the input is NaN, infinite or out of range.
    """
    count, kv_heads, tokens, head_dim = keys.shape
    expected = (page_format.kv_heads, PAGE_TOKENS, page_format.head_dim)
    if (kv_heads, tokens, head_dim) != expected or values.shape != keys.shape:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)}: "
            f"must both be (pages, {', '.join(map(str, expected))})"
        )
    pages = torch.zeros(count, page_format.page_bytes, dtype=torch.uint8, device=keys.device)
    step = max(1, _CHUNK_ELEMENTS // (kv_heads * tokens * head_dim))
    for start in range(0, count, step):
        part = slice(start, start + step)
        arrays = _packed_keys(basis.keys_in(keys[part]), page_format, policy)
        arrays |= _packed_values(basis.values_in(values[part]), page_format, policy)
        for name, array in arrays.items():
            page_format.write(pages[part], name, array)
        finite = [x.half().isfinite().all() for name, x in arrays.items() if "codes" not in name]
        if not bool(torch.stack(finite).all()):
            raise FloatingPointError(
                "keys or values hold NaN, infinity or numbers beyond float16 (65504)"
            )
    return pages


def _packed_keys(
    keys: torch.Tensor, page_format: PageFormat, policy: KVPolicy
) -> dict[str, torch.Tensor]:
    """Arrays of a page, as ``PageFormat.write`` takes them, from (pages, heads, 128, d) float32."""
    unit, norms = keys, None
    if page_format.token_scaling is not None:
        norms = token_rms(keys, page_format.token_scaling)
        unit = divide_by_norm(keys, norms)
    # (pages, heads, groups, tokens, d) or (pages, heads, tokens, groups, channels)
    split, dim = (2, 3) if page_format.key_axis == "channel" else (3, 4)
    grouped = unit.unflatten(split, (-1, page_format.key_group))
    scale, zero = fit_group(grouped, page_format.bits, policy.fit, dim)
    codes = assign_codes(grouped, scale, zero, page_format.bits)
    arrays = {
        "key_codes": codes.view_as(keys),
        "key_scales": scale.squeeze(dim),
        "key_zeros": zero.squeeze(dim),
    }
    if norms is not None:
        coded = (codes * scale + zero).view_as(keys)
        norms = fitted_norm(keys, coded, norms, policy.norm, page_format.token_scaling)
        arrays["norms"] = norms[..., 0]
        if page_format.token_scaling == "shared":
            arrays["norms"] = norms[:, 0, :, 0]
    return arrays


def _packed_values(
    values: torch.Tensor, page_format: PageFormat, policy: KVPolicy
) -> dict[str, torch.Tensor]:
    grouped = values.unflatten(3, (-1, page_format.value_group))
    scale, zero = fit_group(grouped, page_format.bits, policy.fit, 4)
    return {
        "value_codes": assign_codes(grouped, scale, zero, page_format.bits).view_as(values),
        "value_scales": scale.squeeze(4),
        "value_zeros": zero.squeeze(4),
    }
