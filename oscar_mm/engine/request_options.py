"""Keyword arguments of requests: options of sampling, media and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oscar_mm.engine.family import Family
from oscar_mm.engine.sampling import SamplingOptions
from oscar_mm.engine.template import TemplateFields
from oscar_mm.errors import InputError
from oscar_mm.media.options import NAMES, MediaOptionFields, MediaOptions


class QuestionOptions(SamplingOptions, MediaOptionFields, total=False):
    """``SamplingOptions``, plus ``MediaOptions`` for all media of the question."""


class RequestOptions(QuestionOptions, TemplateFields, total=False):
    """``QuestionOptions``, plus ``TemplateFields`` for the conversation.

    Attributes:
        adapter: name of one of the pipeline's adapters; by default, the model alone answers.
    """

    adapter: str | None


def split_media(options: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], MediaOptions]:
    """Split the options of a request into checked media options and unchecked others; return the
    others first.

    Raises:
        InputError: if a media option has an invalid value or is not supported by the family.
    """
    media = {name: value for name, value in options.items() if name in NAMES}
    for name, value in media.items():
        if value is not None and name not in family.media_options:
            has = ", ".join(sorted(family.media_options))
            raise InputError(
                f"{name}: {family.name} does not support this option; it supports {has}"
            )
    rest = {name: value for name, value in options.items() if name not in NAMES}
    return rest, MediaOptions(**media)


def split_template(options: Mapping[str, Any]) -> tuple[dict[str, Any], TemplateFields]:
    """Split options into other options and chat-template options, in this order; check neither."""
    names = TemplateFields.__annotations__
    template = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    return rest, TemplateFields(**template)
