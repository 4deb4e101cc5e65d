"""Read streamed values, in JSON or a similar syntax, and write them as JSON.

Reading does not use recursion, so values can be nested to any depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from oscar_mm.tool_parsers.reader import MAX_NAME, Broken, Reader, Reading, Write

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_WORD = re.compile(r"[-+.\w]*")
_SCALAR = re.compile(
    r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null", re.ASCII
)


@dataclass(frozen=True)
class Syntax:
    """Syntax of values.

    Attributes:
        brackets: for each opening bracket, the closing bracket and the two brackets to write in
            JSON.
        quotes: characters that start a string.
        read_string: function that reads a string with such a quote and writes it as JSON.
        scalar: function that converts a number or a constant to JSON, or raises ``Broken``.
        last_comma: whether a comma may precede a closing bracket.
    """

    brackets: Mapping[str, tuple[str, str]]
    quotes: str
    read_string: Callable[[Reader, Write], Reading[None]]
    scalar: Callable[[str], str]
    last_comma: bool = False


def json_text(value: object) -> str:
    """Convert a value to JSON, escaped to ASCII if it cannot be encoded as UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not _has_surrogates(text) else json.dumps(value)


def read_string(reader: Reader, write: Write) -> Reading[None]:
    """Read a JSON string, which may contain unescaped control characters."""
    write(reader.take(1))
    while True:
        yield from reader.run(_PLAIN, write)
        char = yield from reader.peek()
        if char == "\\":
            size = 6 if (yield from reader.peek(2)) == "\\u" else 2
            if not _ESCAPE.fullmatch((yield from reader.peek(size))):
                raise Broken
            write(reader.take(size))
        elif char == '"':
            write(reader.take(1))
            return
        elif char:
            write(json.dumps(reader.take(1))[1:-1])
        else:
            raise Broken


def _json_scalar(word: str) -> str:
    if not _SCALAR.fullmatch(word):
        raise Broken
    return word


JSON = Syntax({"[": ("]", "[]"), "{": ("}", "{}")}, '"', read_string, _json_scalar)


def read_value(reader: Reader, write: Write, syntax: Syntax = JSON) -> Reading[None]:
    """Read a value and write it as JSON as it arrives.

    Raises:
        Broken: if the text is not a value; the part that was read has already been written.
    """
    closing: list[tuple[str, str]] = []
    while True:
        yield from reader.space()
        char = yield from reader.peek()
        if char in syntax.brackets:
            closer, (opened, closed) = syntax.brackets[reader.take(1)]
            write(opened)
            closing.append((closer, closed))
            if not (yield from _closes(reader, closer)):
                yield from _read_key(reader, write, syntax, closed)
                continue
        elif char and char in syntax.quotes:
            yield from syntax.read_string(reader, write)
        else:
            yield from _read_scalar(reader, write, syntax)
        if not (yield from _read_after(reader, write, syntax, closing)):
            return


def _read_scalar(reader: Reader, write: Write, syntax: Syntax) -> Reading[None]:
    pieces: list[str] = []
    yield from reader.run(_WORD, pieces.append)
    word = "".join(pieces)
    try:
        write(syntax.scalar(word))
    except Broken:
        write(word)
        raise


def _read_after(
    reader: Reader, write: Write, syntax: Syntax, closing: list[tuple[str, str]]
) -> Reading[bool]:
    """Read closing brackets and a comma after a value; return whether another value follows."""
    while closing:
        closer, closed = closing[-1]
        yield from reader.space()
        comma = yield from reader.literal(",")
        if comma and not (syntax.last_comma and (yield from _closes(reader, closer))):
            write(", ")
            yield from _read_key(reader, write, syntax, closed)
            return True
        if not (yield from reader.literal(closer)):
            raise Broken
        write(closed)
        closing.pop()
    return False


def _closes(reader: Reader, closer: str) -> Reading[bool]:
    """Read white space; return whether a closing bracket is next."""
    yield from reader.space()
    return (yield from reader.peek()) == closer


def _read_key(reader: Reader, write: Write, syntax: Syntax, closed: str) -> Reading[None]:
    """Read the key of the next member if ``closed`` ends an object; read nothing in a list."""
    if closed == "}":
        yield from reader.space()
        char = yield from reader.peek()
        if not char or char not in syntax.quotes:
            raise Broken
        yield from syntax.read_string(reader, write)
        yield from reader.space()
        if not (yield from reader.literal(":")):
            raise Broken
        write(": ")


def read_short_string(reader: Reader) -> Reading[str]:
    """Read a JSON string of up to ``MAX_NAME`` characters.

    Raises:
        Broken: if the text is not a string, or the string is longer.
    """
    pieces: list[str] = []
    size = 0

    def write(piece: str) -> None:
        nonlocal size
        size += len(piece)
        if size > MAX_NAME + 2:
            raise Broken
        pieces.append(piece)

    if (yield from reader.peek()) != '"':
        raise Broken
    yield from read_string(reader, write)
    return json.loads("".join(pieces))


def normalized(text: str) -> str | None:
    """Return JSON text in the format that this module writes; None if the text is not JSON."""
    reader, pieces = Reader(), list[str]()
    reader.feed(text)
    reader.ended = True
    try:
        for _ in read_value(reader, pieces.append):
            pass
        for _ in reader.space():
            pass
    except Broken:
        return None
    return None if reader.take(1) else "".join(pieces)


def texts_of(value: object) -> Iterator[str]:
    """Yield all strings within a value; keys also as tags, as some chat templates write them."""
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            for key in one:
                yield from (key, f"<{key}>", f"</{key}>")
            open_values += one.values()
        elif isinstance(one, list | tuple):
            open_values += one


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)
