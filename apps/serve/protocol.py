"""Protocol: parsing and validation of OpenAI's chat-completions requests.

Where OpenAI's own server and vLLM differ, this server behaves like vLLM, because most clients of
open models are written for vLLM:

- It refuses an unknown ``model``, and accepts a request without a ``model``.
- Roles of messages need not alternate. Consecutive user messages, an answer without a question,
  and a system or developer message in the middle are each rendered as a separate message, unless
  the checkpoint's chat template requires alternating roles. "developer" is the same as "system".
- Whatever the role, a ``content`` of null is empty. A part whose text, image or recording is null
  is ignored.
- It ignores unknown fields, and fields that do not change the answer (``metadata``, ``store``,
  ``service_tier``, ...); ``user`` and ``safety_identifier`` matter to ``FairQueue`` only.

Unlike vLLM, this server

- refuses unsupported fields that would change the answer, where vLLM ignores unknown fields;
- refuses roles that chat templates would silently drop, and conversations that end with an answer,
  unless ``continue_final_message`` or ``add_generation_prompt`` says what to do with that answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from oscar_mm.apps.serve.field_error import FieldError
from oscar_mm.apps.serve.media_parts import (
    GivenPart,
    MediaDecoder,
    MediaSource,
    StrictModel,
    UsualOptions,
)
from oscar_mm.apps.serve.spoken import (
    EarlierAudio,
    GivenAudio,
    KeptTranscripts,
    SpokenFormat,
    check_modalities,
)
from oscar_mm.apps.serve.structured import ResponseFormat, StructuredOutputs, grammar_of
from oscar_mm.apps.serve.tools import ToolFields
from oscar_mm.chat.history import PastTurn
from oscar_mm.engine.family import Family
from oscar_mm.engine.message import ASKING, Message, Part
from oscar_mm.engine.request_options import split_media
from oscar_mm.engine.sampling import MAX_LOGPROBS
from oscar_mm.engine.template import USUAL, TemplateFields, TemplateOptions
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality
from oscar_mm.tool_parsers.calls import ToolCall
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import MAX_CALLS

MAX_STRUCTURE = 250_000
"""Maximum number of brackets and commas in a request; they determine its parsing time."""
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Maximum total number of parts in the messages of a request."""
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
"""Maximum length of a stop string, in characters."""
MAX_SALT_CHARACTERS = 256
MAX_ANSWERS = 16
"""Maximum number of answers to one request."""
_OWN_ERROR = "protocol"
_REFUSED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Unsupported fields, and the values (besides null) that do not change the answer."""
_IN_VLLM = {
    *("add_special_tokens", "allowed_token_ids", "chat_template", "documents"),
    *("background", "length_penalty", "logprob_token_ids", "mm_processor_kwargs"),
    *("prompt_embeds", "repetition_detection", "return_token_ids"),
    *("return_tokens_as_token_ids", "skip_special_tokens", "truncate_prompt_tokens"),
    "use_beam_search",
}
"""Unsupported fields that vLLM's server supports."""
_ALL = -1
"""Value that makes vLLM return the log-probabilities of the entire vocabulary."""


_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "seed",
    "min_tokens",
    "ignore_eos",
    "prompt_logprobs",
    "thinking_token_budget",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
)
"""Fields that have the same name and meaning in ``Sampling``."""


def _as_parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is None or isinstance(content, list):
        return content
    raise PydanticCustomError(_OWN_ERROR, "must be text or a list of parts")


class GivenFunction(StrictModel):
    """The name of a called function, and its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class GivenCall(StrictModel):
    """A tool call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: GivenFunction


class GivenMessage(StrictModel):
    """A message in a request."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[GivenPart] | None, BeforeValidator(_as_parts)] = None
    tool_calls: Annotated[list[GivenCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    audio: EarlierAudio | None = None


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool | None = None


def refuse_unsupported(given: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that are not supported and would change the answer.

    Args:
        given: fields of the request, by name.
        refused: for each unsupported field, its values (besides null) that do not change the
            answer.

    Raises:
        FieldError: if a field is unsupported; the message says whether ``--engine vllm``
            supports it.
    """
    for name, value in given.items():
        harmless = refused.get(name)
        if harmless is None or value is None or value in harmless:
            continue
        others = ", ".join(map(repr, harmless)) or "null"
        elsewhere = ", or serve with --engine vllm" if name in _IN_VLLM else ""
        raise FieldError(f"only {others} is supported: leave it out{elsewhere}", name)


