"""Hermes: calls as JSON objects in tags, as written by Hermes 2 Pro, Qwen2.5 and Qwen3.

<tool_call>
{"name": "find", "arguments": {"text": "sign"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oscar_mm.tool_parsers.call_objects import read_call
from oscar_mm.tool_parsers.definitions import ToolDefinition
from oscar_mm.tool_parsers.grammar import call_rules, grammar_of, literal, mark, repeated, sequence
from oscar_mm.tool_parsers.parser import CallWriter, ToolFormat
from oscar_mm.tool_parsers.reader import Reader, Reading

_BEGIN = "<tool_call>"


class Hermes(ToolFormat):
    """Format with JSON calls in tags."""

    name = "hermes"
    begins = (_BEGIN,)
    end = "</tool_call>"

    @classmethod
    def written_by(cls, template: str) -> bool:
        """Whether the template shows a call as a JSON object in tags."""
        names = ('"name": <', '"name":<', '{"name": "')
        return _BEGIN in template and any(name in template for name in names)

    @classmethod
    def grammar(
        cls, tools: Sequence[ToolDefinition], many: bool, mark_tokens: Mapping[str, int]
    ) -> str:
        """Return a grammar for blocks with one call each, separated by line breaks."""
        rules = call_rules(tools, '\n{"name": "', '", "arguments": ', "}\n")
        block = sequence(mark(_BEGIN, mark_tokens), "call", mark(cls.end, mark_tokens))
        return grammar_of(repeated("block", literal("\n"), many), {"block": block, **rules})

    @classmethod
    def read(cls, reader: Reader, calls: CallWriter) -> Reading[None]:
        """Read all objects between two tags."""
        reader.take(len(_BEGIN))
        yield from reader.space()
        yield from read_call(reader, calls)
        while True:
            yield from reader.space()
            if (yield from reader.literal(cls.end)) or (yield from reader.peek()) != "{":
                return
            yield from read_call(reader, calls)
