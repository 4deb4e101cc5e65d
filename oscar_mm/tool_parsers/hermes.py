"""Hermes: calls as JSON objects between tags, as Hermes 2 Pro, Qwen2.5 and Qwen3 write them.

<tool_call>
{"name": "find", "arguments": {"text": "sign"}}
</tool_call>
"""

from __future__ import annotations

from oscar_mm.tool_parsers.call_objects import read_call
from oscar_mm.tool_parsers.parser import CallWriter, ToolFormat
from oscar_mm.tool_parsers.reader import Reader, Reading

_BEGIN = "<tool_call>"


class Hermes(ToolFormat):
    """Calls between tags, in JSON."""

    name = "hermes"
    begins = (_BEGIN,)
    end = "</tool_call>"

    @classmethod
    def written_by(cls, template: str) -> bool:
        """Whether the template shows a tag and a name in JSON."""
        names = ('"name": <', '"name":<', '{"name": "')
        return _BEGIN in template and any(name in template for name in names)

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
