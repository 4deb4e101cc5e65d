"""Sessions of a tiny Qwen3-Omni, and files that a visitor may show."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.demo.session import Session
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.apps.demo.visitor_input import LIMITS, SessionSettings
from oscar_mm.policy import KVPolicy
from tests.pipelines.conftest import NEVER
from tests.prompts import noise, tone
from tests.recordings import write_movie, write_sound

COMPACT = SessionSettings(KVPolicy.preset("compact"), "compact")


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
def sessions(pipe: OscarOmniPipeline, uploads: Path) -> Iterator[Sessions]:
    """An empty one."""
    made = Sessions(pipe, COMPACT, (uploads,))
    yield made
    made.close()


@pytest.fixture
def session(sessions: Sessions) -> Session:
    """Session of a visitor that has just arrived."""
    return sessions.session("a")


def asked(session: Session, text: str, *files: Path, tokens: int = 6) -> int:
    """Ask; how often the page would have been told."""
    options = {"max_new_tokens": tokens, "temperature": 0.0}
    return sum(1 for _ in session.ask(text, files, **options))
