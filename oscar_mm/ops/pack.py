"""pack: 16-bit keys and values of whole pages of key_axis "channel" -> page bytes.

    pack(Tensor keys, Tensor values, Tensor recent, Tensor source, Tensor rows, Tensor slots,
         Tensor(a!) pages, Tensor(b!) bad, Tensor? sigma, str format, bool rotate, str fit,
         str norm, str value_scale) -> ()

    keys, values  (batch, KV heads, tokens, head_dim) of new tokens after RoPE, bfloat16, float16
                  or float32; any strides with contiguous channels
    recent        (slots, 2, KV heads, head_dim) in the same dtype: tokens from before
    source        (n, 128) int32, where a page's tokens are: an index of keys and values, or
                  ~slot of recent
    rows          (n,) int32: of the batch
    slots         (n,) int32: which of ``pages`` is written; below 0 nothing is done, so that a
                  captured graph can have a fixed n
    pages         (pool slots, page_bytes) uint8; written
    bad           (1,) int32; set to 1 where a scale, zero or norm is NaN, infinite or beyond
                  float16 (65504), else left alone. That is so where the input is NaN, infinite or
                  beyond float16, and may be so beyond a quarter of it, as a fit by least squares
                  can reach beyond the values
    sigma         (KV heads or 1, head_dim) float32: balancing, with reciprocals that are bfloat16
              numbers (the kernel rounds others); None for none
    format        of the pages (``oscar_mm.ops.library``)
    rotate, fit, norm, value_scale   as in ``KVPolicy``

What ``recent`` holds may be given up as soon as this returns: later work of the same stream comes
after it.
"""

from __future__ import annotations

import torch

from oscar_mm.ops import pack_kernel
from oscar_mm.ops.library import STATES, Arguments, define, format_of, text_of
from oscar_mm.ops.pack_torch import pack_by_torch
from oscar_mm.ops.store import whole_pages
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import KVPolicy
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.quantize import Recipe

NOT_STORABLE = "keys or values hold NaN, infinity or numbers beyond float16 (65504)"
_NORMS = ("plain", "refit", "unbiased")
_arguments = Arguments("pack")


def pack(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_format: PageFormat,
    policy: KVPolicy,
    basis: Basis,
) -> torch.Tensor:
    """Quantize whole pages, by this operation or, of key_axis "token", by ``store``.

    Args:
        keys: (pages, KV heads, 128, head_dim), float32, bfloat16 or float16, after RoPE; any
            stride.
        values: the same shape and dtype.
        page_format: layout of the pages.
        policy: fit, norm, token scaling and scale of values.
        basis: balancing and rotation of the layer.

    Returns:
        (pages, page_bytes) uint8.

    Raises:
        FloatingPointError: what ``bad`` tells. Finding out waits for the device.
    """
    expected = (page_format.kv_heads, PAGE_TOKENS, page_format.head_dim)
    if tuple(keys.shape[1:]) != expected or values.shape != keys.shape:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)}: "
            f"must both be (pages, {', '.join(map(str, expected))})"
        )
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    of_pages = whole_pages if page_format.by_token else _whole_pages
    pages, bad = of_pages(keys, values, page_format, policy, basis)
    if bool(bad):
        raise FloatingPointError(NOT_STORABLE)
    return pages


def _whole_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_format: PageFormat,
    policy: KVPolicy,
    basis: Basis,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of key_axis "channel", and ``bad``."""
    count, (_, heads, _, head_dim) = len(keys), keys.shape
    order = torch.arange(max(count, PAGE_TOKENS), dtype=torch.int32, device=keys.device)
    rows = order[:count]
    pages = torch.zeros(count, page_format.page_bytes, dtype=torch.uint8, device=keys.device)
    bad = torch.zeros(1, dtype=torch.int32, device=keys.device)
    pack_jobs(
        *(keys, values, keys.new_empty(0, 2, heads, head_dim)),
        *(order[:PAGE_TOKENS].repeat(count, 1), rows, rows, pages, bad, basis.sigma),
        *(text_of(page_format), basis.rotate, policy.fit, policy.norm, policy.value_scale),
    )
    return pages, bad


def _check(
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    source: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    bad: torch.Tensor,
    sigma: torch.Tensor | None,
    format: str,
    rotate: bool,
    fit: str,
    norm: str,
    value_scale: str,
) -> None:
    page_format, device = format_of(format), keys.device
    heads, head_dim, count = page_format.kv_heads, page_format.head_dim, source.shape[0]
    check = _arguments.check
    check("keys", keys, ("batch", heads, "tokens", head_dim), STATES, device, rows=True)
    check("values", values, keys.shape, keys.dtype, device, rows=True)
    check("recent", recent, ("slots", 2, heads, head_dim), keys.dtype, device)
    check("source", source, ("pages", PAGE_TOKENS), torch.int32, device)
    check("rows", rows, (count,), torch.int32, device)
    check("slots", slots, (count,), torch.int32, device)
    check("pages", pages, ("slots", page_format.page_bytes), torch.uint8, device)
    check("bad", bad, (1,), torch.int32, device)
    _arguments.check_sigma(sigma, heads, head_dim, device)
    if page_format.by_token:
        _arguments.refuse(
            "format", f"of key_axis {page_format.key_axis!r}", "of key_axis 'channel'"
        )
    _arguments.check_recipe(fit, norm, _NORMS, value_scale)


def _pack(
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    source: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    bad: torch.Tensor,
    sigma: torch.Tensor | None,
    format: str,
    rotate: bool,
    fit: str,
    norm: str,
    value_scale: str,
) -> None:
    tensors = (keys, values, recent, source, rows, slots, pages, bad, sigma)
    _check(*tensors, format, rotate, fit, norm, value_scale)
    if not len(source):
        return
    recipe = Recipe(format_of(format), rotate, fit, norm, value_scale)
    kernel = pack_kernel.kernel_for(recipe, keys.dtype, keys.device)
    if kernel is None:
        pack_by_torch(*tensors, recipe)
    else:
        pack_kernel.launch(kernel, *tensors, recipe)


pack_jobs = define(
    "pack(Tensor keys, Tensor values, Tensor recent, Tensor source, Tensor rows, Tensor slots,"
    " Tensor(a!) pages, Tensor(b!) bad, Tensor? sigma, str format, bool rotate, str fit, str norm,"
    " str value_scale) -> ()",
    _pack,
    _check,
)
