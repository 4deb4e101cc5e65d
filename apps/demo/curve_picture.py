"""The memory curve of a conversation as a picture to pass on."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from oscar_mm.apps.demo.charts import round_up
from oscar_mm.apps.demo.measured_chat import PARTS, MemoryCurve, MemorySample
from oscar_mm.apps.demo.memory_panel import axis_bytes
from oscar_mm.sizes import format_bytes

SIZE = (1200, 630)
"""Width and height in pixels: what sites show of a link."""
COLORS = {
    "text": "#2f6fb7",
    "image": "#d98200",
    "video": "#12956a",
    "audio": "#b8518c",
    "speech": "#b5482f",
    "states": "#7a5bc7",
    "tables": "#8a94a6",
}
"""Colors of the page's light theme, by part of the memory."""
_INK, _SOFT, _LINE, _LEAD = "#16202e", "#586579", "#d9e0ea", "#0b7a75"
_LEFT, _TOP, _RIGHT, _BOTTOM = 110, 170, 1160, 540
_MAX_POINTS = 400

Point = tuple[float, float]


def curve_picture(curve: MemoryCurve, model: str, preset: str) -> bytes:
    """Draw bytes over tokens, stacked by modality, under the line of a 16-bit cache.

    Args:
        curve: memory of the conversation.
        model: name of the model.
        preset: name of the cache format.

    Returns:
        The bytes of a PNG of ``SIZE``.
    """
    picture = Image.new("RGB", SIZE, "white")
    draw, now = ImageDraw.Draw(picture), curve.last
    samples = curve.thinned(_MAX_POINTS)
    top = round_up(max(max(one.used_bytes, one.bf16_bytes) for one in samples) or 1)
    _axes(draw, top, now.tokens)
    _areas(draw, samples, top)
    plain = [_place(one, one.bf16_bytes, top, now.tokens) for one in samples]
    draw.line(plain, _SOFT, width=3, joint="curve")
    headline = f"{now.ratio:.1f}x smaller than 16-bit" if now.gains else "Memory of keys and values"
    _write(draw, (40, 30), headline, 44, _LEAD)
    sizes = f"{format_bytes(now.used_bytes)} instead of {format_bytes(now.bf16_bytes)}"
    _write(draw, (40, 88), f"{sizes} for {now.tokens:,} tokens of {model}, {preset}", 26, _INK)
    _legend(draw, [part for part in PARTS if any(one.parts[part] for one in samples)])
    _write(draw, (_RIGHT, SIZE[1] - 30), "oscar_mm", 24, _LEAD, anchor="rs")
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def _place(sample: MemorySample, size: float, top: float, tokens: int) -> Point:
    """Return the pixel of a number of bytes at a sample's number of tokens."""
    x = _LEFT + (_RIGHT - _LEFT) * sample.tokens / (tokens or 1)
    return x, _BOTTOM - (_BOTTOM - _TOP) * size / top


def _areas(draw: ImageDraw.ImageDraw, samples: Sequence[MemorySample], top: float) -> None:
    tokens, below = samples[-1].tokens, [0.0] * len(samples)
    for part in PARTS:
        above = [size + one.parts[part] for size, one in zip(below, samples, strict=True)]
        edges = [
            [_place(one, size, top, tokens) for one, size in zip(samples, sizes, strict=True)]
            for sizes in (above, below)
        ]
        if len(samples) > 1 and above != below:
            draw.polygon([*edges[0], *reversed(edges[1])], COLORS[part])
        below = above


def _axes(draw: ImageDraw.ImageDraw, top: float, tokens: int) -> None:
    for quarter in range(5):
        y = _BOTTOM - (_BOTTOM - _TOP) * quarter / 4
        draw.line([(_LEFT, y), (_RIGHT, y)], _LINE)
        _write(draw, (_LEFT - 12, y), axis_bytes(top * quarter / 4), 18, _SOFT, anchor="rm")
    for part in (0, 1, 2):
        place = _LEFT + (_RIGHT - _LEFT) * part / 2, _BOTTOM + 10
        _write(draw, place, f"{tokens * part // 2:,}", 18, _SOFT, anchor=("lt", "mt", "rt")[part])


def _legend(draw: ImageDraw.ImageDraw, parts: Sequence[str]) -> None:
    x, y = 40.0, SIZE[1] - 40
    for name, color in [*((part, COLORS[part]) for part in parts), ("the same in 16-bit", _SOFT)]:
        draw.rectangle([x, y - 8, x + 16, y + 8], color)
        _write(draw, (x + 26, y), name, 20, _INK, anchor="lm")
        x += 60 + draw.textlength(name, _font(20))


def _write(
    draw: ImageDraw.ImageDraw, place: Point, text: str, size: int, color: str, anchor: str = "la"
) -> None:
    draw.text(place, text, color, font=_font(size), anchor=anchor)


def _font(size: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's own font, which every machine has."""
    return ImageFont.load_default(size)  # pyright: ignore[reportReturnType]
