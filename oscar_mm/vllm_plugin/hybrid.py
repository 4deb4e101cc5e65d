"""Block size of hybrid models in vLLM versions that do not ask the backend for its bytes per token.

A hybrid model's attention blocks and the states of its other layers share one buffer, so both must
have the same number of bytes. vLLM 0.25 chooses the block size as if attention had 16-bit pages,
before it asks the layers what they store. Layers with states therefore set the block size again
when vLLM asks them. Newer versions ask the backend (``customize_spec``).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from functools import partial
from math import lcm
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import MambaSpec

from oscar_mm.errors import InputError
from oscar_mm.pages.layout import PAGE_TOKENS


def align_states(config: VllmConfig) -> None:
    """Make layers with states call ``align_blocks`` before they tell vLLM what they store.

    Further calls change nothing.

    Args:
        config: vLLM's configuration, with the layers of the loaded model.
    """
    for layer in config.compilation_config.static_forward_context.values():
        if isinstance(layer, MambaBase):
            layer.get_kv_cache_spec = partial(_aligned_spec, layer)


def align_blocks(config: VllmConfig) -> None:
    """Set the smallest block size, in tokens, with which a block can hold a layer's states.

    Further calls change nothing, nor do calls for a model without states.

    Args:
        config: vLLM's configuration, with the layers of the loaded model. This changes its cache
            configuration: block size in tokens, and bytes to which states are padded.

    Raises:
        InputError: if attention layers need different numbers of bytes per token.
    """
    cache = config.cache_config
    layers = config.compilation_config.static_forward_context.values()
    states = [x for x in layers if isinstance(x, MambaBase)]
    if not states:
        return
    per_token = {_token_bytes(x, config) for x in layers if isinstance(x, Attention)} - {0}
    token_bytes, *others = per_token
    if others:
        raise InputError(
            "--attention-backend CUSTOM (oscar_mm): attention layers of a hybrid model and of its "
            'drafts must have pages of one size; add "attention_backend": "CUSTOM" to '
            "--speculative-config"
        )
    step = PAGE_TOKENS
    if cache.mamba_cache_mode == "all":  # States are cached where a chunk of their kernels ends.
        chunk = cache.mamba_block_size if cache.user_specified_mamba_block_size else None
        step = lcm(step, chunk or config.model_config.get_mamba_chunk_size() or 1)
    cache.block_size = step * -(-max(map(_state_bytes, states)) // (step * token_bytes))
    if cache.mamba_cache_mode in ("all", "align"):
        cache.mamba_block_size = cache.block_size
    cache.mamba_page_size_padded = cache.block_size * token_bytes


def _aligned_spec(layer: Any, vllm_config: VllmConfig) -> Any:
    """Return the spec of a layer with states, in blocks that ``align_blocks`` has set."""
    align_blocks(vllm_config)
    return type(layer).get_kv_cache_spec(layer, vllm_config)


def _token_bytes(layer: Any, config: VllmConfig) -> int:
    """Return the bytes per token of an attention layer; 0 if it stores nothing."""
    own = getattr(layer.impl, "token_bytes", None)
    if own is not None:
        return own
    spec = layer.get_kv_cache_spec(config)
    return 0 if spec is None else spec.page_size_bytes // spec.block_size


def _state_bytes(layer: Any) -> int:
    """Return the bytes of one copy of a layer's states, without padding."""
    shapes, dtypes = tuple(layer.get_state_shape()), layer.get_state_dtype()
    return MambaSpec(shapes=shapes, dtypes=dtypes, block_size=-1).page_size_bytes
