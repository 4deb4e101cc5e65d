"""Qwen3-VL, dense and MoE, and Qwen3-Omni: images and videos with 3-D positions, and audio."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from PIL import Image
from torch.nn.functional import pad
from transformers import Qwen3OmniMoeForConditionalGeneration

from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.engine.family import Encoding, Family
from oscar_mm.media import Audio, Video
from oscar_mm.media.encoder_inputs import (
    SAMPLES,
    DeferredFeatures,
    SizesKept,
    as_samples,
    can_defer,
    in_bytes,
    make_features_in_model,
    pixel_bounds,
    resized,
    scale_in_model,
)
from oscar_mm.media.media import Medium
from oscar_mm.media.options import LOW_PIXELS, OF_MODALITY, MediaOptions
from oscar_mm.media.resample import RATE
from oscar_mm.modality import Modality, token_modalities


def image_tokens(image_processor: Any, image: Image.Image, *, sized: bool = False) -> int:
    """Return the tokens of an image in a prompt; ``sized`` means the processor does not resize."""
    width, height = image.width, image.height
    if not sized:
        width, height = resized(image_processor, width, height)
    side = image_processor.patch_size * image_processor.merge_size
    return (height // side) * (width // side)


def largest_image(image_processor: Any, width: int, height: int) -> tuple[int, int]:
    """See ``Family.largest_image``: the size to which the processor resizes, if it is smaller."""
    if width * height <= pixel_bounds(image_processor)[1]:
        return width, height
    try:
        used = resized(image_processor, width, height)
        # Some strips keep more than the maximum of pixels and would be resized again.
        return used if resized(image_processor, *used) == used else (width, height)
    except ValueError:  # The strip is too long for the processor, which refuses it later.
        return width, height


def longer_sides(tokens: int) -> list[int]:
    """Return the longer sides of all grids with so many tokens, ascending."""
    sides = [side for side in range(1, math.isqrt(tokens) + 1) if tokens % side == 0]
    return [tokens // side for side in reversed(sides)]


def video_arguments(video_processor: Any, videos: Sequence[Video]) -> dict[str, Any]:
    """Return processor arguments for sampled videos that preserve their timestamps."""
    return {
        "videos": [video.frames for video in videos],
        "video_metadata": [video.metadata for video in videos],
        "do_sample_frames": False,
        # The current meaning of None, which transformers has announced to change.
        "cap_pixels_per_frame": bool(video_processor.cap_pixels_per_frame),
    }


_OPTIONS = frozenset({*OF_MODALITY[Modality.IMAGE], *OF_MODALITY[Modality.VIDEO]})
_FEWEST_TOKENS, _MAX_TOKENS = 4, 16384
"""Minimum and maximum tokens of a picture with a given size, as in qwen-vl-utils. No option may ask
for more, because the time of a tower grows with the square of a picture's tokens."""
_FRAME_TOKENS = 128, 768
"""Minimum and maximum tokens of a frame, as in qwen-vl-utils."""
_VIDEO_TOKENS = 115_200
"""Maximum tokens of a video, as in qwen-vl-utils."""


def image_size(
    image_processor: Any, width: int, height: int, options: MediaOptions
) -> tuple[int, int]:
    """See ``Family.image_size``; without options the processor's own limits apply."""
    factor = image_processor.patch_size * image_processor.merge_size
    if options.resized is not None:
        bounds = _FEWEST_TOKENS * factor**2, _MAX_TOKENS * factor**2
        return _resized(options.resized, factor, *bounds)
    least, most = pixel_bounds(image_processor)
    largest = max(most, _MAX_TOKENS * factor**2)
    if options.max_pixels is not None:
        most = min(options.max_pixels, largest)
    elif options.detail == "low":
        most = min(most, LOW_PIXELS)
    if options.min_pixels is not None:
        least = min(options.min_pixels, largest)
        most = max(most, least)
    return _resized((width, height), factor, min(least, most), most)