def check_top(name: str, count: int | None) -> None:
    """Check that the value of a field such as ``top_logprobs`` is in range.

    Args:
        name: name of the field.
        count: value of the field; None is valid.

    Raises:
        FieldError: if the value is out of range; the message says whether ``--engine vllm``
            supports it.
    """
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        elsewhere = ", or serve with --engine vllm" if count == _ALL else ""
        raise FieldError(f"must be from 0 to {MAX_LOGPROBS}{elsewhere}", name)


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class SampledBody(StrictModel):
    """Request fields that the chat-completions and completions APIs have in common."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    echo: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    stop: Annotated[
        Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None,
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("requires stream: true", "stream_options")
        return self

    @property
    def sender(self) -> str:
        """The user for whom the request is sent, in the client's words; "" if it names none."""
        return self.safety_identifier or self.user or ""

    @property
    def has_usage(self) -> bool:
        """Whether the stream ends with the token usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self) -> dict[str, Any]:
        """Return the request's ``Sampling`` options, except ``max_new_tokens`` and ``logprobs``.

        Raises:
            InputError: see ``grammar_of``.
            FieldError: if ``prompt_logprobs`` is out of range, or requested in a stream.
        """
        check_top("prompt_logprobs", self.prompt_logprobs)
        if self.stream and self.prompt_logprobs is not None:
            raise FieldError("is not available in a stream: leave it out", "prompt_logprobs")
        given = {name: getattr(self, name) for name in _SAMPLING} | {
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "seed": None if self.seed == -1 else self.seed,
            "grammar": grammar_of(self),
        }
        return {name: value for name, value in given.items() if value is not None}


class Body(ToolFields, SampledBody):
    """JSON body of a chat-completions request; see ``_REFUSED`` for the fields that it refuses."""

    messages: Annotated[list[GivenMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: list[str] | None = None
    audio: GivenAudio | None = None

    @property
    def speaks(self) -> bool:
        """Whether the answer is also spoken."""
        return "audio" in (self.modalities or ())

    @property
    def template_fields(self) -> TemplateFields:
        """Chat-template options of the request."""
        names = TemplateFields.__annotations__
        return TemplateFields(**{name: getattr(self, name) for name in names})

    @property
    def echoed(self) -> str:
        """Text of the last message if ``echo`` prepends that text to the answer; otherwise ""."""
        open_end = self.continue_final_message or self.add_generation_prompt is False
        last = self.messages[-1]
        if not (self.echo and open_end and last.role == "assistant"):
            return ""
        return "".join(part.text or "" for part in last.content or ())

    @model_validator(mode="after")
    def _check_supported(self) -> Body:
        refuse_unsupported(self.model_extra or {}, _REFUSED)
        if self.top_logprobs and not self.logprobs:
            raise FieldError("requires logprobs: true", "top_logprobs")
        check_top("top_logprobs", self.top_logprobs)
        if check_modalities(self.modalities, self.audio, stream=bool(self.stream)) and self.stop:
            raise FieldError("is not available with audio: leave it out", "stop")
        return self


@dataclass(frozen=True)
class ApiRequest:
    """A validated request to generate one or more answers.

    Attributes:
        model: model name that the client requested, or None.
        system: the system prompt, or None.
        past: earlier turns.
        question: the messages to answer; the last one is from the user.
        sampling: fields of ``Sampling``.
        stream: whether to stream the answer.
        usage: whether a stream ends with the token usage.
        cache_salt: salt of the caches; only requests with the same salt share conversations and
            prefixes.
        n: number of answers to return.
        best_of: number of answers to generate; the ``n`` likeliest are returned.
        tools: tools that the model may call.
        template: options of the chat template.
        raw: token ids of a prompt without a chat template, instead of messages; or None.
        user: user for whom the request is sent, in the client's words; "" if it names none.
        adapter: name of the adapter that answers, or None.
        spoken: voice and audio format of the answer; None for an answer in text.
        script: text to read aloud instead of an answer of the model; or None.
        keeps: whether the conversation is stored, so that later requests may continue it.
    """

    model: str | None
    system: Message | None
    past: tuple[PastTurn, ...]
    question: tuple[Message, ...]
    sampling: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    usage: bool = False
    cache_salt: str = ""
    n: int = 1
    best_of: int = 1
    tools: ToolOffer | None = None
    template: TemplateOptions = USUAL
    raw: tuple[int, ...] | None = None
    user: str = ""
    adapter: str | None = None
    spoken: SpokenFormat | None = None
    script: str | None = None
    keeps: bool = True

    @property
    def count(self) -> int:
        """Number of answers to generate."""
        return max(self.n, self.best_of)

    @property
    def is_whole(self) -> bool:
        """Whether to process the full prompt rather than continue a stored conversation."""
        asks = "prompt_logprobs" in self.sampling or self.spoken is not None
        return not self.keeps or self.raw is not None or asks or self.template.is_special

    def messages(self) -> Iterator[Message]:
        """Yield all messages in order."""
        if self.system is not None:
            yield self.system
        for turn in self.past:
            yield from turn.messages
            yield turn.answer
        yield from self.question


T = TypeVar("T", bound=BaseModel)


def parsed(kind: type[T], data: bytes) -> T:
    """Parse the JSON body of a request.

    Args:
        kind: class of the parsed body.
        data: body of the request, of bounded length.

    Raises:
        FieldError: if a field is wrong; the message names the field and the remedy.
    """
    structure = sum(map(data.count, (b"{", b"[", b",")))
    if structure > MAX_STRUCTURE:
        raise FieldError(
            f"the request has {structure:,} brackets and commas, but at most {MAX_STRUCTURE:,} "
            "are allowed"
        )
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _field_error(error) from None


def checked(fields: dict[str, Any]) -> Body:
    """Validate the fields of a chat-completions request.

    Raises:
        FieldError: see ``parsed``.
    """
    return validated(Body, fields)


def validated(kind: type[T], fields: dict[str, Any]) -> T:
    """Validate the fields of a request against the class of its body.

    Raises:
        FieldError: see ``parsed``.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _field_error(error) from None


