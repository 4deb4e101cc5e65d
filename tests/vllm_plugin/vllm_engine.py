"""A layer inside vLLM as far as a CPU goes: vLLM's configuration, layers, accounting, views of its
buffer and builders of metadata are its own; only the platform and flash attention are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from oscar_mm.vllm_plugin import additional_config
from oscar_mm.vllm_plugin import backend as plugin
from tests.vllm_plugin.requests import HEAD_DIM, HEADS, KV_HEADS, Layer, Request

Configure = Callable[..., VllmConfig]
"""Makes a configuration and sets it as the current one; arguments are those of ``configuration``,
but the folder."""
NEWER = hasattr(AttentionBackend, "customize_spec")
ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
LONGEST = 1000


class GpuLike(Platform):
    """A CPU that says that it is a GPU of compute capability 9.0 where backends are chosen."""

    _enum = PlatformEnum.CPU
    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    capability = DeviceCapability(9, 0)

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def import_kernels(cls) -> None:
        pass

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return cls.capability

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "a CPU"

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """As vLLM's platform of CUDA does with a backend that the user named."""
        options = attn_selector_config._asdict()
        chosen = selected_backend.get_class()
        if reasons := chosen.validate_configuration(device_capability=cls.capability, **options):
            raise ValueError(f"Reason: {reasons}")
        return selected_backend.get_path()


def configuration(
    folder: Path,
    policy: str = "standard",
    drafts: int = 0,
    checkpoint: Path | None = None,
    prefixes: bool = True,
) -> VllmConfig:
    """Return the configuration of a small model, for requests of up to ``LONGEST`` tokens.

    Args:
        folder: for the files of the model.
        policy: as in `--additional-config`.
        drafts: tokens of speculative decoding, by n-grams or by the checkpoint's own module.
        checkpoint: folder of another model.
        prefixes: whether vLLM caches prefixes.
    """
    if checkpoint is None:
        (folder / "config.json").write_text(json.dumps(ARCHITECTURE))
    path = str(checkpoint or folder)
    model = ModelConfig(
        model=path,
        tokenizer=path,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=LONGEST,
        limit_mm_per_prompt={"image": 0, "video": 0},
    )
    scheduler = SchedulerConfig(
        max_model_len=LONGEST,
        is_encoder_decoder=False,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
    )
    speculation = drafts and SpeculativeConfig(
        method="ngram" if checkpoint is None else "mtp",
        num_speculative_tokens=drafts,
        prompt_lookup_max=4,
        target_model_config=model,
        target_parallel_config=ParallelConfig(),
    )
    return VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=CacheConfig(block_size=128, enable_prefix_caching=prefixes),
        attention_config=AttentionConfig(backend=AttentionBackendEnum.CUSTOM),
        speculative_config=speculation or None,
        additional_config=additional_config(policy),
    )


@contextmanager
def loading() -> Iterator[None]:
    """vLLM's loaders have another default of new tensors."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Parent(nn.Module):
    """Attention of a decoder layer, as models of vLLM have it."""

    def __init__(
        self,
        config: VllmConfig,
        number: int = 0,
        norms: bool = True,
        heads: tuple[int, int, int] = (HEADS, KV_HEADS, HEAD_DIM),
        **options: Any,
    ) -> None:
        super().__init__()
        query_heads, kv_heads, head_dim = heads
        name = f"model.layers.{number}.self_attn.attn"
        options = {"cache_config": config.cache_config, "prefix": name} | options
        sizes = (query_heads, head_dim, head_dim**-0.5, kv_heads)
        with loading():
            self.attn = Attention(*sizes, **options)
            if norms:
                self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)

    def load(self) -> plugin.OscarImpl:
        """What follows on loading weights."""
        with loading():
            self.attn.process_weights_after_loading(torch.bfloat16)
        return self.attn.impl


def spec_of(layer: Attention, config: VllmConfig) -> Any:
    """As vLLM's workers ask for it."""
    spec = layer.get_kv_cache_spec(config)
    if NEWER:
        from vllm.v1.worker.utils import customize_attention_spec

        spec = customize_attention_spec(layer.get_attn_backend(), spec)
    return spec


def plan(config: VllmConfig, specs: dict[str, Any], memory: int) -> Any:
    """As vLLM's engine shares memory out to layers."""
    if not NEWER:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(config, [specs], [memory])[0]
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs

    names = [layout.name for layout in plugin.OscarBackend.supported_kv_cache_layouts()]
    resolve_kv_cache_layout(config, [names], specs.values())
    groups = get_global_kv_cache_groups(config, [specs])
    return get_kv_cache_configs(config, [specs], [memory], groups)[0]


