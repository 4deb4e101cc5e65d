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
    split = 2 if page_format.key_axis == "channel" else 3
    keys = _decoded(pages, page_format, "key", split, page_format.key_group)
    if page_format.token_scaling is not None:
        norms = page_format.read(pages, "norms")
        keys = keys * (norms[:, None, :, None] if norms.ndim == 2 else norms[..., None])
    return keys, _decoded(pages, page_format, "value", 3, page_format.value_group)


def unpack_by_torch(
    pages: torch.Tensor, page_format: PageFormat, basis: Basis, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in the model's coordinates and dtype: (n, KV heads, 128, head_dim) each."""
    keys, values = unpack_stored(pages, page_format)
    return basis.keys_out(keys).to(dtype), basis.values_out(values).to(dtype)


def _decoded(
    pages: torch.Tensor, page_format: PageFormat, side: str, split: int, group: int
) -> torch.Tensor:
    """scale * code + zero, with groups of ``group`` along dimension ``split``."""
    codes = page_format.read(pages, f"{side}_codes").float()
    scale = page_format.read(pages, f"{side}_scales").unsqueeze(split + 1)
    zero = page_format.read(pages, f"{side}_zeros").unsqueeze(split + 1)
    return (codes.unflatten(split, (-1, group)) * scale + zero).view_as(codes)
