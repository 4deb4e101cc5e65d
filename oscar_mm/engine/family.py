"""Family: what is specific to a model family: inputs, processor call and positions."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad
from transformers import AutoModelForImageTextToText

from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.cache.paged_attention import TWO_WAY
from oscar_mm.cache.states import layers_of_states
from oscar_mm.cache.window_pages import windows_of
from oscar_mm.engine.chat_format import ANSWER, QUESTION, ChatFormat
from oscar_mm.engine.input_layout import InputLayout
from oscar_mm.engine.message import Message
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.sound_blocks import SoundBlocks
from oscar_mm.engine.speech import Talker
from oscar_mm.engine.template import USUAL, TemplateOptions
from oscar_mm.errors import InputError, shown
from oscar_mm.fast_decode.decoder import has_full_attention
from oscar_mm.fast_decode.drafts import Drafts
from oscar_mm.media.media import Media, Medium
from oscar_mm.media.options import MediaOptions
from oscar_mm.modality import MediumSpan, Modality, token_modalities
from oscar_mm.models.released import ReleasedModel
from oscar_mm.modules import computing_device
from oscar_mm.moe_switch import choose_experts
from oscar_mm.thread_pool import submit_all
from oscar_mm.tool_parsers.offer import ToolOffer


@dataclass(frozen=True, eq=False)
class Encoding:
    """Rendered text and its media, encoded by the processor; tensors on the CPU.

    Attributes:
        input_ids: (1, tokens).
        tensors: further arguments of the model's forward: pixel values, grids, features or a list
            of samples, ...
        positions: (1, tokens), or (3, 1, tokens) for time, height and width; they start at 0.
        media_tokens: number of non-text tokens of each media item, in the order of the text.
    """

    input_ids: torch.Tensor
    tensors: dict[str, Any]
    positions: torch.Tensor
    media_tokens: list[int]


class Family(ChatFormat, ABC):
    """Model family: builds ``Prompt`` objects, independently of any cache.

    Args:
        model: loaded model of the family.
        processor: processor of the model.

    Attributes:
        outer_model: the checkpoint's full model; ``model`` is the part that generates text.

    Raises:
        InputError: if the processor has no chat template.
    """

    model_types: ClassVar[tuple[str, ...]]
    """Values of ``config.model_type`` that the family supports."""

    since: ClassVar[str] = "5.17"
    """First version of transformers that has the models; by default, the oldest supported one."""

    media_options: ClassVar[frozenset[str]] = frozenset({"detail"})
    """Names of the supported ``MediaOptions``; every family accepts ``detail``, which OpenAI
    clients send to any model."""

    auto_class: ClassVar[Any] = AutoModelForImageTextToText
    """Auto class that loads the checkpoints."""

    part: ClassVar[str] = ""
    """Attribute of the loaded model that generates text; "" if the model itself does.
    The configuration of this part is ``{part}_config``."""

    layout: ClassVar[InputLayout]
    """How the model's inputs are cut at media and tokens."""

    fast_layers: ClassVar[frozenset[str]] = frozenset()
    """Names of decoder layer classes that compute what ``oscar_mm.fast_decode`` does, in
    addition to the layer classes of language models that it already supports."""

    fast_towers: ClassVar[frozenset[str]] = frozenset()
    """Names of vision tower classes that ``PictureTower`` runs."""

    talker: Talker | None = None
    """Talker that says answers; None if the checkpoint answers only in text."""

    undivided: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Model type -> part of the names of modules that each rank keeps whole."""

    released: ClassVar[tuple[ReleasedModel, ...]] = ()
    """Shapes of released models, whose memory can be planned without their files."""

    pocket: ClassVar[str]
    """Bundled model whose tokenizer has the same special tokens; for ``released``."""

    plain_template: ClassVar[str]
    """Chat template for the tokenizer of ``pocket``, with the same number of tokens per turn as in
    the released models; for ``released``."""

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(processor)
        self.outer_model, self.model = model, self.text_part(model)
        choose_experts(self.model)
        for layer in self.model.get_decoder().layers if self.layout.two_way else ():
            if self.attends_two_way(layer.self_attn):
                setattr(layer.self_attn, TWO_WAY, self.layout.two_way)

    def attends_two_way(self, attention: Any) -> bool:
        """Return whether media tokens attend to later ones in a layer, by default in every one.

        Args:
            attention: the layer's attention module, of a model with ``InputLayout.two_way``.
        """
        return True

    @classmethod
    def text_part(cls, model: Any) -> Any:
        """Return the part of a loaded model that generates text."""
        return getattr(model, cls.part) if cls.part else model

    @classmethod
    def set_attention(cls, model: Any, towers: str | None) -> None:
        """Set attention "oscar" in the decoder and, unless None, ``towers`` in the encoder
        towers."""
        kinds = ("vision", "audio") if Modality.AUDIO in cls.reads else ("vision",)
        chosen = {f"{kind}_config": towers for kind in kinds if towers}
        # Set on the part, because a model with parts would ignore the setting.
        cls.text_part(model).set_attn_implementation({"text_config": IMPLEMENTATION} | chosen)

    @classmethod
    def as_released(cls, processor: Any, fields: dict[str, Any], model: ReleasedModel) -> Any:
        """Turn the processor and configuration of ``pocket`` into those of a released model.

        Args:
            processor: processor of ``pocket``; may be modified.
            fields: fields of the configuration, modified in place; the token ids stay the same.
            model: shapes and limits of the released model.

        Returns:
            The processor of the released model, with the tokenizer of ``pocket``.
        """
        inner = fields[f"{cls.part}_config"] if cls.part else fields
        inner |= {"text_config": dict(model.text), "vision_config": dict(model.vision)}
        if model.audio:
            inner["audio_config"] = dict(model.audio)
        inner["tie_word_embeddings"] = model.text["tie_word_embeddings"]
        processor.chat_template = cls.plain_template
        return processor

    @classmethod
    def adapt(cls, processor: Any) -> Any:
        """Return the processor that the family uses in place of the checkpoint's."""
        return processor

    @cached_property
    def embeddings(self) -> Any:
        """Module of the input embeddings; looking for it takes transformers 70 us."""
        return self.model.get_input_embeddings()

    @property
    def device(self) -> torch.device:
        """Device that prompts are moved to."""
        return computing_device(self.embeddings)

    @property
    def layer_devices(self) -> dict[int, torch.device]:
        """Device of each layer's keys and values, or of its states."""
        layers = dict(enumerate(self.model.get_decoder().layers))
        if (drafts := Drafts.of(self.model)) is not None:
            layers[drafts.index] = drafts.layers[0]
        return {index: computing_device(layer) for index, layer in layers.items()}

    @property
    def fast_tower(self) -> Any:
        """Vision tower that ``PictureTower`` may run; None if the model has none."""
        tower = self.model.get_encoder(modality="image") if self.fast_towers else None
        return tower if type(tower).__name__ in self.fast_towers else None

    @cached_property
    def feature_levels(self) -> int:
        """Number of layers to whose outputs features of media are added."""
        if not self.layout.features:
            return 0
        return len(self.model.config.vision_config.deepstack_visual_indexes)

    @cached_property
    def keeps_states(self) -> bool:
        """Whether layers with linear attention keep states instead of keys and values."""
        return bool(layers_of_states(self.model.config))

    @cached_property
    def windows(self) -> dict[int, int]:
        """Layer index -> size of its sliding window in tokens, for layers that have one."""
        return windows_of(self.model.config)

    @cached_property
    def shares_passes(self) -> bool:
        """Whether one pass may read several prompts, one after the other.

        States and local attention would mix the tokens of a prompt with those of the one before.
        """
        return not self.keeps_states and has_full_attention(self.model)

    def prompt(
        self,
        messages: Sequence[Message],
        media: Media,
        tools: ToolOffer | None = None,
        template: TemplateOptions = USUAL,
    ) -> Prompt:
        """Build the prompt of a whole conversation: apply the template, run the processor, and
        compute positions.

        Args:
            messages: messages of one or several turns.
            media: media of all messages, each modality in the order of the conversation.
            tools: tools that the model may call.
            template: chat-template options, a result of the method ``template``.

        Returns:
            A prompt on the CPU. Positions are (1, tokens), or with multimodal RoPE (4, 1, tokens):
            text, time, height, width.

        Raises:
            InputError: if the family does not support the modality of a media item.
        """
        text = self.render(messages, tools=tools, template=template)
        prompt = self._prompt(text, media, 0, [], 0, torch.zeros(1, dtype=torch.long))
        return replace(prompt, continues=template.continues)

    def text_prompt(self, ids: Sequence[int]) -> Prompt:
        """Build a prompt from token ids without a chat template, on the CPU.

        Args:
            ids: at least one token id, checked by ``check_ids``.
        """
        tokens = torch.tensor([list(ids)], dtype=torch.long)
        axes = self.encode(QUESTION, []).positions.shape[:-1]
        positions = torch.arange(len(ids)).expand(*axes, -1)
        encoded = Encoding(tokens, {}, positions, [])
        prompt = self._placed(encoded, [], 0, [], 0, torch.zeros(1, dtype=torch.long))
        return replace(prompt, continues=True)

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Reject token ids that are out of range or stand for media.

        Args:
            name: name of the argument, for the error message.
            ids: at least one token id.

        Raises:
            InputError: if an id is invalid; the error names the argument.
        """
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        if unknown := [token for token in ids if not 0 <= token < vocabulary]:
            raise InputError(
                f"{name}: {shown(unknown[0])} is not a token id of this model: ids go from 0 to "
                f"{vocabulary - 1:,}"
            )
        tokens = torch.tensor([list(ids)], dtype=torch.long)
        if (self.modalities_of(tokens) != Modality.TEXT).any():
            raise InputError(
                f"{name} contains a token that stands for media: pass text only, and send media in "
                "messages"
            )

    def modalities_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the modality ids of (batch, tokens) token ids, int8 on the CPU."""
        return token_modalities(ids, config=self.model.config)

    def mark_frames(self, modalities: torch.Tensor, media: Iterable[MediumSpan]) -> None:
        """Mark image tokens in videos as video, in place, if the model takes frames as images.

        Args:
            modalities: (tokens,) modality ids, by token id.
            media: spans of media items.
        """
        for span in media if self.layout.frames_as_images else ():
            if span.modality is Modality.VIDEO:
                inside = modalities[span.start : span.stop]
                inside[inside == Modality.IMAGE] = int(Modality.VIDEO)

    def position_steps(self, modality: Modality, tokens: int) -> Sequence[int] | None:
        """Return the possible numbers of positions by which a run of tokens shifts later tokens.

        Args:
            modality: modality of the run.
            tokens: number of tokens in the run.

        Returns:
            All possible advances in ascending order; None if the number of tokens does not
            determine them.
        """
        return [tokens]

    def sound_blocks(self) -> SoundBlocks | None:
        """Return what cuts a new recording into blocks; None if recordings are only read whole.

        The tokens of a recording must take one position each.
        """
        return None

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

        The prompt consists of ``pending``, of what the chat template writes between an answer and
        the next turn (an end token, a line break, ...), and of the turn.

        Args:
            messages: messages of the new turn.
            media: media of the new turn.
            past_tokens: number of tokens in the cache.
            next_position: (1,) RoPE position of the first new token: ``next_position`` of the last
                prompt plus the number of its answer's tokens in the cache.
            pending: ids of the last answer that are not in the cache: its last token, if the answer
                was ended by max_new_tokens or the caller.
            earlier: modalities of the media of earlier turns.

        Returns:
            A prompt, see ``prompt``. Its ``media`` spans count from the first new token; in the
            cache they lie ``past_tokens`` later.
        """
        # The stand-in for the answer is cut off only after tokenization, since a tokenizer may
        # treat the beginning of a text differently.
        text = self.after_answer(self.listed(messages, earlier))
        lead = self.tokenize(ANSWER).shape[1]
        return self._prompt(text, media, lead, list(pending), past_tokens, next_position)

    def join_media(self, name: str, parts: Sequence[Any]) -> Any:
        """Join a forward argument of several prompts along the media dimension, the first one.

        Images of different sizes or numbers of tiles are padded with zeros, which have no effect.
        """
        if len(parts) == 1:
            return parts[0]
        sizes = [max(sides) for sides in zip(*(part.shape[1:] for part in parts), strict=True)]
        return torch.cat([pad(part, _missing(part.shape[1:], sizes)) for part in parts])

    def concatenate(self, prompts: Sequence[Prompt]) -> Prompt:
        """Concatenate single-row prompts into one row, without changing their positions.

        The result has no salt and no adapter.
        """
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
            layout=self.layout,
        )

    def marked(self, prompt: Prompt, marks: Iterable[int]) -> Prompt:
        """Return a single-row prompt with further ``Prompt.marks``, if the model keeps states or
        has sliding windows.

        Args:
            prompt: the prompt.
            marks: numbers of its tokens; 0 is ignored.
        """
        if not (self.keeps_states or self.windows):
            return prompt
        places = {*prompt.marks, *(mark for mark in marks if mark > 0)}
        return replace(prompt, marks=tuple(sorted(places)))

    @abstractmethod
    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        """Run the processor on rendered text and its media, given in the order of the text."""

    @abstractmethod
    def min_tokens(self, medium: Medium) -> int:
        """Return the minimum number of tokens of a media item, without processing the item."""

    def largest_image(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which an upright image of this size may be scaled down.

        The processor computes the same features for the scaled image, up to rounding, with the same
        number of tokens.

        Returns:
            Width and height in pixels; by default, the size of the image.
        """
        return width, height

    def image_size(self, width: int, height: int, options: MediaOptions) -> tuple[int, int]:
        """Return the width and height that the options resize an image to."""
        return width, height

    def frame_size(
        self, width: int, height: int, frames: int, options: MediaOptions
    ) -> tuple[int, int]:
        """Return the width and height that the options resize each frame of a video to."""
        return width, height

    def generation_setting(self, name: str) -> Any:
        """Return a setting of the checkpoint's generation_config; None if it is not set."""
        return getattr(self.model.generation_config, name)

    def default_sampling(self, do_sample: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint's recommended sampling options, as fields of ``Sampling``.

        Args:
            do_sample: whether to sample; None leaves it to the checkpoint.
        """
        rules = {"repetition_penalty": self.generation_setting("repetition_penalty")}
        if self.generation_setting("do_sample") if do_sample is None else do_sample:
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

    def _prompt(
        self,
        text: str,
        media: Media,
        cut: int,
        pending: list[int],
        past_tokens: int,
        next_position: torch.Tensor,
    ) -> Prompt:
        """Encode text and media, and set the positions; see ``_placed``."""
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
        """Drop the first ``cut`` tokens, which are text, prepend ``pending`` and set positions."""
        before = torch.tensor([pending], dtype=torch.long)
        ids = torch.cat([before, encoded.input_ids[:, cut:]], dim=1)
        begin = torch.arange(len(pending)).expand(*encoded.positions.shape[:-1], -1)
        after = encoded.positions[..., cut:] - cut + len(pending)
        positions = torch.cat([begin.to(after.dtype), after], dim=-1) + next_position.to("cpu")
        following = positions.amax(dim=(0, -1) if positions.ndim == 3 else -1) + 1
        if positions.ndim == 3:
            row = torch.arange(past_tokens, past_tokens + ids.shape[1]).expand(1, 1, -1)
            positions = torch.cat([row.to(positions.dtype), positions])
        modalities = self.modalities_of(ids)
        media = _spans(modalities[0], ordered, encoded.media_tokens)
        self.mark_frames(modalities[0], media)
        return Prompt(
            inputs={"input_ids": ids} | encoded.tensors,
            positions=positions,
            next_position=following,
            modalities=modalities,
            media=media,
            layout=self.layout,
        )

    def _in_order(self, text: str, media: Media) -> list[Medium]:
        """Sort the media by their placeholders in the rendered text."""
        placeholders = self.placeholders
        pattern = "|".join(re.escape(token) for token in placeholders)
        left = {modality: [m for m in media if m.modality is modality] for modality in Modality}
        # An empty pattern would match everywhere.
        found = re.findall(pattern, text) if placeholders else []
        called = [placeholders[token] for token in found]
        if sorted(called) != sorted(medium.modality for medium in media):
            raise InputError(
                "the chat template of this checkpoint does not write one placeholder for each "
                f"media item: {len(media)} media items, {len(called)} placeholders"
            )
        return [left[modality].pop(0) for modality in called]


def _missing(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the padding of the last dimensions to ``sizes``, as ``pad`` takes it."""
    pairs = zip(reversed(shape), reversed(sizes), strict=True)
    return [side for have, want in pairs for side in (0, want - have)]


def _spans(
    modalities: torch.Tensor, media: Sequence[Medium], counts: Sequence[int]
) -> tuple[MediumSpan, ...]:
    places = modalities.nonzero()[:, 0].tolist()
    if len(places) != sum(counts):
        raise RuntimeError(
            f"{len(places)} media tokens in the prompt, but the media need {sum(counts)}"
        )
    spans, first = [], 0
    for medium, count in zip(media, counts, strict=True):
        run = places[first : first + count]
        span = MediumSpan(medium.modality, medium.label, run[0], run[-1] + 1, medium.digest)
        spans.append(span)
        first += count
    return tuple(spans)