def views_of(config: VllmConfig, layers: list[Attention], memory: int) -> dict[str, torch.Tensor]:
    """Each layer's part of the buffer, as vLLM's workers bind it."""
    specs = {layer.layer_name: spec_of(layer, config) for layer in layers}
    kv_cache = plan(config, specs, memory)
    if NEWER:
        from vllm.v1.worker.utils import allocate_kv_cache

        layout = config.cache_config.get_resolved_kv_cache_layout()
        kernel_blocks = [128] * len(kv_cache.kv_cache_groups)
        return allocate_kv_cache(kv_cache, torch.device("cpu"), layout, kernel_blocks)
    from vllm.v1.worker.gpu.attn_utils import _allocate_kv_cache, _reshape_kv_cache
    from vllm.v1.worker.utils import AttentionGroup

    raw = _allocate_kv_cache(kv_cache, {}, torch.device("cpu"))
    groups = [
        AttentionGroup(layer.get_attn_backend(), [layer.layer_name], specs[layer.layer_name], 0)
        for layer in layers
    ]
    return _reshape_kv_cache(groups, raw, "auto", [128], {}, kv_cache)


class Engine(Layer):
    """A layer, the requests of which go through vLLM's layer and builder of metadata.

    Pages are those of vLLM's buffer, in which what was never written is 255.
    """

    def __init__(self, config: VllmConfig, norms: bool = True, **options: Any) -> None:
        super().__init__(**options)
        parent = Parent(config, norms=norms, heads=(HEADS, KV_HEADS, self.head_dim))
        if norms:
            with torch.no_grad():
                parent.k_norm.weight.uniform_(0.5, 2)
        self.impl, self.layer = parent.load(), parent.attn
        self.parent = parent
        self.attention = self.impl.attention
        self.kv_cache = views_of(config, [parent.attn], 2**21)[parent.attn.layer_name]
        self.pages = plugin.pages_of(self.kv_cache)
        config.cache_config.num_gpu_blocks = len(self.pages) * 128 // config.cache_config.block_size
        self.policy = plugin.OscarBackend.settings.policy
        self.pages.fill_(255)
        spec = spec_of(parent.attn, config)
        names = [parent.attn.layer_name]
        config.model_config.dtype = torch.float32  # as the states of requests here
        self.builder = plugin.OscarMetadataBuilder(spec, names, config, torch.device("cpu"))
        self.spec = spec

    def common(
        self,
        scheduled: list[tuple[Request, int]],
        padding: int = 0,
        rejected: int = 0,
        stored: bool = True,
        **changes: Any,
    ) -> CommonAttentionMetadata:
        """What vLLM's runners say of requests and numbers of tokens.

        Args:
            scheduled: requests and numbers of tokens.
            padding: rows without tokens; slots of padding follow too.
            rejected: how much more than the truth the host takes lengths of requests with a past
                for.
            stored: whether tokens have slots.
            changes: of fields.
        """
        rows, count = len(scheduled) + padding, sum(n for _, n in scheduled)
        most = max(n for _, n in scheduled)
        blocks = torch.zeros(rows, 2 + LONGEST // 128 + 8, dtype=torch.int32)
        lengths, starts = torch.zeros(rows, dtype=torch.int32), [0]
        slots = []
        for row, (request, n) in enumerate(scheduled):
            blocks[row, : len(request.blocks)] = torch.tensor(request.blocks)
            lengths[row] = request.read + n
            places = range(request.read, request.read + n)
            slots += [request.blocks[place // 128] * 128 + place % 128 for place in places]
            starts.append(starts[-1] + n)
        starts += [count] * padding
        slots += [-1] * padding * most
        bounds = lengths + torch.tensor(
            [rejected * bool(r.read) for r, _ in scheduled] + [0] * padding
        )
        host_starts = torch.tensor(starts, dtype=torch.int32)
        fields = {
            "query_start_loc": host_starts.clone(),
            "query_start_loc_cpu": host_starts,
            "seq_lens": lengths,
            "num_reqs": rows,
            "num_actual_tokens": len(slots),
            "max_query_len": most,
            "max_seq_len": int(bounds.max()),
            "block_table_tensor": blocks,
            "slot_mapping": torch.tensor(slots) if stored else torch.full((len(slots),), -1),
            "seq_lens_cpu_upper_bound": bounds,
        }
        return CommonAttentionMetadata(**(fields | changes))

    def run(self, scheduled: list[tuple[Request, int]], **options: Any) -> plugin.OscarMetadata:
        """Build metadata of a step, attend, and compare with attention's definition."""
        common = self.common(scheduled, **options)
        metadata = self.builder.build(0, common)
        tokens = len(common.slot_mapping)
        count = sum(n for _, n in scheduled)
        states = []
        for side in range(3):
            of_all = [r.states[side][r.read : r.read + n] for r, n in scheduled]
            padding = of_all[0].new_full((tokens - count, *of_all[0].shape[1:]), torch.nan)
            states.append(torch.cat([*of_all, padding]))
        output = torch.full_like(states[0], torch.nan)
        self.impl.forward(self.layer, *states, self.kv_cache, metadata, output)
        at = 0
        for request, n in scheduled:
            found = output[at : at + n]
            request.outputs.append(found)
            request.read += n
            at += n
            if options.get("stored", True):
                expected = self.expected(request, request.read - n, request.read)
                error = (found.double() - expected).norm() / expected.norm()
                assert error < 1e-4, (request.read, n)
        return metadata
