"""Encoder inputs: pixels and audio samples, converted to features on the tower's device.

Qwen's image processor spends most of its time on values that a GPU computes in negligible time: it
scales each byte to a float32, and writes each picture twice, as the pair of frames that the tower
takes. Here the processor only resizes a picture and cuts it into patches of bytes, which are stored
and copied with 3 bytes per pixel instead of 24. A hook on the model then computes what the
processor would have returned.

For a long recording, a feature extractor keeps all CPU cores busy for seconds, whereas a GPU takes
negligible time. So if the tower is on a GPU, samples are stored and copied, and a hook on the model
runs the extractor on that GPU, one recording after the other. Otherwise features are computed
before the prompt enters the queue.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from oscar_mm.media.resample import RATE, Audio
from oscar_mm.thread_pool import parallel_map

_BATCH_PIXELS = 1 << 21
"""Approximate number of pixels in a thread's batch of pictures."""

_ARGUMENTS = {"pixel_values": "image_processor", "pixel_values_videos": "video_processor"}
"""Arguments of a model's forward method, and the part of the processor that computes each."""
SAMPLES = "audio_samples"
"""Argument of a model's forward method that replaces the features and their mask: a list of each
recording's samples, (n,) float32, on the CPU."""
_MAX_SAMPLES = 3600 * RATE
"""Maximum length in samples of a recording whose features a GPU computes. For an hour this takes at
most 2.5 GB of memory, less than the first convolution of Qwen3-Omni's tower, which takes 3 GB for
500 seconds or more."""
_EXTRACT = "_torch_extract_fbank_features"
"""Method of an extractor that takes (recordings, samples) float32 of equal length and a device. It
is called directly, since ``__call__`` first copies the samples twice, which takes longer than the
computation on a GPU. With a version of transformers that lacks the method, features are computed
before the prompt enters the queue."""


class PixelScale(NamedTuple):
    """How a processor scales bytes to floats: (byte * factor - mean) / std for each channel."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, processor: Any) -> PixelScale | None:
        """Return how an image or video processor scales; None if a model cannot do this later."""
        by_torch = getattr(processor, "backend", None) == "torchvision"
        if not (by_torch and processor.do_rescale and processor.do_normalize):
            return None
        mean, std = processor.image_mean, processor.image_std
        by_channel = isinstance(mean, Sequence) and isinstance(std, Sequence)
        return cls(processor.rescale_factor, tuple(mean), tuple(std)) if by_channel else None

    def scaled(self, processor: Any, patches: torch.Tensor) -> torch.Tensor:
        """Scale patches on their own device, with the same result as the processor's scaling.

        Args:
            processor: image or video processor of the kind that cut the patches.
            patches: (n, channels x frames x side x side) uint8; a single frame is repeated.

        Returns:
            (n, channels x ``temporal_patch_size`` x side x side) float32.
        """
        channels, side = len(self.mean), processor.patch_size
        planes = patches.view(len(patches), channels, -1, side)
        scaled = processor.rescale_and_normalize(
            planes, True, self.factor, True, self.mean, self.std
        )
        frames = scaled.view(len(patches), channels, -1, side * side)
        return frames.expand(-1, -1, processor.temporal_patch_size, -1).flatten(1)


def scale_in_model(model: Any, processor: Any) -> None:
    """Make a model accept pixels as bytes; only the first call for a model has an effect.

    Args:
        model: model whose forward method takes pixel_values and pixel_values_videos.
        processor: processor with Qwen's image processor and video processor.
    """
    if hasattr(model, "_oscar_pixels"):
        return
    parts = {name: getattr(processor, part, None) for name, part in _ARGUMENTS.items()}
    model._oscar_pixels = {name: (PixelScale.of(part), part) for name, part in parts.items()}
    model.register_forward_pre_hook(_scale, with_kwargs=True)


def _scale(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, scaled_inputs(model, kwargs)


def scaled_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's forward method, with byte pixels scaled to floats."""
    found = dict(inputs)
    for name, (scale, part) in model._oscar_pixels.items():
        pixels = inputs.get(name)
        if scale and isinstance(pixels, torch.Tensor) and pixels.dtype == torch.uint8:
            found[name] = scale.scaled(part, pixels)
    return found


