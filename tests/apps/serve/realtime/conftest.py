"""A server of realtime sessions over a tiny model that speaks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from tests.apps.serve.conftest import started
from tests.pipelines.conftest import exact

pytest.importorskip("websockets", reason="the client needs websockets")
pytest.importorskip("webrtcvad", reason="turn detection needs webrtcvad-wheels")
pytest.importorskip("soxr", reason="audio needs soxr")

from tests.apps.serve.realtime.client import KEY, held


@pytest.fixture(scope="module")
def pipe(qwen3_omni_talker_folder: Path) -> OscarOmniPipeline:
    """Attention is exact, so that answers do not depend on when blocks are read; speech is random
    but has 40 frames."""
    pipe = exact(OscarOmniPipeline, qwen3_omni_talker_folder)
    assert pipe.family.talker is not None
    pipe.family.talker.end_code, pipe.family.talker.max_frames = -1, 40
    return pipe


@pytest.fixture(scope="module")
def server(pipe) -> Iterator[tuple[Any, str]]:
    limits = ServerLimits(api_key=KEY, max_new_tokens=200, realtime=4, realtime_idle_s=5)
    with started(create_app(pipe, "tiny", limits)) as both:
        yield both


@pytest.fixture
def address(server, pipe) -> Iterator[str]:
    """Address of the server, which must hold nothing once the clients are gone."""
    yield server[1]
    deadline = time.monotonic() + 10
    while held(server, pipe) != (0, 0.0, 0.0, 0):
        assert time.monotonic() < deadline, held(server, pipe)
        time.sleep(0.02)
