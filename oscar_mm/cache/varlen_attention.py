"""Variable-length (varlen) prefill attention over concatenated prompts.

The past of each row is unpacked into one shared tensor, followed by the row's new tokens. A layer
then needs about a dozen launches for all rows instead of about twenty per row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from oscar_mm.cache.block_table import SequenceTable
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.kernels.launch import uses_wgmma
from oscar_mm.kernels.self_check import relative_error
from oscar_mm.ops.decode_tables import upload
from oscar_mm.ops.decode_torch import has_flash
from oscar_mm.ops.library import numbers_of
from oscar_mm.ops.unpack import unpack_slots
from oscar_mm.ops.varlen import VarlenArguments, VarlenKernel, boundaries, varlen_by_torch
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import Bits

_MAX_KEYS = 16384
"""Maximum number of past and new tokens in a varlen batch: 67 MB with 8 heads of 128 channels in
16-bit precision, and the same again while they are unpacked."""
_MAX_ERROR = 0.02
"""Maximum relative error allowed for flash attention in 16-bit precision: far above its rounding
error and far below the error that a wrong mask would cause."""
_log = logging.getLogger(__name__)


class LongSequence(NamedTuple):
    """A row whose past is too long for a varlen batch.

    Attributes:
        row: index of the row.
        tokens: range of its new tokens.
    """

    row: int
    tokens: slice


class VarlenBatch(NamedTuple):
    """Rows that attend in one launch, and the layout of their concatenated keys.

    Keys are ordered row by row, and each row's new tokens come last.

    Attributes:
        tokens: range of the new tokens of all rows.
        pages: bits -> page ids, (pages,) int32, and the key indices of their tokens, (pages * 128,)
            int64; unused tokens get the index after the last key.
        slots: slot ids and key indices of the tokens in 16-bit precision, (n,) int64 each.
        new_places: (new tokens,) int64 key indices of the new tokens.
        query_ends, key_ends: (rows + 1,) int32 boundaries of the rows.
        longest: maximum number of new tokens in a row, and maximum number of keys in a row.
        keys: total number of keys.
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
    def of(
        cls,
        past: Sequence[SequenceTable],
        lengths: list[int],
        keys: list[int],
        tokens: slice,
        device: torch.device,
    ) -> VarlenBatch:
        """Build the varlen batch of a step as tensors on the layers' device.

        Args:
            past: sequence of each row, as it was before the step.
            lengths: number of new tokens per row.
            keys: number of keys per row, new tokens included.
            tokens: range of the new tokens of all rows.
            device: device of the layers.
        """
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


def varlen_batches(step: StepPlan, device: torch.device) -> Iterator[VarlenBatch | LongSequence]:
    """Split the rows of a step into varlen batches and rows that are too long for a batch.

    Args:
        step: plan with ``lengths``.
        device: device of the layers.
    """
    past, lengths = step.past, step.lengths or []
    keys = [row.stored + new for row, new in zip(past, lengths, strict=True)]
    ends = list(accumulate(lengths, initial=0))
    begins, filled = [0], 0  # A long row gets its own batch.
    for row, count in enumerate(keys):
        if row and filled + count > _MAX_KEYS:
            begins.append(row)
            filled = 0
        filled += count
    for first, stop in pairwise([*begins, len(keys)]):
        tokens, rows = slice(ends[first], ends[stop]), slice(first, stop)
        if keys[first] > _MAX_KEYS:
            yield LongSequence(first, tokens)
        else:
            yield VarlenBatch.of(past[rows], lengths[rows], keys[rows], tokens, device)


def can_attend_varlen(queries: torch.Tensor) -> bool:
    """Return whether ``attend_varlen`` supports queries, (batch, query heads, tokens, head_dim)."""
    return has_flash(queries) and _agrees(queries.device, queries.dtype, queries.shape[3])


