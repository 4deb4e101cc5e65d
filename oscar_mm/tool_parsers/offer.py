"""ToolOffer: what a request offers to the model, and what it may or must do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oscar_mm.errors import InputError, suggestion
from oscar_mm.tool_parsers.definitions import ToolDefinition
from oscar_mm.tool_parsers.parser import MAX_CALLS, ToolCallParser, ToolFormat

NONE, AUTO, REQUIRED = "none", "auto", "required"


@dataclass(frozen=True)
class ToolOffer:
    """Tools that are offered to the model.

    Attributes:
        tools: all of them, which the prompt names.
        tool_format: in which the model writes calls.
        required: whether the answer must be calls.
        named: the only tool that may and must be called, once; None if there is no such.
        parallel: whether an answer may hold several calls.
    """

    tools: tuple[ToolDefinition, ...]
    tool_format: type[ToolFormat]
    required: bool = False
    named: str | None = None
    parallel: bool = True

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if self.named is not None and self.named not in names:
            hint = suggestion(self.named, names)
            raise InputError(f"tool_choice: no tool is named {self.named!r}{hint}")

    @property
    def most_calls(self) -> int:
        """Calls after which an answer ends."""
        return MAX_CALLS if self.parallel and self.named is None else 1

    @property
    def characters(self) -> int:
        """Characters that the tools take in a prompt, up to their punctuation."""
        return sum(tool.characters for tool in self.tools)

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.for_template() for tool in self.tools]

    def parser(self) -> ToolCallParser:
        """Reads the calls of one answer."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        return ToolCallParser(self.tool_format, schemas, self.most_calls)

    def grammar(self, special_tokens: Mapping[str, int]) -> str | None:
        """Lark grammar, as llguidance reads it, of an answer that must be calls; None if it need
        not.

        Args:
            special_tokens: ids of the tokenizer's special tokens, which a grammar names by id.
        """
        if not self.required and self.named is None:
            return None
        tools = [tool for tool in self.tools if self.named in (None, tool.name)]
        return self.tool_format.grammar(tools, self.most_calls > 1, special_tokens)
