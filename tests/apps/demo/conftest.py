"""A hall with a tiny Qwen3-Omni, and files that a visitor may show."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.demo.session import Settings, Visitor
from oscar_mm.apps.demo.sessions import Hall
from oscar_mm.apps.demo.uploads import LIMITS
from oscar_mm.policy import KVPolicy
from tests.pipelines.conftest import NEVER
from tests.prompts import noise, tone
from tests.recordings import write_movie, write_sound

COMPACT = Settings(KVPolicy.preset("compact"), "compact")


@pytest.fixture(scope="session")
def pipe(qwen3_omni_folder: Path) -> OscarOmniPipeline:
    """Answers have all their tokens."""
    made = OscarOmniPipeline(
        qwen3_omni_folder,
        policy=COMPACT.policy,
        device="cpu",
        dtype="bfloat16",
        limits=LIMITS,
        kv_budget="40MB",
    )
    made.model.generation_config.eos_token_id = NEVER
    return made


@pytest.fixture(scope="session")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that were uploaded."""
    folder = tmp_path_factory.mktemp("uploads")
    for index in range(3):
        Image.fromarray(noise(64, 96, index)).save(folder / f"{index}.png")
    write_sound(folder / "tone.wav", tone(1.0))
    write_movie(folder / "clip.mp4", noise(48, 64)[None].repeat(6, 0), None)
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


@pytest.fixture
def hall(pipe: OscarOmniPipeline, uploads: Path) -> Iterator[Hall]:
    """An empty one."""
    made = Hall(pipe, COMPACT, (uploads,))
    yield made
    made.close()


@pytest.fixture
def visitor(hall: Hall) -> Visitor:
    """Who has just come in."""
    return hall.visitor("a")


def asked(visitor: Visitor, text: str, *files: Path, tokens: int = 6) -> int:
    """Ask; how often the page would have been told."""
    options = {"max_new_tokens": tokens, "temperature": 0.0}
    return sum(1 for _ in visitor.ask(text, files, **options))
