"""ToolCallParser: separate the text and the tool calls of a streamed answer."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import ClassVar, cast

from oscar_mm.tool_parsers.calls import ToolCallDelta, Tools
from oscar_mm.tool_parsers.definitions import ToolDefinition
from oscar_mm.tool_parsers.reader import MAX_NAME, Broken, Reader, Reading

MAX_CALLS = 1024
"""Maximum number of calls per answer; the answer ends after the last of them."""

Piece = str | ToolCallDelta


class ToolFormat(ABC):
    """Format in which a model writes tool calls.

    Attributes:
        name: name of the format.
        begins: markers that start calls.
        end: marker that ends calls; "" if there is none.
        inner: markers within calls.
    """

    name: ClassVar[str]
    begins: ClassVar[tuple[str, ...]]
    end: ClassVar[str] = ""
    inner: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def marks(cls) -> tuple[str, ...]:
        """Return all markers, some of which may be single tokens."""
        return tuple(mark for mark in (*cls.begins, *cls.inner, cls.end) if mark)

    @classmethod
    @abstractmethod
    def written_by(cls, template: str) -> bool:
        """Whether a chat template tells the model to write calls in this format."""

    @classmethod
    @abstractmethod
    def read(cls, reader: Reader, calls: CallWriter) -> Reading[None]:
        """Read the calls that start with the next marker.

        Raises:
            Broken: if the text is not a call, or if something else follows complete calls. The text
                since the last complete call is kept: as arguments if a call is open, otherwise as
                text.
        """

    @classmethod
    @abstractmethod
    def grammar(
        cls, tools: Sequence[ToolDefinition], many: bool, mark_tokens: Mapping[str, int]
    ) -> str:
        """Return a grammar, in llguidance's Lark syntax, for answers that consist only of calls.

        Args:
            tools: tools that may be called.
            many: whether to allow several calls.
            mark_tokens: ids of markers that are single tokens, which a grammar refers to by id.
        """

    @classmethod
    def new_id(cls) -> str:
        """Return a new call id that the chat template accepts."""
        return f"call_{uuid.uuid4().hex[:24]}"


class CallWriter:
    """Receives the calls that a format reads, and stores them as pieces of the answer.

    Args:
        tool_format: format of the calls, which creates their ids.
        tools: offered tools.
        limit: maximum number of calls.
        reader: reader of the text.

    Attributes:
        tools: offered tools.
        pieces: pieces of the answer, to which calls are appended.
        is_open: whether a call has started and not ended.
        count: number of calls that have ended.
    """

    def __init__(
        self, tool_format: type[ToolFormat], tools: Tools, limit: int, reader: Reader
    ) -> None:
        self.tools, self.pieces = tools, list[Piece]()
        self.is_open, self.count = False, 0
        self._format, self._limit, self._reader = tool_format, limit, reader

    @property
    def full(self) -> bool:
        """Whether the maximum number of calls has been reached."""
        return self.count >= self._limit

    def begin(self, name: str) -> None:
        """Start a call.

        Raises:
            Broken: if the name is not valid, or the maximum number of calls is reached.
        """
        if self.full or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise Broken
        self.is_open = True
        self.pieces.append(ToolCallDelta(self.count, "", self._format.new_id(), name))

    def write(self, arguments: str) -> None:
        """Write a chunk of the arguments."""
        self.pieces.append(ToolCallDelta(self.count, arguments))

    def end(self) -> None:
        """End a call, which text that is read later can no longer undo."""
        self.is_open = False
        self.count += 1
        self._reader.keep()


class ToolCallParser:
    """Parser that separates text and tool calls while an answer is generated.

    White space around calls is dropped. Text that may be the start of a marker is held back until
    later text decides. Text that starts like a call but is not a call is kept as text.

    Args:
        tool_format: format of the model's chat template.
        tools: offered tools.
        limit: number of calls after which the answer ends; 1 if parallel calls are off.
    """

    def __init__(self, tool_format: type[ToolFormat], tools: Tools, limit: int = MAX_CALLS) -> None:
        self._format, self._reader = tool_format, Reader()
        self._calls = CallWriter(tool_format, tools, limit, self._reader)
        self._space: list[str] = []
        """Held-back white space, which becomes text unless a call follows."""
        self._after_call = False
        self._reading = self._read()

    @property
    def complete(self) -> bool:
        """Whether the maximum number of calls is reached, which ends the answer."""
        return self._calls.full

    def feed(self, text: str) -> list[Piece]:
        """Add text, and return all nonempty pieces whose kind (text or call) is now certain."""
        if self.complete:
            return []
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """End the answer, and return the pieces that were held back."""
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        pieces = list(merged(self._calls.pieces))
        self._calls.pieces.clear()
        return pieces

    def _read(self) -> Reading[None]:
        reader, calls = self._reader, self._calls
        while not calls.full:
            mark = yield from reader.until(self._format.begins, self._write_text)
            if not mark:
                break
            reader.keep()
            count = calls.count
            try:
                yield from self._format.read(reader, calls)
            except Broken:
                yield from self._read_broken(mark if calls.count == count else "")
            if calls.count > count:
                self._space.clear()
                self._after_call = True
        if not self._after_call:
            calls.pieces += self._space

    def _read_broken(self, mark: str) -> Reading[None]:
        """Keep text that is not a valid call: as arguments if a call is open, otherwise as text."""
        reader, calls, end = self._reader, self._calls, self._format.end
        if calls.is_open:
            yield from reader.until([end or self._format.begins[0]], calls.write)
            calls.end()
            if end:
                yield from reader.literal(end)
        else:
            reader.rewind()
            self._write_text(reader.take(len(mark)))

    def _write_text(self, text: str) -> None:
        end = len(text.rstrip())
        if end:
            self._calls.pieces += [*self._space, text[:end]]
            self._space, self._after_call = [], False
        if end < len(text):
            self._space.append(text[end:])


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Merge consecutive pieces of text, or of the same call."""
    for index, group in groupby(pieces, lambda one: None if isinstance(one, str) else one.index):
        if index is None:
            yield "".join(cast("Iterator[str]", group))
        else:
            first, *rest = cast("Iterator[ToolCallDelta]", group)
            yield replace(first, arguments="".join(one.arguments for one in [first, *rest]))
