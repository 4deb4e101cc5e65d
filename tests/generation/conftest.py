"""Checkpoints that several tests of reading prompts share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folders(
    qwen3_vl_folder: Path,
    qwen3_vl_moe_folder: Path,
    qwen3_omni_folder: Path,
    llava_next_folder: Path,
) -> dict[str, Path]:
    """A tiny checkpoint of each kind."""
    return {
        "qwen": qwen3_vl_folder,
        "moe": qwen3_vl_moe_folder,
        "llava": llava_next_folder,
        "omni": qwen3_omni_folder,
    }
