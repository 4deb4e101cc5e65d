"""The plugin inside vLLM as far as a CPU goes: vLLM's configuration, layers, accounting, views of
its buffer and builders of metadata are its own; only the platform and flash attention are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

vllm = pytest.importorskip("vllm")

from vllm import platforms  # noqa: E402
from vllm.config import (  # noqa: E402
    AttentionConfig,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention  # noqa: E402
from vllm.model_executor.models import llama, qwen3  # noqa: E402
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum  # noqa: E402
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import _cached_get_attn_backend  # noqa: E402
from vllm.v1.worker.ubatch_utils import (  # noqa: E402
    maybe_create_ubatch_slices,
    split_attn_metadata,
)

from oscar_mm.errors import InputError  # noqa: E402
from oscar_mm.quant.balance import sigma_from_norms  # noqa: E402
from oscar_mm.vllm_plugin import backend as plugin  # noqa: E402
from oscar_mm.vllm_plugin import register  # noqa: E402
from tests.vllm_plugin.requests import HEAD_DIM, HEADS, KV_HEADS, Layer, Request  # noqa: E402
from tests.vllm_plugin.requests import exact_attention as exact_flash  # noqa: E402

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


@pytest.fixture(autouse=True)
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_current_platform", GpuLike())
    monkeypatch.setattr(plugin, "flash_attention", exact_flash)
    monkeypatch.setattr(plugin.OscarBackend, "settings", plugin.OscarBackend.settings)
    _cached_get_attn_backend.cache_clear()
    register()


Configure = Callable[..., VllmConfig]


@pytest.fixture
def configure(tmp_path: Path) -> Iterator[Configure]:
    """A function that makes a configuration and sets it as the current one."""
    contexts = []

    def make(policy: str = "standard", drafts: int = 0) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURE))
        path = str(tmp_path)
        model = ModelConfig(
            model=path,
            tokenizer=path,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=LONGEST,
        )
        scheduler = SchedulerConfig(
            max_model_len=LONGEST,
            is_encoder_decoder=False,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
        )
        speculation = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=max(drafts, 1),
            prompt_lookup_max=4,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
        config = VllmConfig(
            model_config=model,
            scheduler_config=scheduler,
            cache_config=CacheConfig(block_size=128),
            attention_config=AttentionConfig(backend=AttentionBackendEnum.CUSTOM),
            speculative_config=speculation if drafts else None,
            additional_config={"oscar_mm": {"policy": policy}},
        )
        contexts.append(set_current_vllm_config(config))
        contexts[-1].__enter__()
        return config

    yield make
    for context in reversed(contexts):
        context.__exit__(None, None, None)


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


def test_plugin_is_found() -> None:
    found = entry_points(group="vllm.general_plugins", name="oscar_mm")
    assert {point.load() for point in found} == {register}
    register()
    assert AttentionBackendEnum.CUSTOM.get_class() is plugin.OscarBackend


ACCEPTED = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": None,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(8, 0),
    "attn_type": "decoder",
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"head_size": 64},
        {"dtype": torch.float16},
        {"kv_cache_dtype": "bfloat16"},
        {"block_size": 128},
        {"block_size": 256},
        {"device_capability": DeviceCapability(10, 0)},
        {"use_kv_connector": True},
    ],
)
def test_configurations_that_are_accepted(change: dict) -> None:
    assert plugin.OscarBackend.validate_configuration(**(ACCEPTED | change)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_size": 96}, "head_size"),
        ({"head_size": 256}, "head_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"block_size": 16}, "block_size"),
        ({"use_mla": True}, "MLA"),
        ({"has_sink": True}, "sinks"),
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"use_non_causal": True}, "non-causal"),
        *[
            pytest.param({option: True}, words, marks=pytest.mark.skipif(not NEWER, reason="new"))
            for option, words in (
                ("has_sliding_window", "sliding window"),
                ("use_adaptive_verification", "query lens"),
                ("use_dcp", "DCP"),
                ("use_pcp", "PCP"),
                ("use_rswa", "R-SWA"),
            )
        ],
    ],
)
def test_configurations_that_are_refused(change: dict, words: str) -> None:
    reasons = plugin.OscarBackend.validate_configuration(**(ACCEPTED | change))
    assert len(reasons) == 1 and words in reasons[0]


def test_a_layer_balances_by_the_norms_of_its_parent(configure: Configure) -> None:
    parent = Parent(configure())
    assert isinstance(parent.attn.impl, plugin.OscarImpl)
    with torch.no_grad():
        parent.k_norm.weight.uniform_(0.5, 4)
    attention = parent.load().attention
    assert torch.equal(attention.sigma, sigma_from_norms(parent.q_norm, parent.k_norm, HEAD_DIM))
    assert attention.sigma.dtype == torch.float32 and not attention.waits
    # Weights that are loaded anew change the tensor that captured graphs read.
    address = attention.sigma.data_ptr()
    with torch.no_grad():
        parent.k_norm.weight.mul_(torch.linspace(1, 2, HEAD_DIM))
    before = attention.sigma.clone()
    parent.load()
    assert attention.sigma.data_ptr() == address and not torch.equal(attention.sigma, before)


def test_weights_are_loaded_anew_outside_of_a_configuration(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = Parent(configure())
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", None)
    parent.load()


def test_a_layer_without_norms_waits_for_a_prompt(configure: Configure) -> None:
    parent = Parent(configure(), norms=False)
    attention = parent.load().attention
    assert attention.waits and attention.sigma.dtype == torch.float32
    sigma = attention.sigma
    sigma[:], attention.waits = 2, False
    parent.load()
    assert attention.sigma is sigma and (sigma == 2).all() and not attention.waits


@pytest.mark.parametrize("norms", [True, False])
def test_balancing_lasts_while_vllm_sleeps(norms: bool, configure: Configure) -> None:
    """vLLM keeps the buffers of a model, and puts them back in place."""
    parent = Parent(configure(), norms=norms)
    attention = parent.load().attention
    buffers = dict(parent.named_buffers())
    assert any(buffer is attention.sigma for buffer in buffers.values())
    assert not any("balancing" in name for name in parent.state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alibi_slopes": [1.0] * HEADS}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "capped logits"),
        ({"per_layer_sliding_window": 128}, "sliding windows"),
        ({"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"}, "share another's"),
        ({"sinks": torch.zeros(HEADS)}, "sinks"),
        ({"attn_type": "encoder_only"}, "type"),
    ],
)
def test_layers_that_are_refused(options: dict, words: str, configure: Configure) -> None:
    with pytest.raises(InputError, match=f"does not support.*{words}"):
        Parent(configure(), 1, attn_backend=plugin.OscarBackend, **options)


def test_kinds_of_layers_that_are_refused(configure: Configure) -> None:
    """They have masks and caches of their own, and say so to no backend."""
    parent = Parent(configure())
    sizes = (HEADS, HEAD_DIM, HEAD_DIM**-0.5, 128, KV_HEADS)
    options = {"cache_config": vllm.config.get_current_vllm_config().cache_config}
    with loading():
        parent.attn = ChunkedLocalAttention(*sizes, prefix="model.layers.1.attn", **options)
    with pytest.raises(InputError, match="layers of ChunkedLocalAttention"):
        parent.load()


def test_layers_outside_of_modules_are_refused(configure: Configure) -> None:
    """vLLM tells nobody that their weights are loaded."""
    config = configure()
    layer = Parent(config).attn
    spec = spec_of(layer, config)
    with pytest.raises(InputError, match="--model-impl transformers"):
        plugin.OscarMetadataBuilder(spec, [layer.layer_name], config, torch.device("cpu"))


def test_attention_of_models(configure: Configure, tmp_path: Path) -> None:
    """Decoder layers as vLLM's models of Qwen3 and Llama have them."""
    config = configure()
    world = (1, 0, f"file://{tmp_path / 'world'}", 0, "gloo")
    parallel_state.init_distributed_environment(*world)
    parallel_state.initialize_model_parallel()
    try:
        model, cache = config.model_config.hf_config, config.cache_config
        with loading():
            normed = qwen3.Qwen3DecoderLayer(model, cache, prefix="model.layers.0")
            plain = llama.LlamaDecoderLayer(config, prefix="model.layers.1")
            for layer, waits in ((normed, False), (plain, True)):
                impl = layer.self_attn.attn.impl
                layer.self_attn.attn.process_weights_after_loading(torch.bfloat16)
                assert isinstance(impl, plugin.OscarImpl) and impl.attention.waits is waits
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def test_cache_dtypes_that_are_refused(configure: Configure) -> None:
    config = configure()
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(InputError, match="--kv-cache-dtype fp8"):
        Parent(config, attn_backend=plugin.OscarBackend)
    with pytest.raises(ValueError, match="kv_cache_dtype not supported"):
        Parent(config)
    config.cache_config.cache_dtype = "bfloat16"
    Parent(config)


