"""The plugin as vLLM finds, checks and loads it, and counts and lays out its pages."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

vllm = pytest.importorskip("vllm")

from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers.attention import ChunkedLocalAttention  # noqa: E402
from vllm.model_executor.model_loader import reload  # noqa: E402
from vllm.model_executor.models import llama, qwen3  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from oscar_mm.errors import InputError  # noqa: E402
from oscar_mm.quant.balance import sigma_from_norms  # noqa: E402
from oscar_mm.vllm_plugin import backend as plugin  # noqa: E402
from oscar_mm.vllm_plugin import register  # noqa: E402
from tests.vllm_plugin.vllm_engine import (  # noqa: E402
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    NEWER,
    Configure,
    Parent,
    loading,
    plan,
    spec_of,
    views_of,
)

pytestmark = pytest.mark.usefixtures("gpu_like")


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
        {"head_size": 256},
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
        ({"head_size": 512}, "head_size"),
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
    assert attention.sigma.dtype == torch.float32


def test_weights_are_loaded_anew(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM, outside of a current configuration: captured graphs read the same tensor."""
    config = configure()
    parent = Parent(config)
    reload.record_metadata_for_reloading(parent)
    attention = parent.load().attention
    sigma, before = attention.sigma, attention.sigma.clone()
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", None)
    reload.initialize_layerwise_reload(parent)
    for norm, end in ((parent.q_norm, 1), (parent.k_norm, 5)):
        weight = torch.linspace(1, end, HEAD_DIM).bfloat16()
        norm.weight.weight_loader(norm.weight, weight)
    reload.finalize_layerwise_reload(parent, config.model_config)
    assert attention.sigma is sigma and not torch.equal(sigma, before)
    assert torch.equal(sigma, sigma_from_norms(parent.q_norm, parent.k_norm, HEAD_DIM))
    assert any(buffer is sigma for buffer in parent.buffers())


def test_a_layer_without_norms_is_not_balanced(configure: Configure) -> None:
    assert Parent(configure(), norms=False).load().attention.sigma is None


def test_balancing_lasts_while_vllm_sleeps(configure: Configure) -> None:
    """vLLM keeps the buffers of a model, and puts them back in place."""
    parent = Parent(configure())
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
    """Layers as vLLM has them of Qwen3, balanced by norms, and of Llama, by projections."""
    config = configure()
    world = (1, 0, f"file://{tmp_path / 'world'}", 0, "gloo")
    parallel_state.init_distributed_environment(*world)
    parallel_state.initialize_model_parallel()
    try:
        model, cache = config.model_config.hf_config, config.cache_config
        with loading():
            normed = qwen3.Qwen3DecoderLayer(model, cache, prefix="model.layers.0")
            plain = llama.LlamaDecoderLayer(config, prefix="model.layers.1")
            weight = plain.self_attn.qkv_proj.weight
            with torch.no_grad():
                weight.normal_(generator=torch.Generator().manual_seed(0))
                weight[plain.self_attn.q_size + 5] *= 16  # A channel of the first head's keys.
                plain.input_layernorm.weight.fill_(1)
            for layer, heads in ((normed, 1), (plain, plain.self_attn.num_kv_heads)):
                impl = layer.self_attn.attn.impl
                layer.self_attn.attn.process_weights_after_loading(torch.bfloat16)
                assert isinstance(impl, plugin.OscarImpl)
                assert impl.attention.sigma.shape == (heads, HEAD_DIM)
            first, *others = impl.attention.sigma
            assert first[5] > 2 * first.median()
            assert all(sigma.max() < 2 * sigma.median() for sigma in others)
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


@pytest.mark.parametrize(
    ("policy", "ratio"),
    [("standard", 5.69), ("standard:bits=2", 6.92), ("standard:bits=4/2", 4.83)],
)
def test_accounting(policy: str, ratio: float, configure: Configure) -> None:
    """Blocks that vLLM finds room for, and how many more than in 16-bit precision."""
    config = configure(policy=policy)
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


@pytest.mark.parametrize(
    ("policy", "drafts", "places"),
    [
        ("standard", 0, 4 + 32 + 1),
        ("standard:window=128,sinks=0", 0, 128 + 1),
        ("standard", 3, 4 + 32 + 7),
        ("standard:window=0,sinks=0", 0, 1),
    ],
)
def test_rings_have_memory_once_weights_are_loaded(
    policy: str, drafts: int, places: int, configure: Configure
) -> None:
    """Before vLLM measures what is left for pages; the same tensor after weights are loaded anew,
    as captured graphs have its address."""
    config = configure(policy=policy, drafts=drafts)
    parent = Parent(config)
    rings = parent.load().attention.rings
    of_each = config.scheduler_config.max_num_seqs, places
    assert rings.shape == (of_each[0] * of_each[1], 2, KV_HEADS, HEAD_DIM)
    assert rings.dtype == torch.bfloat16
    assert parent.load().attention.rings is rings


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


@pytest.mark.parametrize("norms", [True, False])
def test_pages_of_another_process(norms: bool, configure: Configure) -> None:
    """They mean the same here: balancing depends on the weights alone."""
    config = configure()
    object.__setattr__(config, "kv_transfer_config", SimpleNamespace(is_kv_transfer_instance=True))
    one, other = (Parent(config, number, norms=norms) for number in (0, 1))
    found, again = (parent.load().attention.sigma for parent in (one, other))
    assert (found is not None) is norms
    assert found is None or torch.equal(found, again)