def in_bytes(processor: Any, model: Any) -> Any:
    """Return a copy of a processor that returns pixels as bytes, if the model scales them in the
    same way as the processor."""
    twin = copy.copy(processor)
    for name, part in _ARGUMENTS.items():
        own = getattr(processor, part, None)
        scale = PixelScale.of(own)
        if scale is not None and scale == model._oscar_pixels[name][0]:
            kind = ImagesInBytes if part == "image_processor" else VideosInBytes
            setattr(twin, part, kind(own))
    return twin


def pixel_bounds(image_processor: Any) -> tuple[int, int]:
    """Return the minimum and maximum pixels per image to which Qwen's image processor resizes."""
    size = image_processor.size
    given = {name: getattr(image_processor, name, None) for name in ("min_pixels", "max_pixels")}
    if given != dict.fromkeys(given):
        # Versions of transformers differ in whether min_pixels or max_pixels has an effect alone.
        size = image_processor._standardize_kwargs(size=size, **given)["size"]
    return size["shortest_edge"], size["longest_edge"]


def resized(image_processor: Any, width: int, height: int) -> tuple[int, int]:
    """Return the width and height to which Qwen's image processor resizes an image.

    Raises:
        ValueError: if the processor rejects the aspect ratio.
    """
    if not image_processor.do_resize:
        return width, height
    min_pixels, max_pixels = pixel_bounds(image_processor)
    factor = image_processor.patch_size * image_processor.merge_size
    height, width = smart_resize(
        height, width, factor, min_pixels=min_pixels, max_pixels=max_pixels
    )
    return width, height


class _Asking:
    """Base class of processors that wrap another processor and expose its attributes."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


class SizesKept(_Asking):
    """Image or video processor that leaves the size of some media unchanged.

    Args:
        processor: the wrapped processor, which resizes the other media.
        sized: whether each media item of a call keeps its size.
    """

    def __init__(self, processor: Any, sized: Sequence[bool]) -> None:
        super().__init__(processor)
        self._sized = sized

    def __call__(self, *given: Any, **options: Any) -> BatchFeature:
        """Return the wrapped processor's output for all media, in the order of the arguments."""
        [media] = given or [options.pop(name) for name in ("images", "videos") if name in options]
        made = []
        for keeps, run in groupby(range(len(media)), lambda place: self._sized[place]):
            places = [*run]
            how = options | ({"do_resize": False} if keeps else {})
            if "video_metadata" in options:
                how["video_metadata"] = [options["video_metadata"][place] for place in places]
            made.append(self._processor([media[place] for place in places], **how))
        return BatchFeature({name: _joined([part[name] for part in made]) for name in made[0]})


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], torch.Tensor):
        return torch.cat([*parts])
    return [one for part in parts for one in part]


class _InBytes(_Asking):
    """Base class of processors that return pixels as bytes."""

    options: ClassVar[dict[str, Any]] = {"do_rescale": False, "do_normalize": False}


class VideosInBytes(_InBytes):
    """Video processor that returns pixels as bytes."""

    def __call__(self, videos: Any, **options: Any) -> BatchFeature:
        """Return the videos' patches, (patches, channels x frames x side x side) uint8, and
        grids."""
        return self._processor(videos, **{**options, **self.options})