def frame_size(
    video_processor: Any, width: int, height: int, frames: int, options: MediaOptions
) -> tuple[int, int]:
    """See ``Family.frame_size``; without options the limits of qwen-vl-utils apply."""
    factor = video_processor.patch_size * video_processor.merge_size
    if options.resized is not None:
        bounds = _FEWEST_TOKENS * factor**2, _MAX_TOKENS * factor**2
        return _resized(options.resized, factor, *bounds)
    low, high = (tokens * factor**2 for tokens in _FRAME_TOKENS)
    least = low if options.min_pixels is None else options.min_pixels
    total = _VIDEO_TOKENS * factor**2 if options.total_pixels is None else options.total_pixels
    share = total / frames * video_processor.temporal_patch_size
    most = min(max(min(high, share), int(least * 1.05)), _MAX_TOKENS * factor**2)
    if options.max_pixels is not None:
        most = min(most, options.max_pixels)
    return _resized((width, height), factor, min(least, most), most)


def _resized(size: tuple[int, int], factor: int, least: Any, most: Any) -> tuple[int, int]:
    """Return a width and height in whole patches whose product is within the pixel limits."""
    from qwen_vl_utils.vision_process import smart_resize  # Slow to import.

    width, height = size
    height, width = smart_resize(height, width, factor, min_pixels=least, max_pixels=most)
    return max(factor, width), max(
        factor, height
    )  # smart_resize rounds the short side of long strips to 0.


_GRIDS = {Modality.IMAGE: "image_grid_thw", Modality.VIDEO: "video_grid_thw"}


class Qwen3Family(Family):
    """Base of Qwen3-VL and Qwen3-Omni, with image sizes that options can set."""

    media_options = _OPTIONS

    def largest_image(self, width: int, height: int) -> tuple[int, int]:
        """See ``Family.largest_image``."""
        return largest_image(self.processor.image_processor, width, height)

    def image_size(self, width: int, height: int, options: MediaOptions) -> tuple[int, int]:
        """See ``Family.image_size``."""
        return image_size(self.processor.image_processor, width, height, options)

    def frame_size(
        self, width: int, height: int, frames: int, options: MediaOptions
    ) -> tuple[int, int]:
        """See ``Family.frame_size``."""
        return frame_size(self.processor.video_processor, width, height, frames, options)


