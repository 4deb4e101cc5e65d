"""Panels of the page: both answers side by side with memory and speed, and the inspection."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from html import escape

from oscar_mm.apps.demo.charts import Line, chart
from oscar_mm.apps.demo.measured_chat import MeasuredChat
from oscar_mm.apps.demo.memory_panel import memory_chart, no_gain_reason
from oscar_mm.apps.demo.session import Session
from oscar_mm.apps.demo.transcript import Exchange
from oscar_mm.inspect.inspection import Inspection
from oscar_mm.inspect.quantization_errors import PAIRS
from oscar_mm.inspect.report import findings
from oscar_mm.sizes import format_bytes

_NOT_COMPARED = (
    '<p class="empty">Start comparing, and every question is answered over a plain 16-bit cache '
    "too, with the same sampling. Questions that were asked are asked again.</p>"
)
_MOST_WORDS = 2000
"""Words of an answer that are compared."""
_MOST_PAIRS = 20
"""Latest questions that are compared."""
NOT_INSPECTED = (
    '<p class="empty">Reads the media of this conversation once more and measures, layer by layer, '
    "how long keys are in each modality, what rotation and token scaling do to them, and what "
    "packing costs.</p>"
)
_STAGES = {
    "raw": "c-plain",
    "rotated": "c-image",
    "balanced": "c-text",
    "balanced, rotated": "c-video",
}


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


def inspection_view(inspection: Inspection) -> str:
    """Show the verdict, charts over layers, and the other findings."""
    verdict, *others = map(escape, findings(inspection))
    charts = [_norms(inspection), _spread(inspection), _channels(inspection)]
    if inspection.has_pages:
        charts += [_errors(inspection)]
    sentences = "".join(f"<li>{finding}</li>" for finding in others)
    return (
        f'<p class="verdict">{verdict}</p><div class="charts">{"".join(charts)}</div>'
        f'<details><summary>In words</summary><ul class="said">{sentences}</ul></details>'
    )


def _over_layers(inspection: Inspection, lines: list[Line], title: str, summary: str) -> str:
    layers = len(inspection.layers)
    last = "; ".join(f"{line.name} {line.points[-1][1]:.2f}" for line in lines)
    return chart(
        lines,
        title=title,
        summary=f"{summary}. In the last layer: {last}",
        x_label="layer",
        show_y=lambda value: f"{value:g}",
        ticks=sorted({0, layers // 2, *(range(layers) if layers <= 8 else ()), layers - 1}),
        least_x=max(1, layers - 1),
    )


def _norms(inspection: Inspection) -> str:
    lines = [
        Line(
            f"{name}, {inspection.tokens[name]:,} tokens",
            f"c-{name}",
            [(layer.index, layer.norms.tokens[name].median) for layer in inspection.layers],
        )
        for name in inspection.layers[0].norms.tokens
    ]
    title = "Norm of keys by modality (median)"
    return _over_layers(inspection, lines, title, "Median norm of a token's key, by layer")


def _spread(inspection: Inspection) -> str:
    lines = []
    for name in inspection.layers[0].norms.heads:
        for scaled in (False, True):
            points = []
            for layer in inspection.layers:
                norms = (layer.norms.scaled if scaled else layer.norms.heads)[name]
                points.append((layer.index, norms.p95 / max(norms.p5, 1e-12)))
            label = f"{name}, {'scaled' if scaled else 'as it is'}"
            lines.append(Line(label, f"c-{name}", points, dashed=scaled))
    title = "Spread of norms before and after token scaling"
    return _over_layers(inspection, lines, title, "95% over 5% percentile of a head's key norms")


def _channels(inspection: Inspection) -> str:
    lines = [
        Line(name, style, [(layer.index, layer.channels[name]) for layer in inspection.layers])
        for name, style in _STAGES.items()
    ]
    title = "Outlier channels before and after rotation and balancing"
    return _over_layers(inspection, lines, title, "Largest over median channel of the worst head")


def _errors(inspection: Inspection) -> str:
    variant, _ = PAIRS["compact"]
    lines = [
        Line(
            name,
            f"c-{'plain' if name == 'all' else name}",
            [(layer.index, layer.errors[variant.label][name].keys) for layer in inspection.layers],
            dashed=name == "all",
        )
        for name in inspection.parts
    ]
    title = "Error of packed keys by modality (compact)"
    return _over_layers(inspection, lines, title, "Relative error of keys in 2-bit pages")
