"""The modality of each token (text, image, video or audio), as spans of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

PADDING = -1
"""Modality id of a token that is masked out and never stored."""


class Modality(IntEnum):
    """Modality ids, the same as in ``mm_token_type_ids`` from transformers' processors."""

    TEXT = 0
    IMAGE = 1
    VIDEO = 2
    AUDIO = 3

    @property
    def label(self) -> str:
        """Lower-case name, as in policies and reports."""
        return self.name.lower()


MEDIA = {kind.label: kind for kind in Modality if kind is not Modality.TEXT}
"""Modalities of media by label."""


@dataclass(frozen=True)
class Span:
    """A run of ``length`` tokens of one modality, from index ``start`` of the sequence."""

    modality: Modality
    start: int
    length: int

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.start + self.length


def spans_of(modalities: Iterable[int]) -> list[Span]:
    """Return the runs of modality ids in a sequence as spans; padding (-1) is skipped."""
    spans, start = [], 0
    for modality, run in groupby(int(m) for m in modalities):
        length = sum(1 for _ in run)
        if modality != PADDING:
            spans.append(Span(Modality(modality), start, length))
        start += length
    return spans


TwoWay = Literal["run", "prompt"]
"""Which media tokens also attend to later ones: image tokens to those of the same run, or all media
tokens of a prompt to each other."""


def two_way_groups(modalities: Iterable[int], kind: TwoWay) -> list[list[int]]:
    """Return groups of tokens that attend to each other: ascending indices, at least two of them.

    Args:
        modalities: modality ids of the new tokens of a sequence, without padding.
        kind: which media tokens attend to each other.
    """
    if kind == "prompt":
        groups = [[index for index, one in enumerate(modalities) if one > Modality.TEXT]]
    else:
        runs = [run for run in spans_of(modalities) if run.modality is Modality.IMAGE]
        groups = [[*range(run.start, run.stop)] for run in runs]
    return [group for group in groups if len(group) > 1]


@dataclass(frozen=True)
class MediumSpan:
    """The tokens of an image, video or recording in a sequence.

    Attributes:
        modality: modality of the media item. A video may contain tokens of other modalities:
            timestamps between frames are text, and the audio track is audio.
        label: name to display: the file's name, or the item's argument and index, as in images[2].
        start: index of the first token.
        stop: index after the last token.
        digest: hexadecimal SHA-256 of the decoded content; see ``oscar_mm.media.media``.
    """

    modality: Modality
    label: str
    start: int
    stop: int
    digest: str

    @property
    def tokens(self) -> int:
        """Number of tokens in the span."""
        return self.stop - self.start

    def shifted(self, tokens: int) -> MediumSpan:
        """Return the span moved ``tokens`` tokens to the right."""
        return replace(self, start=self.start + tokens, stop=self.stop + tokens)


def token_modalities(
    input_ids: torch.Tensor,
    *,
    config: Any = None,
    mm_token_type_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the modality id of each token in a batch.

    Args:
        input_ids: (batch, tokens) integer token ids.
        config: configuration of the model; its ``image_token_id``, ``video_token_id`` and
            ``audio_token_id`` are used if ``mm_token_type_ids`` is None.
        mm_token_type_ids: (batch, tokens) from a processor: 0 text, 1 image, 2 video, 3 audio.
        attention_mask: (batch, tokens), 0 for padding.

    Returns:
        (batch, tokens) int8 on the CPU: 0 to 3, and -1 for padding.

    Raises:
        ValueError: if the shape of ``mm_token_type_ids`` differs from that of ``input_ids``, or if
            it contains ids other than 0 to 3.
    """
    import torch

    if mm_token_type_ids is not None:
        if mm_token_type_ids.shape != input_ids.shape:
            raise ValueError(
                f"mm_token_type_ids has shape {tuple(mm_token_type_ids.shape)}; it must have the "
                f"shape of input_ids, {tuple(input_ids.shape)}"
            )
        given = mm_token_type_ids.to("cpu")
        if given.numel() and not 0 <= int(given.min()) <= int(given.max()) <= 3:
            raise ValueError("mm_token_type_ids must be 0 (text), 1 (image), 2 (video), 3 (audio)")
        modalities = given.to(torch.int8, copy=True)
    else:
        ids = input_ids.to("cpu")
        modalities = torch.zeros(ids.shape, dtype=torch.int8)
        for modality in (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO):
            token_id = getattr(config, f"{modality.label}_token_id", None)
            if token_id is not None:
                modalities[ids == token_id] = int(modality)
    if attention_mask is not None:
        modalities[attention_mask.to("cpu") == 0] = PADDING
    return modalities
