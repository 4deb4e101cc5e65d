"""Page bytes -> keys and values by PyTorch operations: the CPU's path, the kernels' reference."""

from __future__ import annotations

import torch

from oscar_mm.cache.layout import PageFormat
from oscar_mm.quant.basis import Basis


def unpack_stored(
    pages: torch.Tensor, page_format: PageFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as they are stored: balanced and rotated, norms applied.

    Args:
        pages: (n, page_bytes) uint8.

    Returns:
        keys and values, each (n, KV heads, 128, head_dim) float32.
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
    """Keys and values in the model's coordinates and dtype: (n, KV heads, 128, head_dim) each."""
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
    """scale * code + zero, with groups of ``group`` along dimension ``split``."""
    codes = page_format.read(pages, f"{side}_codes").float()
    scale = scales.unsqueeze(split + 1)
    zero = page_format.read(pages, f"{side}_zeros").unsqueeze(split + 1)
    return (codes.unflatten(split, (-1, group)) * scale + zero).view_as(codes)
