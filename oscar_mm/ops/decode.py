"""decode: attention of 1 to 16 new tokens over packed pages, tokens in 16 bit and themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oscar_mm.kernels.launch import OUT_OF_ORDER, has_loops, tell_once
from oscar_mm.ops.decode_kernel import decode_kernel
from oscar_mm.ops.decode_tables import FIELDS
from oscar_mm.ops.decode_torch import DecodeArguments, decode_by_torch
from oscar_mm.ops.library import STATES, ArgumentChecker, define
from oscar_mm.pages.layout import PageFormat

MAX_QUERY_TOKENS = 16
_checker = ArgumentChecker("decode")


def _check(arguments: DecodeArguments) -> None:
    queries, keys, check, device = *arguments[:2], _checker.check, arguments.queries.device
    shape = ("batch", "query heads", "tokens", "d")
    check("queries", queries, shape, STATES, device, rows=True)
    batch, query_heads, tokens, head_dim = queries.shape
    if not 1 <= tokens <= MAX_QUERY_TOKENS:
        _checker.refuse("queries", f"of {tokens} tokens", f"of 1 to {MAX_QUERY_TOKENS}")
    check("keys", keys, (batch, "KV heads", tokens, head_dim), queries.dtype, device, rows=True)
    check("values", arguments.values, keys.shape, queries.dtype, device, rows=True)
    kv_heads = keys.shape[1]
    if query_heads % kv_heads:
        wanted = f"of a multiple of {kv_heads}, the KV heads"
        _checker.refuse("queries", f"of {query_heads} heads", wanted)
    dtypes = (queries.dtype, torch.bfloat16) if queries.dtype == torch.float32 else queries.dtype
    check("recent", arguments.recent, ("slots", 2, kv_heads, head_dim), dtypes, device)
    pages, formats = arguments.pages, arguments.page_formats
    if len(pages) != len(formats):
        _checker.refuse("pages", f"of {len(pages)} pools", f"of {len(formats)}, as formats")
    for pool, page_format in zip(pages, formats, strict=True):
        if (page_format.kv_heads, page_format.head_dim) != (kv_heads, head_dim):
            found = f"for {page_format.kv_heads} heads of {page_format.head_dim}"
            _checker.refuse("formats", found, f"for {kv_heads} of {head_dim}, as keys")
        check("pages", pool, ("slots", page_format.page_bytes), torch.uint8, device)
    _checker.check_sigma(arguments.sigma, kv_heads, head_dim, device, batch)
    check("items", arguments.items, (batch, "longest", 2), torch.int32, device)
    check("recents", arguments.recents, (batch, "longest"), torch.int32, device)
    check("counts", arguments.counts, (batch, 2), torch.int32, device)
    check("assignments", arguments.assignments, ("thread blocks", FIELDS), torch.int32, device)


def _decode(arguments: DecodeArguments) -> torch.Tensor:
    queries, formats = arguments.queries, arguments.page_formats
    columns = queries.shape[1] // arguments.keys.shape[1] * queries.shape[2]
    how = (queries.shape[3], arguments.rotate, queries.dtype, columns, queries.device)
    kernel = decode_kernel(formats, *how) or (_loops(formats) if queries.is_cpu else None)
    return (kernel or decode_by_torch)(arguments)


def _loops(formats: tuple[PageFormat, ...]) -> Callable[[DecodeArguments], torch.Tensor] | None:
    """What is compiled for CPUs; None, with the reason once in the log, for PyTorch operations."""
    if not has_loops("decode"):
        return None
    # Not before it is used: it brings a compiler.
    from oscar_mm.ops.decode_cpu import decode_on_cpu, reads

    if all(map(reads, formats)):
        return decode_on_cpu
    tell_once("decode", OUT_OF_ORDER)
    return None


decode = define("decode", DecodeArguments, _check, _decode, "Tensor")
