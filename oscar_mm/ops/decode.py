"""decode: attention of 1 to 16 new tokens over packed pages, tokens in 16 bit and themselves.

    decode(Tensor queries, Tensor keys, Tensor values, Tensor[] pages, Tensor recent,
           Tensor? sigma, Tensor items, Tensor recents, Tensor counts, Tensor assignments,
           float scaling, str[] formats, bool rotate) -> Tensor

    queries       (batch, query heads, tokens, head_dim) bfloat16, float16 or float32; any strides
                  with contiguous channels
    keys, values  (batch, KV heads, tokens, head_dim) of the new tokens, likewise; attention over
                  them is causal
    pages         one pool, (slots, page_bytes) uint8, for each of ``formats``: at most two
    recent        (slots, 2, KV heads, head_dim): tokens in 16 bit
    sigma         (KV heads or 1, head_dim) float32: balancing of the pages; None for none
    items, recents, counts, assignments   of ``oscar_mm.ops.decode_tables.Tables``
    scaling       factor of the scores
    formats       of the pages (``oscar_mm.ops.library``), by ascending bits
    rotate        whether pages are stored rotated
    result        (batch, query heads, tokens, head_dim), in memory by tokens, then heads

The same bits from run to run. Calls may overlap on several streams and be captured in several
CUDA graphs: what a launch needs besides its arguments is its stream's or its graph's own.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from oscar_mm.ops.decode_kernel import MAX_QUERY_TOKENS, packed_attention
from oscar_mm.ops.decode_tables import FIELDS
from oscar_mm.ops.decode_torch import decode_by_torch
from oscar_mm.ops.library import STATES, Arguments, define, format_of
from oscar_mm.pages.layout import PageFormat

_arguments = Arguments("decode")


def _empty(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: list[torch.Tensor],
    recent: torch.Tensor,
    sigma: torch.Tensor | None,
    items: torch.Tensor,
    recents: torch.Tensor,
    counts: torch.Tensor,
    assignments: torch.Tensor,
    scaling: float,
    formats: list[str],
    rotate: bool,
) -> torch.Tensor:
    """Check the arguments; a result without data."""
    check, device = _arguments.check, queries.device
    shape = ("batch", "query heads", "tokens", "d")
    check("queries", queries, shape, STATES, device, rows=True)
    batch, query_heads, tokens, head_dim = queries.shape
    if not 1 <= tokens <= MAX_QUERY_TOKENS:
        _arguments.refuse("queries", f"of {tokens} tokens", f"of 1 to {MAX_QUERY_TOKENS}")
    check("keys", keys, (batch, "KV heads", tokens, head_dim), queries.dtype, device, rows=True)
    check("values", values, keys.shape, queries.dtype, device, rows=True)
    kv_heads = keys.shape[1]
    if query_heads % kv_heads:
        found, wanted = f"of {query_heads} heads", f"of a multiple of {kv_heads}, the KV heads"
        _arguments.refuse("queries", found, wanted)
    check("recent", recent, ("slots", 2, kv_heads, head_dim), queries.dtype, device)
    known = _formats(tuple(formats))
    if len(pages) != len(known):
        _arguments.refuse("pages", f"of {len(pages)} pools", f"of {len(known)}, as formats")
    for pool, page_format in zip(pages, known, strict=True):
        if (page_format.kv_heads, page_format.head_dim) != (kv_heads, head_dim):
            found = f"for {page_format.kv_heads} heads of {page_format.head_dim}"
            _arguments.refuse("formats", found, f"for {kv_heads} of {head_dim}, as keys")
        check("pages", pool, ("slots", page_format.page_bytes), torch.uint8, device)
    _arguments.check_sigma(sigma, kv_heads, head_dim, device)
    check("items", items, (batch, "longest", 2), torch.int32, device)
    check("recents", recents, (batch, "longest"), torch.int32, device)
    check("counts", counts, (batch, 2), torch.int32, device)
    check("assignments", assignments, ("thread blocks", FIELDS), torch.int32, device)
    return empty_output(queries)


def empty_output(queries: torch.Tensor) -> torch.Tensor:
    """What ``decode`` returns, without data."""
    batch, query_heads, tokens, head_dim = queries.shape
    return queries.new_empty(batch, tokens, query_heads, head_dim).transpose(1, 2)


def _decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: list[torch.Tensor],
    recent: torch.Tensor,
    sigma: torch.Tensor | None,
    items: torch.Tensor,
    recents: torch.Tensor,
    counts: torch.Tensor,
    assignments: torch.Tensor,
    scaling: float,
    formats: list[str],
    rotate: bool,
) -> torch.Tensor:
    states, tables = (
        (queries, keys, values, pages, recent, sigma),
        (items, recents, counts, assignments),
    )
    output = _empty(*states, *tables, scaling, formats, rotate)
    known = _formats(tuple(formats))
    columns = queries.shape[1] // keys.shape[1] * queries.shape[2]
    kernel = packed_attention(
        known, queries.shape[3], rotate, queries.dtype, columns, queries.device
    )
    if kernel is None:
        return output.copy_(decode_by_torch(*states, *tables[:3], scaling, known, rotate))
    kernel(*states, *tables, scaling, output)
    return output


@lru_cache(maxsize=64)
def _formats(texts: tuple[str, ...]) -> tuple[PageFormat, ...]:
    formats = tuple(map(format_of, texts))
    bits = [page_format.bits for page_format in formats]
    if len(bits) > 2 or bits != sorted(set(bits)):
        _arguments.refuse("formats", f"of {bits} bits", "at most two, by ascending bits")
    return formats


decode = define(
    "decode(Tensor queries, Tensor keys, Tensor values, Tensor[] pages, Tensor recent,"
    " Tensor? sigma, Tensor items, Tensor recents, Tensor counts, Tensor assignments,"
    " float scaling, str[] formats, bool rotate) -> Tensor",
    _decode,
    _empty,
)
