"""TextDecoder: decoding of the text's tokens, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Self, cast

from oscar_mm.engine.detokenizer import CONTEXT, Detokenizer
from oscar_mm.engine.output_parsers.output_parser import OutputContext, OutputParser, Part


class TextDecoder(OutputParser):
    """Step between the token parsers and the text parsers.

    Attributes:
        stop_text: stop string that ended the answer; None if none has occurred.
    """

    takes = int

    @classmethod
    def of(cls, context: OutputContext) -> Self:
        """Return a decoder: any answer may have text."""
        return cls(context)

    def __init__(self, context: OutputContext) -> None:
        self._context = context
        self._text: Detokenizer | None = None

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the answer; None if none has occurred."""
        return None if self._text is None else self._text.stop_text

    @property
    def has_begun(self) -> bool:
        """Whether the text has begun."""
        return self._text is not None

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._context.sampling.stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has occurred."""
        return self._text is not None and self._text.stop_text is not None

    def push(self, part: int) -> Sequence[Part]:
        """Return the text that has become final, which may be empty."""
        return self.parse((part,))

    def parse(self, parts: Sequence[Part]) -> list[Part]:
        """Replace consecutive tokens by their text, and leave the other parts in order."""
        parsed: list[Part] = []
        for kind, run in groupby(parts, type):
            if kind is self.takes:
                self._text = self._text or self._begin()
                parsed.append(self._text.push(*cast("Iterable[int]", run)))
            else:
                parsed += run
        return parsed

    def finish(self) -> Sequence[Part]:
        """Return the text that was withheld."""
        return () if self._text is None else (self._text.finish(),)

    def _begin(self) -> Detokenizer:
        """Create the detokenizer at the first token of the text.

        Stop strings apply to the text only, but ``min_tokens`` counts all tokens of the answer.
        """
        context, sampling = self._context, self._context.sampling
        earlier = len(context.token_ids) - 1  # The text's first token is parsed alone.
        continued = context.prompt if context.continues else None
        return Detokenizer(
            context.decoder,
            cast(tuple[str, ...], sampling.stop),  # Sampling makes a tuple of it.
            lead="\n" if earlier else "",
            before=() if continued is None else continued[-CONTEXT:].tolist(),
            keeps_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens - earlier,
        )
