"""vLLM with packed pages: the plugin that vLLM finds by its entry point.

`vllm serve MODEL --attention-backend CUSTOM` takes this attention. Every token is packed as soon as
it is read, into stream pages that are vLLM's blocks: 128 tokens each, complete in themselves, so
that blocks are shared, swapped and computed anew as vLLM likes.

Layers: ``settings`` says how tokens are packed, ``step`` makes the tables of a step, ``attention``
stores and attends, ``backend`` is what vLLM calls.
"""


def register() -> None:
    """Make the attention known to vLLM, in each of its processes; may be called again."""
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    register_backend(AttentionBackendEnum.CUSTOM, "oscar_mm.vllm_plugin.backend.OscarBackend")
