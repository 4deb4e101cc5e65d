"""Prompt scratch: reads short prompts piece by piece, along with decode steps.

The tokens of a piece and those of decoding rows go through the same products, so that the weights
are read once for both, and the whole pass is one CUDA graph. A prompt's embeddings, those of its
media included, wait in scratch memory. Until it is complete, its keys and values stay there too, in
16-bit precision, so that attention within the prompt is exact; then one more graph stores them in
pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.layer import TokenPlaces
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.prompt_tables import PromptTables
from oscar_mm.cache.varlen_attention import VarlenBatch, can_attend_varlen, causal_varlen
from oscar_mm.fast_decode.decoder import Capture, FastDecoder
from oscar_mm.fast_decode.graph_cache import GraphCache
from oscar_mm.fast_decode.layers import FastLayer
from oscar_mm.fast_decode.low_rank import base_of
from oscar_mm.fast_decode.parallel import in_parallel
from oscar_mm.fast_decode.row_adapters import RowAdapters, choosing, chosen
from oscar_mm.ops.append import append
from oscar_mm.ops.decode_tables import upload
from oscar_mm.policy import KVPolicy

MAX_PIECE = 2560
"""Maximum number of rows of a pass, which by arithmetic takes about 60 ms (8B, H200)."""
MAX_PROMPTS = 8
"""Maximum number of prompts that have tokens in a piece. Where our kernel does not run,
FlashAttention 2 takes 0.7 us per layer for each of them, even if a piece has fewer (H200)."""
_MAX_TOKENS = 8192
_MEMORY_SHARE = 64
"""The scratch takes at most this fraction of the GPU's memory: 1/64."""
_MAX_DECODING = 256
"""Maximum number of decoding rows of a pass."""


class PromptRange(NamedTuple):
    """Tokens of a prompt in the scratch.

    Attributes:
        start, stop: range of all tokens, those of the past included.
        first, last: range of the tokens of a piece.
    """

    start: int
    stop: int
    first: int
    last: int

    @property
    def completes(self) -> bool:
        """Whether the piece contains the prompt's last token."""
        return self.last == self.stop


class DecodingRows(NamedTuple):
    """Inputs of a decode step, at fixed addresses.

    Attributes:
        ids, positions, cache: see ``FastDecoder.__call__``.
        idle: see ``choosing``; None if the model has no adapters.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    cache: OscarCache
    idle: torch.Tensor | None


@dataclass
class PromptPiece:
    """Piece whose inputs are ready, to be run by ``GraphRunner`` or ``PromptScratch.run_alone``.

    Attributes:
        size: number of rows, padding included.
        alone: whether the piece must run without a decode step.
        logits: (MAX_PROMPTS, vocabulary) logits after the prompts that the piece completes, in
            order; None until the pass is launched. The next piece overwrites them.
    """

    scratch: PromptScratch
    size: int
    alone: bool = False
    logits: torch.Tensor | None = None


class StoredPrompts(NamedTuple):
    """Result of storing prompts, which may not have arrived from the device yet.

    Attributes:
        flags: (layers,) int32 on the host: whether a key or value was out of range.
        arrived: event after the copy of ``flags``; None if the copy is complete.
    """

    flags: torch.Tensor
    arrived: torch.cuda.Event | None

    def overflowed(self) -> bool:
        """Wait for the flags, and return whether any is set."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return bool(self.flags.any())


