"""Interface to vLLM: the backend, its metadata builder, and a layer's attention.

The most recent and the first tokens of each request are also stored in 16-bit precision, in a ring
per request (``oscar_mm.ops.rings``). The device finds the rings by the blocks of a step's requests,
so this does not depend on vLLM's model runners, which number requests in different ways and move
rows.

Requires vLLM 0.25 or newer; tested with 0.25 and 0.33. Versions differ in how they get the block
size: newer ones ask the backend (``customize_spec``), older ones the layer
(``OscarImpl.process_weights_after_loading``), after vLLM has set another block size for hybrid
models (``oscar_mm.vllm_plugin.hybrid``).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import CUDAGraphMode, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from oscar_mm.errors import InputError
from oscar_mm.kernels.launch import ELEMENTS
from oscar_mm.ops.decode import MAX_QUERY_TOKENS
from oscar_mm.ops.rings import RingShape
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import KVPolicy
from oscar_mm.quant.balance import rotary_angles, sigma_of_layer
from oscar_mm.vllm_plugin import Settings, hybrid
from oscar_mm.vllm_plugin.attention import PagedAttention
from oscar_mm.vllm_plugin.step import Reading, Rings, Step, StepTables

_MIN_CAPABILITY = (8, 0)
_ASKS_BACKEND = hasattr(AttentionBackend, "customize_spec")
"""Whether this version of vLLM asks the backend for the size of pages."""
_BALANCING = "oscar_mm_balancing"
"""Name of a layer's buffer for its balancing."""


class OscarMetadata(Step, AttentionMetadata):
    """The requests of a step."""


