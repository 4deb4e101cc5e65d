"""Registry: the chain of output parsers."""

from __future__ import annotations

from oscar_mm.engine.output_parsers.output_parser import OutputContext, OutputParser
from oscar_mm.engine.output_parsers.reasoning import ReasoningParser
from oscar_mm.engine.output_parsers.text_decoder import TextDecoder
from oscar_mm.engine.output_parsers.tool_calls import ToolCalls

PARSERS: list[type[OutputParser]] = [ReasoningParser, TextDecoder, ToolCalls]
"""Parsers in the order of the chain: token parsers, the decoder, text parsers."""


def parsers_of(context: OutputContext) -> list[OutputParser]:
    """Return the parsers of one answer."""
    made = (kind.of(context) for kind in PARSERS)
    return [parser for parser in made if parser is not None]
