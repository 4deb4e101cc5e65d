"""Byte layout of a page, defined once.

A page stores up to 128 tokens of one modality stream in one layer, keys and values of all KV heads,
in codes of 2, 3 or 4 bits. It is one row of uint8:

    head 0 | head 1 | ... | shared norms (only with token_scaling "shared") | pad to 16 bytes

and a head consists of these fields, each starting at a multiple of 16 bytes (g: key group, c: value
group, d: head_dim, b: bits of keys or of values; little-endian; codes lowest bits first):

    field         shape                        dtype    key_axis "channel" / "token"
    center        (d,)                         float16  only with center
    key_codes     (128, d * b / 8)             uint8
    key_scales    (128 / g, d) / (128, d / g)  float16
    key_zeros     as key_scales                float16
    norms         (128,)                       float16  only with token_scaling "per_head"
    value_codes   (128, d * b / 8)             uint8
    value_scales  (128, d / c)                 float16
    value_zeros   (128, d / c)                 float16

3-bit codes are in two consecutive arrays: one for the low two bits, one for the high bit
(``key_codes_high``, ``value_codes_high``).

A stored key is (scale * code + zero) * norm, a stored value scale * code + zero, both in the
coordinates of ``oscar_mm.quant.basis``. With center, the sign bit of a key's scale says whether to
add the center; the scale is its absolute value.

Pages of key_axis "channel" are written once, as a whole. In pages of key_axis "token" (stream
pages) each byte except the center's belongs to one token, and tokens are written one by one.

If kernels support the format (``PageFormat.in_fragments``), the elements of an array are in the
order in which a warp's lanes read them (``oscar_mm.pages.fragments``), otherwise token by token
(scales and zeros of values, and of keys by token: group by group). ``csrc/common/page.cuh`` is the
only twin of this file.

Unpacked tokens have a slot each in 16-bit precision: (2, KV heads, d), keys then values, as the
attention layer computed them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from oscar_mm.errors import InputError
from oscar_mm.pages.fragments import KERNEL_HEAD_DIMS, Order, fragment_orders, plain_orders
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
"""Bytes of pages that are cleared at a time."""
_PLANES = {2: (2,), 3: (2, 1), 4: (4,)}
"""Bits of the arrays that store codes, lowest bits first."""


def divided_group(group: int, channels: int) -> int:
    """Return the channels of a value group: the largest divisor of ``channels`` up to ``group``."""
    return next(size for size in range(min(group, channels), 0, -1) if channels % size == 0)


@dataclass(frozen=True)
class Field:
    """One typed array of a page; ``offset`` counts bytes from the start of the head or of the
    page."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    per_head: bool
    kind: str
    """"codes", "scales" (with zeros) or "norms", as the memory report sums them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without padding."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class PageFormat:
    """Byte layout of the pages of one layer for one pair of bit widths.

    Raises:
        InputError: if head_dim is not a multiple of the codes that fill whole bytes.
    """

    bits: Bits
    kv_heads: int
    head_dim: int
    key_axis: str
    key_group: int
    value_group: int
    token_scaling: str | None
    center: bool = False

    def __post_init__(self) -> None:
        unit = max(8 // plane for bits in self.bits for plane in _PLANES[bits])
        if self.head_dim % unit:
            instead = "bits of 2 or 4, or " * (3 in self.bits and self.head_dim % 4 == 0)
            raise InputError(
                f"head_dim={self.head_dim}: pages of {self.bits} bits need a multiple of {unit}; "
                f"use {instead}policy 'bf16' for this model"
            )

    @classmethod
    def of(cls, policy: KVPolicy, bits: Bits, kv_heads: int, head_dim: int) -> PageFormat:
        """Return the page layout of a policy for a layer."""
        return cls(
            bits=bits,
            kv_heads=kv_heads,
            head_dim=head_dim,
            key_axis=policy.key_axis,
            key_group=(
                divided_group(policy.key_group, head_dim) if policy.by_token else policy.key_group
            ),
            value_group=divided_group(policy.value_group, head_dim),
            token_scaling=policy.token_scaling,
            center=policy.center,
        )

    @property
    def by_token(self) -> bool:
        """Whether tokens are written one by one instead of in whole pages."""
        return self.key_axis == "token"

    @cached_property
    def fields(self) -> dict[str, Field]:
        """All arrays of a page by name, in byte order."""
        tokens, d = PAGE_TOKENS, self.head_dim
        groups = (tokens, d // self.key_group) if self.by_token else (tokens // self.key_group, d)
        key_groups, value_groups = groups, (tokens, d // self.value_group)
        arrays: list[tuple[str, tuple[int, ...], torch.dtype, str]] = []
        if self.center:
            arrays.append(("center", (d,), torch.float16, "scales"))
        arrays += self._codes("key_codes")
        arrays += [
            ("key_scales", key_groups, torch.float16, "scales"),
            ("key_zeros", key_groups, torch.float16, "scales"),
        ]
        if self.token_scaling == "per_head":
            arrays.append(("norms", (tokens,), torch.float16, "norms"))
        arrays += self._codes("value_codes")
        arrays += [
            ("value_scales", value_groups, torch.float16, "scales"),
            ("value_zeros", value_groups, torch.float16, "scales"),
        ]
        fields, offset = {}, 0
        for name, shape, dtype, kind in arrays:
            fields[name] = Field(offset, shape, dtype, per_head=True, kind=kind)
            offset = _aligned(offset + fields[name].nbytes)
        if self.token_scaling == "shared":
            start = offset * self.kv_heads
            fields["norms"] = Field(start, (tokens,), torch.float16, per_head=False, kind="norms")
        return fields

    def _codes(self, name: str) -> list[tuple[str, tuple[int, ...], torch.dtype, str]]:
        """Return the arrays that store codes."""
        return [
            (plane, (PAGE_TOKENS, self.head_dim * bits // 8), torch.uint8, "codes")
            for plane, _, bits in self.planes(name)
        ]

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of one KV head of a page, a multiple of 16."""
        last = [field for field in self.fields.values() if field.per_head][-1]
        return _aligned(last.offset + last.nbytes)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page, a multiple of 16."""
        shared = sum(field.nbytes for field in self.fields.values() if not field.per_head)
        return _aligned(self.head_bytes * self.kv_heads + shared)

    @property
    def bits_per_value(self) -> float:
        """Bits of a page per stored key or value element, including all overhead."""
        return self.page_bytes * 8 / (2 * PAGE_TOKENS * self.kv_heads * self.head_dim)

    @cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of a page by kind; padding between fields counts as scales."""
        sums = {"codes": 0, "scales": 0, "norms": 0}
        for field in self.fields.values():
            sums[field.kind] += field.nbytes * (self.kv_heads if field.per_head else 1)
        sums["scales"] += self.page_bytes - sum(sums.values())
        return sums

    @property
    def in_fragments(self) -> bool:
        """Whether the arrays are in the kernels' order."""
        if self.head_dim not in KERNEL_HEAD_DIMS:
            return False
        if self.by_token:
            return self.key_group == self.head_dim
        return self.bits in (Bits(2, 2), Bits(4, 4))

    @cached_property
    def orders(self) -> dict[str, Order]:
        """Order of every field; codes have one for their low bits and one for their high bits."""
        tokens, d = PAGE_TOKENS, self.head_dim
        if self.in_fragments:
            return fragment_orders(
                d,
                _PLANES[self.bits.keys],
                _PLANES[self.bits.values],
                None if self.by_token else self.key_group,
                self.value_group,
            )
        key_scales = self.fields["key_scales"].shape
        return plain_orders(tokens, d, key_scales, d // self.value_group, by_token=self.by_token)

    def planes(self, name: str) -> list[tuple[str, int, int]]:
        """Return the arrays of codes: name, index of their first bit within a code, and number of
        bits."""
        bits = self.bits.keys if name.startswith("key") else self.bits.values
        low, *high = _PLANES[bits]
        return [(name, 0, low), *((f"{name}_high", low, plane) for plane in high)]

    def write(self, pages: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Write one array of every page.

        Args:
            pages: (n, page_bytes) uint8 with contiguous rows.
            name: name of the field; "key_codes" or "value_codes" for codes.
            values: codes (n, KV heads, 128, d) in 0 .. 2^bits - 1; key scales and zeros (n, KV
                heads, *field shape); value scales and zeros (n, KV heads, 128, d / c); norms (n, KV
                heads, 128), shared ones (n, 128); center (n, KV heads, d). Any dtype.
        """
        if self.fields[name].kind != "codes":
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
        """Write some tokens' elements of an array of stream pages; other bytes do not change.

        Args:
            pages: (pool slots, page_bytes) uint8.
            slots, places: (n,) int64: page of each token and its place in it, without duplicates.
            name: name of the field; "key_codes" or "value_codes" for codes.
            values: codes (n, KV heads, d), scales and zeros (n, KV heads, groups). Any dtype.
        """
        heads = torch.arange(self.kv_heads, device=pages.device)[:, None]
        is_codes = self.fields[name].kind == "codes"
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
        """Read one array of every page, or of those in (n,) ``slots``, in the shape of ``write``.

        Codes are uint8, other values float32.
        """
        if self.fields[name].kind != "codes":
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
        """Return the places of each token's elements in an array of a stream page, and the
        elements' indices.

        Both are (128, d or groups) int64. Codes of a byte are adjacent.

        Args:
            name: name of the field.
        """
        return _token_elements(self, name)

    def number_places(self, *names: str) -> np.ndarray:
        """Return (KV heads, n) int64: places of float16 numbers in a page, in units of two bytes.

        Args:
            names: names of fields, whose elements are concatenated in natural order; fields that
                the format does not have are left out.
        """
        heads, places = np.arange(self.kv_heads)[:, None] * (self.head_bytes // 2), []
        for name in names:
            if (field := self.fields.get(name)) is not None:
                of_head = field.offset // 2 + np.argsort(self.orders[name].elements().numpy())
                places.append(of_head + heads * field.per_head)
        return np.concatenate(places, axis=1)

    def token_bytes(self, device: torch.device) -> torch.Tensor:
        """Return (page_bytes,) int16: the place of the token to which a byte of a stream page
        belongs, or -1."""
        return _token_bytes(self).to(device)

    def clear_unused(self, pages: torch.Tensor, in_use: np.ndarray) -> None:
        """Zero the unused places of stream pages, (n, page_bytes) uint8 on the CPU.

        Args:
            in_use: (n, 128) bool.
        """
        owners = self.token_bytes(pages.device).long()
        # Bytes without a token, of owner -1, count as in use.
        used = torch.from_numpy(np.pad(in_use, ((0, 0), (0, 1)), constant_values=True))
        count = max(1, _CLEARED_BYTES // self.page_bytes)
        for part, own in zip(pages.split(count), used.split(count), strict=True):
            part *= own[:, owners]

    def all_finite(self, pages: torch.Tensor) -> bool:
        """Return whether no scale, zero or norm of (n, page_bytes) uint8 pages is NaN or
        infinite."""
        names = [name for name, field in self.fields.items() if field.kind != "codes"]
        return all(all_finite(self._view(pages, name)) for name in names)

    def _view(self, pages: torch.Tensor, name: str) -> torch.Tensor:
        """Return a typed view of a field: (n, KV heads, elements), or (n, elements) for shared
        norms."""
        field = self.fields[name]
        source = pages
        if field.per_head:
            source = pages[:, : self.head_bytes * self.kv_heads].unflatten(1, (self.kv_heads, -1))
        return source[..., field.offset : field.offset + field.nbytes].view(field.dtype)


def all_finite(values: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite."""
    # One pass without a copy; NaN propagates to both ends.
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
        if name == "center":
            continue
        order = page_format.orders[name]
        places = torch.arange(PAGE_TOKENS, dtype=torch.int16)[:, None].expand(order.shape)
        owner = order.stored(places)
        per_byte = owner.numel() // field.nbytes
        owner = owner[::per_byte] if per_byte else owner.repeat_interleave(field.dtype.itemsize)
        heads[..., field.offset : field.offset + field.nbytes] = owner
    return owners[0]