class OscarBackend(AttentionBackend):
    """Attention backend over stream pages, which are vLLM's blocks.

    Attributes:
        settings: settings of the model created last, the only one that vLLM's calls on the class
            can refer to.
        config: vLLM's configuration of that model.
    """

    settings: ClassVar[Settings] = Settings.of({})
    config: ClassVar[VllmConfig | None] = None
    supported_dtypes: ClassVar[list[torch.dtype]] = list(ELEMENTS)
    accept_output_buffer = True
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """Return the name of the backend in vLLM's enumeration."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[OscarImpl]:
        """Return the class that implements a layer's attention."""
        return OscarImpl

    @staticmethod
    def get_builder_cls() -> type[OscarMetadataBuilder]:
        """Return the class that builds the tables of a step."""
        return OscarMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int]:
        """Return the supported block sizes: only the number of tokens per page."""
        return [PAGE_TOKENS]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the head sizes with which the plugin has been tested."""
        return [64, 128, 256]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether the kernels run on GPUs of this compute capability."""
        return (capability.major, capability.minor) >= _MIN_CAPABILITY

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: the host must know each request's exact token count (newer vLLM)."""
        return False

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of the pages (older vLLM)."""
        recipe = OscarBackend.settings.recipe(num_kv_heads, head_size)
        return num_blocks, recipe.page_format.page_bytes

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return a layer's spec with the size of our pages (newer vLLM).

        If layers of other backends have larger blocks, our blocks get more tokens, because vLLM
        would pad them otherwise, and our pages must be contiguous.
        """
        size = cls.settings.token_bytes(spec.num_kv_heads, spec.head_size)
        spec = replace(spec, dtype=torch.uint8, state_content_bytes=size)
        if cls.config is None or spec.block_size % PAGE_TOKENS:  # vLLM asks with one token.
            return spec
        page_bytes = spec.page_size_bytes * PAGE_TOKENS // spec.block_size
        tokens = PAGE_TOKENS * -(-_other_block_bytes(cls.config) // page_bytes)
        return replace(spec, block_size=max(spec.block_size, tokens))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the layouts with contiguous blocks (newer vLLM)."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC,)


class OscarMetadataBuilder(AttentionMetadataBuilder[OscarMetadata]):
    """Builds the tables of each step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._max_tokens = int(self.reorder_batch_threshold or 1)
        if self._max_tokens > MAX_QUERY_TOKENS:
            raise InputError(
                f"speculative decoding with {self._max_tokens} tokens a step: must be at most "
                f"{MAX_QUERY_TOKENS} with this attention"
            )
        named = vllm_config.compilation_config.static_forward_context
        self._impls: list[OscarImpl] = [named[name].impl for name in layer_names]
        if not all(impl.is_loaded for impl in self._impls):
            raise _unsupported(["--model-impl transformers or other layers that are not modules"])
        config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        self._longest = config.max_model_len
        pages = -(-self._longest // PAGE_TOKENS) + 1
        rows = max(scheduler.max_num_seqs, *sizes)
        layers = 0 if _takes_layer_by_layer(vllm_config) else len(layer_names)
        rings = self._impls[0].rings(vllm_config, device)
        self._tables = StepTables(
            *(rows, max(scheduler.max_num_batched_tokens, *sizes)),
            *(pages, kv_cache_spec.num_kv_heads, self._impls[0].attention.group, pages, device),
            *(rings, layers),
            stages=not all(impl.is_draft for impl in self._impls),
        )
        for impl in self._impls:
            impl.make_rings(device, config.dtype)
            impl.attention.prepare(device, config.dtype, self._max_tokens)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> OscarMetadata:
        """Build the tables of a step, at the same addresses each time."""
        common = common_attn_metadata
        decodes, readings, _, _ = split_decodes_and_prefills(
            common, decode_threshold=self._max_tokens, require_uniform=True
        )
        host_starts = common.query_start_loc_cpu.numpy()
        # Not max_query_len, which may include rejected drafts.
        tokens = (int(host_starts[1]) or common.max_query_len) if decodes else 1
        lengths = np.zeros(0)
        if readings:
            bounds = common.seq_lens_cpu_upper_bound
            bounds = common.seq_lens.cpu() if bounds is None else bounds
            # An upper bound that includes drafts may exceed the block table.
            lengths = np.minimum(bounds.numpy(), self._longest)
        step = self._tables.step(
            *(common.block_table_tensor, common.seq_lens, common.query_start_loc),
            *(common.slot_mapping, decodes, tokens, host_starts, lengths),
        )
        return OscarMetadata(**vars(step))


class OscarImpl(AttentionImpl[OscarMetadata]):
    """Attention of a vLLM layer.

    Args:
        num_heads, head_size, scale, num_kv_heads, ...: see vLLM's ``AttentionImpl``.

    Attributes:
        attention: implementation of the attention.
        token_bytes: bytes per token of the layer's pages.
        is_loaded: whether vLLM has reported that the weights are loaded.
        is_draft: whether the layer belongs to a draft model, which vLLM creates once the weights of
            the target model are loaded.

    Raises:
        InputError: if pages do not support this kind of layer.
    """

    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        config = get_current_vllm_config()
        parallel = config.parallel_config
        given = {
            "sliding windows": sliding_window,
            "ALiBi": alibi_slopes,
            "capped logits": logits_soft_cap,
            "layers that share another's cache": kv_sharing_target_layer_name,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            f"--kv-cache-dtype {kv_cache_dtype}": kv_cache_dtype
            not in OscarBackend.supported_kv_cache_dtypes,
            "context parallelism": parallel.decode_context_parallel_size > 1
            or parallel.prefill_context_parallel_size > 1,
            **{name: value is not None for name, value in others.items()},
        }
        if refused := [name for name, value in given.items() if value]:
            raise _unsupported(refused)
        OscarBackend.settings = found = Settings.of(config.additional_config)
        OscarBackend.config = config
        self.token_bytes = self.num_kv_heads * found.token_bytes(self.num_kv_heads, head_size)
        self._policy = found.policy
        # Done here, where vLLM's configuration, which may set the version, is available.
        flash = partial(flash_attention, version=get_flash_attn_version(head_size=head_size))
        recipe = found.recipe(self.num_kv_heads, head_size)
        self.attention = PagedAttention(recipe, num_heads, self.scale, flash)
        self._max_past = config.model_config.max_model_len
        self._ring_shape = _ring_shape(config, found.policy)
        self._ring_count = config.scheduler_config.max_num_seqs
        self._rings: Rings | None = None
        self.is_loaded = False
        created = config.compilation_config.static_forward_context.values()
        impls = (getattr(layer, "impl", None) for layer in created)
        self.is_draft = any(isinstance(x, OscarImpl) and x.is_loaded for x in impls)
        # vLLM's layer of this backend, the attention module that contains it, and the decoder
        # layer.
        self._owners: list[weakref.ref[nn.Module]] = []
        self._hook = register_module_module_registration_hook(self._registered)

    def _registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if submodule is not None and getattr(submodule, "impl", None) is self:
            self._owners = [weakref.ref(submodule), weakref.ref(module)]
        elif len(self._owners) == 2 and submodule is self._owners[1]():
            self._owners.append(weakref.ref(module))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Compute the balancing factors from the weights; set the layer's spec unless vLLM gets it
        from the backend."""
        self._hook.remove()
        is_first, self.is_loaded = not self.is_loaded, True
        layer, attention, decoder_layer, *_ = *(owner() for owner in self._owners), None, None, None
        if layer is None:
            return
        if type(layer) is not Attention:  # Other classes may use another mask or other blocks.
            raise _unsupported([f"layers of {type(layer).__name__}"])
        sigma = None
        if self._policy.balances and attention is not None:
            sigma = sigma_of_layer(
                *(decoder_layer, attention, self.head_size, rotary_angles(attention)),
                centered=codec_of(self._policy).centers_keys(self._policy),
            )
        device = next(itertools.chain(layer.buffers(), layer.parameters())).device
        self.attention.balance(sigma, device)
        if is_first:  # Done now, so that vLLM counts this memory as weights.
            self.make_rings(device, act_dtype)
        # A sleeping vLLM keeps only the buffers of layers.
        layer.register_buffer(_BALANCING, self.attention.sigma, persistent=False)
        if is_first and not _ASKS_BACKEND:
            layer.get_kv_cache_spec = self._spec  # pyright: ignore[reportArgumentType]
            hybrid.align_states(get_current_vllm_config())

    def make_rings(self, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate memory for the tokens in the rings of all running requests."""
        places = self._ring_count * self._ring_shape.entries
        self.attention.make_rings(places, device, dtype)

    def rings(self, config: VllmConfig, device: torch.device) -> Rings:
        """Return the requests' rings, which all metadata builders of the layer share.

        The own steps of a draft model neither read nor write rings, because they run ahead of the
        target model's steps. Layers of the draft model may also take part in steps of the target
        model, with its rings.
        """
        layer = self._owners[0]()
        spec = config.cache_config if layer is None else _spec_of(layer, config)
        blocks = (config.cache_config.num_gpu_blocks or 0) * (spec.block_size // PAGE_TOKENS)
        if self._rings is None or self._rings.blocks != blocks:
            shape = self._ring_shape
            shape = RingShape(0, 0, shape.spare) if self.is_draft else shape
            self._rings = Rings(
                *(self._ring_count, shape, blocks, device),
                keeps=config.kv_transfer_config is None,
            )
        return self._rings

    def _spec(self, vllm_config: VllmConfig) -> Any:
        from vllm.v1.kv_cache_interface import TQFullAttentionSpec  # our pages are opaque bytes too

        hybrid.align_blocks(vllm_config)
        return TQFullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size,
            dtype=torch.uint8,
            tq_slot_size=self.token_bytes // self.num_kv_heads,
        )

    def forward(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: OscarMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new keys and values, and attend.

        Args:
            layer: vLLM's layer.
            query: (tokens, query heads, head_dim), after RoPE.
            key, value: (tokens, KV heads, head_dim).
            kv_cache: the layer's pages, in any shape whose first axis is blocks.
            attn_metadata: the step; None in vLLM's memory profiling run.
            output: (tokens, query heads, head_dim), written to.
            output_scale, output_block_scale: None.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("outputs in 8 bits or fewer")
        if attn_metadata is None:
            # Reserve the memory for unpacking the longest past.
            tokens = -(-self._max_past // PAGE_TOKENS) * PAGE_TOKENS
            key.new_empty(2, tokens, self.num_kv_heads, self.head_size)
            return output.fill_(0)
        self.attention(query, key, value, pages_of(kv_cache), attn_metadata, output)
        return output


def _spec_of(layer: Any, config: VllmConfig) -> Any:
    """Return the spec of a layer as vLLM's workers collect it."""
    spec = layer.get_kv_cache_spec(config)
    return layer.get_attn_backend().customize_spec(spec) if spec and _ASKS_BACKEND else spec


def _other_block_bytes(config: VllmConfig) -> int:
    """Return the size of the largest attention block of layers that have another backend, such as
    those with sliding windows; 0 if there are none."""
    layers = config.compilation_config.static_forward_context.values()
    others = (
        _spec_of(layer, config)
        for layer in layers
        if isinstance(layer, Attention) and not isinstance(layer.impl, OscarImpl)
    )
    return max((spec.page_size_bytes for spec in others if spec), default=0)


def _takes_layer_by_layer(config: VllmConfig) -> bool:
    """Return whether a KV connector may read a layer's pages before the next layer attends.

    With full CUDA graphs, decode steps do not call the connector.
    """
    graphs = config.compilation_config.cudagraph_mode
    decodes = None if graphs is None else graphs.decode_mode()
    return config.kv_transfer_config is not None and decodes != CUDAGraphMode.FULL


def _ring_shape(config: VllmConfig, policy: KVPolicy) -> RingShape:
    """Return the shape of the rings of a model's requests."""
    speculation = config.speculative_config
    if speculation is None:
        return RingShape(policy.sinks, policy.window, 1)
    # Drafters that draft in parallel take twice as many tokens.
    max_new = min(1 + 2 * (speculation.num_speculative_tokens or 0), MAX_QUERY_TOKENS)
    return RingShape(policy.sinks, policy.window, max_new)


def _unsupported(names: Iterable[str]) -> InputError:
    return InputError(
        f"--attention-backend CUSTOM (oscar_mm) does not support {', '.join(names)}; "
        "omit the option to use vLLM's own 16-bit attention"
    )


def pages_of(kv_cache: torch.Tensor) -> torch.Tensor:
    """Return the pages of a layer as (pages, page_bytes) uint8.

    Args:
        kv_cache: tensor of any shape and dtype whose first axis is blocks.

    Raises:
        InputError: if the pages are not contiguous.
    """
    pages = kv_cache.view(torch.uint8).view(kv_cache.shape[0], -1)
    if not pages.is_contiguous():
        raise InputError(
            "--attention-backend CUSTOM (oscar_mm) needs contiguous pages, but vLLM pads them, as "
            "it does if layers of the model or of a draft model have blocks of different sizes"
        )
    return pages


def flash_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    reading: Reading,
    *,
    version: int | None,
) -> None:
    """Call the given version of vLLM's flash attention; see
    ``oscar_mm.vllm_plugin.attention.Flash``."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    past = reading.past
    if past is None:
        of_keys = {"cu_seqlens_k": reading.starts, "max_seqlen_k": reading.longest}
    else:
        of_keys = {"seqused_k": past.lengths, "max_seqlen_k": past.longest}
        of_keys["block_table"] = past.table
    flash_attn_varlen_func(
        *(query, keys, values),
        out=output,
        cu_seqlens_q=reading.starts,
        max_seqlen_q=reading.longest,
        softmax_scale=scale,
        causal=True,
        fa_version=version,
        **of_keys,
    )
