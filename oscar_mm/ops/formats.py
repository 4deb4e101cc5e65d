"""Page formats as text: what the operations take, whose arguments are tensors and plain values."""

from __future__ import annotations

from functools import lru_cache

from oscar_mm.cache.layout import PageFormat
from oscar_mm.policy import Bits


@lru_cache(maxsize=256)
def text_of(page_format: PageFormat) -> str:
    """Like "3/2 bits, 8 heads of 128, token 128, value 128, plain, center"."""
    scaling = page_format.token_scaling
    return (
        f"{page_format.bits} bits, {page_format.kv_heads} heads of {page_format.head_dim}, "
        f"{page_format.key_axis} {page_format.key_group}, value {page_format.value_group}, "
        f"{'plain' if scaling is None else scaling}{', center' if page_format.center else ''}"
    )


@lru_cache(maxsize=256)
def format_of(text: str) -> PageFormat:
    """The inverse of ``text_of``.

    Raises:
        ValueError: a text that it does not make.
    """
    try:
        bits, heads, keys, values, scaling, *center = text.split(", ")
        widths = [int(width) for width in bits.removesuffix(" bits").split("/")]
        kv_heads, head_dim = heads.split(" heads of ")
        key_axis, key_group = keys.split(" ")
        page_format = PageFormat(
            bits=Bits(widths[0], widths[-1]),
            kv_heads=int(kv_heads),
            head_dim=int(head_dim),
            key_axis=key_axis,
            key_group=int(key_group),
            value_group=int(values.removeprefix("value ")),
            token_scaling=None if scaling == "plain" else scaling,
            center=bool(center),
        )
        known = text_of(page_format) == text and (
            key_axis in ("channel", "token") and scaling in ("plain", "shared", "per_head")
        )
    except (KeyError, ValueError, ZeroDivisionError):
        known = False
    if not known:
        raise ValueError(
            f"page format {text!r}: must be like '3/2 bits, 8 heads of 128, token 128, value 128, "
            "plain, center' (oscar_mm.ops.formats.text_of)"
        )
    return page_format
