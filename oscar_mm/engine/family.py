"""Family: model-specific parts of the chat template, the processor call and the positions."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jinja2 import TemplateError
from transformers import AutoModelForImageTextToText

from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.engine.grammar import Grammar
from oscar_mm.engine.message import Message, user_message
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.template import USUAL, TemplateFields, TemplateOptions
from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.errors import InputError, shown
from oscar_mm.media.media import Media, Medium
from oscar_mm.media.options import MediaOptions
from oscar_mm.media.part import MediaPart
from oscar_mm.modality import MediumSpan, Modality, token_modalities
from oscar_mm.modules import computing_device
from oscar_mm.moe_switch import choose_experts
from oscar_mm.thread_pool import submit_all
from oscar_mm.tool_parsers.grammar import json_of
from oscar_mm.tool_parsers.marks import mark_tokens
from oscar_mm.tool_parsers.offer import ToolOffer, read_offer
from oscar_mm.tool_parsers.parser import ToolFormat
from oscar_mm.tool_parsers.registry import format_of

_MARKUP = re.compile(r"<.+>|\[.+\]")
_QUESTION, _ANSWER = "oscar-question", "oscar-answer"
"""Stand-ins for an earlier turn, to render only what the template writes after its answer."""


@dataclass(frozen=True, eq=False)
class Encoding:
    """Rendered text and its media, encoded by the processor; tensors on the CPU.

    Attributes:
        input_ids: (1, tokens).
        tensors: further arguments of the model's forward: pixel values, grids, features or a list
            of samples, ...
        positions: (1, tokens), or (3, 1, tokens) of time, height and width, from 0.
        media_tokens: number of non-text tokens of each medium, in the order of the text.
    """

    input_ids: torch.Tensor
    tensors: dict[str, Any]
    positions: torch.Tensor
    media_tokens: list[int]


class Family(ABC):
    """Model family: builds ``Prompt`` objects, independent of any cache.

    Args:
        model: loaded model of the family.
        processor: processor of the model.

    Attributes:
        outer_model: the whole model of the checkpoint; ``model`` is its part that writes text.

    Raises:
        InputError: if the processor has no chat template.
    """

    model_types: ClassVar[tuple[str, ...]]
    """Values of ``config.model_type`` that the family supports."""

    name: ClassVar[str]
    """Common name of the family."""

    reads: ClassVar[frozenset[Modality]]
    """Supported modalities of media."""

    media_options: ClassVar[frozenset[str]] = frozenset({"detail"})
    """Names of the supported ``MediaOptions``; every family accepts ``detail``, which OpenAI's
    clients send to any model."""

    auto_class: ClassVar[Any] = AutoModelForImageTextToText
    """Class that loads the checkpoints."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor
        self.outer_model = model
        if not getattr(processor, "chat_template", None):
            raise InputError(
                "the processor has no chat template, so it is not known how this checkpoint was "
                "taught to converse: pass processor=... with its chat_template set"
            )
        choose_experts(model)
        # The first call turns off the padding and truncation of a saved tokenizer. Later calls
        # change nothing, so several threads may count tokens concurrently.
        self.tokenize(_QUESTION)

    @classmethod
    def set_attention(cls, model: Any, towers: str | None) -> None:
        """Set attention "oscar" in the decoder, and ``towers``, if given, in the towers."""
        vision = {"vision_config": towers} if towers else {}
        model.set_attn_implementation({"text_config": IMPLEMENTATION} | vision)

    @property
    def device(self) -> torch.device:
        """Device of the prompt's tensors."""
        return computing_device(self.model.get_input_embeddings())

    @property
    def layer_devices(self) -> dict[int, torch.device]:
        """Device of each layer's keys and values."""
        return dict(enumerate(map(computing_device, self.model.get_decoder().layers)))

    @property
    def placeholders(self) -> dict[str, Modality]:
        """Placeholder texts by which the chat template marks media."""
        tokens = {
            modality: getattr(self.processor, f"{modality.label}_token") for modality in self.reads
        }
        return {token: modality for modality, token in tokens.items()}

    def check_reads(self, media: Iterable[MediaPart | Medium]) -> None:
        """Refuse media of a modality that the family does not support.

        Raises:
            InputError: if a medium is not supported; names it and the supported modalities.
        """
        for medium in media:
            if medium.modality not in self.reads:
                known = ", ".join(sorted(modality.label for modality in self.reads))
                raise InputError(
                    f"{medium.label}: {self.name} does not read {medium.modality.label}; of media "
                    f"it reads {known}"
                )

    def prompt(
        self,
        messages: Sequence[Message],
        media: Media,
        tools: ToolOffer | None = None,
        template: TemplateOptions = USUAL,
    ) -> Prompt:
        """Build the prompt of a conversation from its beginning: template, processor, positions.

        Args:
            messages: messages of one or several turns.
            media: media of all messages, each modality in the order of the conversation.
            tools: tools that the model may call.
            template: chat-template options from ``template``.

        Returns:
            A prompt on the CPU. Positions are (1, tokens), or with multimodal RoPE (4, 1, tokens):
            text, time, height, width.

        Raises:
            InputError: if the family does not support the modality of a medium.
        """
        text = self.render(messages, tools=tools, template=template)
        prompt = self._prompt(text, media, 0, [], 0, torch.zeros(1, dtype=torch.long))
        return replace(prompt, continues=template.continues)

    def text_prompt(self, ids: Sequence[int]) -> Prompt:
        """Build a prompt of token ids without a chat template, on the CPU.

        Args:
            ids: at least one token id, checked by ``check_ids``.
        """
        tokens = torch.tensor([list(ids)], dtype=torch.long)
        axes = self.encode(_QUESTION, []).positions.shape[:-1]
        positions = torch.arange(len(ids)).expand(*axes, -1)
        encoded = Encoding(tokens, {}, positions, [])
        prompt = self._placed(encoded, [], 0, [], 0, torch.zeros(1, dtype=torch.long))
        return replace(prompt, continues=True)

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Refuse token ids that are out of range or stand for media.

        Args:
            name: name of the argument, for the error.
            ids: at least one token id.

        Raises:
            InputError: if an id is refused; names the argument.
        """
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        if unknown := [token for token in ids if not 0 <= token < vocabulary]:
            raise InputError(
                f"{name}: {shown(unknown[0])} is not a token id of this model: ids go from 0 to "
                f"{vocabulary - 1:,}"
            )
        tokens = torch.tensor([list(ids)], dtype=torch.long)
        if (token_modalities(tokens, config=self.model.config) != Modality.TEXT).any():
            raise InputError(
                f"{name}: contains a token that stands for a medium: give text only, and send "
                "media in messages"
            )

    def position_steps(self, modality: Modality, tokens: int) -> Sequence[int] | None:
        """Return by how many positions a run of tokens may advance the tokens after it.

        Args:
            modality: modality of the run.
            tokens: number of tokens in the run.

        Returns:
            All possible advances in ascending order; None if the tokens do not determine them.
        """
        return [tokens]

    def continuation(
        self,
        messages: Sequence[Message],
        media: Media,
        past_tokens: int,
        next_position: torch.Tensor,
        pending: Sequence[int] = (),
        earlier: Iterable[Modality] = (),
    ) -> Prompt:
        """Build the prompt of a later turn: only the new tokens, positioned after the past.

        First come ``pending``, then what the chat template writes between an answer and the next
        turn (its end token, a line break, ...), then the turn.

        Args:
            messages: messages of the new turn.
            media: media of the new turn.
            past_tokens: number of tokens in the cache.
            next_position: (1,) RoPE position of the first new token: ``next_position`` of the last
                prompt plus the number of its answer's tokens in the cache.
            pending: ids of the last answer that are not in the cache: its last token, if
                max_new_tokens or the caller ended it.
            earlier: modalities of the media of earlier turns.

        Returns:
            A prompt, see ``prompt``. Its ``media`` spans count from the first new token; in the
            cache they lie ``past_tokens`` later.
        """
        # The stand-in of the answer is cut off only after tokenization, as a tokenizer may treat
        # the beginning of a text differently.
        text = self._after_answer(self._listed(messages, earlier))
        lead = self.tokenize(_ANSWER).shape[1]
        return self._prompt(text, media, lead, list(pending), past_tokens, next_position)

    def join_media(self, name: str, parts: Sequence[Any]) -> Any:
        """Join one forward argument of several prompts along the media."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def concatenate(self, prompts: Sequence[Prompt]) -> Prompt:
        """Concatenate single-row prompts into one row, without changing their positions."""
        gathered: dict[str, list[Any]] = {}
        media: list[MediumSpan] = []
        tokens = 0
        for prompt in prompts:
            for name, value in prompt.inputs.items():
                gathered.setdefault(name, []).append(value)
            media += [span.shifted(tokens) for span in prompt.media]
            tokens += prompt.tokens
        ids = torch.cat(gathered.pop("input_ids"), dim=1)
        inputs = {name: self.join_media(name, parts) for name, parts in gathered.items()}
        return Prompt(
            inputs={"input_ids": ids} | inputs,
            positions=torch.cat([prompt.positions for prompt in prompts], dim=-1),
            next_position=prompts[-1].next_position,
            modalities=torch.cat([prompt.modalities for prompt in prompts], dim=1),
            media=tuple(media),
        )

    @abstractmethod
    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        """Run the processor on a rendered text and its media, given in the order of the text."""

    @abstractmethod
    def min_tokens(self, medium: Medium) -> int:
        """Return the minimum number of tokens of a medium, without processing it."""

    @abstractmethod
    def largest_image(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which an upright image of this size may be scaled down.

        The processor computes the same features for the scaled image, up to rounding, in as many
        tokens.

        Returns:
            Width and height in pixels.
        """

    def image_size(self, width: int, height: int, options: MediaOptions) -> tuple[int, int]:
        """Return the width and height to which an image is resized by the options."""
        return width, height

    def frame_size(
        self, width: int, height: int, frames: int, options: MediaOptions
    ) -> tuple[int, int]:
        """Return the width and height to which each frame of a video is resized by the options."""
        return width, height

    def tokenize(self, text: str) -> torch.Tensor:
        """Tokenize rendered text without media to (1, tokens) ids; needs no lock."""
        options = self.text_options(text)
        return self.processor.tokenizer([text], return_tensors="pt", **options)["input_ids"]

    def tokenize_media(self, text: str, modality: Modality, counts: Sequence[int]) -> torch.Tensor:
        """Tokenize, with each placeholder of a modality repeated for the tokens of its medium.

        Repeating ids after tokenization is safe, as special tokens do not depend on their context.
        """
        ids = self.tokenize(text)
        [token] = (name for name, kind in self.placeholders.items() if kind is modality)
        places = ids[0] == self.processor.tokenizer.convert_tokens_to_ids(token)
        times = torch.ones_like(ids[0])
        times[places] = torch.tensor(counts, dtype=times.dtype)
        return ids.repeat_interleave(times, dim=1)

    @cached_property
    def longest_token(self) -> int:
        """Maximum number of characters in a token."""
        return max(map(len, self.processor.tokenizer.get_vocab()))

    def text_options(self, text: str) -> dict[str, Any]:
        """Return tokenizer options that prevent a second BOS token."""
        begin = self.processor.tokenizer.bos_token
        return {"add_special_tokens": False} if begin and text.startswith(begin) else {}

    @cached_property
    def think_tokens(self) -> ThinkTokens | None:
        """Tokens that enclose the model's reasoning; None if it has none."""
        return ThinkTokens.of(self.processor.tokenizer)

    @cached_property
    def tool_format(self) -> type[ToolFormat] | None:
        """Tool-call format of the chat template; None if it has none."""
        return format_of(self._templates)

    def offer(
        self, tools: Sequence[Any] | None, choice: Any = None, *, parallel: bool = True
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

    def with_calls(self, options: Mapping[str, Any], offer: ToolOffer | None) -> Any:
        """Add a grammar for tool calls to sampling options.

        A requested JSON format applies to the text of an answer: an answer that must call tools has
        no text, and any other answer is either JSON or calls. All other grammars apply to the whole
        answer.

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
        """Whether the chat template makes answers begin with reasoning."""
        if self.think_tokens is None:
            return False
        question = self.render([user_message(_QUESTION)])
        return self.think_tokens.opened(self.tokenize(question)[0]) > 0

    def generation_setting(self, name: str) -> Any:
        """Return a setting of the checkpoint's generation_config; None if it is not set."""
        return getattr(self.model.generation_config, name)

    def default_sampling(self) -> dict[str, Any]:
        """Return the checkpoint's recommended sampling, as fields of ``Sampling``."""
        rules = {"repetition_penalty": self.generation_setting("repetition_penalty")}
        if self.generation_setting("do_sample"):
            temperature = self.generation_setting("temperature")
            rules["temperature"] = 1.0 if temperature is None else temperature
            rules |= {name: self.generation_setting(name) for name in ("top_p", "top_k", "min_p")}
        return {name: value for name, value in rules.items() if value is not None}

    def end_tokens(self) -> frozenset[int]:
        """Return the token ids that end an answer."""
        ids = self.generation_setting("eos_token_id")
        if ids is None:
            ids = self.processor.tokenizer.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """Special tokens, and added tokens used by the chat template such as <think>."""
        tokenizer, template = self.processor.tokenizer, str(self.processor.chat_template)
        added = tokenizer.added_tokens_decoder.values()
        # Some tokenizers add runs of spaces and line breaks, which are not control tokens.
        meant = [
            one.content
            for one in added
            if one.special or (_MARKUP.fullmatch(one.content) and one.content in template)
        ]
        return tuple(dict.fromkeys([*tokenizer.all_special_tokens, *meant]))

    def refuse_control_tokens(self, name: str, text: str, *, calls: bool = False) -> None:
        """Refuse user text with control tokens, which could forge turns, reasoning or media.

        Args:
            name: name of the text, for the error.
            text: text from a user.
            calls: allow the marks of tool calls, as in answers.

        Raises:
            InputError: if the text contains a control token.
        """
        allowed = self.tool_format.marks() if calls and self.tool_format else ()
        for token in self.control_tokens:
            if token in text and token not in allowed:
                raise InputError(
                    f"{name} holds {token!r}, a control token of this model: take it out"
                )

    def answer_text(self, answer: Message) -> str:
        """Return an assistant message as the model writes it, with calls in the template's format.

        Raises:
            InputError: if the template does not write tool calls.
        """
        if not answer.tool_calls:
            return answer.written
        question, plain = self._listed([user_message(_QUESTION), Message("assistant", (_ANSWER,))])
        texts = [
            self._render([question, one], add_generation_prompt=False)
            for one in (plain | {"content": _ANSWER}, *self._listed([answer]))
        ]
        before, _, after = texts[0].partition(_ANSWER)
        if not texts[1].startswith(before):
            before = before.rstrip(" ")  # Mistral's writes one before text, none before calls.
        written = texts[1].removeprefix(before).removesuffix(after)
        if len(written) + len(before) + len(after) != len(texts[1]) or not all(
            call.name in written for call in answer.tool_calls
        ):
            raise InputError(
                f"{answer.place}: the chat template of this checkpoint does not write tool calls: "
                "leave tool_calls out"
            )
        return written

    def _after_answer(self, messages: Sequence[dict[str, Any]]) -> str:
        """Render ``messages`` after a stand-in answer, and return the text from that answer on."""
        question = {"role": "user", "content": [{"type": "text", "text": _QUESTION}]}
        # Some templates require an answer to be a list of parts, others a text.
        for content in ([{"type": "text", "text": _ANSWER}], _ANSWER):
            former = [question, {"role": "assistant", "content": content}]
            try:
                text = self._render([*former, *messages])
            except (InputError, TypeError):
                if content is _ANSWER:
                    raise
                continue
            if _ANSWER in text:
                return text[text.index(_ANSWER) :]
        raise InputError("the chat template of this checkpoint leaves out answers")

    def template(self, given: TemplateFields) -> TemplateOptions:
        """Check options of the chat template, and drop variables that it does not use.

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
            InputError: if the family does not support the modality of a medium, the template
                refuses the conversation, or the last message cannot be continued.
        """
        if template.continues:
            _check_continued(messages[-1])
        offered = {} if tools is None else {"tools": tools.for_template()}
        return self._render(self._listed(messages), **offered, **template.as_arguments)

    def _render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        options = {"tokenize": False, "add_generation_prompt": True} | options
        try:
            return self.processor.apply_chat_template(list(messages), **options)
        # Templates process values from clients: schemas, call arguments, variables.
        except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise InputError(
                f"the chat template of this checkpoint refuses the conversation: {error}"
            ) from error

    def _listed(
        self, messages: Sequence[Message], earlier: Iterable[Modality] = ()
    ) -> list[dict[str, Any]]:
        """Convert messages to the dicts that chat templates expect.

        A medium's "label" is its number within its modality in the conversation, from 1; most
        templates do not print it.
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
                        "its media: give the medium itself"
                    )
            content = content or [{"type": "text", "text": ""}]
            listed.append({"role": message.role, "content": content} | _tool_fields(message))
        return listed

    def _prompt(
        self,
        text: str,
        media: Media,
        cut: int,
        pending: list[int],
        past_tokens: int,
        next_position: torch.Tensor,
    ) -> Prompt:
        """Encode text and media, and place the tokens; see ``_placed``."""
        ordered = self._in_order(text, media)
        # Long media are hashed later, one at a time with all threads, after the processor.
        short = [medium for medium in ordered if not medium.in_blocks]
        digests = submit_all(lambda medium: medium.digest, short)
        encoded = self.encode(text, ordered)
        wait(digests)
        return self._placed(encoded, ordered, cut, pending, past_tokens, next_position)

    def _placed(
        self,
        encoded: Encoding,
        ordered: Sequence[Medium],
        cut: int,
        pending: list[int],
        past_tokens: int,
        next_position: torch.Tensor,
    ) -> Prompt:
        """Drop the first ``cut`` tokens (text), prepend ``pending`` and set the positions."""
        before = torch.tensor([pending], dtype=torch.long)
        ids = torch.cat([before, encoded.input_ids[:, cut:]], dim=1)
        begin = torch.arange(len(pending)).expand(*encoded.positions.shape[:-1], -1)
        after = encoded.positions[..., cut:] - cut + len(pending)
        positions = torch.cat([begin.to(after.dtype), after], dim=-1) + next_position.to("cpu")
        following = positions.amax(dim=(0, -1) if positions.ndim == 3 else -1) + 1
        if positions.ndim == 3:
            row = torch.arange(past_tokens, past_tokens + ids.shape[1]).expand(1, 1, -1)
            positions = torch.cat([row.to(positions.dtype), positions])
        modalities = token_modalities(ids, config=self.model.config)
        return Prompt(
            inputs={"input_ids": ids} | encoded.tensors,
            positions=positions,
            next_position=following,
            modalities=modalities,
            media=_spans(modalities[0], ordered, encoded.media_tokens),
        )

    def _in_order(self, text: str, media: Media) -> list[Medium]:
        """Sort the media by their placeholders in the rendered text."""
        placeholders = self.placeholders
        pattern = "|".join(re.escape(token) for token in placeholders)
        left = {modality: [m for m in media if m.modality is modality] for modality in Modality}
        called = [placeholders[token] for token in re.findall(pattern, text)]
        if sorted(called) != sorted(medium.modality for medium in media):
            raise InputError(
                "the chat template of this checkpoint does not write one placeholder for each "
                f"medium: {len(media)} media, {len(called)} placeholders"
            )
        return [left[modality].pop(0) for modality in called]


def _check_continued(message: Message) -> None:
    """Refuse a message whose last part is not text that an answer could continue."""
    last = message.parts[-1] if message.parts else None
    if not isinstance(last, str) or not last.strip() or message.tool_calls:
        raise InputError(
            f"continue_final_message: {message.place} must end with text for an answer to continue"
        )


def _tool_fields(message: Message) -> dict[str, Any]:
    """Return the tool fields of a message for chat templates.

    Without media the content becomes a text, as not all templates accept parts in such messages.
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


def _spans(
    modalities: torch.Tensor, media: Sequence[Medium], counts: Sequence[int]
) -> tuple[MediumSpan, ...]:
    places = modalities.nonzero()[:, 0].tolist()
    if len(places) != sum(counts):
        raise RuntimeError(f"{len(places)} tokens of media, but the media have {sum(counts)}")
    spans, first = [], 0
    for medium, count in zip(media, counts, strict=True):
        run = places[first : first + count]
        span = MediumSpan(medium.modality, medium.label, run[0], run[-1] + 1, medium.digest)
        spans.append(span)
        first += count
    return tuple(spans)