@cache
def _agrees(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch's flash attention works as ``causal_varlen`` expects; warn once if not.

    The operation is undocumented and may change between versions of torch.
    """
    new, whole = (3, 5, 1), (13, 5, 10)
    generator = torch.Generator(device).manual_seed(0)
    queries, keys, values = (
        torch.randn(sum(rows), heads, head_dim, generator=generator, device=device, dtype=dtype)
        for rows, heads in ((new, 4), (whole, 2), (whole, 2))
    )
    nothing = torch.empty(0, device=device)
    query_ends, key_ends = (boundaries(rows, device) for rows in (new, whole))
    run = VarlenBatch(
        tokens=slice(sum(new)),
        pages={},
        slots=(nothing, nothing),
        new_places=nothing,
        query_ends=query_ends,
        key_ends=key_ends,
        longest=(max(new), max(whole)),
        keys=sum(whole),
    )
    expected = varlen_by_torch(
        VarlenArguments(queries, keys, values, query_ends, key_ends, 0.1, queries)
    )
    try:
        found = _by_flash(queries, keys, values, run, 0.1)
        error = relative_error(found, expected)
    except (RuntimeError, TypeError) as reason:  # The operation is missing or has changed.
        error = reason
    if isinstance(error, float) and error < _MAX_ERROR:
        return True
    _log.warning(
        "torch's variable-length flash attention does not work as expected on %s (%s): short "
        "prompts will run one row at a time, which is slower",
        device,
        error,
    )
    return False


def attend_varlen(
    layer: OscarLayer,
    run: VarlenBatch,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Compute causal attention of each row's new tokens over its past and new tokens.

    Call this before ``append``.

    Args:
        layer: layer of the cache.
        run: varlen batch of the rows.
        queries: (1, query heads, new tokens, head_dim).
        keys, values: (1, KV heads, new tokens, head_dim).
        scaling: factor that the scores are multiplied by.

    Returns:
        (1, query heads, new tokens, head_dim).
    """
    if run.keys == keys.shape[2]:  # No row has a past.
        query, key, value = (x[0].transpose(0, 1) for x in (queries, keys, values))
        return causal_varlen(query, key, value, run, scaling).transpose(0, 1)[None]
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    sides = keys.new_empty(2, run.keys + 1, kv_heads, head_dim)
    for bits, (pages, places) in run.pages.items():
        unpacked = unpack_slots(
            *(layer.pages[bits].storage, pages, layer.sigma),
            *(numbers_of(layer.formats[bits]), layer.basis.rotate, keys.dtype),
        )
        for side, found in zip(sides, unpacked, strict=True):
            side.index_copy_(0, places, found.transpose(1, 2).flatten(0, 1))
    slots, places = run.slots
    if len(slots):
        recent = layer.recent.storage[slots].to(keys.dtype)
        sides.index_copy_(1, places, recent.transpose(0, 1))
    for side, new in zip(sides, (keys, values), strict=True):
        side.index_copy_(0, run.new_places, new[0].transpose(0, 1))
    # Drop the last index, to which unused tokens were written.
    tokens = sides[:, : run.keys]
    found = causal_varlen(queries[0].transpose(0, 1), tokens[0], tokens[1], run, scaling)
    return found.transpose(0, 1)[None]


def attend_without_past(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor | None:
    """Compute causal attention of rows of equal length without a past, on Hopper GPUs.

    Args:
        queries: (batch, query heads, tokens, head_dim).
        keys, values: (batch, KV heads, tokens, head_dim).
        scaling: factor that the scores are multiplied by.

    Returns:
        (batch, query heads, tokens, head_dim); None if the kernel does not take the arguments, or
        if gradients are needed.
    """
    if queries.requires_grad or not (queries.is_cuda and uses_wgmma(queries.device)):
        return None
    batch, heads, tokens, head_dim = queries.shape
    ends = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=queries.device)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (queries, keys, values))
    output = queries.new_empty(batch * tokens, heads, head_dim)
    arguments = VarlenArguments(query, key, value, ends, ends, scaling, output)
    if (kernel := VarlenKernel.for_arguments(arguments)) is None:
        return None
    kernel(arguments)
    return output.unflatten(0, (batch, tokens)).transpose(1, 2)


def causal_varlen(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    run: VarlenBatch,
    scaling: float,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of concatenated rows; a row's last query attends to all its keys.

    Args:
        queries: (queries, query heads, head_dim).
        keys, values: (keys, KV heads, head_dim).
        run: varlen batch with the boundaries of the rows.
        scaling: factor that the scores are multiplied by.
        output: tensor for the result; None for a new one.

    Returns:
        (queries, query heads, head_dim).
    """
    to = queries.new_empty(queries.shape) if output is None else output
    ends = run.query_ends, run.key_ends
    arguments = VarlenArguments(queries, keys, values, *ends, scaling, to)
    if (kernel := VarlenKernel.for_arguments(arguments)) is not None:
        kernel(arguments)
        return to
    found = _by_flash(queries, keys, values, run, scaling)
    return found if output is None else output.copy_(found)


def _by_flash(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    run: VarlenBatch,
    scaling: float,
) -> torch.Tensor:
    """Compute ``causal_varlen`` by torch's flash attention."""
    flash = torch.ops.aten._flash_attention_forward
    ends = run.query_ends, run.key_ends, *run.longest
    return flash(queries, keys, values, *ends, 0.0, True, False, scale=scaling)[0]
