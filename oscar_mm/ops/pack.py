"""pack: 16-bit keys and values of whole pages -> page bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from oscar_mm.cache.layout import PAGE_TOKENS, PageFormat
from oscar_mm.ops.kernel import Kernel, switched_off
from oscar_mm.ops.pack_kernel import NOT_STORABLE, kernel_for, pack_by_kernel, takes
from oscar_mm.policy import KVPolicy
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.fit import assign_codes, fit_group
from oscar_mm.quant.scaling import divide_by_norm, fitted_norm, token_rms

_CHUNK_ELEMENTS = 1 << 22
"""Keys packed at a time: bounds the float32 temporaries of a long prompt to about 200 MB."""
_CHECKED_PAGES = 4
_WORST_SHARE = 0.01
"""Bytes of the first pages in which a kernel may differ from PyTorch operations."""
_trusted: dict[Kernel, bool] = {}
_log = logging.getLogger(__name__)


def pack(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_format: PageFormat,
    policy: KVPolicy,
    basis: Basis,
) -> torch.Tensor:
    """Quantize whole pages.

    On a GPU by csrc/pack.cu, whose first pages are compared with those of PyTorch operations.

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
    expected = (page_format.kv_heads, PAGE_TOKENS, page_format.head_dim)
    if tuple(keys.shape[1:]) != expected or values.shape != keys.shape:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)}: "
            f"must both be (pages, {', '.join(map(str, expected))})"
        )
    if keys.is_cuda and not switched_off():
        pages = _by_kernel(keys, values, page_format, policy, basis)
        if pages is not None:
            return pages
    return _by_torch(keys, values, page_format, policy, basis)


def _by_torch(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_format: PageFormat,
    policy: KVPolicy,
    basis: Basis,
) -> torch.Tensor:
    pages = torch.zeros(len(keys), page_format.page_bytes, dtype=torch.uint8, device=keys.device)
    for part in _parts(keys):
        arrays = _packed_keys(basis.keys_in(keys[part]), page_format, policy)
        arrays |= _packed_values(basis.values_in(values[part]), page_format, policy)
        for name, array in arrays.items():
            page_format.write(pages[part], name, array)
        finite = [x.half().isfinite().all() for name, x in arrays.items() if "codes" not in name]
        if not bool(torch.stack(finite).all()):
            raise FloatingPointError(NOT_STORABLE)
    return pages


def _by_kernel(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_format: PageFormat,
    policy: KVPolicy,
    basis: Basis,
) -> torch.Tensor | None:
    """None where the kernel does not take such pages, or is not to be trusted."""
    if not takes(keys, values, page_format, policy):
        return None
    kernel = kernel_for(page_format, policy, basis.rotate, keys.dtype, keys.device)
    if kernel is None or _trusted.get(kernel) is False:
        return None
    norms = None
    if page_format.token_scaling == "shared":
        rows = [token_rms(basis.balanced(keys[part]), "shared") for part in _parts(keys)]
        norms = torch.cat(rows).view(len(keys), PAGE_TOKENS)
    pages = pack_by_kernel(kernel, keys, values, page_format, basis, norms)
    if kernel not in _trusted:
        # Single bytes may differ where a value lies between two codes.
        few = slice(0, _CHECKED_PAGES)
        expected = _by_torch(keys[few], values[few], page_format, policy, basis)
        _trusted[kernel] = float((pages[few] != expected).float().mean()) < _WORST_SHARE
        if not _trusted[kernel]:
            _log.error(
                "the pack kernel disagrees with PyTorch operations on %s: it is not used. Please "
                "report this with the output of `oscar-mm doctor`",
                keys.device,
            )
            return None
    return pages


def _parts(keys: torch.Tensor) -> Iterator[slice]:
    """Pages at a time."""
    step = max(1, _CHUNK_ELEMENTS // keys.shape[1:].numel())
    return (slice(start, start + step) for start in range(0, len(keys), step))


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
