"""Pipeline: base class for loading a checkpoint, validating requests and generating answers."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, Unpack

import torch

from oscar_mm.admission.admission import Admission
from oscar_mm.admission.capacity import KVBudget
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.saved_cache import ADAPTER_SEPARATOR
from oscar_mm.chat.chat import Chat
from oscar_mm.chat.chat_file import ModelFingerprint, read_chat
from oscar_mm.engine.answer import Answer, AnswerStream
from oscar_mm.engine.engine import Engine
from oscar_mm.engine.generate_options import check_do_sample, from_generate
from oscar_mm.engine.message import Message, media_of
from oscar_mm.engine.message_lists import conversation_from
from oscar_mm.engine.prefill_runner import usual_chunk
from oscar_mm.engine.prefix_cache import PrefixCache
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.request import Request
from oscar_mm.engine.request_options import RequestOptions, split_media, split_template
from oscar_mm.engine.sampling import Sampling
from oscar_mm.engine.speech import Speech, VoiceInputs
from oscar_mm.engine.spoken_request import SpokenRequest
from oscar_mm.engine.template import USUAL, TemplateFields, TemplateOptions
from oscar_mm.errors import InputError, shown
from oscar_mm.fast_decode.row_adapters import RowAdapters
from oscar_mm.media import MediaLimits
from oscar_mm.media.media import Media, MediaReader
from oscar_mm.media.options import MediaOptions
from oscar_mm.media.part import media_parts
from oscar_mm.ops.score_errors import warn_of_hard_layers
from oscar_mm.pipelines.batch import BatchResult, batch_results
from oscar_mm.pipelines.loading import Placement, load
from oscar_mm.pipelines.loading_options import LoadingOptions, loading_arguments
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.sizes import parse_bytes
from oscar_mm.tensor_parallel import TPGroup
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import Piece

_REASONING = 8192
"""Tokens added to the default ``max_new_tokens`` of thinking models, for their reasoning."""


class Pipeline:
    """Base class of pipelines, which load a checkpoint, validate requests and generate answers."""

    name: ClassVar[str]
    """Name of the pipeline, see ``oscar_mm.pipelines.registry.pipeline_of``."""

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        *,
        processor: Any = None,
        policy: str | KVPolicy = DEFAULT,
        device: str | torch.device | None = None,
        device_map: str | Mapping[str, Any] | None = None,
        tp_plan: str | Mapping[str, str] | None = None,
        dtype: str | torch.dtype | None = None,
        weights: str | None = None,
        attn_implementation: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        drafts: bool = False,
        max_context: int | None = None,
        prefill_chunk: int | Literal["auto"] | None = None,
        allow_remote: bool = False,
        limits: MediaLimits | None = None,
        video_fps: float = 2.0,
        prefix_cache: int | str | None = None,
        kv_budget: int | str | None = None,
        spill: str | Path | bool = True,
        model_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[LoadingOptions],
    ) -> None:
        """Load a checkpoint, or use a loaded model.

        Args:
            model: hub id, local folder, name of a bundled model (``oscar_mm.models``), or a loaded
                model. A folder may hold a peft adapter, and a loaded model may be a ``PeftModel``.
            processor: processor of a loaded model; None loads it from the model's folder or hub id.
            policy: how keys and values are stored: a ``KVPolicy`` or the name of a preset.
            device: "cuda", "cpu", ...; by default a GPU if there is one.
            device_map: "auto", or a dict from module to device, to put layers on different GPUs,
                each layer with its keys and values.
            tp_plan: "auto" for tensor parallelism: each process started by torchrun stores a part
                of every layer, and the keys, values and states of its own heads. All processes
                must make the same requests in the same order, and get the same answers
                (``oscar_mm.pipelines.loading``).
            dtype: dtype of the weights; by default the checkpoint's on a GPU, float32 on a CPU.
            weights: "fp8" or "int4" quantizes the decoder's weights while the model is loaded,
                which halves or quarters their memory; by default they stay as in the checkpoint.
                Products are computed in ``dtype``.
            attn_implementation: attention of the vision and audio towers ("sdpa",
                "flash_attention_2", "eager"); by default "sdpa", or the implementation that a
                loaded model already uses.
            adapters: folders of LoRA adapters of peft by name, such as ``{"legal": "./legal"}``.
                A request or a chat chooses one with ``adapter="legal"``, and by default none;
                requests with different adapters run together.
            drafts: whether the checkpoint's own draft module (Qwen3.5's MTP) guesses the next
                tokens, which the model verifies: a request that decodes alone gets several tokens
                in one pass of the model, and the same answer. The module takes memory for its
                weights and as much KV cache as one more layer.
            max_context: maximum tokens of a conversation, including its answer; by default, and at
                most, the model's context length. A larger request is refused before prefill.
            prefill_chunk: number of tokens in each chunk of a prompt's prefill. Chunks bound
                activation memory and let other prompts run in between, but later chunks attend to
                packed pages. None prefills the full prompt in one pass, with exact attention.
                "auto", meant for servers, is 1,024 on a CPU and 32,768 on a GPU.
            allow_remote: allow http(s) URLs as media.
            limits: limits on media.
            video_fps: frames per second to sample from videos.
            prefix_cache: memory ("2GB") for cached prompt prefixes, so that the same media after
                the same system prompt are prefilled once. None, the default, turns it off, because
                it uses memory beyond what the requests need, and tokens after a shared prefix
                attend to packed pages.
            kv_budget: memory limit ("8GB") for all chats and requests together. To stay within it,
                idle chats are moved to disk; a request that still does not fit is refused before
                prefill. None sets no limit.
            spill: folder for idle chats; True for a temporary folder; False to refuse requests
                instead.
            model_kwargs: arguments of ``from_pretrained`` that are not in ``LoadingOptions``, such
                as ``{"variant": "fp16"}``.
            options: torch_dtype, quantization_config, generation_config, revision, subfolder,
                trust_remote_code, token, cache_dir and local_files_only, as in transformers; see
                ``oscar_mm.pipelines.loading_options.LoadingOptions``.

        Raises:
            InputError: if an argument is invalid; the message says what would be valid.
        """
        dtype, kwargs = loading_arguments(
            dtype, model_kwargs, options, signature(Pipeline).parameters
        )
        self.policy = KVPolicy.of(policy)
        chunk = None if prefill_chunk == "auto" else prefill_chunk
        for name, value in (("max_context", max_context), ("prefill_chunk", chunk)):
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"{name}={value!r}: must be a positive number of tokens or None")
        limits = MediaLimits() if limits is None else limits
        self.media_reader = MediaReader(limits, allow_remote, video_fps)
        placement = Placement(device, device_map, tp_plan)
        self.store = PageStore(self.policy)
        self.prefixes = budget = None
        if prefix_cache is not None:
            self.prefixes = PrefixCache(parse_bytes("prefix_cache", prefix_cache))
        if kv_budget is not None:
            limit = parse_bytes("kv_budget", kv_budget)
            budget = KVBudget(self.store, limit, spill, self.prefixes)
        self.family = load(
            model,
            processor,
            self.name,
            placement=placement,
            dtype=dtype,
            weights=weights,
            towers=attn_implementation,
            adapters={} if adapters is None else adapters,
            drafts=drafts,
            model_kwargs=kwargs,
        )
        self.store.ranks = TPGroup.of(self.model)
        self.store.ranks.check(self.policy)
        self._free_outside_windows(self.store)
        # Shared with the pipelines that ``with_policy`` derives from this one.
        self._fingerprint = ModelFingerprint(self.model)
        self.media_reader.fit, self.media_reader.sizes = self.family.largest_image, self.family
        longest = self.model.config.get_text_config().max_position_embeddings
        context = min(max_context or longest, longest)
        chunk = usual_chunk(self.family.device) if prefill_chunk == "auto" else chunk
        self.admission = Admission(self.family, self.store, context, chunk, budget)
        self.media_reader.max_seconds = self.admission.max_seconds
        thread = self.admission.thread
        self.engine = Engine(self.family, self.store, self.admission, self.prefixes, thread)
        warn_of_hard_layers(self.model, self.policy)
        name = model if isinstance(model, str | Path) else self.model.name_or_path or "loaded model"
        devices = ", ".join(dict.fromkeys(map(str, self.family.layer_devices.values())))
        dtype_name = str(self.model.dtype).removeprefix("torch.")
        self._loaded = f"{str(name)!r}, device={devices}, dtype={dtype_name}, context={context:,}"

    def __repr__(self) -> str:
        """Describe model, devices, dtype, context and policy in one line, as they were loaded."""
        if (loaded := getattr(self, "_loaded", None)) is None:
            return f"{type(self).__name__}(not loaded)"
        return f"{type(self).__name__}({loaded}, policy={self.policy.name or 'custom'})"

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path | torch.nn.Module, **arguments: Any
    ) -> Self:
        """Create a pipeline: the constructor under the name that it has in transformers.

        Args:
            pretrained_model_name_or_path: ``model`` of the constructor.
            arguments: all other arguments of the constructor.

        Raises:
            InputError: see the constructor.
        """
        return cls(pretrained_model_name_or_path, **arguments)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the checkpoint and its adapters, stored in saved chats; see
        ``model_fingerprint``."""
        return self._fingerprint()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may choose."""
        adapters = RowAdapters.of(self.model)
        return () if adapters is None else tuple(adapters.digests)

    def fingerprint_with(self, adapter: str | None) -> str:
        """Return the fingerprint of chats that an adapter of ``adapters``, or none, reads."""
        adapters = RowAdapters.of(self.model)
        if adapter is None or adapters is None:
            return self.fingerprint
        return f"{self.fingerprint}{ADAPTER_SEPARATOR}{adapters.digest(adapter)}"

    def check_adapter(self, name: Any) -> str | None:
        """Return the name of an adapter that requests may choose, or None for none.

        Raises:
            InputError: if there is no adapter of this name.
        """
        if name is None or (isinstance(name, str) and name in self.adapters):
            return name
        known = ", ".join(map(repr, self.adapters))
        remedy = f"choose from {known}" if known else "pass adapters={...} to the pipeline"
        raise InputError(f"adapter: there is none named {shown(name)}: {remedy}")

    def chat(
        self,
        system: str | None = None,
        *,
        cache_salt: str = "",
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        adapter: str | None = None,
    ) -> Chat:
        """Create a conversation that keeps its cache between turns.

        Args:
            system: system prompt.
            cache_salt: with ``prefix_cache``, only chats with the same salt share prefixes.
            tools: functions that the model may call, in the format of OpenAI's API, or Python
                functions with type hints and a docstring. ``Answer.tool_calls`` contains the calls.
            tool_choice: as in OpenAI's API: "auto", "none", "required", or a function that must be
                called.
            adapter: one of ``adapters``, for all turns; None for the model alone.

        Raises:
            InputError: if the system prompt is empty or not text, the tools are invalid, or there
                is no such adapter.
        """
        if system is not None:
            self.check_text("system", system)
        offer = self.offer(tools, tool_choice)
        adapter = self.check_adapter(adapter)
        return Chat(self, system, cache_salt=cache_salt, tools=offer, adapter=adapter)

    def offer(
        self,
        tools: Sequence[Any] | None,
        tool_choice: Any = None,
        *,
        parallel: bool = True,
    ) -> ToolOffer | None:
        """Validate tools and return them as an offer; None if no tool may be called.

        Args:
            tools, tool_choice: see ``chat``.
            parallel: whether an answer may contain several calls.

        Raises:
            InputError: if a tool is invalid; the message names the tool and says what is valid.
            ToolsUnsupported: if the chat template does not support tools.
            RequestTooLarge: if the tools are too long.
        """
        offer = self.family.offer(tools, tool_choice, parallel=parallel)
        if offer is not None:
            self.admission.check_characters("tools", offer.characters)
        return offer

    def load_chat(self, path: str | Path) -> Chat:
        """Load a chat that ``Chat.save`` wrote with the same model and policy.

        It continues with the adapter of its earlier turns, whatever name that has here. With
        ``tp_plan``, each rank reads its own file; the number of ranks must be the same.

        Raises:
            InputError: if the file cannot be read, is not a chat, was altered or belongs to another
                model, or if the chat does not fit into ``kv_budget``.
        """
        # Read the file in the calling thread, because reading may take a while. Meanwhile, other
        # requests may use up the memory.
        fingerprints = {self.fingerprint_with(name): name for name in (None, *self.adapters)}
        chat = read_chat(
            self.store.ranks.saved_path(path),
            fingerprints=fingerprints,
            policy=self.policy,
            layers=self.admission.layer_shapes,
            family=self.family,
        )
        adapter = fingerprints[chat.cache.fingerprint]
        saved, budget = chat.cache, self.budget
        if chat.tools is not None:
            self.admission.check_characters(f"{path}: tools", chat.tools.characters)
        if budget is not None and saved.bytes > budget.limit:
            raise InputError(
                f"{path} needs {saved.bytes:,} bytes, but kv_budget is only {budget.limit:,}; "
                "raise kv_budget"
            )

        def place() -> OscarCache:
            if budget is not None:
                budget.free_memory(saved.bytes)
            return saved.placed(self.store, self.family.layer_devices)

        conversation = replace(chat.conversation, kv=self.engine.call_with_memory(place))
        return Chat(self, chat.system, conversation, tools=chat.tools, adapter=adapter)

    def batch(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        batch_size: int = 32,
        max_tokens: int = 262_144,
    ) -> list[BatchResult]:
        """Answer many requests, several at a time, and return the results in request order.

        ::

            requests = [{"images": ["a.png"], "prompt": "What is it?"}, {"prompt": "Why?"}]
            for result in pipe.batch(requests):
                print(result.error or result.answer)

        A request is a dict of the arguments of a single call: prompt, images, videos (for
        Qwen3-Omni also audio and use_audio_in_video), system, and ``RequestOptions``. It gets the
        same tokens as a call on its own, up to rounding errors, because matrix products have other
        sizes. An invalid request does not stop the others; its result contains the error. Answers
        are text only. With ``prefix_cache``, shared prompt prefixes are prefilled once.

        Args:
            requests: a list or an iterator; an iterator is consumed as requests finish.
            batch_size: maximum number of running requests.
            max_tokens: maximum total tokens of the running requests, including their longest
                possible answers; a request that exceeds it by itself runs alone.

        Raises:
            InputError: if ``requests`` is not a list of requests, or a limit is invalid.
        """
        results = self.batch_stream(requests, batch_size=batch_size, max_tokens=max_tokens)
        return sorted(results, key=lambda result: result.index)

    def batch_stream(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        batch_size: int = 32,
        max_tokens: int = 262_144,
    ) -> Iterator[BatchResult]:
        """Answer many requests, and yield the results in the order in which they finish.

        Arguments and errors are the same as in ``batch``.
        """
        return batch_results(self, requests, batch_size, max_tokens)

    def with_policy(self, policy: str | KVPolicy) -> Self:
        """Return a pipeline for the same loaded model with another policy.

        Both pipelines share the engine thread and the budget, so their chats can be used from
        several threads at once and count toward the same limit. The new pipeline has no prefix
        cache.

        Args:
            policy: a KVPolicy or the name of a preset.

        Raises:
            InputError: if the preset is unknown, or tensor parallelism does not support the policy.
        """
        twin = copy.copy(self)
        twin.policy = KVPolicy.of(policy)
        self.store.ranks.check(twin.policy)
        twin.store = PageStore(twin.policy, self.store.ranks)
        twin.admission = replace(self.admission, store=twin.store)
        twin.prefixes = None
        twin._free_outside_windows(twin.store)
        twin.engine = Engine(self.family, twin.store, twin.admission, thread=self.engine.thread)
        warn_of_hard_layers(self.model, twin.policy)
        if (budget := self.budget) is not None:
            self.engine.call(lambda: budget.stores.add(twin.store))
        return twin

    def _free_outside_windows(self, store: PageStore) -> None:
        """Let layers with sliding windows store only what windows reach; not with tensor
        parallelism."""
        if store.ranks.count == 1:
            store.free_outside_windows(self.family.windows)

    def release_graphs(self) -> None:
        """Drop the captured CUDA graphs; the next request captures them again.

        With ``tp_plan``, call this before ``torch.distributed.destroy_process_group``, which waits
        as long as a captured graph contains operations of the process group.
        """
        self.engine.release_graphs()

    def new_cache(self) -> OscarCache:
        """Create an empty cache in the pipeline's store; use it only within ``engine.call``."""
        return OscarCache(self.policy, store=self.store)

    @property
    def model(self) -> Any:
        """The transformers model that generates text."""
        return self.family.model

    @property
    def processor(self) -> Any:
        """The processor of the model."""
        return self.family.processor

    @property
    def budget(self) -> KVBudget | None:
        """Memory limit for all caches; None for no limit."""
        return self.admission.budget

    @property
    def max_context(self) -> int:
        """Maximum tokens of a conversation, including its answer."""
        return self.admission.max_context

    @property
    def prefill_chunk(self) -> int | None:
        """Tokens per chunk of a long prompt; None if prompts are not split."""
        return self.admission.prefill_chunk

    @property
    def limits(self) -> MediaLimits:
        """Limits on media."""
        return self.media_reader.limits

    @property
    def allow_remote(self) -> bool:
        """True if http(s) URLs are allowed as media."""
        return self.media_reader.allow_remote

    def read_media(
        self, images: Any = None, videos: Any = None, audio: Any = None, *, sound: bool = False
    ) -> Media:
        """Decode media within the pipeline's limits; see ``media_parts`` and ``MediaReader``."""
        return self.media_reader.read(media_parts(images, videos, audio, sound=sound))

    def check_text(self, name: str, text: Any, *, may_be_empty: bool = False) -> None:
        """Refuse text that is invalid, empty or longer than the context.

        Raises:
            InputError: if the text is invalid or empty; the message names the argument.
            RequestTooLarge: if the text is too long; the message names the argument.
        """
        self.admission.check_text(name, text, may_be_empty=may_be_empty)

    def prepare(
        self,
        messages: Sequence[Message],
        media: Media,
        tools: ToolOffer | None = None,
        template: TemplateOptions = USUAL,
    ) -> Prompt:
        """Apply the chat template and the processor to a conversation with checked texts.

        Args:
            messages: the conversation.
            media: media of all messages, in the order of the messages within each modality.
            tools: tools that the model may call.
            template: checked chat-template options.

        Raises:
            InputError: if the model does not support the media, or there are too many media.
        """
        prompt = self.family.prompt(messages, media, tools, template)
        return prompt.to(self.family.device)

    def read_request(
        self,
        messages: Sequence[Message],
        max_new_tokens: int = 1,
        tools: ToolOffer | None = None,
        template: TemplateOptions = USUAL,
        adapter: str | None = None,
        cancelled: Callable[[], bool] = bool,
    ) -> Prompt:
        """Build the prompt of a conversation, after checking that prompt and answer will fit.

        Args:
            messages: the conversation; its last message is answered or continued.
            max_new_tokens: maximum tokens of the answer.
            tools: tools that the model may call.
            template: checked chat-template options.
            adapter: one of ``adapters``, or None.
            cancelled: function that returns whether the request was cancelled.

        Raises:
            InputError: if texts or media are invalid.
            RequestTooLarge: if the request is too long for ``max_context``, ``kv_budget`` or the
                GPU. If the media headers already show this, it is raised before media are decoded.
        """
        self.admission.check_messages(messages)

        def fits(sizes: Media) -> None:
            self.admission.check_outline(messages, sizes, max_new_tokens, template=template)

        shown = self.media_reader.reading(media_of(messages), fits=fits, cancelled=cancelled)
        with shown as media:
            read = self.prepare(messages, media, tools, template)
        self.admission.check_prompt(read, max_new_tokens)
        return replace(read, adapter=adapter)

    def text_prompt(self, ids: Sequence[int]) -> Prompt:
        """Create a prompt from token ids, without a chat template; the answer continues the ids.

        Args:
            ids: at least one token id, checked by ``Family.check_ids``.
        """
        return self.family.text_prompt(ids).to(self.family.device)

    def chat_completion(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Answer a full conversation, passed as a list of messages.

        Args:
            messages: see ``oscar_mm.engine.message_lists.messages_from``.
            tools, tool_choice: see ``chat``.
            options: see ``oscar_mm.engine.request_options.RequestOptions``.

        Raises:
            InputError: if media, text or numbers are invalid.
            RequestTooLarge: if the conversation is too long.
        """
        start = time.perf_counter()
        offer = self.offer(tools, tool_choice)
        called = self.family.with_calls(options, offer)
        arguments = "messages", "tools", "tool_choice"
        chosen, template, of_media, adapter = self.read_options(called, arguments)
        how: dict[str, Any] = {"options": of_media, "open_end": template.takes_any_end}
        asked = conversation_from("", (None, None, None), messages, None, **how)
        prompt = self.read_request(asked, chosen.max_new_tokens, offer, template, adapter)
        return self.answer(prompt, chosen, start, offer).complete()

    def read_options(
        self, options: Mapping[str, Any], arguments: Sequence[str]
    ) -> tuple[Sampling, TemplateOptions, MediaOptions, str | None]:
        """Validate request options, and split them into sampling, template and media options, and
        the adapter.

        Args:
            options: see ``RequestOptions``.
            arguments: names of the call's other arguments, for the error message.

        Raises:
            InputError: if an option is unknown, has an invalid value, or is not supported by the
                chat template or the family.
        """
        adapter = self.check_adapter(options.get("adapter"))
        options = {name: value for name, value in options.items() if name != "adapter"}
        options, of_media = split_media(options, self.family)
        sampling, fields = split_template(options)
        template = self.family.template(fields)
        if sampling.get("thinking_token_budget") is None:
            sampling["thinking_token_budget"] = template.budget
        known = (*arguments, *TemplateFields.__annotations__, "adapter")
        return self.sampling(sampling, known), template, of_media, adapter

    def sampling(self, options: Mapping[str, Any], arguments: Sequence[str]) -> Sampling:
        """Validate sampling options and return them as ``Sampling``.

        Options that are None or missing get defaults: ``longest_answer`` for max_new_tokens and, if
        there is no temperature, the values of the checkpoint's generation_config for the others.

        Args:
            options: see ``SamplingOptions`` and ``from_generate``.
            arguments: names of the call's other arguments, for the error message.

        Raises:
            InputError: if a name is unknown or a value is invalid.
        """
        names = [field.name for field in fields(Sampling)]
        options = from_generate(options)
        do_sample = options.pop("do_sample", None)
        if unknown := options.keys() - names:
            raise InputError(
                f"unknown argument {', '.join(sorted(unknown))}: choose from "
                f"{', '.join([*arguments, *names])}, or the fields of MediaOptions"
            )
        given = {name: value for name, value in options.items() if value is not None}
        check_do_sample(do_sample, given.get("temperature"))
        rules = {} if "temperature" in given else self.family.default_sampling(do_sample)
        chosen: dict[str, Any] = {"max_new_tokens": self.longest_answer()} | rules | given
        sampling = Sampling(**chosen)
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        sampling.check_ids(vocabulary)
        if sampling.grammar is None:
            return sampling
        ends = self.family.end_tokens()
        grammar = sampling.grammar.compiled(self.processor.tokenizer, vocabulary, ends)
        return replace(sampling, grammar=grammar)

    def longest_answer(self, text: int = 256) -> int:
        """Return the default max_new_tokens: ``text``, plus room for a thinking model's reasoning.

        The sum is at most half of the context, unless ``text`` alone is more.
        """
        if not self.family.thinks:
            return text
        return max(text, min(text + _REASONING, self.max_context // 2))

    def answer(
        self,
        prompt: Prompt,
        sampling: Sampling,
        start: float,
        tools: ToolOffer | None = None,
        *,
        speaker: str | None = None,
    ) -> AnswerStream:
        """Return the answer to a prompt as a stream.

        Args:
            prompt: checked prompt of a single row.
            sampling: sampling options.
            start: ``time.perf_counter()`` when the request arrived.
            tools: tools that the model may call.
            speaker: see ``new_request``.
        """
        return self.streamed(self.new_request(prompt, sampling, start, tools, speaker=speaker))

    def streamed(self, running_request: Request) -> AnswerStream:
        """Return the stream of a request that is not submitted yet."""
        running = weakref.ref(running_request)

        def cancel() -> None:
            if (answer := running()) is not None:
                answer.cancel()

        return AnswerStream(_pieces(running_request), cancel, delivery=running_request.delivery)

    def new_request(
        self,
        prompt: Prompt,
        sampling: Sampling,
        start: float,
        tools: ToolOffer | None = None,
        *,
        speaker: str | None = None,
        script: Sequence[int] | None = None,
    ) -> Request:
        """Create a request without submitting it.

        Args:
            prompt: checked prompt of a single row.
            sampling: sampling options.
            start: ``time.perf_counter()`` when the request arrived.
            tools: tools that the model may call.
            speaker: voice of the speech, from ``check_speech``; None for an answer in text.
            script: ids of the tokens to speak instead of an answer of the model, see ``script``.
        """
        arguments = self.engine, prompt, self.new_cache(), sampling, start
        if speaker is None:
            return Request(*arguments, tools=tools)
        talker = self.family.talker
        assert talker is not None, "check_speech returned the speaker"
        voice = talker.voice(VoiceInputs(prompt, speaker, sampling.seed))
        how: dict[str, Any] = {"talker": talker, "voice": voice, "script": script}
        return SpokenRequest(*arguments, tools=tools, **how)

    def script(self, name: str, text: Any) -> list[int]:
        """Return the ids of the tokens of a text that is read aloud.

        Args:
            name: name of the text, for errors.
            text: the text.

        Raises:
            InputError: if the text is invalid, empty or too long.
        """
        self.check_text(name, text)
        ids, talker = self.family.tokenize(text)[0].tolist(), self.family.talker
        if talker is not None and len(ids) > talker.max_frames:
            raise InputError(
                f"{name} has {len(ids):,} tokens, but at most {talker.max_frames:,} can be spoken: "
                "use a shorter text"
            )
        return ids

    def check_speech(
        self, speaker: Any, sampling: Sampling | None = None, tools: ToolOffer | None = None
    ) -> str:
        """Check that answers can be spoken, and return the name of the voice in lower case.

        Args:
            speaker: name of a voice, in upper or lower case; None for the default.
            sampling: sampling options of the answer.
            tools: tools that the answer may call.

        Raises:
            InputError: if the model has no talker or no such voice, or an option does not allow
                speech.
        """
        talker = self.family.talker
        if talker is None:
            raise InputError(
                "speech: this checkpoint has no talker (or it was disabled), so it answers in text "
                "only; use one with a talker, such as Qwen/Qwen3-Omni-30B-A3B-Instruct"
            )
        if self.store.ranks.count > 1:
            raise InputError("speech: not supported with tensor parallelism (tp_plan); use one GPU")
        if sampling is not None and sampling.stop:
            raise InputError("stop cannot be used with speak=True: leave it out")
        if tools is not None and not self.family.call_tokens(tools):
            raise InputError(
                "tools: the calls of this checkpoint do not begin with a token of their own, so "
                "they would be spoken: leave out tools, or speak=True"
            )
        if not talker.speakers:
            raise InputError(
                "speech: this checkpoint's configuration lists no speakers (speaker_id)"
            )
        if speaker is None:
            return talker.speakers[0]
        if not isinstance(speaker, str) or speaker.lower() not in talker.speakers:
            known = ", ".join(talker.speakers)
            raise InputError(f"speaker {shown(speaker)}: must be one of {known}")
        return speaker.lower()


def _pieces(running_request: Request) -> Generator[Piece | Speech | Answer, None, None]:
    yield from running_request
    answer = running_request.answer()
    # Free the pages of a cancelled request even if the caller keeps the stream.
    del running_request
    yield answer
