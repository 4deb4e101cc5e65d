"""Registry of page formats by the policy's key_axis."""

from __future__ import annotations

from typing import TypeVar

from oscar_mm.pages.codecs.base import PageCodec, PageShape
from oscar_mm.pages.codecs.channel import ChannelCodec
from oscar_mm.pages.codecs.stream import StreamCodec
from oscar_mm.policy import KEY_AXES, KVPolicy

C = TypeVar("C", bound=PageCodec)
_CODECS: dict[str, PageCodec] = {codec.key_axis: codec() for codec in (ChannelCodec, StreamCodec)}
"""Codecs by key_axis; operations of this process identify a codec by its index in this dict."""


def register_codec(codec: type[C]) -> type[C]:
    """Register a page format; use this function as a class decorator.

    Policies then accept its ``key_axis``. Register the format before you create such a policy or
    load a file with such a policy.

    Raises:
        ValueError: if another format already has this key_axis.
    """
    other = _CODECS.get(codec.key_axis)
    if other is not None:
        raise ValueError(
            f"{codec.__name__}: {type(other).__name__} already has key_axis {codec.key_axis!r}"
        )
    KEY_AXES[codec.key_axis] = codec.limits
    _CODECS[codec.key_axis] = codec()
    return codec


def codec_of(owner: KVPolicy | PageShape) -> PageCodec:
    """Return the codec of a policy or of pages."""
    return _CODECS[owner.key_axis]


def codec_number(key_axis: str) -> int:
    """Return the number of a page format in this process: 0 for "channel", 1 for "token", ..."""
    return list(_CODECS).index(key_axis)


def key_axis_of(number: int) -> str:
    """Return the key_axis of the page format with the given number.

    Raises:
        IndexError: if there is no such format.
    """
    return list(_CODECS)[number]