def check_media_options(body: Body, family: Family) -> None:
    """Refuse request-wide media options that the model's family does not support.

    Raises:
        FieldError: see ``parsed``.
    """
    usual = UsualOptions(body)
    try:
        split_media(usual.given, family)
    except InputError as error:
        raise FieldError(str(error), usual.field) from None
    if usual.sound and Modality.AUDIO not in family.reads:
        raise FieldError(
            f"{family.name} does not accept audio: leave out use_audio_in_video", usual.field
        )


def read_request(
    body: Body,
    source: MediaSource,
    template: TemplateOptions = USUAL,
    spoken: SpokenFormat | None = None,
    transcripts: KeptTranscripts | None = None,
) -> ApiRequest:
    """Convert a body to a request: decode its media, and split its messages into turns.

    Args:
        body: the body of the request.
        source: allowed sources of media, and their limits.
        template: validated chat-template options.
        spoken: voice and audio format of the answer; None for an answer in text.
        transcripts: transcripts of earlier spoken answers; None if there are none.

    Raises:
        FieldError: if a field is wrong; the message names the field and the remedy.
    """
    if sum(len(message.content or ()) for message in body.messages) > MAX_PARTS:
        raise FieldError(f"all messages together have more than {MAX_PARTS:,} parts", "messages")
    _fill_in_transcripts(body.messages, KeptTranscripts() if transcripts is None else transcripts)
    decoder = MediaDecoder(source, body.cache_salt or "", UsualOptions(body))
    messages = [
        _decode_message(message, place, decoder) for place, message in enumerate(body.messages)
    ]
    system = messages.pop(0) if messages[0].role == "system" and messages[1:] else None
    sampling = {"thinking_token_budget": template.budget} | body.sampling()
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling["max_new_tokens"] = longest
    sampling["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    request = ApiRequest(
        model=body.model,
        system=None if system is None or system.is_empty else system,
        past=(),
        question=tuple(messages),
        sampling={name: value for name, value in sampling.items() if value is not None},
        stream=bool(body.stream),
        usage=body.has_usage,
        cache_salt=body.cache_salt or "",
        n=body.n or 1,
        template=template,
        user=body.sender,
        spoken=spoken,
    )
    if not template.takes_any_end:
        past, question = _split_turns(messages)
        if not request.is_whole:
            request = replace(request, past=tuple(past), question=question)
    decoder.keep_named()
    return request


