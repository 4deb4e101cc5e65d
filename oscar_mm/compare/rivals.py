"""KV-cache formats of other projects, each described by what it restores and its size in bytes.

The formats are implemented from the papers and from the projects' storage layouts. None of them
uses statistics of a model or a text; each token or tile is quantized separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from oscar_mm.compare.paged import Restored
from oscar_mm.compare.teacher_forcing import LayerStates
from oscar_mm.quant.basis import hadamard

_HALF = 2
"""Bytes per scale, zero point, norm, or value that is not quantized."""
_ROUNDS = 8
"""Number of rounds of KVarN's normalization, as in its vLLM fork."""
_DEVIATIONS = 1e-3, 1e3
_SCALES = math.exp(-0.3), math.exp(10)
"""Lower and upper limits of KVarN's standard deviations, and of its scales."""
_LLOYD_ROUNDS = 1000


class Format(Protocol):
    """A low-bit format for keys and values."""

    @property
    def tile(self) -> int:
        """Number of tokens that are quantized together."""
        ...

    @property
    def channels(self) -> int:
        """Number of channels that must divide head_dim."""
        ...

    def keys(self, x: Tensor) -> Tensor:
        """Quantize and restore keys, (..., tokens, head_dim) float32."""
        ...

    def values(self, x: Tensor) -> Tensor:
        """Quantize and restore values, (..., tokens, head_dim) float32."""
        ...

    def tile_bytes(self, head_dim: int) -> int:
        """Return the size in bytes of a tile's keys and values in one head, including scales
        etc."""
        ...


@dataclass(frozen=True)
class KVarN:
    """KVarN (arXiv:2606.03458): tiles of 128 tokens, normalized by rows and columns.

    Keys and values are rotated; then columns and rows are divided by their standard deviations in
    turn, and the rows (channels of keys, tokens of values) are quantized between their minimum and
    maximum. Scales and zero points have 16 bits.

    Attributes:
        key_bits: bits per key element.
        value_bits: bits per value element.
        tile, channels: see ``Format``.
    """

    key_bits: int
    value_bits: int
    tile: int = 128
    channels: int = 1

    def keys(self, x: Tensor) -> Tensor:
        """See ``Format``."""
        return self._tiled(x, lambda tiles: _evened_and_rounded(tiles.mT, self.key_bits).mT)

    def values(self, x: Tensor) -> Tensor:
        """See ``Format``."""
        return self._tiled(x, lambda tiles: _evened_and_rounded(tiles, self.value_bits))

    def _tiled(self, x: Tensor, restored: Callable[[Tensor], Tensor]) -> Tensor:
        """Quantize and restore keys or values tile by tile.

        If the last tile is incomplete, it is filled up with the tokens before it, so that its
        tokens are quantized with the statistics of a full tile.
        """
        rotation = hadamard(x.shape[-1], x.device)
        rotated = x @ rotation
        left = x.shape[-2] % self.tile
        parts, whole = [], rotated[..., : x.shape[-2] - left, :]
        if whole.shape[-2]:
            parts.append(restored(whole.unflatten(-2, (-1, self.tile))).flatten(-3, -2))
        if left:
            parts.append(restored(rotated[..., -self.tile :, :])[..., -left:, :])
        return torch.cat(parts, dim=-2) @ rotation

    def tile_bytes(self, head_dim: int) -> int:
        """See ``Format``."""
        codes = self.tile * head_dim * (self.key_bits + self.value_bits) // 8
        of_keys, of_values = 2 * head_dim + self.tile, head_dim + 2 * self.tile
        return codes + _HALF * (of_keys + of_values)


def _evened_and_rounded(tiles: Tensor, bits: int) -> Tensor:
    """Divide the rows and columns of (..., rows, columns) tiles by their deviations, quantize them
    row by row, and restore them."""
    of_rows, of_columns = _even_scales(tiles)
    even, steps = tiles / of_rows / of_columns, 2**bits - 1
    low, high = even.amin(-1, keepdim=True), even.amax(-1, keepdim=True)
    step = ((high - low) / steps).clamp(min=1e-10)
    codes = ((even - low) / step).round().clamp(0, steps)
    return (codes * _half(step * of_rows) + _half(low * of_rows)) * _half(of_columns)


