"""The table of segments: what the conversation holds, piece by piece, and how to forget it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from oscar_mm.chat.conversation import Segment
from oscar_mm.modality import Modality
from oscar_mm.sizes import format_bytes

SCRIPT = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-index]');
  if (!button || button.disabled) return;
  button.disabled = true;
  trigger('click', {index: Number(button.dataset.index)});
});
"""
"""Tells the page which button was pressed."""


def segment_table(segments: Sequence[Segment], pictures: Sequence[Sequence[str]]) -> str:
    """The table.

    Args:
        segments: of the conversation.
        pictures: HTML of the media of each turn, in the order of its segments; empty where there
            are none.
    """
    if not segments:
        return (
            '<p class="empty">What you show and ask is listed here, with its tokens and bytes.</p>'
        )
    media = {turn: iter(shown) for turn, shown in enumerate(pictures)}
    rows = "".join(
        _row(one, "" if one.modality is Modality.TEXT else next(media[one.turn], ""))
        for one in segments
    )
    return (
        '<table class="segments"><caption class="sr">Segments of the conversation</caption>'
        '<thead><tr><th scope="col" class="what">Segment</th><th scope="col">Tokens</th>'
        '<th scope="col">Bytes</th><th scope="col"><span class="sr">Forget</span></th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _row(one: Segment, picture: str) -> str:
    label, kind = escape(one.label), one.modality.label
    mark = picture or f'<i class="glyph c-{kind}" aria-hidden="true">{kind[0].upper()}</i>'
    action = ""
    if one.forgotten:
        action = '<span class="gone">forgotten</span>'
    elif one.modality is not Modality.TEXT:
        action = (
            f'<button type="button" data-index="{one.index}" aria-label="Forget {label}" '
            'title="Free its memory; the conversation goes on">Forget</button>'
        )
    return (
        f'<tr class="{"is-gone" if one.forgotten else ""}"><th scope="row"><div class="piece">'
        f'<span class="mark">{mark}</span><span class="name"><b>{label}</b>'
        f'<small class="c-{kind}">{kind}</small></span></div></th>'
        f"<td>{one.tokens:,}</td><td>{format_bytes(one.bytes)}</td><td>{action}</td></tr>"
    )
