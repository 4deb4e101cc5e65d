"""Several names of the model, and the page that tells of the server."""

import html
import json
import re
from typing import Any

import openai
import pytest

from oscar_mm.apps.serve.docs_page import fields_of
from oscar_mm.apps.serve.messages_body import PATH
from oscar_mm.apps.serve.protocol import Body
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from tests.apps.serve.conftest import started, user
from tests.apps.serve.test_openai_types import sent

NAMES = ["tiny", "org/b", "<c>"]


@pytest.fixture(scope="module")
def address(omni) -> Any:
    app = create_app(omni, NAMES[0], ServerLimits(), other_names=NAMES[1:])
    with started(app) as (_, where):
        yield where


def test_the_list_has_all_names_and_the_context(address, omni) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    cards = [*client.models.list()]
    assert [model.id for model in cards] == [model.root for model in cards] == NAMES
    assert {model.max_model_len for model in cards} == {omni.max_context}
    assert client.models.retrieve("org/b").id == "org/b"
    with pytest.raises(
        openai.NotFoundError, match="`d` does not exist: this server has `tiny`, `org"
    ):
        client.models.retrieve("d")


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/chat/completions", {"messages": [user("hi")], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        (PATH, {"messages": [user("hi")], "max_tokens": 2}),
    ],
)
def test_an_answer_has_the_name_that_was_asked_for(address, path: str, given: Any) -> None:
    for asked, expected in (("org/b", "org/b"), ("tiny", "tiny"), (None, "tiny")):
        named = given if asked is None else given | {"model": asked}
        assert json.loads(sent(address, path, named)[1])["model"] == expected
        assert f'"model": "{expected}"' in sent(address, path, named | {"stream": True})[1]
    status, body = sent(address, path, given | {"model": "d"})
    assert status == 404
    assert "`d` does not exist: this server has" in json.loads(body)["error"]["message"]


def test_the_page_lists_paths_and_fields(address) -> None:
    status, page = sent(address, "/docs")
    assert status == 200 and html.escape("<c>") in page and "<c>" not in page
    for path in (
        "/v1/chat/completions",
        "/v1/responses",
        PATH,
        "/v1/models",
        "/metrics",
        "/health",
    ):
        assert f"{path}</code></h2>" in page
    assert all(f"<code>{name}</code>" in page for name in Body.model_fields)
    # Each path says what it is for, and nothing is loaded from elsewhere.
    assert re.findall(r"<h2>.*</h2>\n<p></p>", page) == []
    assert "src=" not in page and "http" not in page and "<script" not in page


def test_types_of_fields() -> None:
    fields = fields_of("/v1/chat/completions")
    assert (fields["temperature"], fields["max_tokens"]) == ("number or null", "integer or null")
    assert fields["messages"] == "list of object"
    assert fields_of(PATH)["stop_sequences"] == "list of string or null"
    assert fields_of("/v1/responses")["stream"] == fields["stream"] == "boolean or null"