def _even_scales(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return KVarN's scales of rows, (..., rows, 1), and columns, (..., 1, columns), from its best
    round."""
    rows, columns = torch.ones_like(tiles[..., :1]), torch.ones_like(tiles[..., :1, :])
    kept, least = (rows, columns), _unevenness(tiles)
    for _ in range(_ROUNDS):
        columns = (columns * _deviation(tiles / rows / columns, -2)).clamp(*_SCALES)
        rows = (rows * _deviation(tiles / rows / columns, -1)).clamp(*_SCALES)
        uneven = _unevenness(tiles / rows / columns)
        better = uneven <= least
        least = torch.where(better, uneven, least)
        kept = tuple(
            torch.where(better, new, old) for new, old in zip((rows, columns), kept, strict=True)
        )
    return kept[0], kept[1]


def _unevenness(tiles: Tensor) -> Tensor:
    """Return the ratio of the largest to the smallest deviation, summed over rows and columns,
    (..., 1, 1)."""
    total = torch.zeros_like(tiles[..., :1, :1])
    for dim in (-2, -1):
        deviations = _deviation(tiles, dim, limited=False)
        largest, smallest = deviations.amax((-2, -1), True), deviations.amin((-2, -1), True)
        total = total + largest / smallest.clamp(min=1e-8)
    return total


def _deviation(tiles: Tensor, dim: int, *, limited: bool = True) -> Tensor:
    """Return standard deviations along ``dim``, which keeps size 1; 0 for a single value."""
    found = tiles.std(dim, correction=min(1, tiles.shape[dim] - 1), keepdim=True)
    return found.clamp(*_DEVIATIONS) if limited else found


@dataclass(frozen=True)
class TurboQuant:
    """TurboQuant, vLLM's variant "nc": a key is a norm and the codes of its rotated direction.

    The levels minimize the squared error for normally distributed numbers (Lloyd and Max), and the
    restored vector is scaled to the stored norm. Values are not rotated; the values of a token are
    quantized between their minimum and maximum. Norm, scale and zero point have 16 bits.

    Attributes:
        key_bits: bits per key element.
        value_bits: bits per value element.
        tile, channels: see ``Format``.
    """

    key_bits: int
    value_bits: int
    tile: int = 1
    channels: int = 1

    def keys(self, x: Tensor) -> Tensor:
        """See ``Format``."""
        rotation, norms = hadamard(x.shape[-1], x.device), x.norm(dim=-1, keepdim=True)
        directions = x @ rotation * (x.shape[-1] ** 0.5 / norms.clamp(min=1e-12))
        levels = normal_levels(self.key_bits).to(x)
        nearest = levels[torch.bucketize(directions, (levels[1:] + levels[:-1]) / 2)]
        return nearest / nearest.norm(dim=-1, keepdim=True) @ rotation * _half(norms)

    def values(self, x: Tensor) -> Tensor:
        """See ``Format``."""
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = ((high - low) / (2**self.value_bits - 1)).clamp(min=1e-8)
        return ((x - low) / step).round() * _half(step) + _half(low)

    def tile_bytes(self, head_dim: int) -> int:
        """See ``Format``."""
        codes = [-(-head_dim * bits // 8) for bits in (self.key_bits, self.value_bits)]
        return sum(codes) + _HALF * 3


@lru_cache(maxsize=8)
def normal_levels(bits: int) -> Tensor:
    """Return (2 ** bits,) float64 levels with minimum squared error for a standard normal
    distribution."""
    levels = torch.linspace(-3.5, 3.5, 2**bits, dtype=torch.float64)
    ends = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(_LLOYD_ROUNDS):
        edges = torch.cat([-ends, (levels[1:] + levels[:-1]) / 2, ends])
        density, share = (-edges.square() / 2).exp() / math.tau**0.5, torch.special.ndtr(edges)
        levels = -density.diff() / share.diff()
    return levels


@dataclass(frozen=True)
class ExLlamaV3:
    """The quantized cache of ExLlamaV3: rotated groups of 32 channels, scaled by their maximum.

    The levels are the midpoints of equal steps between minus and plus the maximum magnitude, which
    is stored in 16 bits. (An option for smaller steps near zero is off by default.)

    Attributes:
        key_bits: bits per key element.
        value_bits: bits per value element.
        tile, channels: see ``Format``.
    """

    key_bits: int
    value_bits: int
    tile: int = 1
    channels: int = 32

    def keys(self, x: Tensor) -> Tensor:
        """See ``Format``."""
        return self._restored(x, self.key_bits)

    def values(self, x: Tensor) -> Tensor:
        """See ``Format``."""
        return self._restored(x, self.value_bits)

    def _restored(self, x: Tensor, bits: int) -> Tensor:
        rotation, half = hadamard(self.channels, x.device), 2 ** (bits - 1)
        groups = x.unflatten(-1, (-1, self.channels)) @ rotation
        largest = groups.abs().amax(-1, keepdim=True) + 1e-10
        codes = (groups / largest * half).floor().clamp(-half, half - 1)
        return ((codes + 0.5) / half * _half(largest) @ rotation).flatten(-2)

    def tile_bytes(self, head_dim: int) -> int:
        """See ``Format``."""
        codes = head_dim * (self.key_bits + self.value_bits) // 8
        return codes + 2 * _HALF * (head_dim // self.channels)


@dataclass(frozen=True)
class INT4:
    """vLLM's int4_per_token_head: a rotated token's smallest to largest number in 16 equal steps.

    Signs are flipped at random, the same for all tokens, before the rotation. Rounding is to whole
    steps from zero, so that numbers beyond a range that does not contain zero are cut. A scale has
    32 bits, of which 4 are the zero point.

    Attributes:
        tile, channels: see ``Format``.
    """

    tile: int = 1
    channels: int = 1

    def keys(self, x: Tensor) -> Tensor:
        """See ``Format``."""
        generator = torch.Generator().manual_seed(0)
        signs = 2 * torch.randint(2, (x.shape[-1],), generator=generator) - 1
        rotation = signs.to(x)[:, None] * hadamard(x.shape[-1], x.device)
        rotated = (x @ rotation).bfloat16().float()
        low, high = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
        step = ((high - low) / 15).clamp(min=1e-6)
        zero = (-low / step).round().clamp(0, 15)
        codes = (rotated / step + zero).round().clamp(0, 15)
        return (codes - zero) * step @ rotation.mT

    values = keys

    def tile_bytes(self, head_dim: int) -> int:
        """See ``Format``."""
        return 2 * (-(-head_dim // 2) + 2 * _HALF)


@dataclass(frozen=True)
class FP8:
    """vLLM's fp8: E4M3 numbers, whose scale is 1 unless the checkpoint has one.

    Attributes:
        tile, channels: see ``Format``.
    """

    tile: int = 1
    channels: int = 1

    def keys(self, x: Tensor) -> Tensor:
        """See ``Format``."""
        largest = torch.finfo(torch.float8_e4m3fn).max
        return x.clamp(-largest, largest).to(torch.float8_e4m3fn).float()

    values = keys

    def tile_bytes(self, head_dim: int) -> int:
        """See ``Format``."""
        return 2 * head_dim


def _half(x: Tensor) -> Tensor:
    """Round to 16-bit precision."""
    return x.half().float()


@dataclass(frozen=True)
class Exact:
    """The tokens and layers that are kept in 16-bit precision.

    Attributes:
        sinks: number of tokens at the beginning.
        recent: number of most recent tokens, including the query's own token.
        tile: number of tokens after the sinks that are packed together once all have arrived.
        layers: number of layers at each end of the model in which nothing is packed; at most half
            of the model's layers.
    """

    sinks: int = 0
    recent: int = 1
    tile: int = 1
    layers: int = 0

    def packed_from(self, tokens: int) -> Tensor:
        """Return, for each token, the first token whose query attends to it in packed form,
        (tokens,) int64."""
        place = torch.arange(tokens)
        tile_ends = self.sinks + ((place - self.sinks) // self.tile + 1) * self.tile
        found = place + self.recent
        if self.tile > 1:
            found = torch.maximum(found, tile_ends)
        found[: self.sinks] = torch.iinfo(found.dtype).max
        return found

    def spares(self, states: LayerStates) -> bool:
        """Whether all tokens of a layer are kept in 16-bit precision."""
        config: Any = states.module.config
        count = min(self.layers, config.num_hidden_layers // 2)
        return not count <= states.index < config.num_hidden_layers - count


@dataclass(frozen=True)
class Held:
    """Size of keys and values, in bytes and in elements."""

    kv_bytes: int
    values: int

    @property
    def bits_per_value(self) -> float:
        """Bits per element."""
        return 8 * self.kv_bytes / self.values


@dataclass(frozen=True)
class Rival:
    """A format with a name, and the tokens that it does not pack.

    Attributes:
        name: name in tables.
        format: format of packed tokens.
        exact: tokens and layers that are not packed.
    """

    name: str
    format: Format
    exact: Exact

    def missing(self, layers: Sequence[LayerStates], ids: Tensor) -> str | None:
        """Return why the format cannot store the model's heads; None if it can."""
        head_dim, channels = layers[0].keys.shape[-1], self.format.channels
        return None if head_dim % channels == 0 else f"head_dim is not a multiple of {channels}"

    def restored(self, states: LayerStates, ids: Tensor) -> Restored:
        """Return keys and values as the format restores them; arguments as in ``Paged``.

        An incomplete tile is packed like a complete one, unless ``exact`` keeps its tokens in
        16-bit precision until it is complete. In a layer where nothing is packed, the tokens that
        other layers pack are counted with their 16-bit size.
        """
        packed = self._packed(len(ids))
        rows, heads, _, head_dim = states.keys.shape
        count = int(packed.sum())
        elements = 2 * rows * heads * head_dim * count
        if self.exact.spares(states):
            return Restored(states.keys, states.values, _HALF * elements, elements)
        first = self.exact.sinks
        last = first + max(0, len(ids) - first) // self.exact.tile * self.exact.tile

        def back(side: Tensor, restore: Callable[[Tensor], Tensor]) -> Tensor:
            found = side.clone()
            if last > first:
                found[:, :, first:last] = restore(side[:, :, first:last].float()).to(side.dtype)
            return torch.where(packed.to(side.device)[:, None], found, side)

        keys, values = back(states.keys, self.format.keys), back(states.values, self.format.values)
        return Restored(keys, values, self._bytes(rows * heads * count, head_dim), elements)

    def one_by_one(self, prompt: int) -> Rival:
        """Return this method unchanged, because a token is stored the same way alone or with
        others."""
        return self

    def restored_from(self, ids: Tensor, prompt: int) -> Tensor:
        """Return, for each token, the first token that reads it in restored form; see ``Paged``."""
        return self.exact.packed_from(len(ids)).clamp(max=len(ids))

    def memory(self, layers: Sequence[LayerStates], ids: Tensor) -> Held:
        """Return the size of the first row's codes, scales and 16-bit tokens, without the free
        memory that the project's cache would reserve."""
        packed, held, values = int(self._packed(len(ids)).sum()), 0, 0
        for states in layers:
            _, heads, tokens, head_dim = states.keys.shape
            few = 0 if self.exact.spares(states) else packed
            held += self._bytes(heads * few, head_dim)
            held += 2 * heads * head_dim * (tokens - few) * _HALF
            values += 2 * heads * head_dim * tokens
        return Held(held, values)

    def _bytes(self, tokens: int, head_dim: int) -> int:
        """Return the size in bytes of one head's packed tokens, prorated from the size of a
        tile."""
        return tokens * self.format.tile_bytes(head_dim) // self.format.tile

    def _packed(self, tokens: int) -> Tensor:
        """Return a mask of the tokens to which the next token attends in packed form, (tokens,)
        bool."""
        return self.exact.packed_from(tokens) <= tokens
