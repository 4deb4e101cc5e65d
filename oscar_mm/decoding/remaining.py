"""A prompt in two: its beginning, and the rest once the beginning is in the cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from oscar_mm.decoding.prompt import Prompt
from oscar_mm.modality import Modality


def beginning(prompt: Prompt, tokens: int) -> Prompt:
    """The first tokens of a prompt of one row, with all of its media.

    Args:
        prompt: as a family made it.
        tokens: fewer than it has, and not before the end of its last medium.
    """
    if not (prompt.media[-1].stop if prompt.media else 1) <= tokens < prompt.tokens:
        raise ValueError(f"{tokens} of {prompt.tokens} tokens leave out a medium, or nothing")
    following = prompt.positions[..., tokens].reshape(-1)[-1:]
    return replace(
        prompt,
        inputs=prompt.inputs | {"input_ids": prompt.inputs["input_ids"][:, :tokens]},
        positions=prompt.positions[..., :tokens],
        next_position=following.to(prompt.next_position.dtype),
        modalities=prompt.modalities[:, :tokens],
    )


def remaining(prompt: Prompt, tokens: int) -> Prompt:
    """A prompt of one row without its first tokens, and without the media in them.

    Args:
        prompt: as a family made it.
        tokens: fewer than it has, and not in the middle of a medium.
    """
    before = [span for span in prompt.media if span.stop <= tokens]
    if any(span.start < tokens < span.stop for span in prompt.media):
        raise ValueError(f"{tokens} tokens end within a medium")
    modalities = prompt.modalities[0]
    counts = {kind: sum(span.modality is kind for span in before) for kind in Modality}
    counts[Modality.AUDIO] += sum(
        span.modality is Modality.VIDEO
        and bool((modalities[span.start : span.stop] == Modality.AUDIO).any())
        for span in before
    )
    inputs = _without(dict(prompt.inputs), counts)
    inputs["input_ids"] = inputs["input_ids"][:, tokens:]
    return Prompt(
        inputs=inputs,
        positions=prompt.positions[..., tokens:],
        next_position=prompt.next_position,
        modalities=prompt.modalities[:, tokens:],
        media=tuple(span.shifted(-tokens) for span in prompt.media if span.stop > tokens),
    )


_PER_MEDIUM = {
    "image_sizes": Modality.IMAGE,
    "image_grid_thw": Modality.IMAGE,
    "video_grid_thw": Modality.VIDEO,
    "video_second_per_grid": Modality.VIDEO,
    "input_features": Modality.AUDIO,
    "feature_attention_mask": Modality.AUDIO,
}
"""Arguments of the model's forward with one row for each medium, or sound of a video."""
_PER_PATCH = {
    "pixel_values": (Modality.IMAGE, "image_grid_thw"),
    "pixel_values_videos": (Modality.VIDEO, "video_grid_thw"),
}
"""Arguments with one row for each patch, and the grids that count them; without, as above."""


def _without(
    inputs: dict[str, torch.Tensor], counts: dict[Modality, int]
) -> dict[str, torch.Tensor]:
    """Without the first media of each kind; an argument of which nothing is left goes."""
    rest = {}
    for name, tensor in inputs.items():
        rows = 0
        if name in _PER_MEDIUM:
            rows = counts[_PER_MEDIUM[name]]
        elif name in _PER_PATCH:
            modality, grids = _PER_PATCH[name]
            rows = counts[modality]
            if grids in inputs:
                rows = int(inputs[grids][:rows].prod(-1).sum())
        elif name != "input_ids":
            raise NotImplementedError(f"{name}: not known how to take media out of it")
        if name == "input_ids" or rows < len(tensor):
            rest[name] = tensor[rows:]
    if "feature_attention_mask" in rest:
        # Padded to the longest sound of those that are left.
        frames = int(rest["feature_attention_mask"].sum(-1).max())
        for name in ("input_features", "feature_attention_mask"):
            rest[name] = rest[name][..., :frames]
    return rest
