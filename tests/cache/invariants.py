"""Drive a cache without a model, and check its invariants.

The central invariant: attention over packed pages equals plain softmax attention over the unpacked
copy of the same pages and the raw new tokens.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from transformers.masking_utils import sliding_window_causal_mask_function

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.attention import attend, mask
from oscar_mm.cache.page_store import PageStore
from oscar_mm.modality import PADDING
from oscar_mm.quant.balance import sigma_from_rms

STREAM = {"key_axis": "token", "token_scaling": None, "center": True}
POLICIES = {
    name: KVPolicy.preset(name) for name in ("channel", "oscar", "kivi", "quarot", "bf16")
} | {
    "four": KVPolicy.preset("channel", bits=4),
    "mixed": KVPolicy.preset("channel", bits={"text": 4, "image": 2, "audio": 16}),
    "no_window": KVPolicy.preset("channel", window=0, sinks=0),
    "stream": KVPolicy(bits=(3, 2), **STREAM),
    "stream_mixed": KVPolicy(bits={"text": (4, 2), "image": 2, "audio": 16}, **STREAM),
    "stream_no_window": KVPolicy(window=0, sinks=0, **STREAM),
}

Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def chunk(
    seed: int,
    tokens: int,
    *,
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
) -> Chunk:
    """Return queries, keys and values of new tokens; a few channels are larger than the others."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, head_dim, generator=generator)

    queries, keys, values = normal(kv_heads * group), normal(kv_heads), normal(kv_heads)
    keys[..., :2] *= 5
    return queries, keys, values


def announce(
    cache: OscarCache,
    batch: int,
    tokens: int,
    padding: torch.Tensor | None,
    window: int | None = None,
) -> torch.Tensor | None:
    """Do what transformers does once per forward pass, before any layer, with attention "oscar"."""
    length, offset = cache.get_mask_sizes(tokens, 0)
    assert length == cache.get_seq_length() + tokens
    full = None
    if padding is not None:
        past = torch.ones(batch, length - tokens, dtype=torch.bool)
        full = torch.cat([past, padding], dim=1)
    sliding = (
        {}
        if window is None
        else {"mask_function": sliding_window_causal_mask_function(window), "local_size": window}
    )
    config = SimpleNamespace(sliding_window=window)
    found = mask(
        *(batch, tokens, length, length - tokens, offset),
        attention_mask=full,
        config=config,
        **sliding,
    )
    assert (found is None) == (window is None or (length <= window and tokens > 1))
    return found


def balance(cache: OscarCache, keys: torch.Tensor) -> None:
    """Give an empty cache without a model random balancing, if its policy balances."""
    if cache.layers or cache.policy.balance is None:
        return
    generator = torch.Generator().manual_seed(11)
    rms = torch.rand(2, keys.shape[1], keys.shape[3], generator=generator) + 0.2
    rms[0, :, :2] *= 5  # As ``chunk`` makes keys.
    cache.sigmas = {index: sigma_from_rms(*rms) for index in range(8)}


