"""The comparison: both answers side by side, with the words that differ marked."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from html import escape

from oscar_mm.apps.demo.measured_chat import MeasuredChat
from oscar_mm.apps.demo.memory_panel import memory_chart
from oscar_mm.apps.demo.session import Session
from oscar_mm.sizes import format_bytes

_NOT_COMPARED = (
    '<p class="empty">Start comparing, and every question is answered over a plain 16-bit cache '
    "too, with the same sampling. Questions that were asked are asked again.</p>"
)
_MOST_WORDS = 2000
"""Words of an answer that are compared."""


def comparison_view(session: Session) -> str:
    """Show both answers to the latest question that has both, and both memories."""
    packed, baseline = session.conversation, session.baseline
    if baseline is None:
        return _NOT_COMPARED
    memory = memory_chart(packed.curve, baseline.curve)
    both = [turn for turn in session.turns if turn.baseline is not None]
    if not both:
        return f'<p class="empty">The next answer is compared.</p>{memory}'
    last = both[-1]
    left, right = mark_differences(last.answer, last.baseline or "")
    same = last.answer == (last.baseline or "")
    verdict = "The answers are the same." if same else "Marked words differ."
    return (
        f'<p class="asked">{escape(last.question)}</p><div class="pair">'
        f"{_card(session.settings.name, left, packed)}{_card('16 bit', right, baseline)}</div>"
        f'<p class="verdict" role="status">{verdict}</p>{memory}'
    )


def _card(name: str, body: str, chat: MeasuredChat) -> str:
    speed = ""
    if chat.timings and chat.timings.tokens_per_s:
        speed = f" · {chat.timings.tokens_per_s:.0f} tokens/s"
    used = format_bytes(chat.curve.last.used_bytes)
    return (
        f'<section><h4>{escape(name)}</h4><p class="answer">{body}</p>'
        f"<footer>{used}{speed}</footer></section>"
    )


def mark_differences(left: str, right: str) -> tuple[str, str]:
    """Return both texts as HTML, with <mark> around what the other text lacks."""
    words = [re.findall(r"\s+|\w+|[^\w\s]", text)[:_MOST_WORDS] for text in (left, right)]
    htmls: tuple[list[str], list[str]] = ([], [])
    for kind, *ranges in SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for html, text, (start, stop) in zip(htmls, words, (ranges[:2], ranges[2:]), strict=True):
            part = escape("".join(text[start:stop]))
            html.append(part if kind == "equal" or not part.strip() else f"<mark>{part}</mark>")
    return "".join(htmls[0]), "".join(htmls[1])
