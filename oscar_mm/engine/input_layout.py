"""InputLayout: which rows of a model's inputs belong to which media item, patch or token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from oscar_mm.modality import Modality, TwoWay

_DECODER = {"inputs_embeds": 1, "position_ids": -1, "cache_position": 0}
"""Arguments of all decoders with one entry per token -> their token dimension."""


@dataclass(frozen=True)
class InputLayout:
    """How the forward arguments of a model, and of its decoder, are cut at media and tokens.

    A prompt cannot be cut if it has media whose arguments are missing here.

    Attributes:
        per_medium: forward argument with one row per media item, or per audio track of a video ->
            modality of the media.
        per_patch: forward argument with one row per patch, tile or token of the media -> modality
            of the media, and the name of the argument with their grids, from which ``rows_of``
            computes the number of rows.
        per_tile: forward argument with one row per tile -> modality of the media; all tiles have
            the same number of tokens.
        places: forward argument among ``per_patch`` whose values are indices, or -1 for none, into
            the first two dimensions, flattened, of another one -> name of that other argument. In a
            prompt, the indices of each media item count from its own first row.
        padded: forward argument among ``per_medium`` whose last dimension is padded to the longest
            media item -> name of the argument with the padding mask.
        video_grids: name of the argument with the grids of videos, for towers that take patches and
            ``grid_thw`` and attend only within an image or a pair of frames: videos may be cut
            between pairs of frames. None if media stay whole.
        frames_as_images: whether the frames of a video, or pairs of them, are images to the model:
            arguments of images contain them too, one row for each run of media tokens, in the order
            of the prompt. Videos may be cut between frames.
        two_way: which media tokens also attend to later ones, so that no chunk of a prompt may end
            between them; None if every token attends only to itself and earlier ones.
        features: decoder argument that is a list of features, one for each of the first layers,
            which adds them to some tokens, row after row -> name of the argument with the (batch,
            tokens) mask of these tokens.
    """

    per_medium: Mapping[str, Modality] = field(default_factory=dict)
    per_patch: Mapping[str, tuple[Modality, str]] = field(default_factory=dict)
    per_tile: Mapping[str, Modality] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    padded: Mapping[str, str] = field(default_factory=dict)
    video_grids: str | None = None
    frames_as_images: bool = False
    two_way: TwoWay | None = None
    features: Mapping[str, str] = field(default_factory=dict)

    @property
    def per_token(self) -> dict[str, int]:
        """Decoder arguments with one entry per token -> their token dimension."""
        return _DECODER | dict.fromkeys(self.features.values(), 1)


def rows_of(grids: torch.Tensor) -> torch.Tensor:
    """Return the number of rows of each media item, (media,) int64.

    Args:
        grids: (media, 4): the rows and columns of two grids; otherwise (media, axes): sizes of one.
    """
    if grids.shape[-1] == 4:
        return grids.unflatten(-1, (2, 2)).prod(-1).sum(-1)
    return grids.prod(-1)
