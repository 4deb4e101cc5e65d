"""Reader: streamed text that generators read from its beginning.

The generators yield when they need more text, and return what they have read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Generator that yields when it needs more text, and returns a T."""
Write = Callable[[str], object]
MAX_NAME = 256
"""Maximum number of characters in the name of a tool, a parameter or a key."""
_SPACE = re.compile(r"\s*")


class Broken(Exception):
    """The text does not have the syntax of a tool call."""


class Reader:
    """Streamed text with a read position; the cost of a chunk does not depend on earlier chunks.

    Attributes:
        ended: whether the text is complete.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._kept: list[str] = []
        """Text that was read since ``keep`` and removed from ``_text``."""
        self._keep = 0
        self.ended = False

    def feed(self, piece: str) -> None:
        """Add text at the end."""
        if self._keep < self._at:
            self._kept.append(self._text[self._keep : self._at])
        self._text, self._at, self._keep = self._text[self._at :] + piece, 0, 0

    def keep(self) -> None:
        """Mark the position to which ``rewind`` returns."""
        self._kept, self._keep = [], self._at

    def rewind(self) -> None:
        """Return to the position of ``keep``."""
        if self._kept:
            self._text = "".join([*self._kept, self._text[self._keep :]])
            self._kept, self._keep = [], 0
        self._at = self._keep

    def take(self, size: int) -> str:
        """Read characters that are already available."""
        taken = self._text[self._at : self._at + size]
        self._at += len(taken)
        return taken

    def peek(self, size: int = 1) -> Reading[str]:
        """Return the next characters without reading them; fewer at the end of the text."""
        while len(self._text) - self._at < size and not self.ended:
            yield
        return self._text[self._at : self._at + size]

    def literal(self, word: str) -> Reading[bool]:
        """Read a given word if it comes next, and return whether it did."""
        while not self._text.startswith(word, self._at):
            left = len(self._text) - self._at
            if self.ended or left >= len(word) or not word.startswith(self._text[self._at :]):
                return False
            yield
        self._at += len(word)
        return True

    def run(self, pattern: re.Pattern[str], write: Write | None = None) -> Reading[None]:
        """Read the next characters as long as they match.

        Args:
            pattern: a repeated pattern for a single character.
            write: function that gets the characters, chunk by chunk.
        """
        while True:
            match = pattern.match(self._text, self._at)
            if match and match[0]:
                self._at = match.end()
                if write is not None:
                    write(match[0])
            if self._at < len(self._text) or self.ended:
                return
            yield

    def space(self) -> Reading[None]:
        """Read white space."""
        return self.run(_SPACE)

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read a short run of characters that match.

        Raises:
            Broken: if the run is longer than ``MAX_NAME``.
        """
        pieces: list[str] = []
        size = 0

        def write(piece: str) -> None:
            nonlocal size
            size += len(piece)
            if size > MAX_NAME:
                raise Broken
            pieces.append(piece)

        yield from self.run(pattern, write)
        return "".join(pieces)

    def until(self, marks: Sequence[str], write: Write) -> Reading[str]:
        """Read the text before the next marker, but not the marker itself.

        Args:
            marks: markers, none of them empty.
            write: function that gets the text before the marker, chunk by chunk.

        Returns:
            The marker; "" at the end of the text.
        """
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            found = pattern.search(self._text, self._at)
            stop = found.start() if found else len(self._text) - self._possible(marks)
            if stop > self._at:
                write(self.take(stop - self._at))
            if found or self.ended:
                return found[0] if found else ""
            yield

    def _possible(self, marks: Sequence[str]) -> int:
        """Return the number of characters at the end that may be the start of a marker."""
        if self.ended:
            return 0
        end = self._text[max(self._at, len(self._text) - max(map(len, marks))) :]
        sizes = (
            size for mark in marks for size in range(1, len(mark)) if end.endswith(mark[:size])
        )
        return max(sizes, default=0)