def test_hybrid_models_are_refused(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure()
    monkeypatch.setattr(type(config.model_config), "is_hybrid", True)
    with pytest.raises(InputError, match="hybrid models"):
        Parent(config)


@pytest.mark.parametrize(
    ("policy", "ratio"),
    [("standard", 5.69), ("standard:bits=2", 6.92), ("standard:bits=4/2", 4.83)],
)
def test_accounting(policy: str, ratio: float, configure: Configure) -> None:
    """Blocks that vLLM finds room for, and how many more than in 16 bit."""
    config = configure(policy)
    sizes = (32, 8, 128)
    layers = [Parent(config, number, heads=sizes) for number in range(2)]
    memory, page_bytes = 2**30, 0
    for layer in layers:
        page_bytes = layer.load().attention._page_format.page_bytes
    specs = {layer.attn.layer_name: spec_of(layer.attn, config) for layer in layers}
    assert {spec.page_size_bytes for spec in specs.values()} == {page_bytes}
    assert {spec.block_size for spec in specs.values()} == {128}
    assert plan(config, specs, memory).num_blocks == memory // (2 * page_bytes)
    assert 128 * 8 * 2 * 128 * 2 / page_bytes == pytest.approx(ratio, abs=0.01)


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


@pytest.mark.parametrize("block_size", [128, 256])
@pytest.mark.parametrize("second", [(HEADS, KV_HEADS, HEAD_DIM), (4, 4, 64), (4, 2, 128)])
def test_pages_follow_each_other(second: tuple, block_size: int, configure: Configure) -> None:
    """Page i of a layer begins at i * page_bytes, also where another layer has other pages."""
    config = configure()
    config.cache_config.block_size = block_size
    parents = [Parent(config, 0), Parent(config, 1, heads=second)]
    for parent in parents:
        parent.load()
    views = views_of(config, [parent.attn for parent in parents], 2**22)
    for parent in parents:
        page_bytes = parent.attn.impl.attention._page_format.page_bytes
        pages = plugin.pages_of(views[parent.attn.layer_name])
        assert pages.dtype == torch.uint8 and pages.shape[1] == page_bytes
        assert pages.is_contiguous() and len(pages) > 8 and len(pages) % (block_size // 128) == 0


class Engine(Layer):
    """A layer, the requests of which go through vLLM's layer and builder of metadata.

    Pages are those of vLLM's buffer, in which what was never written is 255.
    """

    def __init__(self, config: VllmConfig, norms: bool = True, **options: Any) -> None:
        super().__init__(**options)
        parent = Parent(config, norms=norms)
        if norms:
            with torch.no_grad():
                parent.k_norm.weight.uniform_(0.5, 2)
        self.impl, self.layer = parent.load(), parent.attn
        self.parent = parent
        self.attention = self.impl.attention
        self.kv_cache = views_of(config, [parent.attn], 2**21)[parent.attn.layer_name]
        self.pages = plugin.pages_of(self.kv_cache)
        self.pages.fill_(255)
        spec = spec_of(parent.attn, config)
        names = [parent.attn.layer_name]
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


@pytest.fixture
def engine(configure: Configure) -> Engine:
    return Engine(configure())


@pytest.fixture
def speculating(configure: Configure) -> Engine:
    """Requests that decode have four tokens."""
    return Engine(configure(drafts=3))


def test_steps(engine: Engine) -> None:
    """Prompts with and without a past, mixed with requests that decode, and padded decoding."""
    first, second, third = engine.request(400), engine.request(500), engine.request(300)
    step = engine.run([(first, 137), (second, 20)])
    assert not step.decodes and [r.past for r in step.readings] == [None]
    step = engine.run([(first, 1), (second, 129), (third, 40)])
    assert step.decodes == 1 and [r.past is None for r in step.readings] == [False, True]
    step = engine.run([(first, 1), (second, 1), (third, 1)], padding=5)
    step = engine.run([(first, 1), (third, 1)], padding=1, seq_lens_cpu_upper_bound=None)
    first.read, third.read = first.read - 1, third.read - 1
    step = engine.run([(first, 1), (second, 1), (third, 1)], padding=5)
    assert step.decodes == 8 and not step.readings
    for _ in range(130):
        engine.run([(third, 1), (first, 1)])
    engine.run([(third, 1), (second, 31), (first, 1)])


def test_prompt_of_one_token(engine: Engine) -> None:
    request = engine.request(200)
    step = engine.run([(request, 1)])
    assert step.decodes == 1
    engine.run([(request, 100)])


def test_rows_without_tokens_in_a_mixed_step(engine: Engine) -> None:
    first, second = engine.request(300), engine.request(300)
    engine.run([(first, 50), (second, 60)])
    step = engine.run([(first, 1), (second, 100)], padding=3)
    assert [reading.tokens for reading in step.readings] == [slice(1, 101)]


def test_wide_block_tables_and_long_bounds(engine: Engine) -> None:
    """Of a request at the longest length vLLM's bound counts drafts that were rejected."""
    request = engine.request(LONGEST)
    engine.run([(request, LONGEST - 10)])
    engine.run([(request, 4)], rejected=200)


def test_no_bounds_on_the_host(engine: Engine) -> None:
    request = engine.request(300)
    engine.run([(request, 150)])
    engine.run([(request, 50)], seq_lens_cpu_upper_bound=None)


def test_speculation(speculating: Engine) -> None:
    first, second = speculating.request(400), speculating.request(400)
    speculating.run([(first, 126), (second, 60)])
    step = speculating.run([(first, 4), (second, 4)], padding=2)
    assert (step.decodes, step.query_tokens) == (4, 4)
    first.read, second.read = first.read - 3, second.read - 1  # drafts that were rejected
    step = speculating.run([(first, 4), (second, 4)], rejected=3)
    assert (step.decodes, step.query_tokens) == (2, 4)
    # Drafters decode one token a step; vLLM may say the length from before drafts were rejected.
    step = speculating.run([(first, 1), (second, 1)], max_query_len=4)
    assert (step.decodes, step.query_tokens) == (2, 1)
    step = speculating.run([(first, 2), (second, 2)], max_query_len=4)
    assert (step.decodes, step.query_tokens) == (2, 2)


@pytest.mark.parametrize("rejected", [0, 3, 130])
def test_uneven_speculation(rejected: int, speculating: Engine) -> None:
    """Requests with other numbers of drafts are read as prompts; how long they are, only the device
    knows."""
    first, second, third = (speculating.request(500) for _ in range(3))
    speculating.run([(first, 126), (second, 255), (third, 128)])
    for _ in range(3):
        step = speculating.run([(first, 2), (second, 4), (third, 3)], rejected=rejected)
        assert (step.decodes, step.query_tokens) == (1, 2) and len(step.readings) == 1
    # A chunk of a prompt that is shorter than a step of decoding.
    short = speculating.request(90)
    speculating.run([(first, 4), (second, 4), (short, 2), (third, 100)], rejected=rejected)


def test_runs_that_store_nothing(configure: Configure) -> None:
    engine = Engine(configure(), norms=False)
    request, other = engine.request(300), engine.request(300)
    for scheduled in ([(request, 100)], [(request, 1), (other, 30)], [(request, 1), (other, 1)]):
        engine.run(scheduled, stored=False)
        request.read = other.read = 0
    assert engine.attention.waits and (engine.pages == 255).all()


def test_the_first_prompt_balances(configure: Configure) -> None:
    engine = Engine(configure(), norms=False)
    request = engine.request(300)
    engine.run([(request, 100)])
    assert not engine.attention.waits and not (engine.attention.sigma == 1).all()
    sigma = engine.attention.sigma.clone()
    engine.run([(request, 1), (engine.request(200), 150)])
    assert torch.equal(engine.attention.sigma, sigma)


def test_the_warm_up_does_not_balance(configure: Configure) -> None:
    """vLLM's warm-up reads prompts of a few tokens into pages, and decodes."""
    engine = Engine(configure(), norms=False)
    warm_up = {"__name__": "vllm.v1.worker.gpu.warmup", "engine": engine}
    exec("def run(scheduled): engine.run(scheduled)", warm_up)
    requests = [engine.request(20) for _ in range(3)]
    for tokens in (2, 1, 1):
        warm_up["run"]([(request, tokens) for request in requests])
        assert engine.attention.waits and (engine.attention.sigma == 1).all()
    engine.run([(engine.request(200), 150)])
    assert not engine.attention.waits


def test_prompts_too_short_to_balance_by(configure: Configure) -> None:
    """A prompt of one token decodes: what it stored stays as it is when a longer one comes."""
    engine = Engine(configure(), norms=False)
    short = engine.request(200)
    for _ in range(3):
        engine.run([(short, 1)])
    assert not engine.attention.waits
    engine.run([(short, 1), (engine.request(200), 150)])
    assert (engine.attention.sigma == 1).all()


@pytest.mark.parametrize("tokens", [(1, 1, 1, 1), (1, 1, 200, 70), (100, 20)])
def test_two_batches_at_a_time(tokens: tuple, engine: Engine) -> None:
    """Micro-batches overlap, each with a builder of its own; a request may be in both."""
    config = vllm.config.get_current_vllm_config()
    names = [engine.layer.layer_name]
    second = plugin.OscarMetadataBuilder(engine.spec, names, config, torch.device("cpu"))
    requests = [engine.request(400) for _ in tokens]
    engine.run([(request, 140) for request in requests])
    common = engine.common(list(zip(requests, tokens, strict=True)))
    slices, _ = maybe_create_ubatch_slices(True, np.array(tokens), sum(tokens), len(tokens), 2)
    parts = split_attn_metadata(slices, common)
    metadata = [
        builder.build(0, part)
        for builder, part in zip((engine.builder, second), parts, strict=True)
    ]
    states = [
        torch.cat([r.states[side][140 : 140 + n] for r, n in zip(requests, tokens, strict=True)])
        for side in range(3)
    ]
    output = torch.full_like(states[0], torch.nan)
    for part, step in zip(slices, metadata, strict=True):
        own = [x[part.token_slice] for x in states]
        engine.impl.forward(engine.layer, *own, engine.kv_cache, step, output[part.token_slice])
    half, at = sum(tokens) // 2, 0
    for request, n in zip(requests, tokens, strict=True):
        cut = min(max(half - at, 0), n)  # the tokens of it in the first micro-batch
        for start, stop in ((0, cut), (cut, n)):
            expected = engine.expected(request, 140 + start, 140 + stop)
            error = (output[at + start : at + stop].double() - expected).norm()
            assert error <= 1e-4 * expected.norm()
        at += n


def test_a_run_that_measures_memory(engine: Engine) -> None:
    states = [x[:10] for x in engine.request(20).states]
    output = torch.full_like(states[0], torch.nan)
    found = engine.impl.forward(engine.layer, *states, torch.tensor([]), None, output)
    assert found is output and (output == 0).all()


def test_more_than_tables_have_room_for(engine: Engine) -> None:
    requests = [engine.request(1) for _ in range(9)]
    with pytest.raises(ValueError, match="9 requests of 9 tokens"):
        engine.builder.build(0, engine.common([(request, 1) for request in requests]))


def test_too_many_drafts(configure: Configure) -> None:
    with pytest.raises(InputError, match="17 tokens a step: must be at most 16"):
        Engine(configure(drafts=16))


def test_pages_of_another_process(configure: Configure) -> None:
    config = configure()
    object.__setattr__(config, "kv_transfer_config", SimpleNamespace(is_kv_transfer_instance=True))
    Parent(config).load()
    with pytest.raises(InputError, match="policy 'standard:balance=none'"):
        Parent(config, 1, norms=False).load()
