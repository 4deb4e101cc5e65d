"""TemplateOptions: options of the chat template other than messages and tools."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from jinja2.defaults import DEFAULT_NAMESPACE
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from oscar_mm.errors import InputError, shown

BUDGETS = {
    "none": 0,
    "minimal": 512,
    "low": 2048,
    "medium": 8192,
    **dict.fromkeys(("high", "xhigh", "max")),
}
"""Maximum number of tokens of the reasoning, by ``reasoning_effort``; None for no limit."""
MAX_VARIABLES = 64
MAX_VARIABLE_CHARACTERS = 1 << 16
"""Maximum total number of characters of all variables, as JSON."""
_RENDERERS = (PreTrainedTokenizerBase.apply_chat_template, ProcessorMixin.apply_chat_template)
_RESERVED = {
    name
    for renderer in _RENDERERS
    for name, one in inspect.signature(renderer).parameters.items()
    if one.kind is not one.VAR_KEYWORD
} | {"messages", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}
"""Names that the renderer or Jinja sets."""


class TemplateFields(TypedDict, total=False):
    """Chat-template options of a user.

    Attributes:
        chat_template_kwargs: template variables with JSON values, such as ``{"enable_thinking":
            False}``; variables that the template does not use are ignored.
        reasoning_effort: "none", "minimal", "low", "medium", "high", "xhigh" or "max"; sets
            ``enable_thinking`` and ``reasoning_effort`` for templates that use them, and the
            ``thinking_token_budget``, see ``BUDGETS``. Ignored for a model that does not reason.
        continue_final_message: whether to continue the last message instead of starting an answer,
            as in transformers.
        add_generation_prompt: whether to end the prompt with the header of an answer; by default
            True unless ``continue_final_message`` is set.
    """

    chat_template_kwargs: Mapping[str, Any] | None
    reasoning_effort: str | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None


@dataclass(frozen=True)
class TemplateOptions:
    """Checked chat-template options.

    Attributes:
        variables: template variables by name.
        continues: whether the last message is left open, so that the answer continues it.
        opens_answer: whether the prompt ends with the header of an answer.
        budget: maximum number of tokens of the reasoning, set by ``reasoning_effort``; None for no
            limit.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    opens_answer: bool = True
    budget: int | None = None

    @classmethod
    def of(cls, given: TemplateFields) -> TemplateOptions:
        """Check a user's options.

        Raises:
            InputError: if a value is invalid; states the argument, the fault and the valid values.
        """
        variables = dict(_checked_variables(given.get("chat_template_kwargs")))
        effort, budget = given.get("reasoning_effort"), None
        if effort is not None:
            if effort not in BUDGETS:
                known = ", ".join(BUDGETS)
                raise InputError(f"reasoning_effort={shown(effort)}: must be one of {known}")
            budget = BUDGETS[effort]
            by_effort = {"enable_thinking": effort != "none", "reasoning_effort": effort}
            variables = by_effort | variables
        continues, opens = (
            _switch(name, given.get(name))
            for name in ("continue_final_message", "add_generation_prompt")
        )
        if continues and opens:
            raise InputError(
                "continue_final_message: cannot be combined with add_generation_prompt: the last "
                "message is either continued or answered"
            )
        opens = not continues if opens is None else opens
        return cls(variables, bool(continues), opens, budget)

    @property
    def is_special(self) -> bool:
        """Whether the options may change the prompt."""
        return bool(self.variables) or self.takes_any_end

    @property
    def takes_any_end(self) -> bool:
        """Whether the conversation may end with a message of any role."""
        return self.continues or not self.opens_answer

    def known_to(self, template: str) -> dict[str, Any]:
        """Return the variables whose names occur in a template."""
        return {
            name: value
            for name, value in self.variables.items()
            if re.search(rf"\b{re.escape(name)}\b", template)
        }

    @property
    def texts(self) -> Iterator[str]:
        """Texts that the template may insert: all keys and string values of the variables."""
        return _texts(dict(self.variables))

    @property
    def as_arguments(self) -> dict[str, Any]:
        """Arguments of ``apply_chat_template``."""
        return {
            **self.variables,
            "continue_final_message": self.continues,
            "add_generation_prompt": self.opens_answer,
        }


USUAL = TemplateOptions()
"""Default options: no variables, and a prompt that ends with the header of an answer."""


def _checked_variables(given: Any) -> Mapping[str, Any]:
    name = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InputError(f"{name} must be a dict with strings as keys, not {shown(given)}")
    if len(given) > MAX_VARIABLES:
        raise InputError(
            f"{name} has {len(given):,} variables, but at most {MAX_VARIABLES} are allowed"
        )
    if reserved := sorted(_RESERVED.intersection(given)):
        raise InputError(
            f"{name}: {', '.join(reserved)} is set by the request itself: leave it out"
        )
    try:
        size = len(json.dumps(dict(given), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: values must be JSON ({error})") from None
    if size > MAX_VARIABLE_CHARACTERS:
        most = f"at most {MAX_VARIABLE_CHARACTERS:,} are allowed"
        raise InputError(f"{name} has {size:,} characters as JSON, but {most}")
    return given


def _switch(name: str, given: Any) -> bool | None:
    if given is not None and not isinstance(given, bool):
        raise InputError(f"{name}={shown(given)}: must be True or False")
    return given


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
