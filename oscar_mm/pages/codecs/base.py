"""PageCodec: base class of page formats, and the classes that describe pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from oscar_mm.errors import InputError
from oscar_mm.pages.fragments import CODE_PLANES, Order
from oscar_mm.policy import PAGE_TOKENS, Bits, KVPolicy, Limit
from oscar_mm.quant.basis import Basis


def divided_group(group: int, channels: int) -> int:
    """Return the number of channels per group: the largest divisor of ``channels`` that is at most
    ``group``."""
    return next(size for size in range(min(group, channels), 0, -1) if channels % size == 0)


@dataclass(frozen=True)
class PageShape:
    """Parameters of a layer's pages for one pair of bit widths; see ``KVPolicy``.

    Attributes:
        key_axis: name of the codec.
        key_group: see ``PageCodec.key_group``.
        value_group: number of channels per value group, a divisor of head_dim.
    """

    bits: Bits
    kv_heads: int
    head_dim: int
    key_axis: str
    key_group: int
    value_group: int
    token_scaling: str | None
    center: bool = False


@dataclass(frozen=True)
class Fitting:
    """Policy fields that define how numbers are fitted to a page's codes; see ``KVPolicy``."""

    rotate: bool
    fit: str
    norm: str
    value_scale: str

    @property
    def unbiased_keys(self) -> bool:
        """Whether key scales are corrected by ``oscar_mm.quant.fit.unbiased_scale``."""
        return self.fit == "lsq" and self.norm == "unbiased"

    @property
    def lowers_score_error(self) -> bool:
        """Whether keys with their own scales get the codes of
        ``oscar_mm.quant.fit.lower_score_error`` instead of the nearest codes."""
        return self.rotate and self.unbiased_keys


class Array(NamedTuple):
    """Description of an array of a page.

    Attributes:
        name: unique name.
        shape: shape of the array in natural order; (128, n) if each token has n elements.
        dtype: dtype of the elements in the page; uint8 for codes.
        kind: category in the memory report: "codes", "scales" (including zeros) or "norms".
        bits: bits per code (1, 2, 3, 4 or 8) if the elements are integer codes; 0 if they are
            numbers of ``dtype``.
        per_head: whether each KV head has its own array; otherwise, all heads share one array.
        of_tokens: whether the first dimension is tokens.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float16
    kind: str = "scales"
    bits: int = 0
    per_head: bool = True
    of_tokens: bool = True

    @classmethod
    def codes(cls, name: str, channels: int, bits: int) -> Array:
        """Describe an array with the codes of a page's tokens, ``channels`` codes per token."""
        return cls(name, (PAGE_TOKENS, channels), torch.uint8, "codes", bits)


Arrays = Mapping[str, torch.Tensor]


class PageCodec(ABC):
    """Page format: defines a page's arrays and how keys and values are encoded and decoded.

    Codecs have no state; ``oscar_mm.pages.codecs.registry`` contains one instance of each class. A
    subclass must define ``key_axis``, ``arrays``, ``encode`` and ``decode``; it then runs with
    PyTorch operations. Token placement and kernels read the other members.

    Attributes:
        key_axis: value of ``KVPolicy.key_axis`` that selects the format.
        limits: limits on the values of other policy fields.
        appends_tokens: whether tokens are written one by one, when they leave the window, to the
            next position in a page (``oscar_mm.ops.store``), and can be cleared one by one. If
            true, each array that is ``of_tokens`` must have the shape (128, n) and be per head. If
            false, a page is written once, with 128 tokens (``oscar_mm.ops.pack``).
        has_kernels: whether the kernels can convert the format's codes to numbers.
    """

    key_axis: ClassVar[str]
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("center", (False,), "these pages have no center"),
        Limit("token_scaling", (None,), "these pages have no norms"),
    )
    appends_tokens: ClassVar[bool] = True
    has_kernels: ClassVar[bool] = False

    @abstractmethod
    def arrays(self, page: PageShape) -> list[Array]:
        """Return the arrays of a page in byte order; arrays that the heads share come last."""

    @abstractmethod
    def encode(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        page: PageShape,
        fitting: Fitting,
        basis: Basis,
        centers: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Encode keys and values of tokens to the content of the arrays.

        If ``appends_tokens`` is true, each token must be encoded independently of the others.

        Args:
            keys, values: (n, KV heads, tokens, head_dim) in the model's coordinates, any float
                dtype; either n pages of 128 tokens, or n single tokens.
            page: parameters of the pages.
            fitting: how values are fitted.
            basis: conversion to stored coordinates: ``basis.keys_in(keys)`` and
                ``basis.values_in(values)`` return float32.
            centers: (n, KV heads, head_dim) float32, the center of each page in stored coordinates;
                None for formats without a center.

        Returns:
            Array name -> numbers or codes, (n, KV heads, tokens, elements), in any dtype. Arrays
            that are not ``of_tokens``, or that the heads share, have the shape (n, *array shape),
            with KV heads after n if they are per head.
        """

    @abstractmethod
    def decode(self, arrays: Arrays, page: PageShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode arrays to keys and values in stored coordinates, (n, KV heads, 128, head_dim)
        float32 each.

        Args:
            arrays: arrays of n pages by name, in the shapes that ``encode`` returns; codes are
                uint8, other numbers float32. Elements of unused tokens may have any value.
            page: parameters of the pages.
        """

    def check(self, page: PageShape) -> None:
        """Raise InputError if the format does not support such pages; a token's codes must fill
        whole bytes."""
        codes = [array.bits for array in self.arrays(page) if array.bits]
        unit = max((8 // plane for bits in codes for plane in CODE_PLANES[bits]), default=1)
        if page.head_dim % unit:
            instead = "bits of 2 or 4, or " * (3 in codes and page.head_dim % 4 == 0)
            raise InputError(
                f"head_dim={page.head_dim}: pages of {page.bits} bits need a multiple of {unit}: "
                f"use {instead}policy 'bf16' for this model"
            )

    def key_group(self, group: int | str, head_dim: int) -> int:
        """Return the size of a key group for the policy's ``key_group``; by default, a number of
        channels of one token."""
        return head_dim if isinstance(group, str) else divided_group(group, head_dim)

    def centers_keys(self, policy: KVPolicy) -> bool:
        """Return whether a page stores the common part of its keys separately and exactly."""
        return policy.center

    def min_tokens(self, page_bytes: int, token_bytes: int) -> int:
        """Return the minimum number of tokens to begin a page with; with fewer tokens, a page takes
        more bytes than the unpacked tokens.

        Args:
            page_bytes: size of a page in bytes.
            token_bytes: size of a token in 16-bit precision, in bytes.
        """
        return -(-page_bytes // token_bytes) if self.appends_tokens else PAGE_TOKENS

    def in_fragments(self, page: PageShape) -> bool:
        """Return whether the arrays are in the order that kernels read
        (``oscar_mm.pages.fragments``)."""
        return False

    def orders(self, page: PageShape) -> dict[str, Order]:
        """Return the orders of arrays that are not stored in natural order, by name."""
        return {}

    def macros(self, page: PageShape) -> dict[str, str | int]:
        """Return the macros for csrc/common/page.cuh (name -> value) of pages ``in_fragments``."""
        raise NotImplementedError(f"no kernel reads pages of key_axis {self.key_axis!r}")
