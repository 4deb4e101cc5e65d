"""Marks: those of tool calls that are special tokens, and how they are decoded."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from oscar_mm.tool_parsers.parser import ToolFormat


def special_marks(tokenizer: Any, tool_format: type[ToolFormat]) -> dict[str, int]:
    """Ids of a format's marks that are special tokens, which have no text when they are decoded.

    "<tool_call>" is an added token of Qwen's tokenizers, but no special one; "[TOOL_CALLS]" of
    Mistral's and "<|python_tag|>" of Llama's are special.
    """
    added = {one.content: number for number, one in tokenizer.added_tokens_decoder.items()}
    special = {*tokenizer.all_special_tokens} | {
        one.content for one in tokenizer.added_tokens_decoder.values() if one.special
    }
    return {mark: added[mark] for mark in tool_format.marks() if mark in special and mark in added}


class MarkDecoder:
    """Decodes tokens as a tokenizer does, and writes marks that are special tokens.

    Args:
        tokenizer: of the model.
        marks: ids of the marks that are special tokens, by their texts.
    """

    def __init__(self, tokenizer: Any, marks: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        self._marks = {number: mark for mark, number in marks.items()}

    def decode(self, tokens: list[int], **options: Any) -> str:
        """The text of tokens."""
        pieces = []
        for is_mark, group in groupby(tokens, self._marks.__contains__):
            if is_mark:
                pieces += [self._marks[token] for token in group]
            else:
                pieces.append(self._tokenizer.decode(list(group), **options))
        return "".join(pieces)
