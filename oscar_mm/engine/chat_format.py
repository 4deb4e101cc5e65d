"""ChatFormat: conversion of conversations to text and tokens, by chat template and tokenizer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jinja2 import TemplateError

from oscar_mm.engine.grammar import Grammar
from oscar_mm.engine.message import Message, user_message
from oscar_mm.engine.template import USUAL, TemplateFields, TemplateOptions
from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.errors import InputError
from oscar_mm.media.media import Medium
from oscar_mm.media.part import MediaPart
from oscar_mm.modality import Modality
from oscar_mm.tool_parsers.grammar import json_of
from oscar_mm.tool_parsers.marks import mark_tokens
from oscar_mm.tool_parsers.offer import ToolOffer, read_offer
from oscar_mm.tool_parsers.parser import ToolFormat
from oscar_mm.tool_parsers.registry import format_of

_MARKUP = re.compile(r"<.+>|\[.+\]")
QUESTION, ANSWER = "oscar-question", "oscar-answer"
"""Stand-ins for an earlier turn, to render only what the template writes after its answer."""


class ChatFormat:
    """Chat template and tokenizer of a model: messages to text, text to tokens.

    Args:
        processor: processor of the model.

    Raises:
        InputError: if the processor has no chat template.
    """

    name: str
    """Common name of the model family."""

    reads: ClassVar[frozenset[Modality]]
    """Supported media modalities."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        if not getattr(processor, "chat_template", None):
            raise InputError(
                "the processor has no chat template, without which the prompt format of this "
                "checkpoint is unknown: pass processor=... with its chat_template set"
            )
        # The first call turns off the padding and truncation of a saved tokenizer. Later calls
        # change nothing, so several threads may count tokens concurrently.
        self.tokenize(QUESTION)

    @property
    def placeholders(self) -> dict[str, Modality]:
        """Placeholder texts that the chat template writes for media, with their modalities."""
        tokens = {
            modality: getattr(self.processor, f"{modality.label}_token") for modality in self.reads
        }
        return {token: modality for modality, token in tokens.items()}

    def check_reads(self, media: Iterable[MediaPart | Medium]) -> None:
        """Refuse media of a modality that the family does not support.

        Raises:
            InputError: if a media item is not supported; names the item and the supported
                modalities.
        """
        for medium in media:
            if medium.modality not in self.reads:
                known = ", ".join(sorted(modality.label for modality in self.reads)) or "text only"
                raise InputError(
                    f"{medium.label}: {self.name} does not support {medium.modality.label}; "
                    f"it supports {known}"
                )

    def tokenize(self, text: str) -> torch.Tensor:
        """Tokenize rendered text without media to (1, tokens) ids; needs no lock."""
        options = self.text_options(text)
        found = self.processor.tokenizer([text], return_attention_mask=False, **options)
        # PyTorch takes several times as long as NumPy to read a list.
        return torch.from_numpy(np.array(found["input_ids"], np.int64))

    def tokenize_media(self, text: str, modality: Modality, counts: Sequence[int]) -> torch.Tensor:
        """Tokenize, repeating each placeholder of a modality once per token of its media item.

        Repeating ids after tokenization is safe, since special tokens do not depend on context.
        """
        ids = self.tokenize(text)
        if not counts:
            return ids
        [token] = (name for name, kind in self.placeholders.items() if kind is modality)
        places = ids[0] == self.processor.tokenizer.convert_tokens_to_ids(token)
        times = torch.ones_like(ids[0])
        times[places] = torch.tensor(counts, dtype=times.dtype)
        return ids.repeat_interleave(times, dim=1)

    @cached_property
    def longest_token(self) -> int:
        """Number of characters in the longest token."""
        return max(map(len, self.processor.tokenizer.get_vocab()))

    def text_options(self, text: str) -> dict[str, Any]:
        """Return tokenizer options that prevent a second BOS token before the text."""
        begin = self.processor.tokenizer.bos_token
        return {"add_special_tokens": False} if begin and text.startswith(begin) else {}

    @cached_property
    def think_tokens(self) -> ThinkTokens | None:
        """Tokens that enclose the model's reasoning; None if the model does not reason."""
        return ThinkTokens.of(self.processor.tokenizer)

    @cached_property
    def tool_format(self) -> type[ToolFormat] | None:
        """Tool-call format of the chat template; None if it does not support tools."""
        return format_of(self._templates)

    def offer(
        self,
        tools: Sequence[Any] | None,
        choice: Any = None,
        *,
        parallel: bool = True,
    ) -> ToolOffer | None:
        """Check the tools of a request; see ``read_offer`` for the arguments.

        Raises:
            InputError: if a tool or the choice is invalid or contains a control token.
        """
        offer = read_offer(tools, choice, parallel, self.tool_format)
        for place, tool in enumerate(() if offer is None else offer.tools):
            for text in tool.texts():
                self.refuse_control_tokens(f"tools[{place}]", text)
        return offer

    def call_tokens(self, offer: ToolOffer | None) -> frozenset[int]:
        """Return the ids of the tokens that begin tool calls, of marks that are single tokens."""
        if offer is None:
            return frozenset()
        marks = mark_tokens(self.processor.tokenizer, offer.tool_format)
        return frozenset(marks[mark] for mark in offer.tool_format.begins if mark in marks)

    def with_calls(self, options: Mapping[str, Any], offer: ToolOffer | None) -> Any:
        """Add a grammar for tool calls to sampling options.

        A requested JSON format applies only to the text of an answer: an answer that must call
        tools has no text, and any other answer is either JSON or calls. All other grammars apply to
        the whole answer.

        Raises:
            InputError: if the answer must call tools and match another grammar, or the call format
                cannot express the parameters of a tool.
        """
        if offer is None:
            return options
        asked, text = options.get("grammar"), None
        if asked is not None and asked.kind != "json":
            if offer.must_call:
                raise InputError(f"tool_choice: cannot be combined with {asked.name}")
            return options
        if asked is not None:
            text = json_of(json.loads(asked.text))
        marks = mark_tokens(self.processor.tokenizer, offer.tool_format)
        grammar = offer.grammar(marks, text)
        if grammar is None:
            return options
        name = "tool_choice" if asked is None else asked.name
        return {**options, "grammar": Grammar.calls(grammar, name)}

    @cached_property
    def thinks(self) -> bool:
        """Whether answers begin with reasoning according to the chat template."""
        if self.think_tokens is None:
            return False
        question = self.render([user_message(QUESTION)])
        return self.think_tokens.opened(self.tokenize(question)[0]) > 0

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """Special tokens, added tokens used by the chat template such as <think>, placeholders."""
        tokenizer, template = self.processor.tokenizer, str(self.processor.chat_template)
        added = tokenizer.added_tokens_decoder.values()
        # Some tokenizers add runs of spaces and line breaks, which are not control tokens.
        meant = [
            one.content
            for one in added
            if one.special or (_MARKUP.fullmatch(one.content) and one.content in template)
        ]
        return tuple(dict.fromkeys([*tokenizer.all_special_tokens, *meant, *self.placeholders]))

    def refuse_control_tokens(self, name: str, text: str, *, calls: bool = False) -> None:
        """Refuse user text with control tokens, which could forge turns, reasoning or media.

        Args:
            name: name of the text, for the error message.
            text: text from a user.
            calls: whether to allow tool-call markers, as in answers.

        Raises:
            InputError: if the text contains a control token.
        """
        allowed = self.tool_format.marks() if calls and self.tool_format else ()
        for token in self.control_tokens:
            if token in text and token not in allowed:
                raise InputError(
                    f"{name} contains {token!r}, a control token of this model: remove it"
                )

    def answer_text(self, answer: Message) -> str:
        """Return an assistant message as the model writes it, with calls in the template's format.

        Raises:
            InputError: if the message has tool calls, but the template does not support them.
        """
        if not answer.tool_calls:
            return answer.written
        question, plain = self.listed([user_message(QUESTION), Message("assistant", (ANSWER,))])
        texts = [
            self._render([question, one], add_generation_prompt=False)
            for one in (plain | {"content": ANSWER}, *self.listed([answer]))
        ]
        before, _, after = texts[0].partition(ANSWER)
        if not texts[1].startswith(before):
            before = before.rstrip(" ")  # Mistral's has one before text, none before calls.
        written = texts[1].removeprefix(before).removesuffix(after)
        if len(written) + len(before) + len(after) != len(texts[1]) or not all(
            call.name in written for call in answer.tool_calls
        ):
            raise InputError(
                f"{answer.place}: this checkpoint's chat template does not support tool calls: "
                "leave tool_calls out"
            )
        return written

    def after_answer(self, messages: Sequence[dict[str, Any]]) -> str:
        """Render ``messages`` after a stand-in answer; return the text from that answer onwards.

        Raises:
            InputError: if the template refuses the messages, omits answers, or writes placeholders
                for media of these messages before the answer.
        """
        question = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
        # Some templates require an answer to be a list of parts, others require a string.
        for content in ([{"type": "text", "text": ANSWER}], ANSWER):
            former = [question, {"role": "assistant", "content": content}]
            try:
                text = self._render([*former, *messages])
            except (InputError, TypeError):
                if content is ANSWER:
                    raise
                continue
            before, answer, after = text.partition(ANSWER)
            if any(placeholder in before for placeholder in self.placeholders):
                raise InputError(
                    "the chat template of this checkpoint writes all media at the beginning of a "
                    "conversation: show them in the first turn, or start a new chat; a request "
                    "that passes messages may show them in any turn"
                )
            if answer:
                return answer + after
        raise InputError("the chat template of this checkpoint omits answers")

    def template(self, given: TemplateFields) -> TemplateOptions:
        """Check chat-template options, and drop variables that the template does not use.

        Raises:
            InputError: see ``TemplateOptions.of``; also if a variable contains a control token.
        """
        options = TemplateOptions.of(given)
        options = replace(options, variables=options.known_to(self._templates))
        special = self.processor.tokenizer.special_tokens_map
        if reserved := sorted(set(special).intersection(options.variables)):
            raise InputError(
                f"chat_template_kwargs: {', '.join(reserved)} is set by the tokenizer: leave it out"
            )
        for text in options.texts:
            self.refuse_control_tokens("chat_template_kwargs", text)
        return options

    @property
    def _templates(self) -> str:
        """All chat templates of the checkpoint."""
        template = self.processor.chat_template
        return template if isinstance(template, str) else " ".join(template.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: ToolOffer | None = None,
        template: TemplateOptions = USUAL,
    ) -> str:
        """Render a conversation with the chat template, up to where an answer begins.

        Args:
            messages: messages with texts and media in order.
            tools: tools that the model may call.
            template: chat-template options from ``template``.

        Raises:
            InputError: if the family does not support the modality of a media item, the template
                refuses the conversation, or the last message cannot be continued.
        """
        if template.continues:
            _check_continued(messages[-1])
        offered = {} if tools is None else {"tools": tools.for_template()}
        return self._render(self.listed(messages), **offered, **template.as_arguments)

    def _render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        options = {"tokenize": False, "add_generation_prompt": True} | options
        try:
            return self.processor.apply_chat_template(list(messages), **options)
        # Templates process values from clients: schemas, call arguments, variables.
        except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise InputError(
                f"the chat template of this checkpoint refuses the conversation: {error}"
            ) from error

    def listed(
        self, messages: Sequence[Message], earlier: Iterable[Modality] = ()
    ) -> list[dict[str, Any]]:
        """Convert messages to the dicts that chat templates expect.

        The "label" of a media item is its number among the conversation's items of the same
        modality, from 1; most templates do not print it.
        """
        shown = Counter(earlier)
        listed = []
        for message in messages:
            self.check_reads(message.media)
            content: list[dict[str, Any]] = []
            for part in message.parts:
                if isinstance(part, MediaPart):
                    shown[part.modality] += 1
                    content.append({"type": part.modality.label, "label": shown[part.modality]})
                elif isinstance(part, str):
                    content.append({"type": "text", "text": part})
                else:
                    raise InputError(
                        f"{message.place}: {part.label} comes from a chat, which does not store "
                        "its media: pass the media item itself"
                    )
            content = content or [{"type": "text", "text": ""}]
            listed.append({"role": message.role, "content": content} | _tool_fields(message))
        return listed


def _check_continued(message: Message) -> None:
    """Refuse a message whose last part is not text that an answer could continue."""
    last = message.parts[-1] if message.parts else None
    if not isinstance(last, str) or not last.strip() or message.tool_calls:
        raise InputError(
            f"continue_final_message: {message.place} must end with text for an answer to continue"
        )


def _tool_fields(message: Message) -> dict[str, Any]:
    """Return the tool fields of a message for chat templates.

    Content without media becomes a string, as not all templates accept parts in messages with tool
    fields.
    """
    fields: dict[str, Any] = {}
    if message.tool_calls:
        fields["tool_calls"] = [call.for_template() for call in message.tool_calls]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if (message.tool_calls or message.role == "tool") and not message.media:
        fields["content"] = message.written
    return fields
