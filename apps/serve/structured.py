"""Structured output: its request fields in the APIs of OpenAI and vLLM."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from oscar_mm.engine.grammar import Grammar
from oscar_mm.errors import InputError


class JsonSchema(BaseModel):
    """A named JSON schema; answers conform to the schema whether or not ``strict`` is set."""

    model_config = ConfigDict(strict=True)

    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's field for structured output."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's field for structured output; its backend and white-space options are ignored."""

    model_config = ConfigDict(strict=True)

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None


class AsksForStructure(Protocol):
    """A request body with fields for structured output."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: dict[str, Any] | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def grammar_of(body: AsksForStructure) -> Grammar | None:
    """Return the grammar that the answer must match; None if none is requested.

    Raises:
        InputError: if several fields request a grammar, or a field is invalid; the message starts
            with the field's name.
    """
    given = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *_of_fields(
            {
                "json": body.guided_json,
                "regex": body.guided_regex,
                "choice": body.guided_choice,
                "grammar": body.guided_grammar,
            },
            "guided_{}",
        ),
    ]
    if len(given) > 1:
        first, *others = dict.fromkeys(grammar.name for grammar in given)
        if not others:
            raise InputError(f"{first}: has several constraints: keep only one")
        raise InputError(f"{first}: cannot be combined with {', '.join(others)}")
    return given[0] if given else None


def _of_response_format(asked: ResponseFormat | None) -> list[Grammar]:
    name = "response_format"
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [Grammar.json_object(name)]
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise InputError(f"{name}: json_schema.schema is missing")
    return [Grammar.json_schema(asked.json_schema.schema_, name)]


def _of_structured_outputs(asked: StructuredOutputs | None) -> list[Grammar]:
    name = "structured_outputs"
    if asked is None:
        return []
    if asked.structural_tag is not None:
        raise InputError(f"{name}: structural_tag is not supported: leave it out")
    fields = {"json": asked.json_, "regex": asked.regex, "choice": asked.choice}
    found = _of_fields(fields | {"grammar": asked.grammar}, name)
    return [*found, Grammar.json_object(name)] if asked.json_object else found


def _of_fields(fields: dict[str, Any], name: str) -> list[Grammar]:
    makers = {
        "json": Grammar.json_schema,
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.cfg,
    }
    return [
        makers[kind](value, name.format(kind))
        for kind, value in fields.items()
        if value is not None
    ]