class ImagesInBytes(_InBytes):
    """Image processor that returns pixels as bytes and runs in several threads."""

    options: ClassVar[dict[str, Any]] = {**_InBytes.options, "temporal_patch_size": 1}

    def __call__(self, images: Sequence[Image.Image], **options: Any) -> BatchFeature:
        """Return the patches of RGB images, (patches, channels x side x side) uint8, and their
        grids."""
        batches = list(_batches(images))
        resizes = options.get("do_resize", self._processor.do_resize)
        counts = [sum(self._patches(image, resizes) for image in some) for some in batches]
        channels, side = len(self._processor.image_mean), self._processor.patch_size
        pixels = torch.empty(sum(counts), channels * side**2, dtype=torch.uint8)
        parts = pixels.split(counts)

        def process(index: int) -> torch.Tensor:
            made = self._processor(batches[index], **{**options, **self.options})
            parts[index].copy_(made["pixel_values"])
            return made["image_grid_thw"]

        grids = torch.cat([*parallel_map(process, range(len(batches)))])
        return BatchFeature({"pixel_values": pixels, "image_grid_thw": grids})

    def _patches(self, image: Image.Image, resizes: bool) -> int:
        side, (width, height) = self._processor.patch_size, image.size
        if resizes:
            width, height = resized(self._processor, width, height)
        return (width // side) * (height // side)


def _batches(images: Sequence[Image.Image]) -> Iterator[Sequence[Image.Image]]:
    """Split images into runs of about ``_BATCH_PIXELS`` pixels, keeping their order."""
    before = accumulate((image.width * image.height for image in images), initial=0)
    numbers = [pixels // _BATCH_PIXELS for pixels in before][: len(images)]
    cuts = [place for place, (one, two) in enumerate(pairwise(numbers), 1) if one != two]
    for start, stop in pairwise([0, *cuts, len(images)]):
        yield images[start:stop]


def tower_device(model: Any) -> torch.device | None:
    """Return the GPU of a model's audio tower; None if the tower is not on a GPU."""
    device = next(model.get_encoder(modality="audio").parameters()).device
    return device if device.type == "cuda" else None


def make_features_in_model(model: Any, extractor: Any) -> None:
    """Make a model accept audio samples; only the first call for a model has an effect.

    Args:
        model: model whose forward method takes input_features and feature_attention_mask.
        extractor: feature extractor of the model's processor.
    """
    if hasattr(model, "_oscar_extractor"):
        return
    model._oscar_extractor = extractor
    model.register_forward_pre_hook(_make, with_kwargs=True)


def _make(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, with_features(model, kwargs)


def with_features(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's forward method, with samples replaced by features."""
    found = dict(inputs)
    if SAMPLES in found:
        found |= _features(model._oscar_extractor, found.pop(SAMPLES), tower_device(model))
    return found


def _features(
    extractor: WhisperFeatureExtractor,
    recordings: Sequence[torch.Tensor],
    device: torch.device | None,
) -> dict[str, torch.Tensor]:
    """Compute the features of each recording separately, padded to the longest, and their mask.

    Args:
        extractor: feature extractor of the model.
        recordings: samples of each recording, (n,) float32, on the CPU.
        device: device of the result; None for the CPU.

    Returns:
        Features (recordings, channels, frames) float32 and mask (recordings, frames) int32.
    """
    frames = [len(recording) // extractor.hop_length for recording in recordings]
    shape = len(frames), extractor.feature_size, max(frames)
    features = torch.zeros(shape, device=device)
    mask = torch.zeros(len(frames), max(frames), dtype=torch.int32, device=device)
    for index, (recording, count) in enumerate(zip(recordings, frames, strict=True)):
        made = getattr(extractor, _EXTRACT)(recording[None].numpy(), str(features.device))
        features[index, :, :count] = torch.from_numpy(made[0])
        mask[index, :count] = 1
    return {"input_features": features, "feature_attention_mask": mask}


def can_defer(model: Any, extractor: Any, recordings: Iterable[Audio]) -> bool:
    """Whether the model can compute these recordings' features itself, with the same result as the
    extractor, so that a prompt may store samples."""
    alike = extractor is model._oscar_extractor and isinstance(extractor, WhisperFeatureExtractor)
    short = all(len(one.samples) <= _MAX_SAMPLES for one in recordings)
    return alike and hasattr(extractor, _EXTRACT) and short and tower_device(model) is not None


class DeferredFeatures:
    """Stand-in for a feature extractor that returns samples in place of features."""

    def __init__(self, extractor: WhisperFeatureExtractor) -> None:
        self._extractor = extractor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extractor, name)

    def __call__(self, recordings: Sequence[np.ndarray], **options: Any) -> BatchFeature:
        """Return the samples of one recording, (1, samples) float32, and the mask of its future
        features, (1, frames) int32."""
        [samples] = recordings
        mask = np.ones((1, len(samples) // self._extractor.hop_length), np.int32)
        found = {"input_features": samples[None], "attention_mask": mask}
        return BatchFeature(found, tensor_type=options.get("return_tensors"))


def as_samples(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the outputs of a processor that uses ``DeferredFeatures`` to a model's arguments."""
    found = dict(inputs)
    if "input_features" in found:
        del found["feature_attention_mask"]
        found[SAMPLES] = [*found.pop("input_features")]
    return found
