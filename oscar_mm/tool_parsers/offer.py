"""ToolOffer: the tools of a request, and which of them may or must be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_mm.errors import InputError, ToolsUnsupported, shown, suggestion
from oscar_mm.tool_parsers.definitions import ToolDefinition, read_definitions
from oscar_mm.tool_parsers.grammar import calls_or
from oscar_mm.tool_parsers.parser import MAX_CALLS, ToolCallParser, ToolFormat

_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolOffer:
    """The tools that are offered to the model.

    Attributes:
        tools: all tools, as listed in the prompt.
        tool_format: format in which the model writes calls.
        required: whether the answer must consist of calls.
        named: name of the tool that must be called exactly once; None if there is no such tool.
        parallel: whether an answer may contain several calls.
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
    def max_calls(self) -> int:
        """Number of calls after which an answer ends."""
        return MAX_CALLS if self.parallel and self.named is None else 1

    @property
    def characters(self) -> int:
        """Approximate number of characters that the tools take in a prompt; a template may use
        other punctuation."""
        return sum(tool.characters for tool in self.tools)

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools in the format that chat templates take."""
        return [tool.for_template() for tool in self.tools]

    def parser(self) -> ToolCallParser:
        """Return a parser for the calls of one answer."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        return ToolCallParser(self.tool_format, schemas, self.max_calls)

    @property
    def must_call(self) -> bool:
        """Whether the answer must call tools."""
        return self.required or self.named is not None

    def grammar(self, mark_tokens: Mapping[str, int], text: str | None = None) -> str | None:
        """Return the answer's grammar in llguidance's Lark syntax; None if any answer is valid.

        Args:
            mark_tokens: ids of markers that are single tokens, see ``marks.mark_tokens``.
            text: grammar rule for the text of an answer without calls; None allows any text.

        Raises:
            InputError: if the format cannot represent the parameters of a tool.
        """
        if not self.must_call and text is None:
            return None
        tools = [tool for tool in self.tools if self.named in (None, tool.name)]
        calls = self.tool_format.grammar(tools, self.max_calls > 1, mark_tokens)
        return calls if self.must_call or text is None else calls_or(text, calls)


def read_offer(
    tools: Sequence[Any] | None,
    choice: Any,
    parallel: bool,
    tool_format: type[ToolFormat] | None,
) -> ToolOffer | None:
    """Validate the tools and the tool choice of a request.

    Args:
        tools: tools, see ``read_definitions``.
        choice: OpenAI's tool_choice: "none", "auto", "required", a function, or None.
        parallel: whether an answer may contain several calls.
        tool_format: tool format of the model's chat template; None if it does not support tools.

    Returns:
        The offer; None if no tools are given, or none may be called.

    Raises:
        InputError: if an argument is invalid; the message names argument, error and remedy.
        ToolsUnsupported: if they are valid, but the template does not support them.
    """
    definitions, named = read_definitions(() if tools is None else tools), _named(choice)
    if choice == "none":
        return None
    if not definitions:
        if named is not None or choice == "required":
            raise InputError("tool_choice: requires tools to choose from; pass tools")
        return None
    if tool_format is None:
        raise ToolsUnsupported(
            "tools: the chat template of this checkpoint does not support tools, or writes calls "
            "in an unknown format; leave tools out"
        )
    return ToolOffer(definitions, tool_format, choice == "required", named, parallel)


def _named(choice: Any) -> str | None:
    """Return the name of the chosen function; None if the choice does not name one."""
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InputError(
            f'tool_choice: {shown(choice)} must be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": ...}}'
        )
    return name
