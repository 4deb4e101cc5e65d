"""The bytes of a page, written down once.

A page holds 128 tokens of one modality stream in one layer, keys and values of all KV heads, in
2- or 4-bit codes. It is one row of uint8:

    head 0 | head 1 | ... | shared norms (only with token_scaling "shared") | pad to 16 bytes

and a head is, each field starting at a multiple of 16 bytes (g: key group, c: value group, d:
head_dim, b: bits; little-endian; codes lowest bits first):

    field         shape                        dtype    key_axis "channel" / "token"
    key_codes     (128, d * b / 8)             uint8
    key_scales    (128 / g, d) / (128, d / g)  float16
    key_zeros     as key_scales                float16
    norms         (128,)                       float16  only with token_scaling "per_head"
    value_codes   (128, d * b / 8)             uint8
    value_scales  (d / c, 128)                 float16
    value_zeros   (d / c, 128)                 float16

A stored key is (scale * code + zero) * norm, a stored value scale * code + zero, both in the
coordinates of ``oscar_mm.quant.basis``. Where the kernels run (head_dim 64 and 128, key_axis
"channel") the elements of an array are in the order in which a warp's lanes take them
(``oscar_mm.cache.fragments``), elsewhere as the shapes say. ``csrc/page.cuh`` is the only twin of
this file.

Tokens that are not (yet) packed are in blocks of 32 in the model's dtype: (2, KV heads, 32, d),
keys then values, as the attention layer made them. Four blocks make a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from oscar_mm.cache.fragments import KERNEL_HEAD_DIMS, Order, fragment_orders, plain_orders
from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy
from oscar_mm.quant.bits import pack_bits, unpack_bits

PAGE_TOKENS = 128
BLOCK_TOKENS = 32
ALIGNMENT = 16


def divided_group(group: int, channels: int) -> int:
    """Channels of a value group: the largest divisor of ``channels`` that is at most ``group``."""
    return next(size for size in range(min(group, channels), 0, -1) if channels % size == 0)


@dataclass(frozen=True)
class Field:
    """One typed array of a page. ``offset`` counts bytes from the head's or the page's start."""

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
    """Byte layout of the pages of one layer for one bit width.

    Raises:
        InputError: head_dim is no multiple of 8 / bits, so that codes would not fill bytes.
    """

    bits: int
    kv_heads: int
    head_dim: int
    key_axis: str
    key_group: int
    value_group: int
    token_scaling: str | None

    def __post_init__(self) -> None:
        if self.head_dim % (8 // self.bits):
            raise InputError(
                f"head_dim={self.head_dim}: {self.bits}-bit pages need a multiple of "
                f"{8 // self.bits}; use policy 'bf16' for this model"
            )

    @classmethod
    def of(cls, policy: KVPolicy, bits: int, kv_heads: int, head_dim: int) -> PageFormat:
        """The layout that a policy gives a layer."""
        return cls(
            bits=bits,
            kv_heads=kv_heads,
            head_dim=head_dim,
            key_axis=policy.key_axis,
            key_group=(
                policy.key_group
                if policy.key_axis == "channel"
                else divided_group(policy.key_group, head_dim)
            ),
            value_group=divided_group(policy.value_group, head_dim),
            token_scaling=policy.token_scaling,
        )

    @cached_property
    def fields(self) -> dict[str, Field]:
        """All arrays of a page by name, in the order of their bytes."""
        tokens, d = PAGE_TOKENS, self.head_dim
        if self.key_axis == "channel":
            key_groups = (tokens // self.key_group, d)
        else:
            key_groups = (tokens, d // self.key_group)
        value_groups = (d // self.value_group, tokens)
        codes = (tokens, d * self.bits // 8)
        arrays = [
            ("key_codes", codes, torch.uint8, "codes"),
            ("key_scales", key_groups, torch.float16, "scales"),
            ("key_zeros", key_groups, torch.float16, "scales"),
            ("norms", (tokens,), torch.float16, "norms"),
            ("value_codes", codes, torch.uint8, "codes"),
            ("value_scales", value_groups, torch.float16, "scales"),
            ("value_zeros", value_groups, torch.float16, "scales"),
        ]
        fields, offset = {}, 0
        for name, shape, dtype, kind in arrays:
            if name == "norms" and self.token_scaling != "per_head":
                continue
            fields[name] = Field(offset, shape, dtype, per_head=True, kind=kind)
            offset = _aligned(offset + fields[name].nbytes)
        if self.token_scaling == "shared":
            start = offset * self.kv_heads
            fields["norms"] = Field(start, (tokens,), torch.float16, per_head=False, kind="norms")
        return fields

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
        """Bits of a page per key or value element that it stores, everything counted."""
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
        return self.key_axis == "channel" and self.head_dim in KERNEL_HEAD_DIMS

    @cached_property
    def _orders(self) -> dict[str, Order]:
        tokens, d = PAGE_TOKENS, self.head_dim
        if self.in_fragments:
            return fragment_orders(self.bits, d, self.key_group, self.value_group)
        keys = self.fields["key_scales"].shape
        return plain_orders(tokens, d, keys, d // self.value_group)

    def write(self, pages: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Write one array of every page.

        Args:
            pages: (n, page_bytes) uint8 with contiguous rows.
            name: of the field.
            values: codes (n, KV heads, 128, d) in 0 .. 2^bits - 1; key scales and zeros
                (n, KV heads, *field shape); value scales and zeros (n, KV heads, 128, d / c);
                norms (n, KV heads, 128), shared ones (n, 128). Any dtype.
        """
        field, view = self.fields[name], self._view(pages, name)
        ordered = self._orders[name].stored(values)
        if field.kind == "codes":
            ordered = pack_bits(ordered, self.bits)
        view.copy_(ordered)

    def read(self, pages: torch.Tensor, name: str) -> torch.Tensor:
        """One array of every page, as ``write`` takes it: codes uint8, others float32."""
        view = self._view(pages, name)
        if self.fields[name].kind == "codes":
            return self._orders[name].natural(unpack_bits(view, self.bits))
        return self._orders[name].natural(view.float())

    def all_finite(self, pages: torch.Tensor) -> bool:
        """Whether no scale, zero or norm of (n, page_bytes) uint8 pages is NaN or infinite."""
        names = [name for name, field in self.fields.items() if field.kind != "codes"]
        return all(all_finite(self._view(pages, name)) for name in names)

    def _view(self, pages: torch.Tensor, name: str) -> torch.Tensor:
        """Typed view of a field: (n, KV heads, elements), of shared norms (n, elements)."""
        field = self.fields[name]
        source = pages
        if field.per_head:
            source = pages[:, : self.head_bytes * self.kv_heads].unflatten(1, (self.kv_heads, -1))
        return source[..., field.offset : field.offset + field.nbytes].view(field.dtype)


def all_finite(values: torch.Tensor) -> bool:
    """Whether none of them is NaN or infinite."""
    # In one pass and without a copy; NaN goes through to both.
    return not values.numel() or all(bool(end.isfinite()) for end in torch.aminmax(values))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
