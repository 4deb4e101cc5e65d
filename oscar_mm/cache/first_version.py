"""Conversion of saved caches of version 1 to the current format.

They store tokens in 16-bit precision in blocks of 32, ``layer.<i>.blocks`` (n, 2, KV heads, 32,
head_dim), and the ids of blocks in ``blocks``; the number of a stream's blocks follows from its
number of tokens in 16-bit precision. Pages of key_axis "token" are stored token by token for every
head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from oscar_mm.cache.checked_file import Kind
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat, unpack_bits
from oscar_mm.policy import PLAIN, Bits, KVPolicy

_BLOCK_TOKENS = 32
_BITS = (Bits(2, 2), Bits(4, 4), PLAIN)
_SUFFIX = ".blocks"


def check_policy(policy: KVPolicy) -> None:
    """Raise ValueError if a file of version 1 cannot have this policy."""
    if policy.center or not set(policy.bits) <= set(_BITS):
        raise ValueError("its policy is not one of version 1")


def kinds_now(kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return names, dtypes and shapes in the current format, but with the number of blocks in place
    of the number of tokens.

    Raises:
        KeyError, ValueError: if blocks have another shape, or tensors have names of the current
            format.
    """
    found = dict(kinds)
    if named := [name for name in found if name == "recent" or _is_of_layer(name, ".recent")]:
        raise ValueError(f"unknown tensors {sorted(named)[:3]}")
    found["recent"] = found.pop("blocks")
    for name in [name for name in found if _is_of_layer(name, _SUFFIX)]:
        dtype, (count, sides, heads, tokens, width) = found.pop(name)
        if tokens != _BLOCK_TOKENS:
            raise ValueError(f"{name} is of {tokens} tokens")
        found[_renamed(name)] = Kind(dtype, (count, sides, heads, width))
    return found


def tensors_now(
    tensors: Mapping[str, torch.Tensor], formats: Mapping[str, PageFormat]
) -> dict[str, torch.Tensor]:
    """Convert the tensors of a file whose kinds were checked to the current format.

    Args:
        formats: page formats by tensor name.

    Raises:
        ValueError: if blocks and streams are inconsistent.
    """
    found = dict(tensors)
    blocks, tails = found.pop("blocks").numpy().astype(np.int64), found["streams"].numpy()[:, 3]
    names = [name for name in found if _is_of_layer(name, _SUFFIX)]
    counts = {len(found[name]) for name in names}
    if ((tails < 0) | (tails > len(blocks) * _BLOCK_TOKENS)).any():
        raise ValueError("a stream is out of range")
    if tails.sum() > found["codes"].numel():
        raise ValueError(f"{tails.sum()} tokens in 16 bit")
    ends = np.cumsum(-(-tails // _BLOCK_TOKENS))
    if (ends[-1] if len(ends) else 0) != len(blocks):
        raise ValueError("streams and their slots differ in number")
    if any(((blocks < 0) | (blocks >= count)).any() for count in counts):
        raise ValueError("a block is out of range")
    places = [np.zeros(0, np.int64)]
    for tail, end in zip(tails.tolist(), ends.tolist(), strict=True):
        start = end - -(-tail // _BLOCK_TOKENS)
        whole = blocks[start:end, None] * _BLOCK_TOKENS + np.arange(_BLOCK_TOKENS)
        places.append(whole.ravel()[:tail])
    used, recent = np.unique(np.concatenate(places), return_inverse=True)
    found["recent"] = torch.from_numpy(recent.astype(np.int32))
    for name in names:
        tokens = found.pop(name).transpose(2, 3).transpose(1, 2).flatten(0, 1)
        found[_renamed(name)] = tokens[torch.from_numpy(used)].contiguous()
    for name, page_format in formats.items():
        if page_format.by_token:
            found[name] = _pages_now(found[name], page_format)
    return found


def _pages_now(pages: torch.Tensor, page_format: PageFormat) -> torch.Tensor:
    """Reorder pages of key_axis "token", (n, page_bytes) uint8, to the current order."""
    found = torch.zeros_like(pages)
    heads = pages[:, : page_format.head_bytes * page_format.kv_heads]
    heads = heads.unflatten(1, (page_format.kv_heads, -1))
    for name, field in page_format.fields.items():
        raw = heads[..., field.offset : field.offset + field.nbytes]
        if field.kind == "codes":
            bits = field.shape[1] * 8 // page_format.head_dim
            values = unpack_bits(raw, bits).unflatten(-1, (PAGE_TOKENS, page_format.head_dim))
        else:
            values = raw.contiguous().view(field.dtype)
            by_group = name.startswith("value")
            shape = field.shape[::-1] if by_group else field.shape
            values = values.unflatten(-1, shape)
            values = values.transpose(-1, -2) if by_group else values
        page_format.write(found, name, values)
    return found


def _is_of_layer(name: str, suffix: str) -> bool:
    return name.startswith("layer.") and name.endswith(suffix)


def _renamed(name: str) -> str:
    return f"{name.removesuffix(_SUFFIX)}.recent"
