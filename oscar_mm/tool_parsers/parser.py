"""ToolCallParser: text and tool calls of an answer, told apart as its text comes."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import ClassVar, cast

from oscar_mm.tool_parsers.calls import ToolCall, ToolCallDelta, Tools, joined_calls
from oscar_mm.tool_parsers.definitions import ToolDefinition
from oscar_mm.tool_parsers.reader import MAX_NAME, Broken, Reader, Reading

MAX_CALLS = 1024
"""Most calls of an answer, which ends after the last of them."""

Piece = str | ToolCallDelta


class ToolFormat(ABC):
    """How a model writes tool calls.

    Attributes:
        name: of the format.
        begins: marks with which calls begin.
        end: mark with which they end; "" if there is none.
        inner: marks within them.
    """

    name: ClassVar[str]
    begins: ClassVar[tuple[str, ...]]
    end: ClassVar[str] = ""
    inner: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def marks(cls) -> tuple[str, ...]:
        """All marks, of which some are tokens of their own."""
        return tuple(mark for mark in (*cls.begins, *cls.inner, cls.end) if mark)

    @classmethod
    @abstractmethod
    def written_by(cls, template: str) -> bool:
        """Whether a chat template tells the model to write calls in this format."""

    @classmethod
    @abstractmethod
    def read(cls, reader: Reader, calls: CallWriter) -> Reading[None]:
        """Read the calls that begin with the mark that comes next.

        Raises:
            Broken: there is none, or no more. The text since the last complete call is not lost: of
                a call that has begun it is the arguments, else text of the answer.
        """

    @classmethod
    @abstractmethod
    def grammar(
        cls, tools: Sequence[ToolDefinition], many: bool, mark_tokens: Mapping[str, int]
    ) -> str:
        """Lark grammar, as llguidance reads it, of an answer that is nothing but calls.

        Args:
            tools: that may be called.
            many: allow several calls.
            mark_tokens: ids of marks that are tokens of their own, which a grammar names by id.
        """

    @classmethod
    def new_id(cls) -> str:
        """A new id for a call, as the chat template accepts it."""
        return f"call_{uuid.uuid4().hex[:24]}"


class CallWriter:
    """Takes the calls that a format reads.

    Args:
        tool_format: makes their ids.
        tools: that are offered.
        limit: calls after which no more is read.
        reader: what they are read from.

    Attributes:
        tools: that are offered.
        pieces: of the answer, which the calls are added to.
        is_open: whether a call has begun and not ended.
        count: calls that have ended.
    """

    def __init__(
        self, tool_format: type[ToolFormat], tools: Tools, limit: int, reader: Reader
    ) -> None:
        self.tools, self.pieces = tools, list[Piece]()
        self.is_open, self.count = False, 0
        self._format, self._limit, self._reader = tool_format, limit, reader

    @property
    def full(self) -> bool:
        """Whether no more calls are taken."""
        return self.count >= self._limit

    def begin(self, name: str) -> None:
        """Begin a call.

        Raises:
            Broken: this can be no name, or there are enough calls.
        """
        if self.full or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise Broken
        self.is_open = True
        self.pieces.append(ToolCallDelta(self.count, "", self._format.new_id(), name))

    def write(self, arguments: str) -> None:
        """Write a piece of the arguments."""
        self.pieces.append(ToolCallDelta(self.count, arguments))

    def end(self) -> None:
        """End a call: what is read from now on does not undo it."""
        self.is_open = False
        self.count += 1
        self._reader.keep()


class ToolCallParser:
    """Tells text and tool calls apart while an answer is written.

    White space around calls belongs neither to them nor to the text. What may be the beginning of a
    mark waits until that is decided. Text that begins like a call and is none stays text.

    Args:
        tool_format: of the model's chat template.
        tools: that are offered.
        limit: calls after which the answer ends: 1 without parallel calls.
    """

    def __init__(self, tool_format: type[ToolFormat], tools: Tools, limit: int = MAX_CALLS) -> None:
        self._format, self._reader = tool_format, Reader()
        self._calls = CallWriter(tool_format, tools, limit, self._reader)
        self._space: list[str] = []
        """White space that is text unless a call follows."""
        self._after_call = False
        self._text: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._reading = self._read()

    @property
    def complete(self) -> bool:
        """Whether all calls that are allowed have been written: the answer ends there."""
        return self._calls.full

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far; the last one may be in the middle of its arguments."""
        return joined_calls(self._deltas)

    def feed(self, text: str) -> list[Piece]:
        """Take text; the pieces that are now certain, none empty."""
        if self.complete:
            return []
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """The pieces that waited for more text."""
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        pieces = list(merged(self._calls.pieces))
        self._calls.pieces.clear()
        self._text += (piece for piece in pieces if isinstance(piece, str))
        self._deltas += (piece for piece in pieces if isinstance(piece, ToolCallDelta))
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
        """Keep what is no call: as arguments of a call that has begun, else as text."""
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


def parse(
    text: str, tool_format: type[ToolFormat], tools: Tools, limit: int = MAX_CALLS
) -> tuple[str, tuple[ToolCall, ...]]:
    """The text and the calls of a whole answer; text after ``limit`` calls is left out."""
    parser = ToolCallParser(tool_format, tools, limit)
    parser.feed(text)
    parser.finish()
    return parser.text, parser.calls


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join pieces that follow each other in the text or in one call."""
    for index, group in groupby(pieces, lambda one: None if isinstance(one, str) else one.index):
        if index is None:
            yield "".join(cast("Iterator[str]", group))
        else:
            first, *rest = cast("Iterator[ToolCallDelta]", group)
            yield replace(first, arguments="".join(one.arguments for one in [first, *rest]))
