"""Qwen3-Omni: audio, images and videos, with 3-D positions and timestamps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import Qwen2VLVideoProcessor, Qwen3OmniMoeForConditionalGeneration

from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.engine.family import Encoding
from oscar_mm.engine.input_layout import InputLayout
from oscar_mm.media import Audio, Video
from oscar_mm.media.encoder_inputs import (
    SAMPLES,
    DeferredFeatures,
    as_samples,
    can_defer,
    in_bytes,
    make_features_in_model,
    scale_in_model,
)
from oscar_mm.media.media import Medium
from oscar_mm.media.options import OF_MODALITY
from oscar_mm.media.resample import RATE
from oscar_mm.modality import Modality
from oscar_mm.models import released
from oscar_mm.models.released import ReleasedModel
from oscar_mm.moe_switch import choose_experts
from oscar_mm.pipelines.families.qwen import (
    PATCHES,
    PICTURE_OPTIONS,
    QwenFamily,
    image_tokens,
    limited,
    longer_sides,
    video_arguments,
)
from oscar_mm.pipelines.families.qwen3_omni_blocks import (
    MASK,
    OmniSoundBlocks,
    audio_tokens,
    heard,
)
from oscar_mm.pipelines.families.qwen3_omni_talker import Qwen3OmniTalker
from oscar_mm.pipelines.registry import register_family


@register_family
class Qwen3Omni(QwenFamily):
    """Family of Qwen3-Omni-30B-A3B: Instruct, Thinking and Captioner.

    ``model`` is the thinker, which generates text; ``outer_model`` also contains the talker, if the
    checkpoint has one. Loading makes the thinker accept ``logits_to_keep``, pixels as bytes, and
    audio samples (``oscar_mm.media.encoder_inputs``).

    A prompt is processed one media item at a time. Thus the features and positions of an item do
    not depend on the other items, and videos with and without audio can be mixed. (For several
    items at once, the processor would pad recordings to the longest and use one frame rate for all
    videos.) Loading also makes the audio tower process each recording as if it were alone.
    """

    model_types = ("qwen3_omni_moe",)
    name = "Qwen3-Omni"
    reads = frozenset({Modality.IMAGE, Modality.VIDEO, Modality.AUDIO})
    media_options = PICTURE_OPTIONS | frozenset(OF_MODALITY[Modality.AUDIO])
    auto_class = Qwen3OmniMoeForConditionalGeneration
    part = "thinker"
    layout = InputLayout(
        per_medium={
            "image_grid_thw": Modality.IMAGE,
            "video_grid_thw": Modality.VIDEO,
            "video_second_per_grid": Modality.VIDEO,
            "input_features": Modality.AUDIO,
            MASK: Modality.AUDIO,
            SAMPLES: Modality.AUDIO,
        },
        per_patch=PATCHES,
        padded={"input_features": MASK, MASK: MASK},
        video_grids="video_grid_thw",
        features={"deepstack_visual_embeds": "visual_pos_masks"},
    )
    fast_layers = frozenset({"Qwen3OmniMoeThinkerTextDecoderLayer"})
    fast_towers = frozenset({"Qwen3OmniMoeVisionEncoder"})
    released = released.QWEN3_OMNI
    pocket = "pocket-omni"

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        _teach_logits_to_keep(self.model)
        scale_in_model(self.model, processor)
        make_features_in_model(self.model, processor.feature_extractor)
        _read_each_as_alone(self.model.get_encoder(modality="audio"))
        if model.has_talker:
            choose_experts(model.talker)

    @classmethod
    def set_attention(cls, model: Any, towers: str | None) -> None:
        """See ``Family.set_attention``; the talker's decoder has the same attention."""
        super().set_attention(model, towers)
        if model.has_talker:
            model.talker.model.set_attn_implementation(IMPLEMENTATION)

    @cached_property
    def talker(self) -> Qwen3OmniTalker | None:
        """See ``Family.talker``."""
        return Qwen3OmniTalker(self.outer_model) if self.outer_model.has_talker else None

    @classmethod
    def as_released(cls, processor: Any, fields: dict[str, Any], model: ReleasedModel) -> Any:
        """See ``Family.as_released``; images have the same limits as frames."""
        super().as_released(processor, fields, model)
        processor.video_processor = limited(Qwen2VLVideoProcessor, model, model.pixels)
        return processor

    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        """See ``Family.encode``."""
        left, reading = list(media), in_bytes(self.processor, self.model)
        sounds = [one for one in map(_sound, media) if one is not None]
        waits = can_defer(self.model, self.processor.feature_extractor, sounds)
        if waits:
            reading.feature_extractor = DeferredFeatures(self.processor.feature_extractor)
        ids, positions, counts = [], [], []
        gathered: dict[str, list[Any]] = {}
        place = torch.zeros(())
        for piece, is_medium in self._pieces(text):
            if is_medium:
                inputs = self._process(reading, piece, left.pop(0))
                part = inputs.pop("input_ids")
                spatial = self._positions(part, inputs)
                counts.append(int(self.modalities_of(part).count_nonzero()))
                for name, value in (as_samples(inputs) if waits else inputs).items():
                    gathered.setdefault(name, []).append(value)
            else:
                part = self.tokenize(piece)
                spatial = torch.arange(part.shape[1]).expand(3, 1, -1).float()
            ids.append(part)
            positions.append(spatial + place)
            place = positions[-1].max() + 1
        return Encoding(
            input_ids=torch.cat(ids, dim=1),
            tensors={name: self.join_media(name, parts) for name, parts in gathered.items()},
            positions=torch.cat(positions, dim=-1),
            media_tokens=counts,
        )

    def join_media(self, name: str, parts: Sequence[Any]) -> Any:
        """See ``Family.join_media``; audio features (recordings, ..., frames) are right-padded."""
        if name == SAMPLES:
            return [samples for part in parts for samples in part]
        if name in self.layout.padded:
            longest = max(part.shape[-1] for part in parts)
            parts = [
                part if part.shape[-1] == longest else pad(part, (0, longest - part.shape[-1]))
                for part in parts
            ]
        return super().join_media(name, parts)

    def position_steps(self, modality: Modality, tokens: int) -> Sequence[int] | None:
        """See ``Family.position_steps``; the positions of a video depend on its timestamps."""
        if modality is Modality.VIDEO:
            return None
        return longer_sides(tokens) if modality is Modality.IMAGE else [tokens]

    def min_tokens(self, medium: Medium) -> int:
        """See ``Family.min_tokens``; videos are bounded by ``MediaLimits``."""
        if medium.modality is Modality.IMAGE:
            processor = self.processor.image_processor
            return image_tokens(processor, medium.content, sized=medium.sized)
        sound = _sound(medium)
        return 0 if sound is None else audio_tokens(len(sound.samples))

    def sound_blocks(self) -> OmniSoundBlocks | None:
        """See ``Family.sound_blocks``."""
        tower = self.model.get_encoder(modality="audio").config
        is_cut_evenly = tower.n_window_infer % (2 * tower.n_window) == 0
        extractor = self.processor.feature_extractor
        return OmniSoundBlocks(extractor, tower) if is_cut_evenly else None

    @cached_property
    def thinks(self) -> bool:
        """See ``Family.thinks``.

        Also True if the template strips reasoning from earlier turns, since such a checkpoint may
        start reasoning by itself. False if the checkpoint can speak, because those do not reason.
        """
        may_think = self.think_tokens is not None and "</think>" in str(
            self.processor.chat_template
        )
        return super().thinks or (may_think and not self.outer_model.has_talker)

    def generation_setting(self, name: str) -> Any:
        """See ``Family.generation_setting``; the outer model's setting is the fallback."""
        setting = super().generation_setting(name)
        return getattr(self.outer_model.generation_config, name) if setting is None else setting

    def _pieces(self, text: str) -> list[tuple[str, bool]]:
        """Split the text into media (with their delimiters) and other text; True marks media."""
        vision = (self.processor.vision_bos_token, self.processor.vision_eos_token)
        audio = (self.processor.audio_bos_token, self.processor.audio_eos_token)
        blocks = [
            "".join(re.escape(token) for token in (around[0], placeholder, around[1]))
            for placeholder, modality in self.placeholders.items()
            for around in [audio if modality is Modality.AUDIO else vision]
        ]
        pieces = re.split(f"({'|'.join(blocks)})", text)
        return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]

    def _process(self, reading: Any, piece: str, medium: Medium) -> dict[str, torch.Tensor]:
        """Process one media item, and return its ids and other arguments of ``forward``."""
        content, how = medium.content, {"do_resize": False} if medium.sized else {}
        if isinstance(content, Audio):
            inputs = heard(reading.feature_extractor, content.samples)
            ids = self.tokenize_media(piece, Modality.AUDIO, [audio_tokens(len(content.samples))])
            return {"input_ids": ids} | inputs
        if not isinstance(content, Video):
            inputs = reading.image_processor([content], return_tensors="pt", **how)
            merged = self.processor.image_processor.merge_size**2
            counts = (inputs["image_grid_thw"].prod(-1) // merged).tolist()
            return {"input_ids": self.tokenize_media(piece, Modality.IMAGE, counts), **inputs}
        arguments = video_arguments(self.processor.video_processor, [content]) | how
        if content.sound is not None:
            arguments |= {"audio": [content.sound.samples], "sampling_rate": RATE}
            arguments |= self._interleaved()
        inputs = reading(text=[piece], fps=content.fps, return_tensors="pt", **arguments)
        unused = ("attention_mask", "mm_token_type_ids")
        return {name: torch.as_tensor(x) for name, x in inputs.items() if name not in unused}

    def _interleaved(self) -> dict[str, Any]:
        """Return processor arguments for using a recording as the video's audio track."""
        if hasattr(self.processor, "load_audio_from_video"):
            return {"load_audio_from_video": True, "audio_from_video_indices": [0]}
        return {"use_audio_in_video": True}  # Older versions of transformers.

    def _positions(self, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute (3, 1, tokens) float32 positions of a media item, starting at 0.

        The model's rope_deltas are not used.
        """
        audio = inputs.get(MASK)
        positions, _ = self.model.get_rope_index(
            ids,
            image_grid_thw=inputs.get("image_grid_thw"),
            video_grid_thw=inputs.get("video_grid_thw"),
            attention_mask=torch.ones_like(ids),
            use_audio_in_video=audio is not None and "video_grid_thw" in inputs,
            audio_seqlens=None if audio is None else audio.sum(-1),
            second_per_grids=inputs.get("video_second_per_grid"),
        )
        return positions.float()


def _sound(medium: Medium) -> Audio | None:
    """Return the audio of a media item, or None if it has no audio."""
    if medium.modality is Modality.VIDEO:
        return medium.content.sound
    return medium.content if medium.modality is Modality.AUDIO else None


_logits_to_keep: ContextVar[int] = ContextVar("logits_to_keep", default=0)
"""Number of trailing tokens whose logits the current forward pass keeps; 0 for all."""


def _teach_logits_to_keep(thinker: Any) -> None:
    """Make the thinker support ``logits_to_keep``, as other models do.

    Without it, the logits of a 32,000-token prompt alone take 20 GB in float32.
    """
    if getattr(thinker, "_oscar_keeps_logits", False):
        return
    thinker._oscar_keeps_logits = True

    def note(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        _logits_to_keep.set(kwargs.pop("logits_to_keep", 0))
        return args, kwargs

    def cut(_: Any, args: tuple) -> tuple:
        # A slice from -0 keeps all logits.
        return (args[0][:, -_logits_to_keep.get() :],)

    def forget(*_: Any) -> None:
        _logits_to_keep.set(0)

    thinker.register_forward_pre_hook(note, with_kwargs=True)
    thinker.lm_head.register_forward_pre_hook(cut)
    thinker.register_forward_hook(forget, always_call=True)


_later: ContextVar[tuple[Any, ...]] = ContextVar("later", default=())
"""Outputs of the audio tower for the remaining recordings of the current call."""


def _read_each_as_alone(tower: Any) -> None:
    """Make the audio tower's features of a recording independent of the other recordings.

    The tower cuts recordings into one-second chunks and pads all chunks of a call to the longest.
    Its convolutions treat padding differently from the end of a chunk, so the features of a
    recording of less than a second would depend on the other recordings. Here, recordings share a
    call only if each would get the same padding on its own.
    """
    if getattr(tower, "_oscar_reads_each_as_alone", False):
        return
    tower._oscar_reads_each_as_alone = True
    longest = 2 * tower.config.n_window

    def read_later(
        tower: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        lengths = kwargs.get("feature_lens")
        if lengths is None or len(args) != 1:
            return None
        alike = groupby(lengths.tolist(), lambda frames: min(frames, longest))
        runs = [lengths.new_tensor(list(run)) for _, run in alike]
        parts = args[0].split([int(run.sum()) for run in runs], dim=1)
        calls = [
            ((part,), kwargs | {"feature_lens": run}) for part, run in zip(parts, runs, strict=True)
        ]
        _later.set(tuple(tower(*args, **kwargs) for args, kwargs in calls[1:]))
        return calls[0]

    def join(_: Any, __: tuple, output: Any) -> Any:
        later = _later.get()
        _later.set(())
        if output is None or not later:
            return None  # The tower failed, or the output is complete.
        parts = [output, *later]
        # Drop the hidden states, which ``generate`` requests for speech, because nothing uses them.
        read = [name for name, value in output.items() if isinstance(value, torch.Tensor)]
        return type(output)(**{name: torch.cat([part[name] for part in parts]) for name in read})

    tower.register_forward_pre_hook(read_later, with_kwargs=True)
    tower.register_forward_hook(join, always_call=True)
