"""Attention of prompts in line: new tokens of several rows, one row after the other.

The pasts of many rows are unpacked into one tensor, where each row's new tokens follow them, so
that a layer takes a dozen launches for all rows instead of some twenty for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import torch

from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.rows import Row
from oscar_mm.cache.step import Step
from oscar_mm.ops.decode_tables import upload
from oscar_mm.ops.library import numbers_of
from oscar_mm.ops.unpack import unpack_slots
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import Bits

_MOST_KEYS = 16384
"""Past and new tokens of the rows of a run: 67 MB of 8 heads of 128 in 16 bit, as much again while
they are unpacked."""


class LongRow(NamedTuple):
    """A row whose past is too long for a run.

    Attributes:
        row: its number.
        tokens: its new ones.
    """

    row: int
    tokens: slice


class Run(NamedTuple):
    """Rows that attend in one launch, and where their keys lie next to each other: those of a row
    follow each other, new tokens last.

    Attributes:
        tokens: new ones of all rows.
        pages: bits -> (pages,) int32, and (pages * 128,) int64 places of their tokens; what is not
            in use goes to the place after the last key.
        slots: (n,) int64 of tokens in 16 bit, and their places.
        new_places: (new tokens,) int64.
        query_ends, key_ends: (rows + 1,) int32, where rows begin and end.
        longest: most new tokens of a row, and most keys.
        keys: of all rows.
    """

    tokens: slice
    pages: dict[Bits, tuple[torch.Tensor, torch.Tensor]]
    slots: tuple[torch.Tensor, torch.Tensor]
    new_places: torch.Tensor
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    longest: tuple[int, int]
    keys: int

    @classmethod
    def of(cls, past: list[Row], lengths: list[int], tokens: slice, device: torch.device) -> Run:
        """The run of some rows, for layers on a device."""
        stored = [row.stored for row in past]
        keys = [before + new for before, new in zip(stored, lengths, strict=True)]
        key_ends = np.cumsum([0, *keys])
        pages: dict[Bits, list[int]] = {}
        places: dict[Bits, list[np.ndarray]] = {}
        slots: list[int] = []
        slot_places: list[np.ndarray] = []
        for row, start in zip(past, key_ends[:-1].tolist(), strict=True):
            for stream in row.streams.values():
                if stream.pages:
                    pages.setdefault(stream.bits, []).extend(stream.pages)
                for first, stop in zip(stream.starts, stream.stops, strict=True):
                    of_page = np.full(PAGE_TOKENS, key_ends[-1])
                    of_page[first:stop] = np.arange(start, start + stop - first)
                    places.setdefault(stream.bits, []).append(of_page)
                    start += stop - first
                slots += stream.slots
                slot_places.append(np.arange(start, start + len(stream.slots)))
                start += len(stream.slots)
        new_places = [
            np.arange(end - new, end) for end, new in zip(key_ends[1:], lengths, strict=True)
        ]

        def on_device(x: np.ndarray, dtype: type = np.int64) -> torch.Tensor:
            return upload(np.ascontiguousarray(x, dtype), device)

        return cls(
            tokens,
            {
                bits: (
                    on_device(np.array(found), np.int32),
                    on_device(np.concatenate(places[bits])),
                )
                for bits, found in pages.items()
            },
            (on_device(np.array(slots)), on_device(np.concatenate([[], *slot_places]))),
            on_device(np.concatenate(new_places)),
            on_device(np.cumsum([0, *lengths]), np.int32),
            on_device(key_ends, np.int32),
            (max(lengths), max(keys)),
            int(key_ends[-1]),
        )


def runs_of(step: Step, device: torch.device) -> Iterator[Run | LongRow]:
    """The rows of a step in runs, for layers on a device.

    Args:
        step: with ``lengths``.
        device: of the layers.
    """
    past, lengths = step.past, step.lengths or []
    keys = [row.stored + new for row, new in zip(past, lengths, strict=True)]
    ends = list(accumulate(lengths, initial=0))
    # Which run each row is in; a long one is alone.
    number, filled, runs = 0, 0, list[int]()
    for count in keys:
        if runs and filled + count > _MOST_KEYS:
            number, filled = number + 1, 0
        filled += count
        runs.append(number)
    for _, group in groupby(range(len(runs)), key=runs.__getitem__):
        rows = list(group)
        first, stop = rows[0], rows[-1] + 1
        tokens = slice(ends[first], ends[stop])
        if keys[first] > _MOST_KEYS:
            yield LongRow(first, tokens)
        else:
            yield Run.of(past[first:stop], lengths[first:stop], tokens, device)


def attend_in_line(
    layer: OscarLayer,
    run: Run,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Causal attention of the new tokens of a run's rows, each to its row; before ``append``.

    Args:
        layer: of the cache.
        run: its rows.
        queries: (1, query heads, new tokens, head_dim).
        keys, values: (1, KV heads, new tokens, head_dim).
        scaling: factor of the scores.

    Returns:
        (1, query heads, new tokens, head_dim).
    """
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    sides = keys.new_empty(2, kv_heads, run.keys + 1, head_dim)
    for bits, (pages, places) in run.pages.items():
        unpacked = unpack_slots(
            *(layer.pages[bits].storage, pages, layer.sigma),
            *(numbers_of(layer.formats[bits]), layer.basis.rotate, keys.dtype),
        )
        for side, found in zip(sides, unpacked, strict=True):
            side.index_copy_(1, places, found.transpose(0, 1).flatten(1, 2))
    slots, places = run.slots
    if len(slots):
        recent = layer.recent.storage[slots].to(keys.dtype).permute(1, 2, 0, 3)
        sides.index_copy_(2, places, recent)
    for side, new in zip(sides, (keys, values), strict=True):
        side.index_copy_(1, run.new_places, new[0])
    # Without what lies behind the last key.
    by_token = sides[:, :, : run.keys].transpose(1, 2)
    found = flash_in_line(queries[0].transpose(0, 1), by_token[0], by_token[1], run, scaling)
    return found.transpose(0, 1)[None]


def flash_in_line(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, run: Run, scaling: float
) -> torch.Tensor:
    """Attention of rows that follow each other; the last query of a row sees its last key.

    Args:
        queries: (queries, query heads, head_dim).
        keys, values: (keys, KV heads, head_dim).
        run: where rows begin and end.
        scaling: factor of the scores.

    Returns:
        (queries, query heads, head_dim).
    """
    flash = torch.ops.aten._flash_attention_forward
    ends = run.query_ends, run.key_ends, *run.longest
    return flash(queries, keys, values, *ends, 0.0, True, False, scale=scaling)[0]
