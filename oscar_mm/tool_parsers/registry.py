"""Registry: the formats of tool calls by name, and the one that a chat template asks for."""

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
"""In the order in which a template is asked: one with several marks has the first of them."""


def format_of(template: str) -> type[ToolFormat] | None:
    """The format in which a chat template tells the model to write calls; None if in no known one.

    Args:
        template: text of the template.
    """
    text = template.replace('\\"', '"')  # Most of it stands in strings of the template.
    return next((one for one in FORMATS.values() if one.written_by(text)), None)
