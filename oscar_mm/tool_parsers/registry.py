"""Registry: tool-call formats by name, and detection of a chat template's format."""

from __future__ import annotations

from oscar_mm.tool_parsers.hermes import Hermes
from oscar_mm.tool_parsers.llama3_json import Llama3Json
from oscar_mm.tool_parsers.mistral import Mistral, MistralNamed
from oscar_mm.tool_parsers.parser import ToolFormat
from oscar_mm.tool_parsers.pythonic import Pythonic
from oscar_mm.tool_parsers.qwen3_coder import Qwen3Coder

FORMATS: dict[str, type[ToolFormat]] = {
    one.name: one for one in (Qwen3Coder, Hermes, MistralNamed, Mistral, Pythonic, Llama3Json)
}
"""Formats in the order of detection; the first that matches a template is used."""


def format_of(template: str) -> type[ToolFormat] | None:
    """Return the format in which a chat template asks for calls; None if it is unknown.

    Args:
        template: text of the template.
    """
    text = template.replace('\\"', '"')  # Most markers are within strings of the template.
    return next((one for one in FORMATS.values() if one.written_by(text)), None)
