"""KV connector for vLLM that replaces the prefill of every prompt by random values in the KV cache,
so that decoding starts immediately at any context length."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
)

_BLOCKS_AT_ONCE = 1024
_SMALL = 0xBF
"""Mask that clears the top exponent bit, so that no 8-bit or 16-bit number is NaN, or 2 or more."""


class FilledCache(DecodeBenchConnector):
    """Connector that fills the full cache when it is created, instead of each request's blocks."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Fill the caches of all layers."""
        super().register_kv_caches(kv_caches)
        for cache in kv_caches.values():
            for part in cache.split(_BLOCKS_AT_ONCE):
                part.view(torch.uint8).random_(0, 256).bitwise_and_(_SMALL)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing, because the cache has already been filled."""
