"""ToolCalls: parser of calls to offered tools within the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from oscar_mm.engine.output_parsers.output_parser import OutputContext, OutputParser, Part
from oscar_mm.tool_parsers.parser import ToolCallParser


class ToolCalls(OutputParser):
    """Parser of tool calls, in the format of the model's chat template."""

    @classmethod
    def of(cls, context: OutputContext) -> Self | None:
        """Return a parser if tools are offered, else None."""
        return None if context.tools is None else cls(context.tools.parser())

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser

    def push(self, part: str) -> Sequence[Part]:
        """Return text outside calls, and pieces of calls."""
        return self._parser.feed(part)

    def finish(self) -> Sequence[Part]:
        """Return text held back as a possible start of a call, or the rest of an incomplete
        call."""
        return self._parser.finish()

    @property
    def stopped(self) -> bool:
        """Whether the last allowed call has ended."""
        return self._parser.complete
