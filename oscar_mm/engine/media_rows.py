"""Media rows: what towers make of the media in waiting prompts, as inputs of decoder layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.engine.family import Family
from oscar_mm.engine.prefill import embedded
from oscar_mm.engine.prompt import Prompt, part_of
from oscar_mm.fast_decode.picture_tower import MAX_PATCHES, Picture, PictureTower
from oscar_mm.fast_decode.row_adapters import RowAdapters, choosing
from oscar_mm.media.encoder_inputs import scaled_inputs
from oscar_mm.modality import MediumSpan, Modality
from oscar_mm.ops.decode_tables import moved


class MediumRows(NamedTuple):
    """Rows of a media item.

    Attributes:
        place: index of the prompt.
        start: index of the item's first token in the prompt.
        rows: (tokens, hidden size) embeddings.
        features: (levels, tokens, hidden size): what is added to the outputs of the first layers;
            None if the model adds nothing.
    """

    place: int
    start: int
    rows: torch.Tensor
    features: torch.Tensor | None


_Key = tuple[str | None, Modality, str, int]
"""Adapter of the prompt, and modality, digest and number of tokens of a media item."""


def media_rows(
    family: Family,
    prompts: Sequence[Prompt],
    cache: OscarCache,
    tower: PictureTower | None = None,
) -> list[MediumRows]:
    """Run the towers for the media of several prompts, once for all media with the same adapter,
    and for equal media once.

    Args:
        family: model family.
        prompts: prompts of a single row, whose media ``Prompt.media`` lists.
        cache: an unused cache, which stays empty.
        tower: the model's vision tower as graphs; None if it runs only as modules.
    """
    parts = dict[_Key, Prompt]()
    for prompt in prompts:
        for span in prompt.media:
            parts.setdefault(_key(prompt, span), part_of(prompt, span.start, span.stop))
    found = dict[_Key, tuple[torch.Tensor, torch.Tensor | None]]()
    for adapter in dict.fromkeys(name for name, *_ in parts):
        keys = [key for key in parts if key[0] == adapter]
        if tower is not None and not tower.fails:
            shown = [key for key in keys if _shows_picture(parts[key])]
            keys = [key for key in keys if key not in shown]
            found |= zip(shown, _seen(family, [parts[key] for key in shown], tower), strict=True)
        own = _computed(family, [parts[key] for key in keys], adapter, cache) if keys else ()
        found |= zip(keys, own, strict=True)
    return [
        MediumRows(place, span.start, *found[_key(prompt, span)])
        for place, prompt in enumerate(prompts)
        for span in prompt.media
    ]


def _key(prompt: Prompt, span: MediumSpan) -> _Key:
    return prompt.adapter, span.modality, span.digest, span.tokens


def _shows_picture(part: Prompt) -> bool:
    """Return whether a media item is a picture for ``PictureTower``, and has no other tokens."""
    [span], grid = part.media, part.inputs.get("image_grid_thw")
    return (
        part.adapter is None
        and span.modality is Modality.IMAGE
        and grid is not None
        and len(grid) == 1
        and bool((part.modalities == Modality.IMAGE).all())
        and len(part.inputs["pixel_values"]) <= MAX_PATCHES
    )


def _seen(
    family: Family, parts: Sequence[Prompt], tower: PictureTower
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield the rows and features of prompts that consist of a picture each."""
    pictures = list[Picture]()
    for part in parts:
        pixels = moved(part.inputs["pixel_values"], family.device)
        pixels = scaled_inputs(family.model, {"pixel_values": pixels})["pixel_values"]
        _, *sides = part.inputs["image_grid_thw"][0].tolist()
        pictures.append(Picture(pixels, *sides))
    for found in tower(pictures):
        yield found[0], found[1:] if len(found) > 1 else None


def _computed(
    family: Family, parts: Sequence[Prompt], adapter: str | None, cache: OscarCache
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield the rows and features of prompts that consist of a media item each."""
    adapters = RowAdapters.of(family.model)
    with choosing(None if adapters is None else adapters.idle([adapter])):
        arguments = embedded(family.model, family.concatenate(parts), cache)
    [rows], features = arguments["inputs_embeds"], None
    for name, mask in family.layout.features.items():
        if levels := arguments.get(name):
            features = rows.new_zeros(len(levels), *rows.shape)
            features[:, arguments[mask][0]] = torch.stack(levels).to(rows.dtype)
    before = 0
    for part in parts:
        after = before + part.tokens
        yield rows[before:after], None if features is None else features[:, before:after]
        before = after
