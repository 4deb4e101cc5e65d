"""Byte layout of a page.

A page stores the keys and values of all KV heads for up to 128 tokens of one modality stream in one
layer. It is a row of uint8:

    head 0 | head 1 | ... | arrays that the heads share | padding to a multiple of 16 bytes

A head consists of the arrays of the page's codec (``oscar_mm.pages.codecs``). Each array
starts at a multiple of 16 bytes and is little-endian; the lowest bits of a byte contain the first
code.
3-bit codes are in two consecutive arrays: one for the low two bits, one for the high bit
(``key_codes_high``, ``value_codes_high``).

Pages are written either all at once or token by token (``PageCodec.appends_tokens``). If they are
written token by token, each byte belongs to one token, except in arrays that are not ``of_tokens``.

If kernels support the format (``PageFormat.in_fragments``), the elements of an array are in the
order in which a warp's lanes read them (``oscar_mm.pages.fragments``); otherwise they are ordered
token by token, or as the codec specifies. Only ``csrc/common/page.cuh`` duplicates this layout.

Each unpacked token has a slot in 16-bit precision, (2, KV heads, d): its keys, then its values, as
the attention layer computed them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from oscar_mm.pages.codecs.base import Array, PageCodec, PageShape, divided_group
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.pages.fragments import CODE_PLANES, Order, as_is
from oscar_mm.policy import PAGE_TOKENS, Bits, KVPolicy


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack (..., n) codes of any dtype in 0 .. 2^bits - 1 into (..., n * bits / 8) uint8."""
    per_byte = 8 // bits
    if codes.shape[-1] % per_byte:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole bytes")
    parts = codes.to(torch.uint8).unflatten(-1, (-1, per_byte))
    packed = parts[..., 0].clone()
    for place in range(1, per_byte):
        packed |= parts[..., place] << (bits * place)
    return packed


def unpack_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack (..., n) uint8 into (..., n * 8 / bits) uint8 codes; inverse of ``pack_bits``."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


ALIGNMENT = 16
_CLEARED_BYTES = 1 << 26
"""Maximum number of bytes to clear at a time."""