class Qwen3VL(Qwen3Family):
    """Qwen3-VL-2B to -235B-A22B, Instruct and Thinking.

    Loading lets the model accept pixels as bytes, see ``oscar_mm.media.encoder_inputs``.
    """

    model_types = ("qwen3_vl", "qwen3_vl_moe")
    name = "Qwen3-VL"
    reads = frozenset({Modality.IMAGE, Modality.VIDEO})

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        scale_in_model(model, processor)

    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        """See ``Family.encode``."""
        pictures = [medium for medium in media if medium.modality is Modality.IMAGE]
        clips = [medium for medium in media if medium.modality is Modality.VIDEO]
        images, videos = ([medium.content for medium in some] for some in (pictures, clips))
        reading = in_bytes(self.processor, self.model)
        for part, some in (("image_processor", pictures), ("video_processor", clips)):
            if any(sized := [medium.sized for medium in some]):
                setattr(reading, part, SizesKept(getattr(reading, part), sized))
        if videos:
            # The models were trained with a pair of marks around each frame and none around the
            # video; transformers 5 inserts the frames between the template's two marks.
            marks = self.processor.vision_start_token, self.processor.vision_end_token
            video = self.processor.video_token
            inputs = reading(
                text=[text.replace(video.join(marks), video)],
                images=images or None,
                **video_arguments(self.processor.video_processor, videos),
                **self.text_options(text),
                return_tensors="pt",
            )
        else:
            inputs = reading.image_processor(images, return_tensors="pt") if images else {}
        grids = {name: inputs[name] for name in _GRIDS.values() if name in inputs}
        merged = self.processor.image_processor.merge_size**2
        counts = {
            modality: (grids[name].prod(-1) // merged).tolist()
            for modality, name in _GRIDS.items()
            if name in grids
        }
        if videos:
            ids = inputs["input_ids"]
        else:
            ids = self.tokenize_media(text, Modality.IMAGE, counts.get(Modality.IMAGE, []))
        tensors = {name: inputs[name] for name in inputs if name.startswith("pixel_values")}
        return Encoding(
            input_ids=ids,
            tensors=tensors | grids,
            positions=self._positions(ids, grids),
            media_tokens=[counts[medium.modality].pop(0) for medium in media],
        )

    def min_tokens(self, medium: Medium) -> int:
        """See ``Family.min_tokens``; videos are bounded by ``MediaLimits``."""
        if medium.modality is Modality.IMAGE:
            processor = self.processor.image_processor
            return image_tokens(processor, medium.content, sized=medium.sized)
        return 0

    def position_steps(self, modality: Modality, tokens: int) -> Sequence[int]:
        """See ``Family.position_steps``."""
        return [tokens] if modality is Modality.TEXT else longer_sides(tokens)

    def _positions(self, ids: torch.Tensor, grids: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute (3, 1, tokens) int64 positions on the CPU.

        The model's own rope_deltas are not used: that is one number on the model, overwritten by
        each request.
        """
        if not grids:
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        spatial, _ = self.model.model.get_rope_index(
            ids,
            mm_token_type_ids=token_modalities(ids, config=self.model.config).int(),
            attention_mask=torch.ones_like(ids),
            **grids,
        )
        return spatial.long()


_FRAME = RATE // 100
"""Samples between two frames of audio features."""
_BY_FRAME = ("input_features", "feature_attention_mask")


class Qwen3Omni(Qwen3Family):
    """Qwen3-Omni-30B-A3B, Instruct, Thinking and Captioner.

    ``model`` is the thinker, which generates text; ``outer_model`` also has the talker, if the
    checkpoint has one. Loading lets the thinker accept ``logits_to_keep``, pixels as bytes, and
    samples (``oscar_mm.media.encoder_inputs``).

    A prompt is processed one medium at a time. Thus a medium gets the same features and positions
    whatever it is combined with (the processor would pad recordings to the longest and use one
    frame rate for all videos), and videos with and without sound can be mixed. Loading also makes
    the audio tower process each recording as if it were alone.
    """

    model_types = ("qwen3_omni_moe",)
    name = "Qwen3-Omni"
    reads = frozenset({Modality.IMAGE, Modality.VIDEO, Modality.AUDIO})
    media_options = _OPTIONS | frozenset(OF_MODALITY[Modality.AUDIO])
    auto_class = Qwen3OmniMoeForConditionalGeneration

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model.thinker, processor)
        self.outer_model = model
        _teach_logits_to_keep(self.model)
        scale_in_model(self.model, processor)
        make_features_in_model(self.model, processor.feature_extractor)
        _read_each_as_alone(self.model.get_encoder(modality="audio"))

    @classmethod
    def set_attention(cls, model: Any, towers: str | None) -> None:
        """See ``Family.set_attention``; set on the thinker, as the outer model would ignore it."""
        chosen = {"vision_config": towers, "audio_config": towers} if towers else {}
        model.thinker.set_attn_implementation({"text_config": IMPLEMENTATION} | chosen)

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
                counts.append(int(token_modalities(part, config=self.model.config).count_nonzero()))
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
        """See ``Family.join_media``; audio features (sounds, ..., frames) are padded at the end."""
        if name == SAMPLES:
            return [samples for part in parts for samples in part]
        if name in _BY_FRAME:
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

    @cached_property
    def thinks(self) -> bool:
        """See ``Family.thinks``.

        Also True if the template strips reasoning from earlier turns, since such a checkpoint may
        open it by itself, unless the checkpoint can speak: those do not reason.
        """
        may_think = self.think_tokens is not None and "</think>" in str(
            self.processor.chat_template
        )
        return super().thinks or (may_think and not self.outer_model.has_talker)

    def generation_setting(self, name: str) -> Any:
        """See ``Family.generation_setting``; settings may be those of the outer model."""
        setting = super().generation_setting(name)
        return getattr(self.outer_model.generation_config, name) if setting is None else setting

    def _pieces(self, text: str) -> list[tuple[str, bool]]:
        """Split the text into media with their opening and closing tokens, and the rest."""
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
        """Run a processor on one medium; return ids and further arguments of the forward."""
        content, how = medium.content, {"do_resize": False} if medium.sized else {}
        if isinstance(content, Audio):
            inputs = _heard(reading.feature_extractor, content)
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
        """Return processor arguments for a recording that belongs to the video."""
        if hasattr(self.processor, "load_audio_from_video"):
            return {"load_audio_from_video": True, "audio_from_video_indices": [0]}
        return {"use_audio_in_video": True}  # Older versions of transformers.

    def _positions(self, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute (3, 1, tokens) float32 positions of one medium from 0, without rope_deltas."""
        audio = inputs.get("feature_attention_mask")
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
    """Return the recording of a medium, if it has sound."""
    if medium.modality is Modality.VIDEO:
        return medium.content.sound
    return medium.content if medium.modality is Modality.AUDIO else None


def _heard(extractor: Any, sound: Audio) -> dict[str, torch.Tensor]:
    """Compute features of a recording and their mask with the processor's options."""
    found = extractor(
        [sound.samples],
        sampling_rate=RATE,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return {
        "input_features": found["input_features"],
        "feature_attention_mask": found["attention_mask"],
    }


def audio_tokens(samples: int) -> int:
    """Count the tokens of a recording: 13 per second, and an eighth of the remaining frames."""
    seconds, rest = divmod(samples // _FRAME, 100)
    # Each of three convolutions halves the number of frames and rounds up.
    return 13 * seconds + -(-rest // 8)


_logits_to_keep: ContextVar[int] = ContextVar("logits_to_keep", default=0)
"""Number of trailing logits that the running forward pass keeps; 0 for all."""
_default_logits: ContextVar[int] = ContextVar("default_logits", default=0)
"""Number of trailing logits kept by a forward pass that does not specify it; 0 for all."""


@contextmanager
def last_logits_only() -> Iterator[None]:
    """Keep only the last token's logits within the block unless a forward pass asks for more."""
    token = _default_logits.set(1)
    try:
        yield
    finally:
        _default_logits.reset(token)


def _teach_logits_to_keep(thinker: Any) -> None:
    """Let the thinker keep the logits of the last tokens only, as other models can.

    Without it the logits of a prompt of 32,000 tokens alone take 20 GB in float32.
    """
    if getattr(thinker, "_oscar_keeps_logits", False):
        return
    thinker._oscar_keeps_logits = True

    def note(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        _logits_to_keep.set(kwargs.pop("logits_to_keep", _default_logits.get()))
        return args, kwargs

    def cut(_: Any, args: tuple) -> tuple:
        # With 0 the slice from -0 keeps all logits.
        return (args[0][:, -_logits_to_keep.get() :],)

    def forget(*_: Any) -> None:
        _logits_to_keep.set(0)

    thinker.register_forward_pre_hook(note, with_kwargs=True)
    thinker.lm_head.register_forward_pre_hook(cut)
    thinker.register_forward_hook(forget, always_call=True)


_later: ContextVar[tuple[Any, ...]] = ContextVar("later", default=())
"""Outputs of the audio tower for the remaining recordings of the running call."""


def _read_each_as_alone(tower: Any) -> None:
    """Make the audio tower's features of a recording independent of the other recordings.

    The tower cuts recordings into pieces of one second and pads the pieces of a call to the
    longest. Its convolutions treat padding differently from the end of a piece, so that a recording
    of less than a second would depend on the others. Here recordings share a call only if each
    alone would get the same padding.
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
            return None  # The tower failed, or the output is whole.
        parts = [output, *later]
        # Hidden states, which ``generate`` requests for speech, are dropped: nothing uses them.
        read = [name for name, value in output.items() if isinstance(value, torch.Tensor)]
        return type(output)(**{name: torch.cat([part[name] for part in parts]) for name in read})

    tower.register_forward_pre_hook(read_later, with_kwargs=True)
    tower.register_forward_hook(join, always_call=True)
