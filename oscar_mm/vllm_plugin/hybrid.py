"""Block size of hybrid models in vLLM versions that do not ask the backend for its bytes per token.

A hybrid model's attention blocks and the states of its other layers share one buffer, so both must
have the same number of bytes. vLLM 0.25 chooses the block size as if attention had 16-bit pages;
newer versions ask the backend (``customize_spec``).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from math import lcm
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms.interface import Platform
from vllm.v1.kv_cache_interface import MambaSpec

from oscar_mm.errors import InputError


def align_blocks(config: VllmConfig) -> None:
    """Set the smallest block size, in tokens, with which a block can hold a layer's states.

    Args:
        config: vLLM's configuration, with the layers of the loaded model. This changes its cache
            configuration: block size in tokens, and bytes to which states are padded.

    Raises:
        InputError: if attention layers need different numbers of bytes per token.
    """
    cache = config.cache_config
    layers = config.compilation_config.static_forward_context.values()
    specs = [x.get_kv_cache_spec(config) for x in layers if isinstance(x, Attention)]
    token_bytes, *others = {x.page_size_bytes // x.block_size for x in specs if x is not None}
    if others:
        raise InputError(
            "--attention-backend CUSTOM (oscar_mm): attention layers of a hybrid model and of its "
            'drafts must have pages of one size; add "attention_backend": "CUSTOM" to '
            "--speculative-config"
        )
    state_bytes = max(_state_bytes(x) for x in layers if isinstance(x, MambaBase))
    step = cache.block_size
    if cache.mamba_cache_mode == "all":  # States are cached where a chunk of their kernels ends.
        step = lcm(step, cache.mamba_block_size or config.model_config.get_mamba_chunk_size() or 1)
    cache.block_size = step * -(-state_bytes // (step * token_bytes))
    if cache.mamba_cache_mode in ("all", "align"):
        cache.mamba_block_size = cache.block_size
    cache.mamba_page_size_padded = cache.block_size * token_bytes


def _state_bytes(layer: Any) -> int:
    """Return the bytes of one copy of a layer's states, without padding."""
    shapes, dtypes = tuple(layer.get_state_shape()), layer.get_state_dtype()
    return MambaSpec(shapes=shapes, dtypes=dtypes, block_size=-1).page_size_bytes


def align_for(backend: type) -> None:
    """Make vLLM call ``align_blocks`` for hybrid models with a backend.

    Further calls with the same backend change nothing.

    Args:
        backend: attention backend of the model.
    """
    before = Platform._align_hybrid_block_size.__func__
    if getattr(before, "backend", None) is backend:
        return

    def align(cls: type[Platform], vllm_config: VllmConfig, backend_cls: type) -> None:
        if backend_cls is backend:
            align_blocks(vllm_config)
        else:
            before(cls, vllm_config, backend_cls)

    align.backend = backend
    Platform._align_hybrid_block_size = classmethod(align)
