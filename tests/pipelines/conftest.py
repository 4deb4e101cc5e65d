"""Pipelines that several modules ask, loaded once; none of them may be changed."""

from pathlib import Path

import pytest

from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.pipelines.families.qwen3_omni_talker import Qwen3OmniTalker
from oscar_mm.pipelines.pipeline import Pipeline

NEVER = 1 << 20
"""An end token that no model chooses, so that an answer has all its tokens."""


def exact(kind: type[Pipeline], folder: Path) -> Pipeline:
    pipe = kind(folder, policy="bf16", device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """End speech after 20 frames; random weights say an answer of a few words in 150."""
    monkeypatch.setattr(Qwen3OmniTalker, "max_frames", 20)


@pytest.fixture(scope="session")
def llava(llava_next_folder) -> OscarVLPipeline:
    return exact(OscarVLPipeline, llava_next_folder)


@pytest.fixture(scope="session")
def vicuna(llava_next_vicuna_folder) -> OscarVLPipeline:
    return exact(OscarVLPipeline, llava_next_vicuna_folder)


@pytest.fixture(scope="session")
def qwen(qwen3_vl_folder) -> OscarVLPipeline:
    return exact(OscarVLPipeline, qwen3_vl_folder)


@pytest.fixture(scope="session")
def omni(qwen3_omni_folder) -> OscarOmniPipeline:
    return exact(OscarOmniPipeline, qwen3_omni_folder)


@pytest.fixture(scope="session")
def speaking(qwen3_omni_talker_folder) -> OscarOmniPipeline:
    return exact(OscarOmniPipeline, qwen3_omni_talker_folder)
