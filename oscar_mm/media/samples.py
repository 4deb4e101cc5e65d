"""Samples of recordings, of which a model makes features where its tower reads.

A feature extractor spends seconds of all cores on a long recording, and a GPU no time. So where the
tower is on a GPU, samples wait and travel, and a hook of the model has the extractor make features
on that GPU, one recording after the other. Elsewhere features are made before a prompt waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, WhisperFeatureExtractor

from oscar_mm.media.mono import RATE, Audio

SAMPLES = "audio_samples"
"""Argument of a model's forward instead of features and their mask: a list of the samples of each
recording, (n,) float32, which stay on the CPU."""

_MOST_SAMPLES = 3600 * RATE
"""Most samples of a recording that a GPU makes features of. An hour takes 2.5 GB at most meanwhile,
less than the first convolution of Qwen3-Omni's tower after it: 3 GB from 500 seconds on."""

_EXTRACT = "_torch_extract_fbank_features"
"""What an extractor calls with (recordings, samples) float32 of equal length and a device. Its
__call__ copies samples twice before, which takes longer than all else on a GPU. With a version of
transformers that lacks the method, features are made before a prompt waits."""


def tower_device(model: Any) -> torch.device | None:
    """The GPU of a model's audio tower, where features are made; None if the tower is elsewhere."""
    device = next(model.get_encoder(modality="audio").parameters()).device
    return device if device.type == "cuda" else None


def make_features_in_model(model: Any, extractor: Any) -> None:
    """Let a model take samples, with the first feature extractor that it is given.

    Args:
        model: its forward takes input_features and feature_attention_mask by name.
        extractor: of its processor.
    """
    if hasattr(model, "_oscar_extractor"):
        return
    model._oscar_extractor = extractor
    model.register_forward_pre_hook(_make, with_kwargs=True)


def _make(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, with_features(model, kwargs)


def with_features(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a model's forward, with features instead of samples."""
    found = dict(inputs)
    if SAMPLES in found:
        found |= _features(model._oscar_extractor, found.pop(SAMPLES), tower_device(model))
    return found


def _features(
    extractor: WhisperFeatureExtractor,
    recordings: Sequence[torch.Tensor],
    device: torch.device | None,
) -> dict[str, torch.Tensor]:
    """Features of each recording as if it were alone, padded to the longest, and their mask.

    Args:
        extractor: makes them.
        recordings: (n,) float32 samples of each, on the CPU.
        device: None for the CPU.

    Returns:
        (recordings, channels, frames) float32 and (recordings, frames) int32.
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


def may_wait(model: Any, extractor: Any, recordings: Iterable[Audio]) -> bool:
    """Whether a prompt may have samples of these recordings, and the model make the features that
    this extractor would."""
    alike = extractor is model._oscar_extractor and isinstance(extractor, WhisperFeatureExtractor)
    short = all(len(one.samples) <= _MOST_SAMPLES for one in recordings)
    return alike and hasattr(extractor, _EXTRACT) and short and tower_device(model) is not None


class UnmadeFeatures:
    """Stands for a feature extractor: gives samples for features, and the mask of the features."""

    def __init__(self, extractor: WhisperFeatureExtractor) -> None:
        self._extractor = extractor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extractor, name)

    def __call__(self, recordings: Sequence[np.ndarray], **options: Any) -> BatchFeature:
        """(1, samples) float32 and (1, frames) int32 of one recording."""
        [samples] = recordings
        mask = np.ones((1, len(samples) // self._extractor.hop_length), np.int32)
        found = {"input_features": samples[None], "attention_mask": mask}
        return BatchFeature(found, tensor_type=options.get("return_tensors"))


def as_samples(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a processor makes of a medium by ``UnmadeFeatures``, as arguments of a model."""
    found = dict(inputs)
    if "input_features" in found:
        del found["feature_attention_mask"]
        found[SAMPLES] = [*found.pop("input_features")]
    return found
