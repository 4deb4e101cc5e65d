"""What ``decode`` is given, and ``decode`` by PyTorch operations."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from oscar_mm.ops.decode_tables import SECOND, START
from oscar_mm.ops.library import FORMAT_NUMBERS, ArgumentChecker, format_of, sigma_of
from oscar_mm.ops.merged_attention import MergedAttention
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.quantize import unpack_stored

_TOKENS_AT_ONCE = 2048
"""Tokens of the past that are in memory at a time, in float32, without a kernel."""
_FEW = 16_384
"""Most tokens that are unpacked for all rows in one pass; more are unpacked row by row."""
_checker = ArgumentChecker("decode")


class DecodeArguments(NamedTuple):
    """Arguments of ``decode``.

    The result is (batch, query heads, tokens, head_dim), in memory by tokens, then heads.

    Attributes:
        queries: (batch, query heads, tokens, head_dim) bfloat16, float16 or float32; any strides
            with contiguous channels.
        keys: (batch, KV heads, tokens, head_dim) of the new tokens, in the same dtype; attention
            over them is causal.
        values: the shape of keys.
        pages: one pool, (slots, page_bytes) uint8, for each of ``formats``: at most two.
        recent: (slots, 2, KV heads, head_dim): tokens in 16 bit, in the dtype of queries; also in
            bfloat16 where that is float32.
        sigma: (KV heads or 1, head_dim) float32: balancing of the pages; or (batch, KV heads or 1,
            head_dim): each row's own; None for none.
        items, recents, counts, assignments: of ``oscar_mm.ops.decode_tables.Tables``.
        scaling: factor of the scores.
        formats: of the pages (``oscar_mm.ops.library.numbers_of``), by ascending bits.
        rotate: whether pages are stored rotated.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: list[torch.Tensor]
    recent: torch.Tensor
    sigma: torch.Tensor | None
    items: torch.Tensor
    recents: torch.Tensor
    counts: torch.Tensor
    assignments: torch.Tensor
    scaling: float
    formats: list[int]
    rotate: bool

    @property
    def page_formats(self) -> tuple[PageFormat, ...]:
        """Layouts of the pages; ValueError if they are not such as ``formats`` may have."""
        return _formats(tuple(self.formats))

    def result(self) -> torch.Tensor:
        """What ``decode`` returns, without data."""
        batch, query_heads, tokens, head_dim = self.queries.shape
        return self.queries.new_empty(batch, tokens, query_heads, head_dim).transpose(1, 2)


def decode_by_torch(arguments: DecodeArguments) -> torch.Tensor:
    """``decode`` by PyTorch operations, a row at a time; waits for the device."""
    queries, keys, values, pages, recent, sigma, items, recents, counts, *_ = arguments
    output = arguments.result()
    all_pages = items[torch.arange(items.shape[1], device=items.device) < counts[:, 1:2]]
    few = [
        _FewPages(pages[number], all_pages[(all_pages[:, 1] >= SECOND) == bool(number)][:, 0], one)
        for number, one in enumerate(arguments.page_formats)
    ]
    for row, (in_16_bit, in_pages) in enumerate(counts.tolist()):
        of_row = slice(row, row + 1)
        plain = MergedAttention(queries[of_row].float(), arguments.scaling)
        plain.add(keys[of_row].float(), values[of_row].float(), causal=True)
        for slots in recents[row, :in_16_bit].split(_TOKENS_AT_ONCE) if in_16_bit else ():
            stored = recent[slots].permute(1, 2, 0, 3).float()
            plain.add(stored[:1], stored[1:])
        # In the coordinates of pages; scores are the same in either.
        basis = Basis(queries.shape[3], arguments.rotate, sigma_of(sigma, row))
        turned = basis.queries_in(queries[row].reshape(keys.shape[1], -1, queries.shape[3]))
        packed = MergedAttention(turned.view_as(queries[of_row]), arguments.scaling)
        entries = items[row, :in_pages]
        for number, stored_pages in enumerate(few):
            mine = entries[(entries[:, 1] >= SECOND) == bool(number)]
            for part in mine.split(_TOKENS_AT_ONCE // PAGE_TOKENS) if len(mine) else ():
                stored = stored_pages[part[:, 0]]
                used = part[:, 1] % SECOND
                packed.add(*(_in_use(side, used // START, used % START) for side in stored))
        if in_pages:
            plain.merge(basis.values_out(packed.output()), packed.total)
        output[row] = plain.output()[0]
    return output


class _FewPages:
    """Keys and values of pages, unpacked in one pass for all rows unless they are many.

    Args:
        pages: (slots, page_bytes) uint8.
        slots: (n,) slots that are asked for.
        page_format: of the pages.
    """

    def __init__(self, pages: torch.Tensor, slots: torch.Tensor, page_format: PageFormat) -> None:
        self._pages, self._format = pages, page_format
        self._slots = slots.unique()
        few = 0 < len(self._slots) <= _FEW // PAGE_TOKENS
        self._unpacked = unpack_stored(pages[self._slots], page_format) if few else None

    def __getitem__(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of (n,) slots, each (n, KV heads, 128, d) float32."""
        if self._unpacked is None:
            return unpack_stored(self._pages[slots], self._format)
        places = torch.searchsorted(self._slots, slots.contiguous())
        keys, values = self._unpacked
        return keys[places], values[places]


def _in_use(states: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """(n, KV heads, tokens, d) -> (1, KV heads, tokens from starts to stops - 1, d)."""
    places = torch.arange(states.shape[2], device=states.device)
    used = (places >= starts[:, None]) & (places < stops[:, None])
    joined = states.transpose(0, 1).flatten(1, 2)[None]
    return joined if bool(used.all()) else joined[:, :, used.flatten()]


@lru_cache(maxsize=64)
def _formats(numbers: tuple[int, ...]) -> tuple[PageFormat, ...]:
    starts = range(0, len(numbers), FORMAT_NUMBERS)
    formats = tuple(format_of(numbers[start : start + FORMAT_NUMBERS]) for start in starts)
    bits = [page_format.bits for page_format in formats]
    if len(bits) > 2 or bits != sorted(set(bits)):
        _checker.refuse("formats", f"of {bits} bits", "at most two, by ascending bits")
    return formats