def attend_oscar(
    cache: OscarCache,
    new: Chunk,
    *,
    ids: torch.Tensor | None = None,
    layer: int = 0,
    window: int | None = None,
    module: nn.Module | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a layer with attention "oscar"; return its output (batch, query heads, tokens, head_dim).

    ids: (batch, tokens) modality ids, PADDING for pads; announced before layer 0.
    """
    queries, keys, values = new
    visible = None
    balance(cache, keys)
    if layer == 0:
        padding = None if ids is None or not (ids == PADDING).any() else ids != PADDING
        if ids is not None:
            cache.expect(ids)
        visible = announce(cache, keys.shape[0], keys.shape[2], padding, window)
    keys, values = cache.update(keys, values, layer)
    output, _ = attend(module or nn.Identity(), queries, keys, values, visible, s_aux=sinks)
    return output.transpose(1, 2)


def plain_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    real: torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal softmax attention in float64, with queries of the last tokens; 0 for pads.

    real: (batch, length) bool, False for padding.
    sinks: (query heads,) scores of a token without a value, which each query sees.
    """
    batch, kv_heads, length, head_dim = keys.shape
    tokens = queries.shape[2]
    keys, values = keys.double(), values.double()
    # The queries of a KV head follow each other, so that it need not be repeated.
    rows = queries.double().reshape(batch, kv_heads, -1, head_dim)
    query, key = torch.arange(length - tokens, length)[:, None], torch.arange(length)
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    visible = visible.expand(batch, 1, tokens, length)
    if real is not None:
        visible = visible & real[:, None, None]
    scores = (rows @ keys.transpose(2, 3) * head_dim**-0.5).view(batch, -1, tokens, length)
    scores = scores.masked_fill_(~visible, -torch.inf)
    if sinks is not None:
        added = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, added], dim=-1)
    shares = scores.softmax(-1)[..., :length]
    output = (shares.reshape(batch, kv_heads, -1, length) @ values).view(queries.shape)
    if real is not None:
        output[
            ~real[:, -tokens:, None, None].expand(-1, -1, *output.shape[1::2]).transpose(1, 2)
        ] = 0
    return output


def check_chunk(
    cache: OscarCache,
    new: Chunk,
    *,
    ids: torch.Tensor | None = None,
    past_real: torch.Tensor | None = None,
    layer: int = 0,
    window: int | None = None,
    module: nn.Module | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Feed a chunk, check the central invariant and return the output of attention."""
    queries, keys, values = new
    batch, _, tokens, _ = keys.shape
    past = cache.get_seq_length() if layer == 0 else cache.get_seq_length() - tokens
    all_keys, all_values = keys, values
    if past:
        assert layer == 0, "the past of later layers is gone once layer 0 has taken the chunk"
        stored = cache.unpacked(layer)
        all_keys = torch.cat([stored[0], keys], dim=2)
        all_values = torch.cat([stored[1], values], dim=2)
    real = None
    if ids is not None:
        before = torch.ones(batch, past, dtype=torch.bool) if past_real is None else past_real
        real = torch.cat([before, ids != PADDING], dim=1)
    expected = plain_attention(queries, all_keys, all_values, real, window, sinks)
    found = attend_oscar(
        cache, new, ids=ids, layer=layer, window=window, module=module, sinks=sinks
    )
    assert found.shape == queries.shape and found.dtype == queries.dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    return found


def filled(
    policy: str | KVPolicy, ids: torch.Tensor, *, seed: int = 0, **shape: int
) -> tuple[OscarCache, Chunk]:
    """Return a cache of one layer that has read a prompt, and the prompt."""
    cache = OscarCache(policy)
    prompt = chunk(seed, ids.shape[1], batch=ids.shape[0], **shape)
    attend_oscar(cache, prompt, ids=ids)
    return cache, prompt


def random_ids(seed: int, *lengths: int) -> torch.Tensor:
    """Return (1, sum of lengths) ids: spans of these lengths, each of a different modality than the
    previous one."""
    generator = torch.Generator().manual_seed(seed)
    ids, modality = [], 0
    for length in lengths:
        ids.append(torch.full((length,), modality))
        modality = (modality + 1 + int(torch.randint(0, 3, (1,), generator=generator))) % 4
    return torch.cat(ids)[None]


def left_padded(ids: torch.Tensor, *lengths: int) -> torch.Tensor:
    """Return rows with the last ``length`` ids each, padded on the left."""
    rows = ids.repeat(len(lengths), 1)
    for row, length in zip(rows, lengths, strict=True):
        row[: len(row) - length] = PADDING
    return rows


def poison(store: PageStore) -> None:
    """Fill free slots with NaN, so that reading them shows."""
    for pools in store.layers.values():
        for bits, pool in pools.by_bits.items():
            free = torch.tensor(store.allocators[bits]._free, dtype=torch.long)
            free = free[free < len(pool.storage)]
            pool.storage.index_fill_(0, free, 0xFF if bits.packed else torch.nan)
