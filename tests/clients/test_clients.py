"""Released third-party clients against our server.

The clients are installed beside the package, those for node into the folder that ``CLIENTS_NODE``
names; what is not there is skipped, and the reason is the command that installs it.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.apps.serve.conftest import text, user
from tests.apps.serve.test_messages import FIND, PATH, SAID, SHOWN
from tests.apps.serve.test_openai_types import sent
from tests.clients import programs, python_clients  # noqa: F401
from tests.clients.matrix import CELLS, CLIENTS, fill
from tests.clients.served import Served, serving
from tests.thinking import ids_of, saying

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def served(qwen3_omni_folder) -> Iterator[Served]:
    with serving(qwen3_omni_folder) as found:
        yield found


@pytest.mark.parametrize(("client", "feature"), CELLS, ids=str)
def test_cell(served, client: str, feature: str) -> None:
    [known] = [one for one in CLIENTS if one.name == client]
    if known.version is None:
        pytest.skip(known.install)
    fill(client, feature, served)


def test_types_of_anthropic(served) -> None:
    """Bodies and events are valid for its types, strictly; those of openai are tried in
    tests/apps/serve."""
    types = pytest.importorskip("anthropic.types")
    body: Any = {"messages": [user(SHOWN, text("What is it?"))], "max_tokens": 200, "tools": [FIND]}
    with saying(served.pipe, ids_of(served.pipe, SAID)):
        whole = sent(served.address, PATH, body)[1]
        events = sent(served.address, PATH, body | {"stream": True})[1]
    message = types.Message.model_validate_json(whole, strict=True)
    assert [block.type for block in message.content] == ["text", "tool_use"]
    event: Any = TypeAdapter(types.RawMessageStreamEvent)
    for frame in events.split("\n\n")[:-1]:
        data = frame.partition("data: ")[2]
        if json.loads(data)["type"] != "ping":  # which the client itself takes out
            event.validate_json(data, strict=True)
