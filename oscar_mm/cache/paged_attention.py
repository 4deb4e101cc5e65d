"""Paged attention of a layer over stored tokens and over new tokens that are not stored yet.

``LayerCall`` and ``KeyLength`` carry a cache through a model's forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from oscar_mm.cache.block_table import SequenceTable
from oscar_mm.cache.layer import OscarLayer, TokenPlaces
from oscar_mm.cache.step_plan import AttentionShape, StepPlan, Tokens
from oscar_mm.cache.varlen_attention import (
    VarlenBatch,
    attend_varlen,
    attend_without_past,
    can_attend_varlen,
    varlen_batches,
)
from oscar_mm.kernels.launch import multiprocessors, refuse_capture
from oscar_mm.modality import TwoWay
from oscar_mm.ops.decode import (
    DecodeKernel,
    decode_directly,
    decode_kernel,
    max_total_tokens,
    takes_sinks,
)
from oscar_mm.ops.decode_tables import DecodeArguments, Tables, tables_of
from oscar_mm.ops.decode_torch import MergedAttention, has_flash
from oscar_mm.ops.library import numbers_of
from oscar_mm.ops.sinks import with_sink_key
from oscar_mm.ops.window_mask import window_of
from oscar_mm.pages.layout import PageFormat
from oscar_mm.torch_modes import eager

TWO_WAY = "two_way_media"
"""Name of an attribute of attention modules, a ``TwoWay``: which of the media tokens also attend to
later ones. Other modules do not have it."""
_CONCATENATED = (
    "a pass over the concatenated tokens of several rows does not support sliding windows: pass "
    "each row alone"
)
_MIN_BLOCK = 512
"""Minimum number of tokens whose sliding windows are read together."""
_PLANNED_TOKENS = 8192
"""Minimum prompt length in tokens for which torch may choose cuDNN, if our kernel does not take the
prompt: cuDNN spends 38 ms planning for each new length (H200)."""


def attend_stored(
    layer: OscarLayer,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    step: StepPlan,
    inside: list[SequenceTable] | None = None,
    sinks: torch.Tensor | None = None,
    groups: Sequence[Sequence[Tokens]] = (),
    window: int | None = None,
) -> torch.Tensor:
    """Compute attention of a chunk of new tokens over the past and, causally, over the chunk.

    Call this before ``append``. A short chunk attends to the packed pages
    (``oscar_mm.ops.decode``). For a longer chunk, the past is unpacked in parts of bounded size.

    Args:
        layer: layer of the cache.
        queries: (batch, query heads, tokens, head_dim).
        keys, values: (batch, KV heads, tokens, head_dim) of the chunk.
        scaling: factor that the scores are multiplied by.
        step: plan with which ``append`` will store the chunk.
        inside: for a chunk of one token per row, the part of each row's past that it attends to; by
            default, the whole past.
        sinks: (query heads,) float32, see ``oscar_mm.ops.sinks``.
        groups: for each row, groups of tokens that also attend to later tokens of their group.
        window: for a chunk of one token per row, size of the layer's sliding window in tokens, the
            new one included; by default, it attends to the whole past.

    Returns:
        (batch, query heads, tokens, head_dim); 0 for queries that are padding.
    """
    queries, keys, values = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, values)
    )
    empty = not any(sequence.stored for sequence in step.past)
    if empty and step.real is None and step.lengths is None and not groups:
        return _causal(queries, keys, values, scaling, sinks)
    chunk = _ChunkAttention(
        layer, step, queries, keys, values, scaling, inside, sinks, groups, window
    )
    # A single new token is either padding or real, so its row's output can be masked afterwards.
    if step.lengths is not None:
        together = sinks is None and not groups and can_attend_varlen(queries)
        return chunk.varlen() if together else chunk.by_rows()
    new = keys.shape[2]
    fits = new == 1 or (step.real is None and new <= chunk.max_decoded(step.past))
    if fits and chunk.by_kernel:
        return chunk.decoded()
    # Attention row by row copies tables to the device, which a graph would not repeat.
    refuse_capture(f"attention of layer {layer.index} by rows", layer.device)
    return chunk.by_rows()


class _Plan(NamedTuple):
    """Attention arguments that all layers of the same kind share in a step."""

    formats: tuple[PageFormat, ...]
    tables: Tables
    numbers: list[int]
    """The formats, encoded as an argument of ``decode``."""
    kernel: DecodeKernel | None


@dataclass(frozen=True)
class _ChunkAttention:
    """Attention of a layer's new tokens to the past and to each other."""

    layer: OscarLayer
    step: StepPlan
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float
    inside: list[SequenceTable] | None
    sinks: torch.Tensor | None
    groups: Sequence[Sequence[Tokens]]
    window: int | None = None

    @property
    def by_kernel(self) -> bool:
        """Whether the kernels for packed pages take all arguments."""
        takes = self.sinks is None or takes_sinks(self.queries.device)
        return takes and not self.groups

    def max_decoded(self, rows: Sequence[SequenceTable]) -> int:
        """Return the maximum number of new tokens per row that attend to the packed pages."""
        layer, group = self.layer, self.queries.shape[1] // self.keys.shape[1]
        in_16_bit = sum(len(stream.slots) for row in rows for stream in row.streams.values())
        # The kernel is no faster for tokens in 16-bit precision, so they must be few.
        packed = 4 * in_16_bit <= sum(row.stored for row in rows)
        return max_total_tokens(
            tuple(layer.formats.values()) if packed else (), group, layer.device
        )

    def decoded(self) -> torch.Tensor:
        """Attend with the decode kernel; without a kernel, with the operation ``decode``."""
        layer, output = self.layer, self._decoded(self.queries, self.keys, self.values)
        in_rows = self.step.real
        if in_rows is None:
            return output

        def rows_that_go_on() -> torch.Tensor:
            present = [len(real) > 0 for real in in_rows]
            return torch.tensor(present, device=layer.device).view(-1, 1, 1, 1)

        return output * self.step.once(("rows that go on", layer.device), rows_that_go_on)

    def _decoded(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        row: int | None = None,
    ) -> torch.Tensor:
        """Attend to the packed pages and 16-bit tokens of all rows, or of one row."""
        layer, plan = self.layer, self._plan(queries, keys, row)
        pages = [layer.pages[page_format.bits].storage for page_format in plan.formats]
        states = (queries, keys, values, pages, layer.recent.storage, layer.sigma)
        how = self.scaling, plan.numbers, layer.cache.policy.rotate, self.sinks
        arguments = DecodeArguments(*states, *plan.tables.of_past, *how)
        if plan.kernel is None:
            return decode_directly(arguments)
        early = self.step.fixed is not None and not self.step.chained
        return plan.kernel(arguments, early=early)

    def _plan(self, queries: torch.Tensor, keys: torch.Tensor, row: int | None) -> _Plan:
        layer, step = self.layer, self.step
        columns = keys.shape[2] * (queries.shape[1] // keys.shape[1])

        def tables(attention: AttentionShape) -> Tables:
            if self.inside is not None:
                return tables_of(*attention.over(self.inside), layer.device)
            if row is None:
                return step.tables(attention, layer.device)
            return tables_of(*attention.over([step.past[row]]), layer.device)

        def make() -> _Plan:
            formats = tuple(layer.formats.values())
            first, second, *_ = *layer.formats, None, None
            workers = multiprocessors(layer.device)
            attention = AttentionShape(
                *((first, second), layer.kv_heads, columns, workers),
                *(self.window, layer.places),
            )
            return _Plan(
                formats,
                tables(attention),
                numbers_of(*formats),
                decode_kernel(
                    formats, layer.head_dim, layer.basis.rotate, layer.dtype, columns, layer.device
                ),
            )

        layers_alike = (layer.device, layer.dtype, layer.kv_heads, layer.head_dim, columns, row)
        # The step keeps the lists, so that their ids differ.
        return step.once((*layers_alike, self.window, layer.places, id(self.inside)), make)

    def varlen(self) -> torch.Tensor:
        """Attend in varlen batches: consecutive rows share a launch."""
        step, device, found = self.step, self.layer.device, list[torch.Tensor]()
        for run in step.once(("runs", device), lambda: list(varlen_batches(step, device))):
            queries, keys, values = (
                x[:, :, run.tokens] for x in (self.queries, self.keys, self.values)
            )
            if isinstance(run, VarlenBatch):
                found.append(attend_varlen(self.layer, run, queries, keys, values, self.scaling))
            else:
                found.append(self._merged(run.row, queries, keys, values))
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)

    def by_rows(self) -> torch.Tensor:
        """Attend one row at a time, since the rows' pasts differ in length."""
        output = torch.zeros_like(self.queries)
        for row, place, tokens in self._tokens_of_rows():
            queries, keys, values = (
                x[place : place + 1, :, tokens] for x in (self.queries, self.keys, self.values)
            )
            output[place][:, tokens] = self._merged(row, queries, keys, values)[0]
        return output

    def _merged(
        self, row: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attend to the new tokens and the past of a row; the past is unpacked in parts unless
        there are few new tokens."""
        alone = self.step.lengths is not None and not self.groups
        if alone and not self.step.past[row].stored:
            return _causal(queries, keys, values, self.scaling, self.sinks)
        past = self.step.past[row]
        few = queries.is_cpu and queries.shape[2] <= self.max_decoded([past])
        if few and past.stored and self.by_kernel:
            return self._decoded(queries, keys, values, row)
        merged = MergedAttention(queries, self.scaling)
        merged.add(keys, values, causal=True)
        for tokens in self.groups[row] if self.groups else ():
            merged.add_later(keys, values, tokens)
        for keys, values in self._past(row):
            merged.add(keys[None], values[None])
        if self.sinks is not None:
            merged.add_sinks(self.sinks)
        return merged.output()

    def _tokens_of_rows(self) -> Iterator[tuple[int, int, Tokens]]:
        """For each row that has new tokens, yield the row, its index in the batch, and its tokens
        without padding."""
        if self.step.lengths is not None:
            stops = accumulate(self.step.lengths)
            for row, (length, stop) in enumerate(zip(self.step.lengths, stops, strict=True)):
                yield row, 0, slice(stop - length, stop)
            return
        for row in range(len(self.queries)):
            if self.step.real is None:
                yield row, row, slice(None)
            elif len(self.step.real[row]):
                yield row, row, torch.from_numpy(self.step.real[row]).to(self.layer.device)

    def _past(self, row: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield keys and values of a row's past in parts, (KV heads, n, head_dim) each.

        Streams of all modalities are combined: fewer parts need fewer launches.
        """
        layer = self.layer
        past = (self.step.past if self.inside is None else self.inside)[row]
        if self.window is not None:
            past = past.latest(self.window - 1)
        make = partial(TokenPlaces.of, past.streams.values(), layer.device, layer.places)
        kind = "held", row, self.window, id(self.inside), layer.device, layer.places
        return layer.parts(self.step.once(kind, make), layer.dtype)


def _band(window: int, before: int, queries: int, device: torch.device) -> torch.Tensor:
    """Return (1, 1, queries, before + queries) bool: whether a key is in a query's window.

    Args:
        window: size of the windows in tokens.
        before: number of keys before those of the queries.
        queries: number of consecutive queries.
        device: device of the mask.
    """
    keys = torch.arange(before + queries, device=device)
    distance = keys[before:, None] - keys
    return ((distance >= 0) & (distance < window))[None, None]


def _masked(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    states = queries, keys, values, visible
    if sinks is not None:
        states = with_sink_key(*states, sinks, scaling)
    # Padding attends to nothing.
    return scaled_dot_product_attention(*states, scale=scaling, enable_gqa=True).nan_to_num()


def _causal(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if sinks is not None:
        merged = MergedAttention(queries, scaling)
        merged.add(keys, values, causal=True)
        merged.add_sinks(sinks)
        return merged.output()
    found = attend_without_past(queries, keys, values, scaling)
    if found is not None:
        return found
    if queries.shape[2] < _PLANNED_TOKENS and has_flash(queries):
        # Called directly, since ``sdpa_kernel`` would switch the backend for all threads of the
        # process.
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(queries, keys, values, 0.0, True, scale=scaling)[0]
    return scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True
    )


class KeyLength(int):
    """Number of keys, returned by ``get_mask_sizes``, with a reference to the cache."""

    cache: Any

    def __new__(cls, length: int, cache: Any) -> KeyLength:
        """Create an int with the attribute ``cache``, an OscarCache or a stand-in for one."""
        self = super().__new__(cls, length)
        self.cache = cache
        return self


class LayerCall:
    """Call of a layer's attention in one forward pass, attached to the layer's new keys."""

    def __init__(self, layer: OscarLayer, step: StepPlan) -> None:
        self._layer, self._step = layer, step

    @eager
    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        visible: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over the past and the chunk of new tokens, then store the chunk.

        Args:
            module: attention module of the model, see ``TWO_WAY``.
            query: (batch, query heads, new tokens, head_dim).
            key, value: (batch, KV heads, new tokens, head_dim).
            scaling: factor that the scores are multiplied by.
            visible: (batch, 1 or query heads, new tokens, all tokens): bool, whether a query
                attends to a token, or numbers to add to the scores; None for causal attention; or
                the mask of a sliding window, see ``oscar_mm.ops.window_mask``.
            sinks: (query heads,) float32, see ``oscar_mm.ops.sinks``.
        """
        layer, step, asked = self._layer, self._step, query.dtype
        if step.chained:
            layer.append(key, value, step)
        query = query.to(key.dtype)
        kind: TwoWay | None = getattr(module, TWO_WAY, None)
        # A single token has no later ones.
        several = key.shape[2] > 1
        groups = step.two_way(kind, query.device) if kind is not None and several else []
        if (window := window_of(visible)) is not None:
            visible = None
            if step.lengths is not None:
                raise NotImplementedError(_CONCATENATED)
        elif visible is not None and groups:
            visible = self._with_later(visible, groups)
        inside = None if visible is None else self._inside(visible)
        if window is not None and key.shape[2] > 1:
            output = self._in_window(query, key, value, scaling, window, sinks, groups)
        elif visible is None or inside is not None:
            output = attend_stored(
                *(layer, query, key, value, scaling, step, inside, sinks, groups, window)
            )
        else:
            refuse_capture(f"attention of layer {layer.index} with a mask", layer.device)
            states = (query, *layer.with_past(step, key, value), self._stored(visible))
            output = _masked(*states, scaling, sinks)
        # A step that packs at its end never writes to a slot that it reads.
        if not step.chained:
            layer.append(key, value, step, beside=step.packs_at_end)
        return output.to(asked)

    def _in_window(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int,
        sinks: torch.Tensor | None,
        groups: Sequence[Sequence[Tokens]],
    ) -> torch.Tensor:
        """Attend from several new tokens to their sliding windows, block by block.

        Of the past, only what these windows contain is unpacked. A block of tokens reads only the
        keys in its own windows. With ``groups``, all new tokens are one block, since tokens of a
        group also attend to tokens of later blocks.
        """
        layer, step, new = self._layer, self._step, key.shape[2]
        past = min(layer.cache.get_seq_length() - new, window - 1)
        if past:
            rows = step.once(("latest", past), lambda: [row.latest(past) for row in step.past])
            before = layer.unpacked(rows, past, key.dtype)
            key, value = (torch.cat(x, 2) for x in zip(before, (key, value), strict=True))
        stored = step.once(("window", past, layer.device), partial(self._real_tokens, past + new))
        length, found = new if groups else max(window, _MIN_BLOCK), list[torch.Tensor]()
        for start in range(past, past + new, length):
            first, stop = max(0, start - window + 1), min(start + length, past + new)
            shape = window, start - first, stop - start, layer.device
            visible = step.once(("band", *shape), partial(_band, *shape))
            if stored is not None:
                visible = visible & stored[:, None, None, first:stop]
            if groups:  # The step keeps it, so that all layers with this window share the result.
                rows = partial(visible.expand, len(query), -1, -1, -1)
                visible = self._with_later(step.once(("rows", *shape), rows), groups)
            queries = query[:, :, start - past : stop - past]
            keys, values = (x[:, :, first:stop] for x in (key, value))
            found.append(_masked(queries, keys, values, visible, scaling, sinks))
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def _real_tokens(self, count: int) -> torch.Tensor | None:
        """Return (batch, count) bool: whether each of the last tokens is stored; None if all
        are."""
        real = self._layer.cache.real_tokens(count)
        return None if bool(real.all()) else real.to(self._layer.device)

    def _with_later(
        self, visible: torch.Tensor, groups: Sequence[Sequence[Tokens]]
    ) -> torch.Tensor:
        """Return a bool mask by which tokens also attend to later ones of their group."""
        step = self._step

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            seen = visible.clone(memory_format=torch.contiguous_format)
            new = torch.arange(seen.shape[2], device=seen.device)
            past = seen.shape[3] - seen.shape[2]
            for row, of_row in enumerate(groups):
                for group in of_row:
                    padding = 0 if step.real is None else int(step.real[row][0])
                    tokens = new[group] + padding
                    places = slice(None), tokens[:, None], past + tokens
                    inside = seen[row][places]
                    seen[row][places] = inside | torch.ones_like(inside).triu()
            return visible, seen

        # The step keeps the mask, which all layers with the same window share.
        return step.once(("two-way", id(visible)), make)[1]

    def _inside(self, visible: torch.Tensor) -> list[SequenceTable] | None:
        """Return the past that a mask leaves to the only new token of each row, if that is all from
        some token on, as with attention within chunks; None for other masks and for several new
        tokens."""
        step = self._step
        if visible.shape[1:3] != (1, 1) or visible.dtype != torch.bool:
            return None
        if step.real is not None or step.lengths is not None or step.fixed is not None:
            return None

        def make() -> tuple[torch.Tensor, list[SequenceTable] | None]:
            return visible, self._latest(visible[:, 0, 0].cpu())

        # The step keeps the mask, which all layers with the same window share.
        return step.once(("inside", id(visible)), make)[1]

    def _latest(self, visible: torch.Tensor) -> list[SequenceTable] | None:
        """Return each row's past from its first visible token on, if later ones are visible too.

        Args:
            visible: (batch, all tokens) bool on the CPU.
        """
        real = self._layer.cache.real_tokens(visible.shape[1])
        seen = visible & real
        first = seen.int().argmax(1, keepdim=True)
        if not torch.equal(seen, real & (torch.arange(seen.shape[1]) >= first)):
            return None
        starts = first[:, 0].tolist()
        counts = [visible.shape[1] - 1 - start for start in starts]  # without the new token
        rows = [row.latest(count) for row, count in zip(self._step.past, counts, strict=True)]
        return rows if all(row.stored for row in rows) else None

    def _stored(self, visible: torch.Tensor) -> torch.Tensor:
        """Return the mask with tokens that are not stored (padding, forgotten tokens) hidden."""

        def real() -> torch.Tensor:
            return self._layer.cache.real_tokens(visible.shape[-1])[:, None, None]

        stored = self._step.once(("stored", visible.device), lambda: real().to(visible.device))
        if visible.dtype == torch.bool:
            return visible & stored
        return visible.masked_fill(~stored, -torch.inf)
