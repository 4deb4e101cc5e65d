"""Caches of one layer with random keys and values, filled as attention "oscar" fills them."""

from __future__ import annotations

import torch

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.step import Step
from oscar_mm.modality import Modality

_ROUND, _ROUND_TEXT = 512, 64
_BALANCE_TOKENS = 1024
"""Tokens whose queries balancing sees."""
_PIECE_ELEMENTS = 1 << 26
"""Elements of the keys that are stored at a time: 128 MB of bfloat16."""


def text_and_images(tokens: int) -> torch.Tensor:
    """(tokens,) modality ids: rounds of 64 text and 448 image tokens."""
    in_round = torch.arange(tokens) % _ROUND
    return torch.where(in_round < _ROUND_TEXT, int(Modality.TEXT), int(Modality.IMAGE))


def begin_step(
    cache: OscarCache, keys: torch.Tensor, values: torch.Tensor
) -> tuple[OscarLayer, Step]:
    """Bring new tokens to layer 0; returns the layer and the step that it has to carry out."""
    cache.attend_packed(None)
    cache.update(keys, values, 0)
    return cache.layers[0], cache.ledger.last


def store_tokens(
    cache: OscarCache,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor | None = None,
) -> None:
    """Store new tokens in layer 0; queries (of the first tokens) settle the balancing."""
    layer, step = begin_step(cache, keys, values)
    if queries is not None:
        layer.settle_basis(keys[:, :, : queries.shape[2]], queries)
    layer.append(keys, values, step)


def synthetic_cache(
    policy: str | KVPolicy,
    shape: tuple[int, int, int, int],
    query_heads: int,
    generator: torch.Generator,
    answer: int = 0,
) -> OscarCache:
    """A cache of one layer that holds a prompt of text and images, random and bfloat16.

    Args:
        policy: a KVPolicy or the name of a preset.
        shape: batch, KV heads, tokens, head_dim.
        query_heads: heads of the queries that settle the balancing.
        generator: makes the random numbers; its device is the cache's.
        answer: how many of the tokens come one at a time, as text, after the prompt.
    """
    batch, kv_heads, tokens, head_dim = shape

    def normal(heads: int, count: int) -> torch.Tensor:
        size = (batch, heads, count, head_dim)
        device = generator.device
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    cache = OscarCache(policy)
    prompt = tokens - answer
    cache.expect(text_and_images(prompt).expand(batch, prompt))
    piece = max(_BALANCE_TOKENS, _PIECE_ELEMENTS // (batch * kv_heads * head_dim))
    queries: torch.Tensor | None = normal(query_heads, min(_BALANCE_TOKENS, prompt))
    for start in range(0, prompt, piece):
        count = min(piece, prompt - start)
        store_tokens(cache, normal(kv_heads, count), normal(kv_heads, count), queries)
        queries = None
    for _ in range(answer):
        store_tokens(cache, normal(kv_heads, 1), normal(kv_heads, 1))
    return cache