@dataclass(frozen=True)
class Field:
    """Typed array of a page. ``offset`` is in bytes from the start of the head; for arrays that the
    heads share, from the start of the page."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    per_head: bool
    kind: str
    """Category in the memory report: "codes", "scales" (including zeros) or "norms"."""
    of_tokens: bool
    """Whether the first dimension is tokens."""
    is_codes: bool
    """Whether the elements are codes (several may share a byte) instead of numbers."""

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes, without padding."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class PageFormat(PageShape):
    """Byte layout of the pages of one layer for one pair of bit widths.

    Raises:
        InputError: if the codec does not support such pages; see ``PageCodec.check``.
    """

    def __post_init__(self) -> None:
        self.codec.check(self)

    @classmethod
    def of(cls, policy: KVPolicy, bits: Bits, kv_heads: int, head_dim: int) -> PageFormat:
        """Return the page layout of a policy for a layer."""
        return cls(
            bits=bits,
            kv_heads=kv_heads,
            head_dim=head_dim,
            key_axis=policy.key_axis,
            key_group=codec_of(policy).key_group(policy.key_group, head_dim),
            value_group=divided_group(policy.value_group, head_dim),
            token_scaling=policy.token_scaling,
            center=policy.center,
        )

    @cached_property
    def codec(self) -> PageCodec:
        """Codec that defines what the arrays contain."""
        return codec_of(self)

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of a page in byte order; 3-bit codes count as one array."""
        return tuple(self.codec.arrays(self))

    @cached_property
    def fields(self) -> dict[str, Field]:
        """All fields of a page by name, in byte order; 3-bit codes take two fields."""
        fields: dict[str, Field] = {}
        offset = 0
        for per_head in (True, False):
            for array in self.arrays:
                for name, shape in self._parts(array) if array.per_head == per_head else ():
                    kind = array.kind, array.of_tokens, bool(array.bits)
                    fields[name] = Field(offset, shape, array.dtype, per_head, *kind)
                    offset = _aligned(offset + fields[name].nbytes)
            offset *= self.kv_heads
        return fields

    def _parts(self, array: Array) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of the fields that store an array."""
        if not array.bits:
            return [(array.name, array.shape)]
        *tokens, count = array.shape
        planes = self.planes(array.name)
        return [(plane, (*tokens, count * bits // 8)) for plane, _, bits in planes]

    @cached_property
    def head_bytes(self) -> int:
        """Size of one KV head in a page in bytes, a multiple of 16."""
        last = [field for field in self.fields.values() if field.per_head][-1]
        return _aligned(last.offset + last.nbytes)

    @cached_property
    def page_bytes(self) -> int:
        """Size of a page in bytes, a multiple of 16."""
        shared = sum(field.nbytes for field in self.fields.values() if not field.per_head)
        return _aligned(self.head_bytes * self.kv_heads + shared)

    @property
    def bits_per_value(self) -> float:
        """Bits per stored key or value element, including all overhead."""
        return self.page_bytes * 8 / (2 * PAGE_TOKENS * self.kv_heads * self.head_dim)

    @cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """Size of a page in bytes, split by kind; padding between fields counts as scales."""
        sums = {"codes": 0, "scales": 0, "norms": 0}
        for field in self.fields.values():
            sums[field.kind] += field.nbytes * (self.kv_heads if field.per_head else 1)
        sums["scales"] += self.page_bytes - sum(sums.values())
        return sums

    @property
    def in_fragments(self) -> bool:
        """Whether the arrays are in the order that kernels read."""
        return self.codec.in_fragments(self)

    @cached_property
    def orders(self) -> dict[str, Order]:
        """Element order of each field; codes have one for their low bits and one for their high
        bits."""
        natural = {
            name: as_is(*array.shape) for array in self.arrays for name, *_ in self._parts(array)
        }
        return natural | self.codec.orders(self)

    def planes(self, name: str) -> list[tuple[str, int, int]]:
        """Return (name, index of its first bit within a code, number of bits) of each field that
        stores an array of codes."""
        [bits] = [array.bits for array in self.arrays if array.name == name]
        low, *high = CODE_PLANES[bits]
        return [(name, 0, low), *((f"{name}_high", low, plane) for plane in high)]

    def write(self, pages: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Write one array of every page.

        Args:
            pages: (n, page_bytes) uint8 with contiguous rows.
            name: name of the field; "key_codes" or "value_codes" for codes.
            values: codes in 0 .. 2^bits - 1 or numbers, of shape (n, KV heads, *array shape), or
                (n, *array shape) if the heads share the array. Any dtype.
        """
        if not self.fields[name].is_codes:
            self._view(pages, name).copy_(self.orders[name].stored(values))
            return
        codes = values.to(torch.uint8)
        for plane, first, bits in self.planes(name):
            part = codes >> first & (1 << bits) - 1
            stored = self.orders[plane].stored(part)
            self._view(pages, plane).copy_(pack_bits(stored, bits))

    def write_tokens(
        self,
        pages: torch.Tensor,
        slots: torch.Tensor,
        places: torch.Tensor,
        name: str,
        values: torch.Tensor,
    ) -> None:
        """Write the elements of some tokens in an array; other bytes of the pages do not change.

        Args:
            pages: (pool slots, page_bytes) uint8.
            slots, places: (n,) int64: each token's page and its index in the page, without
                duplicates.
            name: name of the field; "key_codes" or "value_codes" for codes.
            values: codes or numbers, (n, KV heads, elements per token). Any dtype.
        """
        heads = torch.arange(self.kv_heads, device=pages.device)[:, None]
        is_codes = self.fields[name].is_codes
        planes = self.planes(name) if is_codes else [(name, 0, 8)]
        for plane, first, bits in planes:
            elements, order = (
                table.to(pages.device)[places][:, None] for table in self.token_elements(plane)
            )
            ordered = values.gather(2, order.expand(-1, self.kv_heads, -1))
            if is_codes:
                codes = ordered.to(torch.uint8) >> first & (1 << bits) - 1
                ordered, elements = pack_bits(codes, bits), elements[..., :: 8 // bits] * bits // 8
            view = self._view(pages, plane)
            view[slots[:, None, None], heads, elements] = ordered.to(view.dtype)

    def read(
        self, pages: torch.Tensor, name: str, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Read one array of all pages, or only of the pages in (n,) ``slots``.

        The result has the shape that ``write`` takes. Codes are uint8, other values float32.
        """
        if not self.fields[name].is_codes:
            view = self._view(pages, name)
            return self.orders[name].natural((view if slots is None else view[slots]).float())
        codes: torch.Tensor | None = None
        for plane, first, bits in self.planes(name):
            stored = unpack_bits(self._view(pages, plane), bits)
            part = self.orders[plane].natural(stored) << first
            codes = part if codes is None else codes | part
        assert codes is not None
        return codes

    def token_elements(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each token's elements are in an array of a stream page, and their indices
        within the token.

        Both are (128, d or groups) int64. Codes that share a byte are adjacent.

        Args:
            name: name of the field.
        """
        return _token_elements(self, name)

    def number_places(self, *names: str) -> np.ndarray:
        """Return the offsets of float16 numbers in a page, in units of two bytes: (KV heads, n)
        int64.

        Args:
            names: names of the fields, whose elements are concatenated in natural order; fields
                that the format does not have are left out.
        """
        heads, places = np.arange(self.kv_heads)[:, None] * (self.head_bytes // 2), []
        for name in names:
            if (field := self.fields.get(name)) is not None:
                of_head = field.offset // 2 + np.argsort(self.orders[name].elements().numpy())
                places.append(of_head + heads * field.per_head)
        return np.concatenate(places, axis=1)

    def token_bytes(self, device: torch.device) -> torch.Tensor:
        """Return the index of the token that each byte of a stream page belongs to, (page_bytes,)
        int16; -1 for bytes of no token."""
        return _token_bytes(self).to(device)

    def clear_unused(self, pages: torch.Tensor, in_use: np.ndarray) -> None:
        """Set the bytes of unused tokens to 0; pages that are written all at once do not change.

        Args:
            pages: (n, page_bytes) uint8 on the CPU.
            in_use: (n, 128) bool: whether each token of a page is in use.
        """
        if not self.codec.appends_tokens:
            return
        owners = self.token_bytes(pages.device).long()
        # Bytes that belong to no token (-1) count as in use.
        used = torch.from_numpy(np.pad(in_use, ((0, 0), (0, 1)), constant_values=True))
        count = max(1, _CLEARED_BYTES // self.page_bytes)
        for part, own in zip(pages.split(count), used.split(count), strict=True):
            part *= own[:, owners]

    def all_finite(self, pages: torch.Tensor) -> bool:
        """Return whether all scales, zeros and norms of (n, page_bytes) uint8 pages are finite."""
        names = [name for name, field in self.fields.items() if not field.is_codes]
        return all(all_finite(self._view(pages, name)) for name in names)

    def _view(self, pages: torch.Tensor, name: str) -> torch.Tensor:
        """Return a typed view of a field: (n, KV heads, elements), or (n, elements) if the heads
        share it."""
        field = self.fields[name]
        source = pages
        if field.per_head:
            source = pages[:, : self.head_bytes * self.kv_heads].unflatten(1, (self.kv_heads, -1))
        return source[..., field.offset : field.offset + field.nbytes].view(field.dtype)


def all_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite."""
    if values.dtype.itemsize == 1:  # torch does not compare these
        values = values.float()
    # This takes one pass without a copy; NaN propagates to both minimum and maximum.
    return not values.numel() or all(bool(end.isfinite()) for end in torch.aminmax(values))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=256)
def _token_elements(page_format: PageFormat, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    order = page_format.orders[name]
    natural = order.elements()
    token, element = natural // order.shape[1], natural % order.shape[1]
    stored = token.argsort(stable=True)
    return stored.view(order.shape), element[stored].view(order.shape)


@lru_cache(maxsize=64)
def _token_bytes(page_format: PageFormat) -> torch.Tensor:
    owners = torch.full((1, page_format.page_bytes), -1, dtype=torch.int16)
    heads = owners[:, : page_format.head_bytes * page_format.kv_heads]
    heads = heads.unflatten(1, (page_format.kv_heads, -1))
    for name, field in page_format.fields.items():
        if not field.of_tokens:
            continue
        order = page_format.orders[name]
        places = torch.arange(PAGE_TOKENS, dtype=torch.int16)[:, None].expand(order.shape)
        owner = order.stored(places)
        per_byte = owner.numel() // field.nbytes
        owner = owner[::per_byte] if per_byte else owner.repeat_interleave(field.dtype.itemsize)
        heads[..., field.offset : field.offset + field.nbytes] = owner
    return owners[0]
