"""Picture tower: a vision tower like Qwen3-VL's as CUDA graphs, one for each of a few numbers of
patches.

As modules, the tower has some 700 launches, which take the host longer than a GPU computes for a
picture of usual size; meanwhile the answers that decode wait. Pixels, positions and the ends of
pictures are inputs of the graphs. Pictures are concatenated, then padded; a picture attends only to
itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from oscar_mm.fast_decode.decoder import Capture
from oscar_mm.fast_decode.graph_cache import GraphCache
from oscar_mm.kernels.self_check import relative_error
from oscar_mm.modules import devices, modules_of, run_as_written
from oscar_mm.ops.decode_tables import moved, upload
from oscar_mm.ops.decode_torch import has_flash
from oscar_mm.ops.varlen import boundaries

MAX_PATCHES = 4096
"""Maximum number of patches of a graph: a picture of 1024 x 1024 pixels. With more, a GPU takes
longer than the host."""
_SIZES = (256, 512, 1024, 1536, 2048, 3072, MAX_PATCHES)
"""Numbers of patches of the graphs, to which pictures are padded."""
_MAX_PICTURES = 8
"""Maximum number of pictures that a graph reads at once."""
_MAX_ERROR = 0.02
"""Maximum relative error allowed for flash attention, far above its rounding error."""
_log = logging.getLogger(__name__)
_ATTENTION = "oscar_flash_pictures"
"""Name of ``_attend``. Towers pass the ends of pictures on as a tensor if the name of their
attention contains "flash"."""


class Picture(NamedTuple):
    """Patches of a picture.

    Attributes:
        pixels: (rows * columns, values of a patch), on the tower's device.
        rows, columns: size of the grid of patches.
    """

    pixels: torch.Tensor
    rows: int
    columns: int


class Sides(NamedTuple):
    """Inputs of attention, (tokens, heads, head_dim) each."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class PictureTower:
    """Runs a vision tower on pictures; used in the engine thread.

    Args:
        tower: tower that ``takes`` accepts.
        capture: capture function of graphs that share their memory.
    """

    def __init__(self, tower: Any, capture: Capture) -> None:
        [device] = devices(tower)
        self._tower, self._device = tower, device
        self._merged = tower.spatial_merge_size**2
        values = tower.patch_embed.proj.weight[0].numel()
        with torch.inference_mode(False):
            pixels = torch.zeros(MAX_PATCHES, values, dtype=tower.dtype, device=device)
            places = torch.zeros(MAX_PATCHES, 6, dtype=torch.long, device=device)
            weights = torch.zeros(MAX_PATCHES, 4, device=device)
            ends = torch.zeros(_MAX_PICTURES + 2, dtype=torch.int32, device=device)
        self._inputs, self._ends = (pixels, places, weights), ends
        self._graphs = GraphCache(capture, device, what="pictures are read")
        self._tables = lru_cache(32)(self._tables_of)

    @staticmethod
    def takes(tower: Any) -> bool:
        """Return whether the tower runs as written, on one device, and in a dtype that attention
        over several pictures supports."""
        head_dim = tower.config.hidden_size // tower.config.num_heads
        return (
            len(devices(tower)) == 1
            and run_as_written(modules_of(tower))
            and can_attend(tower.pos_embed.weight.new_empty(1, 1, 1, head_dim))
        )

    @property
    def fails(self) -> bool:
        """Whether a graph could not be captured."""
        return self._graphs.fails

    def warm_up(self, until: float) -> None:
        """Capture all sizes that are not captured yet; the pixels do not matter.

        Args:
            until: time of ``perf_counter`` after which nothing more is captured.
        """
        for size in reversed(_SIZES):  # Smaller graphs reuse the memory of larger ones.
            self._ends.copy_(upload(_table([size], size), self._device))
            while not (self.fails or self._graphs.has(size)) and perf_counter() < until:
                self._graphs.run(size, partial(self._computed, size))

    def __call__(self, pictures: Sequence[Picture]) -> Iterator[torch.Tensor]:
        """Yield (1 + levels, tokens, hidden size) for each picture of at most ``MAX_PATCHES``
        patches: the embeddings of its tokens, and the features that are added to the outputs of
        the first layers."""
        batch, patches = list[Picture](), 0
        for picture in pictures:
            count = len(picture.pixels)
            if batch and (patches + count > MAX_PATCHES or len(batch) == _MAX_PICTURES):
                yield from self._run(batch)
                batch, patches = [], 0
            batch.append(picture)
            patches += count
        if batch:
            yield from self._run(batch)

    def _run(self, batch: Sequence[Picture]) -> Sequence[torch.Tensor]:
        counts = [len(picture.pixels) for picture in batch]
        ends = [*accumulate(counts)]
        size = next(size for size in _SIZES if size >= ends[-1])
        for picture, count, end in zip(batch, counts, ends, strict=True):
            tables = self._tables(picture.rows, picture.columns)
            for target, source in zip(self._inputs, (picture.pixels, *tables), strict=True):
                target[end - count : end] = source
        self._ends.copy_(upload(_table(ends, size), self._device))
        found = self._graphs.run(size, partial(self._computed, size))
        # The next run overwrites the result.
        found = found[:, : ends[-1] // self._merged].clone()
        return found.split([count // self._merged for count in counts], 1)

    def _computed(self, size: int) -> torch.Tensor:
        """Run the tower on the first ``size`` rows of the inputs."""
        pixels, places, weights = (x[:size] for x in self._inputs)
        with _attending(self._tower.config):
            output = self._tower(
                pixels,
                grid_thw=None,
                position_ids=places[:, :2],
                interp_indices=places[:, 2:],
                interp_weights=weights,
                # Flash attention writes up to the last end, even past the rows.
                cu_seqlens=self._ends.clamp(max=size),
                max_seqlen=size,
                return_dict=True,
            )
        return torch.stack([output.pooler_output, *output.deepstack_features])

    def _tables_of(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions and the indices and weights of interpolation of a grid: (patches, 6)
        int64 and (patches, 4) float32, on the device."""
        tower, grid = self._tower, torch.tensor([[1, rows, columns]])
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
        positions = get_vision_position_ids(grid, tower.spatial_merge_size)
        places = torch.cat([positions, indices], 1)
        return moved(places, self._device), moved(weights, self._device)


def _table(ends: Sequence[int], size: int) -> np.ndarray:
    """Return (_MAX_PICTURES + 2,) int32 boundaries; the first sequence after the pictures is the
    padding."""
    table = np.full(_MAX_PICTURES + 2, size, np.int32)
    table[: len(ends) + 1] = [0, *ends]
    return table


@contextmanager
def _attending(config: Any) -> Iterator[None]:
    """Within the block, towers with this configuration use ``_attend``."""
    before = config._attn_implementation
    config._attn_implementation = _ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def can_attend(queries: torch.Tensor) -> bool:
    """Return whether ``within`` supports queries, (batch, heads, tokens, head_dim)."""
    return has_flash(queries) and _agrees(queries.device, queries.dtype, queries.shape[3])


@cache
def _agrees(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch's flash attention, which is undocumented, works as ``within`` expects;
    warn once if not."""
    counts, generator = [130, 3, 0, 300], torch.Generator(device).manual_seed(0)
    shape, placed = (3, sum(counts), 2, head_dim), {"dtype": dtype, "device": device}
    sides = torch.randn(shape, generator=generator, **placed)
    ends = boundaries(counts, device)
    expected = within(Sides(*sides.double().cpu()), ends.cpu(), max(counts), 0.1)
    try:
        found = within(Sides(*sides), ends, max(counts), 0.1)
        error = relative_error(found.cpu(), expected)
    except (RuntimeError, TypeError) as reason:  # The operation is missing or has changed.
        error = reason
    if isinstance(error, float) and error < _MAX_ERROR:
        return True
    _log.warning("pictures are read without CUDA graphs on %s: flash attention: %s", device, error)
    return False


def _attend(
    module: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each picture: (1, heads, patches, head_dim) to (1, patches, heads,
    head_dim)."""
    sides = Sides(*(x[0].transpose(0, 1) for x in (queries, keys, values)))
    return within(sides, cu_seq_lens_q, max_length_q, scaling)[None], None


def within(sides: Sides, ends: torch.Tensor, longest: int, scaling: float) -> torch.Tensor:
    """Compute attention within each of several adjacent sequences.

    Args:
        sides: queries, keys and values, on a GPU in 16-bit precision.
        ends: (sequences + 1,) int32 boundaries.
        longest: maximum number of tokens of a sequence.
        scaling: factor that the scores are multiplied by.

    Returns:
        (tokens, heads, head_dim).
    """
    if sides.queries.is_cuda:
        flash, arguments = torch.ops.aten._flash_attention_forward, (ends, ends, longest, longest)
        return flash(*sides, *arguments, 0.0, False, False, scale=scaling)[0]
    counts = ends.diff().tolist()
    parts = zip(*(x.transpose(0, 1).split(counts, 1) for x in sides), strict=True)
    found = [scaled_dot_product_attention(*part, scale=scaling) for part in parts]
    return torch.cat(found, 1).transpose(0, 1)


AttentionInterface.register(_ATTENTION, _attend)
