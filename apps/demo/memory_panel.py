"""The memory panel: what the conversation holds now, in numbers and over its tokens."""

from __future__ import annotations

from html import escape

from oscar_mm.apps.demo.charts import Line, chart
from oscar_mm.apps.demo.curve import PARTS, Curve
from oscar_mm.generation.answer import Timings
from oscar_mm.sizes import format_bytes

_POINTS = 160
_NOTE = (
    '<p class="how">Tokens stay in 16 bit until 128 of their modality fill a page, so a short '
    "conversation gains little. Every byte that is in use counts.</p>"
)
_LEAST_TOKENS, _LEAST_BYTES = 256, 100_000
"""Where the axes end before there is much to show."""


def memory_panel(curve: Curve, timings: Timings | None, other: Curve | None = None) -> str:
    """Tiles and chart.

    Args:
        curve: of the conversation.
        timings: of the latest answer, as far as it goes.
        other: of the same conversation over a 16-bit cache, where that runs beside it.
    """
    now = curve.last
    speed = f"{timings.tokens_per_s:.0f}" if timings and timings.tokens_per_s else "-"
    wait = f"{timings.prefill_s:.2f} s" if timings else "-"
    tiles = "".join(
        f'<div class="tile{" lead" if lead else ""}"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)}</dd><small>{escape(note)}</small></div>"
        for name, value, note, lead in (
            ("16 bit takes", f"{now.ratio:.2f}x", "as much", True),
            ("Held now", format_bytes(now.held), f"{now.stored:,} tokens", True),
            ("In 16 bit", format_bytes(now.plain), "the same tokens", False),
            ("Bits per value", f"{now.bits_per_value:.2f}", "all counted", False),
            ("Speed", speed, "tokens/s", False),
            ("First token", wait, "media and prompt", False),
        )
    )
    return f'<dl class="tiles">{tiles}</dl>{memory_chart(curve, other)}{_NOTE}'


def memory_chart(curve: Curve, other: Curve | None) -> str:
    """Bytes over tokens, stacked by modality, below what 16 bit would take."""
    samples = curve.thinned(_POINTS)
    shown = [part for part in PARTS if any(sample.parts[part] for sample in samples)]
    lines, below = [], [0.0] * len(samples)
    for part in shown or PARTS[:1]:
        below = [height + one.parts[part] for height, one in zip(below, samples, strict=True)]
        points = [(one.tokens, height) for one, height in zip(samples, below, strict=True)]
        lines.append(Line(part, f"c-{part}", points, filled=True))
    plain = [(sample.tokens, sample.plain) for sample in samples]
    lines.append(Line("the same in 16 bit", "c-plain", plain, dashed=True))
    if other is not None:
        measured = [(sample.tokens, sample.held) for sample in other.thinned(_POINTS)]
        lines.append(Line("16 bit, measured", "c-other", measured))
    now = curve.last
    summary = (
        f"{now.stored} tokens hold {format_bytes(now.held)}; in 16 bit they would hold "
        f"{format_bytes(now.plain)}, {now.ratio:.2f} times as much"
    )
    return chart(
        lines,
        title="Memory of keys and values",
        summary=summary,
        x_label="tokens of the conversation",
        show_y=_short,
        least_x=_LEAST_TOKENS,
        least_y=_LEAST_BYTES,
    )


def _short(count: float) -> str:
    """Bytes for an axis, where the steps are round."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g}"
