"""Checkpoints and a pipeline that several tests of prefill share."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from oscar_mm import OscarVLPipeline


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


@pytest.fixture(scope="module")
def plain(qwen3_vl_folder: Path) -> "OscarVLPipeline":
    """Pipeline that tests must not change."""
    from tests.engine.engine import loaded

    return loaded(qwen3_vl_folder)
