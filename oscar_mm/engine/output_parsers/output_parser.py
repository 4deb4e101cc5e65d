"""OutputParser: base class of the steps that turn an answer's tokens into pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.tool_parsers.marks import MarkDecoder, special_marks
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import Piece

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from oscar_mm.engine.sampling import Sampling

Part = int | Piece
"""A token that is not decoded yet, or a piece of the answer."""


@dataclass(frozen=True)
class OutputContext:
    """Information about an answer for its parsers.

    Attributes:
        tokenizer: tokenizer of the model.
        sampling: sampling options.
        thinks: tokens that enclose reasoning; None if the model does not reason.
        prompt: (tokens,) ids of the prompt; None if unknown.
        tools: offered tools.
        continues: whether the answer continues the last text of the prompt.
        token_ids: tokens of the answer so far.
    """

    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    thinks: ThinkTokens | None = None
    prompt: torch.Tensor | None = None
    tools: ToolOffer | None = None
    continues: bool = False
    token_ids: list[int] = field(default_factory=list)

    @cached_property
    def opened(self) -> int:
        """Number of tokens at the end of the prompt that open the reasoning."""
        if self.thinks is None or self.prompt is None:
            return 0
        return self.thinks.opened(self.prompt)

    @cached_property
    def decoder(self) -> PreTrainedTokenizerBase:
        """Tokenizer that also decodes the special tokens that delimit tool calls."""
        tools = self.tools
        if tools is None or not (marks := special_marks(self.tokenizer, tools.tool_format)):
            return self.tokenizer
        return cast("PreTrainedTokenizerBase", MarkDecoder(self.tokenizer, marks))


class OutputParser(ABC):
    """A step of the chain that turns an answer's tokens into pieces.

    Each parser receives what the previous parser returns: token ids at first, and text once the
    ids are decoded. A parser returns its own pieces in place of the parts it reads, and all other
    parts unchanged.

    Attributes:
        takes: type of the parts that the parser reads: ``int`` for token ids, ``str`` for text.
            Parts of other types, including subclasses such as ``Reasoning``, bypass the parser.
    """

    takes: ClassVar[type] = str

    @classmethod
    @abstractmethod
    def of(cls, context: OutputContext) -> Self | None:
        """Return a parser for one answer; None if there will be nothing to parse."""

    @abstractmethod
    def push(self, part: Any) -> Sequence[Part]:
        """Read a token or a text, and return the parts that are now final."""

    def finish(self) -> Sequence[Part]:
        """Return the parts that were held back; call this after the last token."""
        return ()

    @property
    def may_stop(self) -> bool:
        """Whether ``stopped`` may become true; then the engine waits for the parser."""
        return type(self).stopped is not OutputParser.stopped

    @property
    def stopped(self) -> bool:
        """Whether the answer ends here; nothing is pushed afterwards."""
        return False

    def parse(self, parts: Sequence[Part]) -> list[Part]:
        """Push the parts that this parser takes, and leave the others in order."""
        parsed: list[Part] = []
        for part in parts:
            if type(part) is self.takes:
                parsed += self.push(part)
            else:
                parsed.append(part)
        return parsed
