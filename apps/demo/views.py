"""Views: what each part of the page shows of a visitor."""

from __future__ import annotations

from html import escape

from oscar_mm.apps.demo.differences import comparison
from oscar_mm.apps.demo.memory_panel import memory_chart, memory_panel
from oscar_mm.apps.demo.segments import segment_table
from oscar_mm.apps.demo.visitor import Visitor

_NOT_COMPARED = (
    '<p class="empty">Start comparing, and every question is answered over a plain 16-bit cache '
    "too, with the same sampling. Questions that were asked are asked again.</p>"
)
NOT_INSPECTED = (
    '<p class="empty">Reads the media of this conversation once more and measures, layer by layer, '
    "how long keys are in each modality, what rotation and token scaling do to them, and what "
    "packing costs.</p>"
)


def panel(visitor: Visitor) -> str:
    """Numbers and chart of the memory."""
    other = visitor.other.curve if visitor.other else None
    return memory_panel(visitor.side.curve, visitor.side.timings, other)


def segments(visitor: Visitor) -> str:
    """What the conversation is made of."""
    return segment_table(
        visitor.side.segments, [[shown.html for shown in one.shown] for one in visitor.turns]
    )


def compared(visitor: Visitor) -> str:
    """Both answers to the latest question that has both."""
    if visitor.other is None:
        return _NOT_COMPARED
    chart = memory_chart(visitor.side.curve, visitor.other.curve)
    both = [one for one in visitor.turns if one.other is not None]
    if not both:
        return f'<p class="empty">The next answer is compared.</p>{chart}'
    last, name = both[-1], visitor.settings.name
    cards = comparison(
        last.question, last.answer, last.other or "", visitor.side, visitor.other, name
    )
    return f"{cards}{chart}"


def status(visitor: Visitor) -> str:
    """A line about this conversation and the server."""
    policy = visitor.settings.policy
    bits = ", ".join(f"{name} {count}" for name, count in policy.bits._asdict().items())
    return (
        f'<p class="status"><b>{escape(visitor.settings.name)}</b> · bits: {escape(bits)} · '
        f"window {policy.window} · {escape(visitor.hall.status)}</p>"
    )