def _fill_in_transcripts(messages: list[GivenMessage], transcripts: KeptTranscripts) -> None:
    """Fill in the text of assistant messages that refer to the audio of an earlier answer."""
    for place, message in enumerate(messages):
        if message.audio is None:
            continue
        field = f"messages[{place}].audio"
        if message.role != "assistant":
            raise FieldError("only a message of role assistant may have audio", field)
        if not message.content:
            text = transcripts.transcript(message.audio, field)
            message.content = [GivenPart(type="text", text=text)]


def _split_turns(messages: list[Message]) -> tuple[list[PastTurn], tuple[Message, ...]]:
    """Split messages into earlier turns and the question.

    An assistant message is an answer if it follows a message of another role; otherwise it becomes
    part of the next question.
    """
    past: list[PastTurn] = []
    question: list[Message] = []
    for message in messages:
        if message.role == "assistant" and question and question[-1].role != "assistant":
            past.append(PastTurn(tuple(question), message))
            question = []
        else:
            question.append(message)
    if not question or question[-1].role == "assistant":
        raise FieldError(
            "must not end with an assistant's message unless continue_final_message is set",
            "messages",
        )
    for last in (*(turn.messages[-1] for turn in past), question[-1]):
        if last.is_empty:
            raise FieldError("must not be empty", last.place)
    return past, tuple(question)


def _decode_message(given: GivenMessage, place: int, decoder: MediaDecoder) -> Message:
    parts: list[Part] = []
    for index, part in enumerate(given.content or ()):
        name = f"messages[{place}].content[{index}]"
        if part.type != "text" and given.role not in ASKING:
            raise FieldError(
                f"only messages of role user or tool may contain media, not {given.role!r}", name
            )
        if part.type == "text":
            parts += [] if part.text is None else [part.text]
        elif (medium := decoder.decode(part, name)) is not None:
            parts.append(medium)
    role, label = "system" if given.role == "developer" else given.role, f"messages[{place}]"
    calls = [
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in given.tool_calls or ()
    ]
    if calls and role != "assistant":
        raise FieldError(
            "only a message of role assistant may have tool calls", f"{label}.tool_calls"
        )
    result = (given.tool_call_id, given.name) if role == "tool" else (None, None)
    return Message(role, tuple(parts), f"{label}.content", tuple(calls), *result)


_MESSAGES = {
    "missing": "is missing",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "literal_error": "must be {expected}",
    "list_type": "must be a list",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must not be empty",
    "too_long": "has {actual_length} entries, but at most {max_length} are allowed",
    "string_too_short": "must not be empty",
    "union_tag_invalid": "must have a type among {expected_tags}",
    "union_tag_not_found": "must have a type",
    "string_too_long": "has more than the allowed {max_length} characters",
}
"""Error message for each of pydantic's error types."""


_NO_NAMES = (
    *("[key]", "str", "dict[str,any]"),
    *("message", "function_call", "function_call_output"),
)
"""Names that pydantic inserts into the location of an error in a dict or a union."""


def _field_error(error: ValidationError) -> FieldError:
    """Convert the first of pydantic's errors to an error that uses the API's name of the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return FieldError(f"the request is not valid JSON: {context['error']}")
    if isinstance(own := context.get("error"), FieldError):
        return own
    places = [part for part in first["loc"] if part not in _NO_NAMES]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in places)
    if first["type"] == _OWN_ERROR:
        message = first["msg"]
    else:
        message = _MESSAGES.get(first["type"], "is not valid in this API").format(**context)
    return FieldError(message if name else f"the request {message}", name[1:] or None)
