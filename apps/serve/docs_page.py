"""The HTML page at /docs: the server's endpoints and their request fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import BaseRoute

from oscar_mm import __version__
from oscar_mm.apps.serve import messages_body, responses_body
from oscar_mm.apps.serve.completions_body import CompletionBody
from oscar_mm.apps.serve.messages_body import MessagesBody
from oscar_mm.apps.serve.protocol import Body
from oscar_mm.apps.serve.responses_body import ResponsesBody
from oscar_mm.apps.serve.speech_body import SPEECH, SpeechBody
from oscar_mm.apps.serve.tokenizing import DetokenizeBody, TokenizeBody
from oscar_mm.apps.serve.transcriptions_body import (
    TRANSCRIPTIONS,
    TRANSLATIONS,
    TranscriptionBody,
)

_BODIES: dict[str, tuple[type[BaseModel], Iterable[str]]] = {
    "/v1/chat/completions": (Body, ()),
    "/v1/completions": (CompletionBody, ()),
    "/v1/responses": (ResponsesBody, responses_body.SAME),
    **dict.fromkeys(
        (messages_body.PATH, messages_body.COUNT_TOKENS), (MessagesBody, messages_body.SAME)
    ),
    "/tokenize": (TokenizeBody, ()),
    "/detokenize": (DetokenizeBody, ()),
    SPEECH: (SpeechBody, ()),
    TRANSCRIPTIONS: (TranscriptionBody, ()),
    TRANSLATIONS: (TranscriptionBody, ()),
}
"""For each endpoint, its request body and the chat-completions fields that it also accepts."""
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>oscar-mm serve</title><style>
body {{ font-family: sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em }}
td, th {{ text-align: left; padding: 0 1em 0 0 }}
</style></head><body><h1>oscar-mm serve {version}</h1>
<p>Models: {models}. Fields have the meaning of the API that defines the path; docs/serving.md of
the project says which values are supported.</p>
{paths}</body></html>
"""


def docs_page(routes: Iterable[BaseRoute], models: Iterable[str]) -> str:
    """Return the /docs page as HTML, without scripts or external resources.

    Args:
        routes: routes of the application; the page shows their docstrings.
        models: names of the model.
    """
    listed = [route for route in routes if isinstance(route, APIRoute) and route.include_in_schema]
    paths = "".join(text for route in listed for text in _described(route))
    names = ", ".join(f"<code>{escape(name)}</code>" for name in models)
    return _PAGE.format(version=escape(__version__), models=names, paths=paths)


def _described(route: APIRoute) -> Iterator[str]:
    methods = " ".join(sorted(route.methods or ()))
    yield f"<h2><code>{methods} {escape(route.path)}</code></h2>\n"
    yield f"<p>{escape(route.endpoint.__doc__ or '')}</p>\n"
    if route.path in _BODIES:
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td></tr>\n"
            for name, kind in sorted(fields_of(route.path).items())
        )
        yield f"<table><tr><th>field</th><th>type</th></tr>\n{rows}</table>\n"


def fields_of(path: str) -> dict[str, str]:
    """Return the request fields of an endpoint, with their JSON types."""
    body, same = _BODIES[path]
    fields = _types(body)
    shared = _types(Body)
    return fields | {name: shared.get(name, "any") for name in same}


def _types(body: type[BaseModel]) -> dict[str, str]:
    properties = body.model_json_schema(by_alias=True)["properties"]
    return {name: _type(schema) for name, schema in properties.items()}


def _type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return schema.get("type", "object" if "$ref" in schema else "any")
