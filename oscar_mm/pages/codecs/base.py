"""PageCodec: the base class of page formats, and what it says about pages."""

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
    """Return the channels of a value group: the largest divisor of ``channels`` up to ``group``."""
    return next(size for size in range(min(group, channels), 0, -1) if channels % size == 0)


@dataclass(frozen=True)
class PageShape:
    """Parameters of the pages of one layer for one pair of bit widths; ``KVPolicy`` explains them.

    Attributes:
        key_axis: name of the codec.
        key_group: see ``PageCodec.key_group``.
        value_group: channels of a value group, a divisor of head_dim.
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
    """How values are fitted to what a page can store; ``KVPolicy`` explains the fields."""

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
        """Whether keys that have scales of their own get the codes of
        ``oscar_mm.quant.fit.lower_score_error`` instead of the nearest ones."""
        return self.rotate and self.unbiased_keys


class Array(NamedTuple):
    """An array of a page.

    Attributes:
        name: unique name.
        shape: shape of its elements in natural order: (128, n) if each token has n of them.
        dtype: dtype in the page; of codes, uint8.
        kind: "codes", "scales" (with zeros) or "norms", as the memory report sums them.
        bits: bits of a code, 1, 2, 3, 4 or 8, which is an integer; 0 if the elements are numbers of
            the dtype.
        per_head: whether every KV head has such an array; otherwise the heads share one.
        of_tokens: whether its first dimension is the page's tokens.
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
        """Return the codes of all tokens of a page, ``channels`` codes each."""
        return cls(name, (PAGE_TOKENS, channels), torch.uint8, "codes", bits)


Arrays = Mapping[str, torch.Tensor]


class PageCodec(ABC):
    """A page format: its arrays, how keys and values become arrays and how they are read again.

    Codecs have no state: ``oscar_mm.pages.codecs.registry`` has one instance of each class.
    A subclass needs a name, ``arrays``, ``encode`` and ``decode``; it then runs on PyTorch
    operations. The other members tell placement and kernels what else is possible.

    Attributes:
        key_axis: value of ``KVPolicy.key_axis`` that selects the format.
        limits: what the format allows in other fields of the policy.
        appends_tokens: whether each token is written when it leaves the window, to the next place
            of a page (``oscar_mm.ops.store``), and can be cleared alone; every array that is
            ``of_tokens`` then has the shape (128, n), per head. Otherwise pages are written once,
            with 128 tokens (``oscar_mm.ops.pack``).
        has_kernels: whether the kernels know how the format's codes become numbers.
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
        """Return the arrays of a page in byte order; shared ones come after all heads."""

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
        """Return the content of the arrays for tokens.

        Tokens must not depend on each other if the format ``appends_tokens``.

        Args:
            keys, values: (n, KV heads, tokens, head_dim) in the model's coordinates, any float
                dtype. There are n pages of 128 tokens, or n single tokens.
            page: parameters of the pages.
            fitting: how values are fitted.
            basis: stored coordinates: ``basis.keys_in(keys)`` and ``basis.values_in(values)`` are
                float32.
            centers: (n, KV heads, head_dim) float32, the stored center of each page, in stored
                coordinates; None for formats without a center.

        Returns:
            By name of the array: (n, KV heads, tokens, elements) numbers or codes, of any dtype;
            arrays that are not ``of_tokens`` or that heads share have their own shape after n.
        """

    @abstractmethod
    def decode(self, arrays: Arrays, page: PageShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values in stored coordinates, (n, KV heads, 128, head_dim) float32 each.

        Args:
            arrays: arrays of n pages by name, in the shapes of ``encode``: codes are uint8, other
                numbers float32. Places that no token has taken have any content.
            page: parameters of the pages.
        """

    def check(self, page: PageShape) -> None:
        """Raise InputError if there are no such pages: codes must fill whole bytes."""
        codes = [array.bits for array in self.arrays(page) if array.bits]
        unit = max((8 // plane for bits in codes for plane in CODE_PLANES[bits]), default=1)
        if page.head_dim % unit:
            instead = "bits of 2 or 4, or " * (3 in codes and page.head_dim % 4 == 0)
            raise InputError(
                f"head_dim={page.head_dim}: pages of {page.bits} bits need a multiple of {unit}; "
                f"use {instead}policy 'bf16' for this model"
            )

    def key_group(self, group: int, head_dim: int) -> int:
        """Return the size of a key group for the policy's ``key_group``: channels of a token."""
        return divided_group(group, head_dim)

    def centers_keys(self, policy: KVPolicy) -> bool:
        """Return whether a page stores the common part of its keys separately, without error."""
        return policy.center

    def min_tokens(self, page_bytes: int, token_bytes: int) -> int:
        """Return the number of tokens that begin a page, which takes no more bytes than they do.

        Args:
            page_bytes: bytes of a page.
            token_bytes: bytes of a token in 16-bit precision.
        """
        return -(-page_bytes // token_bytes) if self.appends_tokens else PAGE_TOKENS

    def in_fragments(self, page: PageShape) -> bool:
        """Return whether the arrays are in the kernels' order (``oscar_mm.pages.fragments``)."""
        return False

    def orders(self, page: PageShape) -> dict[str, Order]:
        """Return the orders of arrays that are not stored in natural order, by name."""
        return {}

    def macros(self, page: PageShape) -> dict[str, str | int]:
        """Return the macros of csrc/common/page.cuh, for pages that are ``in_fragments``."""
        raise NotImplementedError(f"no kernel reads pages of key_axis {self.key_axis!r}")
