"""Any conversation is what plain transformers makes of it, and leaves nothing behind.

``pytest -m soak`` takes the walks that are too many for every day. A failure names its steps; the
same seed takes them again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.pipelines.pipeline import Pipeline
from tests.chat.plain import Plain
from tests.chat.questions import media_of
from tests.chat.walk import Walk

FAMILIES = {
    "llava": (OscarVLPipeline, "llava_next_folder"),
    "qwen": (OscarVLPipeline, "qwen3_vl_folder"),
    "omni": (OscarOmniPipeline, "qwen3_omni_folder"),
}
WAYS = (
    {},
    {"prefill_chunk": 48, "prefix_cache": "2MB"},
    {"kv_budget": "3MB"},
    {"kv_budget": "4MB", "prefix_cache": "1MB"},
)
"""Options of the pipelines, walk by walk; the walks of a family begin one option later than those
of the family before, so that every day has all options."""
PACKED = ("standard", "channel", "oscar")


def walks(quick: int) -> list[Any]:
    """Seeds and steps: a few short walks for every day, and a hundred longer ones."""
    many = [pytest.param(seed, 25, marks=pytest.mark.soak) for seed in range(quick, quick + 100)]
    return [*((seed, 8) for seed in range(quick)), *many]


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> dict[str, list[Any]]:
    """What all walks show."""
    return media_of(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def models(request) -> dict[str, tuple[Plain, Pipeline]]:
    """Return for each family plain transformers, and a pipeline whose answers end at some words."""
    found = {}
    for family, (kind, folder) in FAMILIES.items():
        plain = Plain(family, request.getfixturevalue(folder))
        pipe = kind(request.getfixturevalue(folder), policy="bf16", device="cpu")
        plain.never_write_control_tokens(pipe.model)
        pipe.model.generation_config.eos_token_id = list(range(300, 400, 3))
        found[family] = plain, pipe
    return found


def walk(models, media, family: str, policy: str, seed: int, steps: int, folder: Path) -> None:
    plain, loaded = models[family]
    spill = folder / "spilled"
    spill.mkdir(parents=True, exist_ok=True)
    pipe = type(loaded)(
        loaded.family.outer_model,
        processor=loaded.processor,
        policy=policy,
        device="cpu",
        spill=spill,
        **WAYS[(seed + [*FAMILIES].index(family)) % len(WAYS)],
    )
    Walk(pipe, plain, media, policy == "bf16", seed, folder).run(steps)


@pytest.mark.daily("llava-0-8", "omni-0-8")
@pytest.mark.parametrize(("seed", "steps"), walks(quick=2))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_conversation_is_one_prefill(family, seed, steps, models, media, tmp_path) -> None:
    walk(models, media, family, "bf16", seed, steps, tmp_path)


@pytest.mark.daily("omni-0-8")
@pytest.mark.parametrize(("seed", "steps"), walks(quick=1))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_conversation_over_packed_pages(family, seed, steps, models, media, tmp_path) -> None:
    walk(models, media, family, PACKED[seed // len(WAYS) % len(PACKED)], seed, steps, tmp_path)
