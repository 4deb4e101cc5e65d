"""A server for third-party clients, with a record of their requests."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.serve.access_log import LOGGER
from oscar_mm.apps.serve.protocol import ApiRequest
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from oscar_mm.engine.message import ASKING
from oscar_mm.media.part import MediaPart
from oscar_mm.modality import Modality
from tests.apps.serve.conftest import started
from tests.tool_template import TOOL_TEMPLATE

MODEL = "tiny"
_VIDEO = "{%- elif part.type == 'video'"
_AUDIO = "{%- elif part.type == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>\n"


class Served:
    """A running server and its record.

    Attributes:
        pipe: the pipeline that answers; its chat template supports tools.
        address: URL of the server, without a path.
        requests: requests that were answered.
        lines: lines of the access log.
    """

    def __init__(self, pipe: OscarOmniPipeline, address: str) -> None:
        self.pipe, self.address = pipe, address
        self.requests: list[ApiRequest] = []
        self.lines: list[str] = []

    @property
    def base(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.address}/v1"

    def media(self, modality: Modality) -> list[bytes]:
        """Return the media of one modality in the last request."""
        parts = [part for message in self.requests[-1].messages() for part in message.parts]
        media = [part for part in parts if isinstance(part, MediaPart)]
        return [bytes(part.source) for part in media if part.modality is modality]

    @property
    def told(self) -> str:
        """Texts of users and tools in the last request."""
        messages = [one for one in self.requests[-1].messages() if one.role in ASKING]
        return "\n".join(text for one in messages for text in one.texts)

    def answered(self, path: str) -> bool:
        """Whether a path has answered; its line may come after its answer."""
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            if any(f" {path} 200 " in line for line in self.lines):
                return True
            time.sleep(0.01)
        return False

    @property
    def refusals(self) -> list[str]:
        """Lines of requests that were refused."""
        return [line for line in self.lines if '"' in line]


class _Lines(logging.Handler):
    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record.getMessage())


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Serve a checkpoint with images and audio; environment variables tell clients the address."""
    pipe = OscarOmniPipeline(folder, policy="compact", device="cpu", prefix_cache="1MB")
    pipe.processor.chat_template = TOOL_TEMPLATE.replace(_VIDEO, _AUDIO + _VIDEO, 1)
    app = create_app(pipe, MODEL, ServerLimits(max_new_tokens=1000))
    conversations: Any = app.state.service.conversations
    answer_steps = conversations.answer_steps
    with started(app) as (_, address):
        served = Served(pipe, address)

        def watched(request: Any) -> Any:
            served.requests.append(request)
            return answer_steps(request)

        conversations.answer_steps = watched
        handler, level = _Lines(lambda line: served.lines.append(line)), LOGGER.level
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        with patch.dict(os.environ, _variables(served)):
            yield served
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


def _variables(served: Served) -> dict[str, str]:
    return {
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": served.base,
        "OPENAI_API_BASE": served.base,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_BASE_URL": served.address,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
    }


def as_json(value: Any) -> Any:
    """Return a value, parsed if it is JSON text."""
    return json.loads(value) if isinstance(value, str) else value
