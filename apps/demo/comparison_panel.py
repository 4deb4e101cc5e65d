"""The comparison: both answers side by side, with the words that differ marked."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from html import escape

from oscar_mm.apps.demo.measured_chat import Side
from oscar_mm.apps.demo.memory_panel import memory_chart
from oscar_mm.apps.demo.session import Visitor
from oscar_mm.sizes import format_bytes

_NOT_COMPARED = (
    '<p class="empty">Start comparing, and every question is answered over a plain 16-bit cache '
    "too, with the same sampling. Questions that were asked are asked again.</p>"
)
_LONGEST = 2000
"""Words of an answer that are compared."""


def comparison(question: str, answer: str, other: str, side: Side, beside: Side, name: str) -> str:
    """The latest answer of both sides.

    Args:
        question: that was asked.
        answer: over the packed cache.
        other: over the 16-bit cache.
        side: the packed one; ``beside`` the 16-bit one.
        name: of the packed policy.
    """
    left, right = marked(answer, other)
    verdict = "The answers are the same." if answer == other else "Marked words differ."
    return (
        f'<p class="asked">{escape(question)}</p><div class="pair">'
        f"{_card(name, left, side)}{_card('16 bit', right, beside)}</div>"
        f'<p class="verdict" role="status">{verdict}</p>'
    )


def _card(name: str, body: str, side: Side) -> str:
    speed = ""
    if side.timings and side.timings.tokens_per_s:
        speed = f" · {side.timings.tokens_per_s:.0f} tokens/s"
    held = format_bytes(side.curve.last.held)
    return (
        f'<section><h4>{escape(name)}</h4><p class="answer">{body}</p>'
        f"<footer>{held}{speed}</footer></section>"
    )


def marked(one: str, other: str) -> tuple[str, str]:
    """Both texts as HTML, with what the other has not in <mark>."""
    words = [re.findall(r"\s+|\w+|[^\w\s]", text)[:_LONGEST] for text in (one, other)]
    sides: tuple[list[str], list[str]] = ([], [])
    for kind, *places in SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for side, text, (start, stop) in zip(sides, words, (places[:2], places[2:]), strict=True):
            part = escape("".join(text[start:stop]))
            side.append(part if kind == "equal" or not part.strip() else f"<mark>{part}</mark>")
    return "".join(sides[0]), "".join(sides[1])


def comparison_view(visitor: Visitor) -> str:
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
