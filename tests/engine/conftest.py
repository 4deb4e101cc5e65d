"""Checkpoints and a pipeline that several tests of prefill share."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from oscar_mm import OscarVLPipeline
    from tests.engine.mixing import Capture


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


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> "Capture":
    """Make engines mix prompts with decode steps on a CPU."""
    from tests.engine.mixing import mix

    return mix(monkeypatch)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Sizes of the pieces that were read, and whether a decode step took them along."""
    from oscar_mm.engine.mixed_prefill import MixedPrefill

    found = list[tuple[int, bool]]()
    finish = MixedPrefill.finish

    def noted(self: MixedPrefill, piece: Any) -> None:
        found.append((piece.size, piece.logits is not None))
        finish(self, piece)

    monkeypatch.setattr(MixedPrefill, "finish", noted)
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make mixed passes small, and capture them at once."""
    from oscar_mm.engine import mixed_prefill

    for name in ("_ROWS_ALONE", "_ROWS_WITH_DECODE"):
        monkeypatch.setattr(mixed_prefill, name, (32, 48, 64))
    monkeypatch.setattr(mixed_prefill, "_MIN_PROMPT_TOKENS", 8)
    monkeypatch.setattr(mixed_prefill, "_SEPARATE_PIECES", 1)
