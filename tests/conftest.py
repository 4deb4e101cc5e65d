"""Fixtures of the whole suite."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import build

# Tiny tensors gain nothing from threads, and on busy cores threads waiting for each other cost
# more than the work.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3_vl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with its processor."""
    return build("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="session")
def qwen3_vl_moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with experts."""
    return build("qwen3_vl_moe", tmp_path_factory.mktemp("qwen3_vl_moe"))


@pytest.fixture(scope="session")
def llava_next_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA-v1.6 on Mistral."""
    return build("llava_next", tmp_path_factory.mktemp("llava_next"))


@pytest.fixture(scope="session")
def llava_next_vicuna_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA-v1.6 on Vicuna."""
    return build("llava_next_vicuna", tmp_path_factory.mktemp("llava_next_vicuna"))


@pytest.fixture(scope="session")
def qwen3_omni_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Omni that cannot speak."""
    return build("qwen3_omni", tmp_path_factory.mktemp("qwen3_omni"))


@pytest.fixture(scope="session")
def qwen3_omni_talker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Omni that can speak."""
    return build("qwen3_omni_talker", tmp_path_factory.mktemp("qwen3_omni_talker"))
