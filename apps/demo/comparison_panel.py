"""The comparison: both answers to each question side by side, memory and speed of both."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from html import escape

from oscar_mm.apps.demo.measured_chat import MeasuredChat
from oscar_mm.apps.demo.memory_panel import memory_chart, no_gain_reason
from oscar_mm.apps.demo.session import Session
from oscar_mm.apps.demo.transcript import Exchange
from oscar_mm.sizes import format_bytes

_NOT_COMPARED = (
    '<p class="empty">Start comparing, and every question is answered over a plain 16-bit cache '
    "too, with the same sampling. Questions that were asked are asked again.</p>"
)
_MOST_WORDS = 2000
"""Words of an answer that are compared."""
_MOST_PAIRS = 20
"""Latest questions that are compared."""


def comparison_view(session: Session) -> str:
    """Show memory and speed of both caches, and both answers to each of the latest questions."""
    packed, baseline = session.conversation, session.baseline
    if baseline is None:
        return _NOT_COMPARED
    pairs = [turn for turn in session.turns if turn.baseline is not None][-_MOST_PAIRS:]
    complete = [turn for turn in pairs if turn is not session.baseline_exchange]
    same = sum(turn.answer == turn.baseline for turn in complete)
    verdict = "The next answer is compared."
    if complete:
        verdict = f"{same} of {len(complete)} answers are the same."
        if same < len(complete):
            verdict += " Marked words differ."
    now, reason = packed.curve.last, ""
    if now.bf16_bytes and not now.gains:
        text = escape(no_gain_reason(now, packs=session.settings.policy.packs))
        reason = f'<p class="how">{text}</p>'
    cards = _card(session.settings.name, packed) + _card("16 bit", baseline)
    return (
        f'<div class="pair">{cards}</div>{reason}'
        f'<p class="verdict" role="status">{verdict}</p>'
        f"{''.join(_pair(turn, turn in complete) for turn in reversed(pairs))}"
        f"{memory_chart(packed.curve, baseline.curve)}"
    )


def _card(name: str, chat: MeasuredChat) -> str:
    speed, wait = "-", "-"
    if chat.timings:
        speed, wait = f"{chat.timings.tokens_per_s or 0:.0f}", f"{chat.timings.prefill_s:.2f} s"
    used = format_bytes(chat.curve.last.used_bytes)
    return (
        f"<section><h2>{escape(name)}</h2><p><b>{used}</b></p>"
        f"<footer>{speed} tokens/s, first token {wait}</footer></section>"
    )


def _pair(turn: Exchange, is_complete: bool) -> str:
    answers = turn.answer, turn.baseline or ""
    left, right = mark_differences(*answers) if is_complete else map(escape, answers)
    return (
        f'<article class="compared"><p class="asked">{escape(turn.question)}</p><div class="pair">'
        f'<p class="answer">{left}</p><p class="answer">{right}</p></div></article>'
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
