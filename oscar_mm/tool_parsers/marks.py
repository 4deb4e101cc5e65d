"""Find tool-call markers that are single tokens, and decode those that are special tokens."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from oscar_mm.tool_parsers.parser import ToolFormat


def mark_tokens(tokenizer: Any, tool_format: type[ToolFormat]) -> dict[str, int]:
    """Return the ids of a format's markers that are single tokens, by marker text."""
    added = {one.content: number for number, one in tokenizer.added_tokens_decoder.items()}
    return {mark: added[mark] for mark in tool_format.marks() if mark in added}


def special_marks(tokenizer: Any, tool_format: type[ToolFormat]) -> dict[str, int]:
    """Return the ids of a format's markers that are special tokens, which decoding skips.

    "[TOOL_CALLS]" of Mistral's tokenizers and "<|python_tag|>" of Llama's are special, and
    "<tool_call>" of Qwen's is not.
    """
    special = {
        *tokenizer.all_special_ids,
        *(number for number, one in tokenizer.added_tokens_decoder.items() if one.special),
    }
    marks = mark_tokens(tokenizer, tool_format)
    return {mark: number for mark, number in marks.items() if number in special}


class MarkDecoder:
    """Decodes tokens as the tokenizer does, but keeps markers that are special tokens.

    Args:
        tokenizer: tokenizer of the model.
        marks: ids of the markers that are special tokens, by marker text.
    """

    def __init__(self, tokenizer: Any, marks: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        self._marks = {number: mark for mark, number in marks.items()}

    def decode(self, tokens: list[int], **options: Any) -> str:
        """Return the text of tokens."""
        pieces = []
        for is_mark, group in groupby(tokens, self._marks.__contains__):
            if is_mark:
                pieces += [self._marks[token] for token in group]
            else:
                pieces.append(self._tokenizer.decode(list(group), **options))
        return "".join(pieces)
