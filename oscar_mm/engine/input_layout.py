"""InputLayout: which rows of a model's inputs belong to which medium, patch or token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oscar_mm.modality import Modality

_DECODER = {"inputs_embeds": 1, "position_ids": -1, "cache_position": 0}
"""Arguments of any decoder with one entry per token, and their token dimension."""


@dataclass(frozen=True)
class InputLayout:
    """How the forward arguments of a model, and of its decoder, are cut at media and tokens.

    A prompt with a medium whose arguments are missing here cannot be cut.

    Attributes:
        per_medium: forward arguments with one row per medium of a modality, or per sound of a
            video.
        per_patch: forward arguments with one row per patch: modality of the media, and the argument
            with the grids (media, 3) that count their patches.
        padded: forward arguments among ``per_medium`` that are padded at the end of their last
            dimension to the longest medium, and the argument with the mask of the padding.
        video_grids: argument with the grids of videos, for towers that take patches and
            ``grid_thw`` and attend only within an image or a pair of frames: videos may be cut
            between pairs of frames. None if media stay whole.
        features: decoder arguments that are lists of features, one of which each of the first
            layers adds to some tokens, row after row; and the argument with the (batch, tokens)
            mask of these tokens.
    """

    per_medium: Mapping[str, Modality] = field(default_factory=dict)
    per_patch: Mapping[str, tuple[Modality, str]] = field(default_factory=dict)
    padded: Mapping[str, str] = field(default_factory=dict)
    video_grids: str | None = None
    features: Mapping[str, str] = field(default_factory=dict)

    @property
    def per_token(self) -> dict[str, int]:
        """Decoder arguments with one entry per token, and their token dimension."""
        return _DECODER | dict.fromkeys(self.features.values(), 1)
