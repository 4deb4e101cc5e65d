"""Read calls written as JSON objects with a name and arguments, as in several formats."""

from __future__ import annotations

import json

from oscar_mm.tool_parsers.parser import CallWriter
from oscar_mm.tool_parsers.reader import Broken, Reader, Reading
from oscar_mm.tool_parsers.values import normalized, read_short_string, read_value

_ARGUMENTS = ("arguments", "parameters")
_NO_ARGUMENTS = "{}"
_BEFORE = ("type", "id")
"""Keys that may precede the arguments of a bare object."""


def read_call(reader: Reader, calls: CallWriter, *, bare: bool = False) -> Reading[None]:
    """Read an object with a name and arguments, in any order, and write it as a call.

    Args:
        reader: reader of the text.
        calls: writer of calls.
        bare: whether the object has no marker before it. If so, it counts as a call only if the
            name of an offered tool precedes the arguments.

    Raises:
        Broken: if the text is not such an object, or ends within it.
    """
    name: str | None = None
    arguments, written = _NO_ARGUMENTS if not bare else "", False
    if not (yield from reader.literal("{")):
        raise Broken
    more = True
    while more:
        key = yield from _read_key(reader)
        if key == "name" and name is None:
            name = yield from read_short_string(reader)
            _check(name, calls, bare)
        elif key in _ARGUMENTS and name is not None and not written:
            calls.begin(name)
            yield from read_arguments(reader, calls)
            calls.end()
            written = True
        elif bare and not written:
            if key not in _BEFORE:
                raise Broken
            yield from read_short_string(reader)  # The text is held back, so values must be short.
        else:
            pieces: list[str] = []
            yield from read_value(reader, pieces.append)
            arguments = "".join(pieces) if key in _ARGUMENTS else arguments
        yield from reader.space()
        more = yield from reader.literal(",")
    if not (yield from reader.literal("}")) or (name is None or not (written or arguments)):
        raise Broken
    if not written:
        calls.begin(name)
        calls.write(_as_object(arguments))
        calls.end()
    reader.keep()


def read_arguments(reader: Reader, calls: CallWriter) -> Reading[None]:
    """Read the arguments of an open call, writing them as they arrive.

    Raises:
        Broken: if the arguments are not JSON.
    """
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        yield from read_value(reader, calls.write)
    else:
        pieces: list[str] = []
        try:
            yield from read_value(reader, pieces.append)
        except Broken:
            calls.write("".join(pieces))
            raise
        calls.write(_as_object("".join(pieces)))


def _read_key(reader: Reader) -> Reading[str]:
    yield from reader.space()
    key = yield from read_short_string(reader)
    yield from reader.space()
    if not (yield from reader.literal(":")):
        raise Broken
    yield from reader.space()
    return key


def _check(name: str, calls: CallWriter, bare: bool) -> None:
    if bare and name not in calls.tools:
        raise Broken


def _as_object(arguments: str) -> str:
    """Return arguments as an object, even if a model writes null, or the object within a string."""
    if arguments == "null":
        return _NO_ARGUMENTS
    inner = normalized(json.loads(arguments)) if arguments.startswith('"') else None
    return inner if inner is not None and inner.startswith("{") else arguments
