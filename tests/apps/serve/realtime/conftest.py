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
from tests.pipelines.conftest import NEVER, exact

pytest.importorskip("websockets", reason="the client needs websockets")
pytest.importorskip("webrtcvad", reason="turn detection needs webrtcvad-wheels")
pytest.importorskip("soxr", reason="audio needs soxr")

from tests.apps.serve.realtime.client import KEY, PUSH, Talk, held, sound


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


class SmallServer:
    """Server whose memory does not hold three conversations together."""

    def __init__(self, pipe: OscarOmniPipeline, address: str) -> None:
        self.pipe, self.address = pipe, address
        self._read, self._used = list[int](), list[int]()

    async def ask(self, one: Talk, number: int) -> None:
        """Ask by a recording of its own, and note what the answer reads and how much is used."""
        how = {"output_modalities": ["text"], "max_output_tokens": 3}
        await one.connection.session.update(session=PUSH | how)
        await one.say(sound(9.7, seed=number))
        await one.connection.input_audio_buffer.commit()
        await one.connection.response.create()
        usage = (await one.until("response.done")).response.usage
        self._read.append(usage.input_token_details.cached_tokens)
        self._used.append(self.pipe.engine.call(lambda: self.pipe.store.memory().used_bytes))

    def check(self) -> None:
        """Check that three conversations began, and that then the first went on where it was."""
        assert self._read[:3] == [0, 0, 0] and self._read[3] > 126
        assert 3 * self._used[0] > 734_000 > max(self._used)


@pytest.fixture
def small_server(qwen3_omni_talker_folder: Path) -> Iterator[SmallServer]:
    how: dict[str, Any] = {"policy": "bf16", "device": "cpu", "kv_budget": "734kB"}
    pipe = OscarOmniPipeline(qwen3_omni_talker_folder, **how)
    pipe.model.generation_config.eos_token_id = NEVER
    with started(create_app(pipe, "tiny", ServerLimits(api_key=KEY))) as (_, address):
        yield SmallServer(pipe, address)