class PromptScratch:
    """Inputs, keys and values of prompts that are not complete yet, and the passes that read them.

    Args:
        model: model that ``PromptLayers.takes`` accepts.
        store: page store of the prompts' caches.
        axes: leading axes of the position ids, see ``GraphRunner``.
        sigmas: see ``balancing_of``.
        tokens: capacity, see ``capacity``.
        levels: see ``Family.feature_levels``.
        capture: capture function of graphs that share their memory.

    Attributes:
        capture: see above; ``GraphRunner`` captures its mixed passes with it.
    """

    def __init__(
        self,
        model: Any,
        store: PageStore,
        axes: tuple[int, ...],
        sigmas: dict[int, torch.Tensor],
        tokens: int,
        levels: int,
        capture: Capture,
    ) -> None:
        self.tokens, self.capture, self._store = tokens, capture, store
        self._decoder = FastDecoder(model)
        [device] = self._decoder.devices
        dtype = model.get_output_embeddings().weight.dtype
        self._layers = layers = [FastLayer.of(layer) for layer in model.get_decoder().layers]
        self._indices = [layer.attention.layer_idx for layer in layers]
        with torch.inference_mode(False):
            shapes = [(tokens, 2, x.heads[1], x.attention.head_dim) for x in layers]
            self._sides = [torch.zeros(x, dtype=dtype, device=device) for x in shapes]
            width = model.get_input_embeddings().weight.shape[1]
            # The last line is the padding's and stays 0.
            self._embeddings = torch.zeros(tokens + 1, width, dtype=dtype, device=device)
            shape = levels, *self._embeddings.shape
            self._features = torch.zeros(shape, dtype=dtype, device=device)
            positions = (*axes, 1, MAX_PIECE)
            self._positions = torch.zeros(positions, dtype=torch.long, device=device)
            lines = MAX_PROMPTS + 2 * (MAX_PROMPTS + 2) + MAX_PIECE
            self._table = torch.zeros(lines, dtype=torch.long, device=device)
            # See ``append``: batch row, token of the piece, place in the scratch; -1 for padding.
            self._writes = torch.zeros(MAX_PIECE, 3, dtype=torch.int32, device=device)
            self._writes[:, 1] = torch.arange(MAX_PIECE)
            self._flags = torch.zeros(len(layers), dtype=torch.int32, device=device)
            # Numbers that are not finite are reported when the complete prompt is stored.
            self._unused_flag = self._flags.new_zeros(1)
            self._adapters, self._idle = RowAdapters.of(model), None
            if self._adapters is not None:
                self._idle = self._adapters.table[:1].repeat(MAX_PIECE, 1)
            head = model.get_output_embeddings().weight
            self._logits = head.new_zeros(MAX_PROMPTS + _MAX_DECODING, head.shape[0])
        self._tables = PromptTables(tokens, MAX_PROMPTS, store.policy, device)
        self._sigmas = sigmas
        self._view = self._new_view()
        self._alone, self._storing = GraphCache(capture, device), GraphCache(capture, device)

    @staticmethod
    def capacity(model: Any, levels: int, device: torch.device) -> int:
        """Return the number of tokens that a scratch should hold; see the class."""
        layers, weight = model.get_decoder().layers, model.get_output_embeddings().weight
        attention, width = layers[0].self_attn, weight.shape[1]
        sides = sum(base_of(x).weight.shape[0] for x in (attention.k_proj, attention.v_proj))
        token_bytes = (len(layers) * sides + (1 + levels) * width) * weight.element_size()
        memory = torch.cuda.get_device_properties(device).total_memory
        return min(_MAX_TOKENS, memory // _MEMORY_SHARE // token_bytes)

    @staticmethod
    def takes(model: Any, policy: KVPolicy) -> bool:
        """Return whether there are operations for the model's heads and the policy's pages."""
        head_dim = model.get_decoder().layers[0].self_attn.head_dim
        weight = model.get_output_embeddings().weight
        attends = can_attend_varlen(weight.new_empty(1, 1, 1, head_dim))
        return attends and PromptTables.takes_policy(policy)

    @property
    def fails(self) -> bool:
        """Whether graphs could not be captured."""
        return self._alone.fails or self._storing.fails

    def put(self, rows: torch.Tensor, start: int, features: torch.Tensor | None = None) -> None:
        """Write the inputs of a prompt's tokens, from index ``start`` on.

        Args:
            rows: (tokens, hidden size) embeddings, or what towers made of media.
            features: (levels, tokens, hidden size): what is added to the outputs of the first
                layers; None if nothing is.
        """
        places = slice(start, start + len(rows))
        self._embeddings[places] = rows
        self._features[:, places] = 0 if features is None else features

    def prepare(
        self,
        ranges: Sequence[PromptRange],
        positions: torch.Tensor | int,
        size: int,
        adapters: Sequence[str | None],
    ) -> PromptPiece:
        """Write the tables of a piece, whose inputs ``put`` has written; the previous piece must be
        launched.

        Args:
            ranges: adjacent prompts of the piece, at most ``MAX_PROMPTS``; those that the piece
                completes come first.
            positions: (..., 1, tokens) RoPE positions of the piece on the device, or one for all.
            size: number of rows, at least that of the tokens; further rows are padding.
            adapters: the adapter of each prompt, or None.
        """
        counts = [x.last - x.first for x in ranges]
        self._positions[..., : sum(counts)] = positions
        query_ends = [0, *accumulate(counts)]
        lasts = [end - 1 for x, end in zip(ranges, query_ends[1:], strict=True) if x.completes]
        key_ends = [ranges[0].start, *(x.last for x in ranges)]
        ends = np.empty((2, MAX_PROMPTS + 2), np.int64)
        # One more sequence consists of the padding and attends to nothing.
        ends[0], ends[1] = size, key_ends[-1]
        ends[:, : len(query_ends)] = query_ends, key_ends
        places = np.full(MAX_PIECE, -1)
        places[: sum(counts)] = np.concatenate([np.arange(x.first, x.last) for x in ranges])
        table = [np.array(lasts + [0] * (MAX_PROMPTS - len(lasts))), ends.ravel(), places]
        self._table.copy_(upload(np.concatenate(table), self._table.device))
        self._writes[:, 2] = self._table[-MAX_PIECE:]
        if self._adapters is not None and self._idle is not None:
            pairs = zip(adapters, counts, strict=True)
            idle = self._adapters.idle([name for name, count in pairs for _ in range(count)])
            self._idle[: sum(counts)] = self._adapters.table[:1] if idle is None else idle
        return PromptPiece(self, size)

    def can_take(self, cache: OscarCache) -> bool:
        """Return whether a cache has the store and the balancing vectors of this scratch."""
        return self._view.can_take(cache)

    def load(self, cache: OscarCache, start: int) -> None:
        """Unpack the stored tokens of a single-row cache, in any order, from ``start`` on."""
        places = TokenPlaces.of(cache.kv_manager.streams(), self._table.device)
        layers = {layer.index: layer for layer in cache.packed_layers}
        for index, sides in zip(self._indices, self._sides, strict=True):
            end = start
            for part in layers[index].parts(places, sides.dtype):
                begin, end = end, end + part[0].shape[1]
                for side, x in zip(sides.unbind(1), part, strict=True):
                    side[begin:end] = x.transpose(0, 1)

    def run_alone(self, piece: PromptPiece) -> None:
        """Launch a piece without decoding rows."""
        piece.logits = self._alone.run(piece.size, partial(self.run, piece.size))

    def run(self, size: int, decoding: DecodingRows | None = None) -> torch.Tensor:
        """Run the prepared piece of ``size`` rows, together with a decode step if there are
        decoding rows.

        Returns:
            (MAX_PROMPTS + batch, vocabulary) logits of completed prompts and of decoding rows.
        """
        idle = self._idle if self._idle is None else self._idle[:size]
        if decoding is not None and idle is not None and decoding.idle is not None:
            idle = torch.cat([idle, decoding.idle])
        with choosing(idle):
            return self._computed(size, decoding)

    def _computed(self, size: int, decoding: DecodingRows | None) -> torch.Tensor:
        lasts, *ends, to = self._table.split(
            [MAX_PROMPTS, MAX_PROMPTS + 2, MAX_PROMPTS + 2, MAX_PIECE]
        )
        here, positions = to[:size], self._positions[..., :size]
        rows, cache = self._embeddings[here], None
        if decoding is not None:
            ids, their_positions, cache, _ = decoding
            rows = torch.cat([rows, self._decoder.embed(ids).flatten(0, 1)])
            positions = torch.cat([positions, their_positions.transpose(-1, -2)], -1)
            cache.attend_packed(None)
        cosine, sine = self._decoder.angles(rows[None], positions)
        query_ends, key_ends = (x.to(torch.int32) for x in ends)
        run = VarlenBatch(
            slice(size), {}, (to, to), here, query_ends, key_ends, (size, self.tokens), size
        )
        writes = self._writes[:size], self._unused_flag
        for level, (layer, sides) in enumerate(zip(self._layers, self._sides, strict=True)):
            heads = layer.projected(rows)
            layer.turn_(heads, cosine, sine)
            found = heads.new_empty(len(heads), layer.heads[0], layer.attention.head_dim)
            if cache is not None:
                decoded = layer.attend(heads[size:], len(heads) - size, cache)
                found[size:] = decoded.view_as(found[size:])
            _attend(layer, heads[:size], sides, writes, run, found[:size])
            idle = chosen()
            if layer is self._layers[-1]:  # Only attention needs rows without logits.
                needed = torch.cat([lasts, torch.arange(size, len(rows), device=rows.device)])
                rows, found, here = rows[needed], found[needed], here[lasts]
                idle = None if idle is None else idle[needed]
            with choosing(idle):
                attended = layer.output(found.flatten(1), residual=rows, in_place=True)
                rows = layer.feed_forward(attended)
            if level < len(self._features):  # 0 for text, so that one graph serves all pieces.
                rows[: len(here)] += self._features[level][here]
        head = partial(self._decoder.logits, rows)
        logits = head() if cache is None else in_parallel(rows.device, head, cache.end_step)
        # Each graph would keep logits of its own.
        return self._logits[: len(logits)].copy_(logits)

    def store(
        self, caches: Sequence[OscarCache], modalities: Sequence[np.ndarray], start: int
    ) -> StoredPrompts:
        """Store complete prompts, adjacent in the scratch, in the pages of their caches.

        Args:
            caches: at most ``MAX_PROMPTS``; a single one if it is not empty.
            modalities: (tokens,) int8 modality ids of each prompt.
            start: index of the first new token in the scratch.
        """
        try:
            flags = self._stored(caches, modalities, start)
        except BaseException:
            self._view = self._new_view()  # The old one is incomplete.
            raise
        sent, arrived = flags.to("cpu", non_blocking=True), None
        if flags.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(flags.device))
        return StoredPrompts(sent, arrived)

    def _stored(
        self, caches: Sequence[OscarCache], modalities: Sequence[np.ndarray], start: int
    ) -> torch.Tensor:
        """Store prompts, and return the overflow flags of all layers."""
        view = self._view
        view.set_rows(caches)
        step = view.begin(modalities)
        if not self._tables.write(step, start):
            raise RuntimeError("the tables have too little capacity for these prompts")
        self._store.reserve(for_graph=True)
        for layer in view.packed_layers if step.copies else ():
            layer.copy_pages(step)
        step.copies, step.fixed = [], self._tables

        def work() -> None:
            self._flags.zero_()
            for place, (index, sides) in enumerate(zip(self._indices, self._sides, strict=True)):
                keys, values = sides.permute(1, 2, 0, 3)[:, None]
                layer = view.layer_for(index, keys, values)
                layer.use_flag(self._flags, place)
                layer.append(keys, values, step)

        self._storing.run(view.version, work)
        view.unchecked = False  # The caller checks the flags.
        view.replayed(step)
        view.settle()
        view.set_rows([])
        return self._flags

    def _new_view(self) -> BatchView:
        view = BatchView(self._store)
        view.sigmas = self._sigmas
        return view


def stored_tokens(cache: OscarCache) -> int:
    """Return the number of tokens that a single-row cache stores."""
    return sum(sequence.stored for sequence in cache.kv_manager.sequences)


def _attend(
    layer: FastLayer,
    heads: torch.Tensor,
    sides: torch.Tensor,
    writes: tuple[torch.Tensor, torch.Tensor],
    run: VarlenBatch,
    output: torch.Tensor,
) -> None:
    """Copy new keys and values to the scratch, and write (tokens, query heads, head_dim) attention
    over each prompt's tokens so far to ``output``.

    Args:
        writes: ``writes`` and ``not_finite`` of ``oscar_mm.ops.append.AppendArguments``.
    """
    queries, *new = heads.split(layer.heads, 1)
    keys, values = (x.transpose(0, 1)[None] for x in new)
    append(keys, values, sides, *writes)
    causal_varlen(queries, sides[:, 0], sides[:, 1], run, layer.attention.scaling, output)
