"""Hybrid models in vLLM: layers of several kinds share memory, in blocks of equally many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration

vllm = pytest.importorskip("vllm")

from vllm.config import AttentionConfig, VllmConfig  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: E402
from vllm.model_executor.model_loader import get_model  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from oscar_mm.errors import InputError  # noqa: E402
from oscar_mm.quant.balance import sigmas_of_model  # noqa: E402
from oscar_mm.vllm_plugin import backend as plugin  # noqa: E402
from tests.draft_weights import with_drafts  # noqa: E402
from tests.tiny_qwen3_5 import qwen3_5  # noqa: E402
from tests.vllm_plugin.vllm_engine import (  # noqa: E402
    NEWER,
    Configure,
    GpuLike,
    Parent,
    plan,
    spec_of,
    views_of,
)

pytestmark = pytest.mark.usefixtures("gpu_like")
MEMORY = 2**26


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3.5 with states as large as 12 pages, and an MTP module."""
    folder = tmp_path_factory.mktemp("qwen3_5")
    states = {
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
    }
    qwen3_5(folder / "model", seed=0, mtp_num_hidden_layers=1, **states)
    return with_drafts(folder / "model", folder / "with_drafts")


@pytest.fixture
def load(checkpoint: Path, configure: Configure, tmp_path: Path) -> Iterator[Configure]:
    """Load the checkpoint, and its module for drafts if there are any, as vLLM's workers do."""
    world = (1, 0, f"file://{tmp_path / 'world'}", 0, "gloo")

    def loaded(backend_of_drafts: str = "CUSTOM", **options: Any) -> VllmConfig:
        config = configure(checkpoint=checkpoint, **options)
        parallel_state.init_distributed_environment(*world)
        parallel_state.initialize_model_parallel()
        config.device_config.device = torch.device("cpu")
        get_model(vllm_config=config)
        if (drafts := config.speculative_config) is not None:
            config.attention_config = AttentionConfig(backend=backend_of_drafts)
            get_model(vllm_config=config, model_config=drafts.draft_model_config)
        GpuLike.update_block_size_for_backend(config)
        return config

    yield loaded
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def layers_of(config: VllmConfig, kind: type) -> dict[str, Any]:
    named = config.compilation_config.static_forward_context
    return {name: layer for name, layer in named.items() if isinstance(layer, kind)}


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
def test_pages_and_states_have_blocks_of_one_size(
    drafts: int, prefixes: bool, load: Configure
) -> None:
    """They are the smallest blocks of whole pages in which a layer's states fit."""
    config = load(drafts=drafts, prefixes=prefixes)
    attention, others = layers_of(config, Attention), layers_of(config, MambaBase)
    assert [layer.impl.is_draft for layer in attention.values()] == [False, True][
        : 1 + (drafts > 0)
    ]
    # The first layer that vLLM asks has states in this model, and attention in others.
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in others.items()}
    specs |= {name: spec_of(layer, config) for name, layer in attention.items()}
    assert specs == specs | {name: x.get_kv_cache_spec(config) for name, x in others.items()}
    page_bytes = next(iter(attention.values())).impl.attention._page_format.page_bytes
    # Four heads of 128 x 128 float32 numbers; 3 tokens, and drafts, of 768 bfloat16 channels.
    state_bytes = 4 * 128 * 128 * 4 + (3 + drafts) * (2 * 2 + 4) * 128 * 2
    pages = -(-state_bytes // page_bytes)
    assert config.cache_config.block_size == 128 * pages
    assert {spec.page_size_bytes for spec in specs.values()} == {pages * page_bytes}
    assert others and plan(config, specs, MEMORY).num_blocks > 8


def test_pages_are_contiguous(load: Configure) -> None:
    config = load(drafts=2)
    layers = list(layers_of(config, Attention).values())
    views = views_of(config, layers, MEMORY)
    for layer in layers:
        pages = plugin.pages_of(views[layer.layer_name])
        assert pages.shape[1] == layer.impl.attention._page_format.page_bytes
        blocks, rest = divmod(len(pages), config.cache_config.block_size // 128)
        assert not rest
        config.cache_config.num_gpu_blocks = blocks
        assert layer.impl.rings(config, torch.device("cpu")).blocks == len(pages)


def test_drafts_with_a_backend_of_vllm(load: Configure) -> None:
    """Drafts have a backend of vLLM, with larger blocks, unless the user chooses ours for them."""
    if not NEWER:
        config = load(backend_of_drafts="FLASH_ATTN", drafts=2)
        first, *_ = layers_of(config, MambaBase).values()
        with pytest.raises(InputError, match='add "attention_backend": "CUSTOM" to --speculative'):
            first.get_kv_cache_spec(config)
        return
    config = load(backend_of_drafts="FLASH_ATTN", drafts=2)
    own, drafts = (spec_of(layer, config) for layer in layers_of(config, Attention).values())
    page_bytes = own.page_size_bytes * 128 // own.block_size
    assert own.page_size_bytes - page_bytes < drafts.page_size_bytes <= own.page_size_bytes


def test_balancing_is_that_of_the_checkpoint(checkpoint: Path, load: Configure) -> None:
    """vLLM's norms multiply by one plus their weights too, and RoPE turns a quarter of a head."""
    model = Qwen3_5ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16)
    (expected,) = sigmas_of_model(model).values()
    assert expected.unique().numel() > 20
    (layer,) = layers_of(load(), Attention).values()
    assert torch.equal(layer.impl.attention.sigma, expected)


@pytest.mark.skipif(not NEWER, reason="older vLLM has one backend for all layers")
@pytest.mark.parametrize("heads", [(8, 4, 256), (4, 2, 64), (4, 4, 128)])
def test_layers_with_windows_stay_those_of_vllm(heads: tuple, configure: Configure) -> None:
    """Blocks of our layers have at least as many bytes, and consist of contiguous whole pages."""
    config = configure()
    kinds = {"sliding_window": AttentionBackendEnum.FLASH_ATTN}
    config.attention_config = AttentionConfig(
        backend=AttentionBackendEnum.CUSTOM,
        backend_per_kind=kinds,
    )
    windows = [Parent(config, n, heads=heads, per_layer_sliding_window=512) for n in range(5)]
    full = Parent(config, 5, heads=heads)
    full.load()
    assert not any(isinstance(layer.attn.impl, plugin.OscarImpl) for layer in windows)
    specs = {layer.attn.layer_name: spec_of(layer.attn, config) for layer in [*windows, full]}
    own = specs.pop(full.attn.layer_name)
    page_bytes = full.attn.impl.attention._page_format.page_bytes
    (block_bytes,) = {spec.page_size_bytes for spec in specs.values()}
    pages, rest = divmod(own.page_size_bytes, page_bytes)
    assert rest == 0 and own.block_size == 128 * pages
    assert own.page_size_bytes - page_bytes < block_bytes <= own.page_size_bytes
    views = views_of(config, [layer.attn for layer in [*windows, full]], MEMORY)
    found = plugin.pages_of(views[full.attn.layer_name])
    assert found.shape[1] == page_bytes and len(found) % pages == 0
    config.cache_config.num_gpu_blocks = len(found) // pages
    rings = full.attn.impl.rings(config, torch.device("cpu"))
    assert rings.blocks == len(found)
