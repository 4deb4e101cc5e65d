"""Fixtures for tests inside vLLM; they import it, which other tests do without."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_plugin.requests import exact_attention


@pytest.fixture
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM on a CPU that says it is a GPU, with the plugin and without flash attention."""
    from vllm import platforms
    from vllm.v1.attention.selector import _cached_get_attn_backend

    from oscar_mm.vllm_plugin import backend, register
    from tests.vllm_plugin.vllm_engine import GpuLike

    monkeypatch.setattr(platforms, "_current_platform", GpuLike())
    monkeypatch.setattr(backend, "flash_attention", exact_attention)
    monkeypatch.setattr(backend.OscarBackend, "settings", backend.OscarBackend.settings)
    _cached_get_attn_backend.cache_clear()
    register()


@pytest.fixture
def configure(gpu_like: None, tmp_path: Path) -> Iterator[Any]:
    """As ``vllm_engine.Configure`` says."""
    from vllm.config import set_current_vllm_config

    from tests.vllm_plugin.vllm_engine import configuration

    with ExitStack() as stack:

        def make(**options: Any) -> Any:
            config = configuration(tmp_path, **options)
            stack.enter_context(set_current_vllm_config(config))
            return config

        yield make


@pytest.fixture
def engine(configure: Any) -> Any:
    """A layer whose requests go through vLLM."""
    from tests.vllm_plugin.vllm_engine import Engine

    return Engine(configure())


@pytest.fixture
def speculating(configure: Any) -> Any:
    """An engine in which requests that decode have four tokens."""
    from tests.vllm_plugin.vllm_engine import Engine

    return Engine(configure(drafts=3))
