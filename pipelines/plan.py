"""Plan: compute the memory that a conversation needs, without loading the model's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor

from oscar_mm.admission.capacity import ModelShape
from oscar_mm.admission.request_size import count_tokens
from oscar_mm.engine.family import Family
from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits
from oscar_mm.media.audio import silence
from oscar_mm.media.image import PictureSize
from oscar_mm.media.media import Media
from oscar_mm.media.video import sampled
from oscar_mm.modality import Modality
from oscar_mm.models import source_of
from oscar_mm.models.released import ReleasedModel, released_model
from oscar_mm.pipelines.adapters import adapter_base
from oscar_mm.pipelines.loading import meta_model, outline, stored_weights
from oscar_mm.pipelines.registry import family_of
from oscar_mm.pipelines.text import context_of, is_text_model, outline_text_model
from oscar_mm.pipelines.weight_formats import already_quantized, check_format, quantized_bytes
from oscar_mm.policy import DEFAULT, KVPolicy

_LIMITS = MediaLimits()


@dataclass(frozen=True)
class Session:
    """Media and text of a conversation to plan for.

    Attributes:
        images: number of images.
        image_size: width and height of each image, in pixels.
        audio_s: length of a recording, in seconds; 0 for no recording.
        video_s: length of a video file, in seconds; 0 for no video.
        video_size: width and height of the video's frames, in pixels.
        text_tokens: total tokens of all questions and answers.

    Raises:
        InputError: if a number is invalid.
    """

    images: int = 0
    image_size: tuple[int, int] = (1280, 960)
    audio_s: float = 0.0
    video_s: float = 0.0
    video_size: tuple[int, int] = (1280, 720)
    text_tokens: int = 512

    def __post_init__(self) -> None:
        for name, maximum in (("images", 10**5), ("text_tokens", 10**9)):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= maximum:
                raise InputError(f"{name}={value!r}: must be a whole number from 0 to {maximum:,}")
        for name in ("audio_s", "video_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(f"{name}={value!r}: must be a number of seconds, 0 or more")

    def media(self, limits: MediaLimits, video_fps: float) -> Media:
        """Return placeholder media with the sizes and lengths of this session.

        Raises:
            InputError: if a media item exceeds the limits.
        """
        limits.check_frame(*self.image_size, "image_size")
        limits.check_audio(self.audio_s, "audio_s")
        # Only the size of an image matters.
        images: list[Any] = [PictureSize(*self.image_size)] * self.images
        videos = []
        if self.video_s:
            limits.check_video(*self.video_size, self.video_s, "video_s")
            videos = [sampled(self.video_s, self.video_size, video_fps, limits, None)]
        return Media(
            images=images,
            videos=videos,
            audio=[silence(self.audio_s)] if self.audio_s else [],
        )


@dataclass(frozen=True)
class Plan:
    """Token counts and KV cache sizes of a conversation.

    Attributes:
        family: name of the model family, or the model type of a text-only model.
        shape: dimensions of the model.
        policy: policy of the KV cache.
        tokens: token counts by modality: "text", "image", "video", "audio".
        context: context length of the model, in tokens.
        weights: format of the weights: "16-bit", that of a quantized checkpoint, or the one that
            they are quantized to at load.
    """

    family: str
    shape: ModelShape
    policy: KVPolicy
    tokens: dict[str, int]
    context: int
    weights: str = "16-bit"

    @property
    def total(self) -> int:
        """Total number of tokens."""
        return sum(self.tokens.values())

    @property
    def kv_bytes(self) -> int:
        """Size in bytes of the keys and values with the policy."""
        return self.shape.kv_bytes(self.policy, self.tokens)

    @property
    def bf16_bytes(self) -> int:
        """Size in bytes of the keys and values in 16-bit precision."""
        return self.shape.kv_bytes(_PLAIN, self.tokens)

    def by_modality(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of each modality: in 16-bit precision, and with the policy.

        The numbers add up to the totals. Text includes the window and the sinks; each other
        modality counts only the bytes that it adds to the modalities before it.
        """
        tokens: dict[str, int] = {}
        before, sizes = (0, 0), {}
        for name, count in self.tokens.items():
            if count:
                tokens[name] = count
                after = tuple(self.shape.kv_bytes(one, tokens) for one in (_PLAIN, self.policy))
                sizes[name] = (after[0] - before[0], after[1] - before[1])
                before = after[0], after[1]
        return sizes

    def fits(self, gpu_bytes: float) -> tuple[int, int]:
        """Return how many such conversations fit on a GPU in addition to the weights: with keys and
        values in 16-bit precision, and with the policy."""
        how = (_PLAIN, self.policy)
        in_16_bit, packed = (self.shape.conversations(gpu_bytes, one, self.tokens) for one in how)
        return in_16_bit, packed

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as a dict that can be converted to JSON."""
        return {
            "tokens": dict(self.tokens),
            "total": self.total,
            "context": self.context,
            "fits_context": self.total <= self.context,
            "kv_bytes": self.kv_bytes,
            "bf16_bytes": self.bf16_bytes,
            "weights": self.weights,
            "weight_bytes": self.shape.weight_bytes,
            "parameters": self.shape.parameters,
        }


_PLAIN = KVPolicy.preset("bf16")


def plan(
    model: str | Path,
    session: Session,
    policy: str | KVPolicy = DEFAULT,
    *,
    weights: str | None = None,
    limits: MediaLimits = _LIMITS,
    video_fps: float = 2.0,
) -> Plan:
    """Plan a conversation, using only the configuration and processor of a model.

    Args:
        model: name of a bundled model, hub id or folder; causal language models are supported too.
            The folder of an adapter stands for its base model.
            Released models (``oscar_mm.models.released``) are known by name, without the hub.
        session: media and text of the conversation.
        policy: policy for storing keys and values.
        weights: "fp8" or "int4" to count 16-bit weights as the pipeline's argument of this name
            quantizes them; None to count them as the checkpoint stores them.
        limits: limits on media, as in the pipeline.
        video_fps: frames per second to sample from videos.

    Raises:
        InputError: if the model does not exist, or media or the format of its weights are not
            supported, or media exceed the limits, or ``weights`` is given for a checkpoint that is
            already quantized.
    """
    chosen = KVPolicy.of(policy)
    if weights is not None:
        check_format(weights)
    media = session.media(limits, video_fps)
    model, _ = adapter_base(model)
    released = released_model(model)
    if released is None and is_text_model(model):
        if len(media):
            raise InputError(
                f"{model} is a language model, which supports no images, audio or videos: plan for "
                "text only"
            )
        network = outline_text_model(model)
        outer_model, decoder, name = network, network.get_decoder(), network.config.model_type
        tokens = dict.fromkeys((modality.label for modality in Modality), 0)
    else:
        family = outline(model) if released is None else released_skeleton(released)
        network, outer_model, tokens = family.model, family.outer_model, count_tokens(family, media)
        decoder = family.text_part(outer_model).get_decoder()
        name = ", ".join(filter(None, (family.name, released and released.part)))
    tokens["text"] += session.text_tokens
    stored = None if released else stored_weights(source_of(model))
    if weights is not None:
        if stored:
            raise already_quantized(weights)
        stored = weights.upper(), quantized_bytes(outer_model, decoder, weights)
    weight_format, stored_bytes = stored or (Plan.weights, None)
    return Plan(
        family=name,
        shape=ModelShape.of(network.config, outer_model.num_parameters(), stored_bytes),
        policy=chosen,
        tokens=tokens,
        context=context_of(network.config),
        weights=weight_format,
    )


def released_skeleton(released: ReleasedModel) -> Family:
    """Create a family with a released model's dimensions, a bundled tokenizer and no weights.

    Token counts of media are the same as with the released processor; the token count of the chat
    template's text is off by a few tokens at most.
    """
    family = family_of(released.family)
    folder = source_of(family.pocket)
    fields: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    del fields["model_type"]
    processor: Any = AutoProcessor.from_pretrained(folder)
    processor = family.as_released(processor, fields, released)
    config = AutoConfig.for_model(released.family, **fields)
    return family(meta_model(family.auto_class, config).eval(), processor)
