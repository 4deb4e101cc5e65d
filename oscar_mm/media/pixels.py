"""Pixels of pictures and videos as bytes, which a model scales where it reads them.

An image processor of Qwen's spends most of its time on numbers that a GPU works out in no time: it
scales each byte to a float32, and writes a picture twice, as the pair of frames that towers take.
Here the processor resizes a picture and cuts it into patches, in bytes; they wait and travel as 3
bytes a pixel instead of 24. A hook of the model makes of them what the processor would have made.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image
from transformers import BatchFeature

from oscar_mm.media.thread_pool import in_threads

_BATCH_PIXELS = 1 << 21
"""Pixels of the pictures that a thread processes together."""

_ARGUMENTS = {"pixel_values": "image_processor", "pixel_values_videos": "video_processor"}
"""Arguments of a model's forward, and the part of a processor that makes each."""


class PixelScale(NamedTuple):
    """How a processor makes numbers of bytes: (byte * factor - mean) / std, by channel."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, processor: Any) -> PixelScale | None:
        """That of an image or video processor; None if its pixels cannot be scaled later."""
        by_torch = getattr(processor, "backend", None) == "torchvision"
        if not (by_torch and processor.do_rescale and processor.do_normalize):
            return None
        mean, std = processor.image_mean, processor.image_std
        by_channel = isinstance(mean, Sequence) and isinstance(std, Sequence)
        return cls(processor.rescale_factor, tuple(mean), tuple(std)) if by_channel else None

    def scaled(self, processor: Any, patches: torch.Tensor) -> torch.Tensor:
        """Patches as a processor would have made them, on the device where they are.

        Args:
            processor: of the kind that cut the patches.
            patches: (n, channels x frames x side x side) uint8; a single frame stands for all.

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
    """Let a model take pixels as bytes, of the first processor that it is given.

    Args:
        model: its forward takes pixel_values and pixel_values_videos by name.
        processor: has an image processor and a video processor of Qwen's.
    """
    if hasattr(model, "_oscar_pixels"):
        return
    parts = {name: getattr(processor, part, None) for name, part in _ARGUMENTS.items()}
    model._oscar_pixels = {name: (PixelScale.of(part), part) for name, part in parts.items()}
    model.register_forward_pre_hook(_scale, with_kwargs=True)


def _scale(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, scaled_inputs(model, kwargs)


def scaled_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a model's forward, with numbers for pixels that are bytes."""
    found = dict(inputs)
    for name, (scale, part) in model._oscar_pixels.items():
        pixels = inputs.get(name)
        if scale and isinstance(pixels, torch.Tensor) and pixels.dtype == torch.uint8:
            found[name] = scale.scaled(part, pixels)
    return found


def in_bytes(processor: Any, model: Any) -> Any:
    """A copy of a processor that leaves pixels as bytes where the model scales them alike."""
    twin = copy.copy(processor)
    for name, part in _ARGUMENTS.items():
        own = getattr(processor, part, None)
        scale = PixelScale.of(own)
        if scale is not None and scale == model._oscar_pixels[name][0]:
            kind = ImagesInBytes if part == "image_processor" else VideosInBytes
            setattr(twin, part, kind(own))
    return twin


class _InBytes:
    """A processor whose pixels stay bytes; its attributes are those of the one that it asks."""

    options: ClassVar[dict[str, Any]] = {"do_rescale": False, "do_normalize": False}

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


class VideosInBytes(_InBytes):
    """A video processor that leaves pixels as bytes."""

    def __call__(self, videos: Any, **options: Any) -> BatchFeature:
        """Patches of videos, (patches, channels x frames x side x side) uint8, and their grids."""
        return self._processor(videos, **{**options, **self.options})


class ImagesInBytes(_InBytes):
    """An image processor that leaves pixels as bytes, and works in several threads."""

    options: ClassVar[dict[str, Any]] = {**_InBytes.options, "temporal_patch_size": 1}

    def __call__(self, images: Sequence[Image.Image], **options: Any) -> BatchFeature:
        """Patches of RGB images, (patches, channels x side x side) uint8, and their grids."""
        batches = list(_batches(images))
        patches = self._processor.get_number_of_image_patches
        counts = [sum(patches(image.height, image.width) for image in some) for some in batches]
        channels, side = len(self._processor.image_mean), self._processor.patch_size
        pixels = torch.empty(sum(counts), channels * side**2, dtype=torch.uint8)
        parts = pixels.split(counts)

        def process(index: int) -> torch.Tensor:
            made = self._processor(batches[index], **{**options, **self.options})
            parts[index].copy_(made["pixel_values"])
            return made["image_grid_thw"]

        grids = torch.cat([*in_threads(process, range(len(batches)))])
        return BatchFeature({"pixel_values": pixels, "image_grid_thw": grids})


def _batches(images: Sequence[Image.Image]) -> Iterator[Sequence[Image.Image]]:
    """Images in their order, those that follow each other together."""
    before = accumulate((image.width * image.height for image in images), initial=0)
    numbers = [pixels // _BATCH_PIXELS for pixels in before][: len(images)]
    cuts = [place for place, (one, two) in enumerate(pairwise(numbers), 1) if one != two]
    for start, stop in pairwise([0, *cuts, len(images)]):
        yield images[start:stop]
