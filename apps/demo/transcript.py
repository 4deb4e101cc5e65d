"""The transcript: questions, media and answers as HTML in which all text is escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from oscar_mm.apps.demo.exchange import Exchange
from oscar_mm.apps.demo.thumbnails import Shown

SCRIPT = """
const box = document.getElementById('transcript');
watch('value', () => {
  if (box.dataset.away !== 'yes') box.scrollTop = box.scrollHeight;
});
if (!box.dataset.away) {
  box.dataset.away = 'no';
  box.tabIndex = 0;
  box.setAttribute('role', 'log');
  box.setAttribute('aria-label', 'Conversation');
  let sound = null, pressed = null;
  const silence = () => {
    if (sound) sound.pause();
    if (pressed) pressed.setAttribute('aria-pressed', 'false');
    sound = pressed = null;
  };
  box.addEventListener('click', (event) => {
    const button = event.target.closest('button[data-sound]');
    if (!button) return;
    const again = button === pressed;
    silence();
    if (again) return;
    pressed = button;
    pressed.setAttribute('aria-pressed', 'true');
    sound = new Audio(button.dataset.sound);
    sound.addEventListener('ended', silence);
    sound.play().catch(silence);
  });
  box.addEventListener('scroll', () => {
    const below = box.scrollHeight - box.scrollTop - box.clientHeight;
    box.dataset.away = below > 120 ? 'yes' : 'no';
  });
}
"""
"""Keeps the end in sight, unless somebody scrolled up; plays one recording at a time."""
_EMPTY = (
    '<div class="welcome"><b>Show pictures, recordings or a video, and ask about them.</b>'
    "<p>The model keeps what it has seen in a packed cache: later questions cost their own tokens "
    "only. The memory panel shows what it holds.</p></div>"
)


def history(exchanges: Sequence[Exchange], writing: Exchange | None = None) -> str:
    """All of it but the answer that is being written; changes at the ends of a turn only."""
    if not exchanges:
        return _EMPTY
    numbers: Counter[str] = Counter()
    parts = []
    for exchange in exchanges:
        parts.append(_asked(exchange, numbers))
        if exchange is not writing:
            parts.append(_answered(exchange))
    return "".join(parts)


def live(exchange: Exchange | None) -> str:
    """The answer that is being written, or nothing."""
    if exchange is None:
        return ""
    thought = _folded(exchange, unfolded=not exchange.answer)
    if exchange.answer:
        text = f"<p>{escape(exchange.answer)}</p>"
    else:
        text = f'<p class="dots">{"thinking" if thought else "reading"}</p>'
    return f'<article class="said live" aria-busy="true">{thought}{text}</article>'


def _asked(exchange: Exchange, numbers: Counter[str]) -> str:
    shown = "".join(_figure(one, numbers) for one in exchange.shown)
    media = f'<div class="media">{shown}</div>' if shown else ""
    text = f"<p>{escape(exchange.question)}</p>" if exchange.question else ""
    return f'<article class="asked">{media}{text}</article>' if media or text else ""


def _figure(one: Shown, numbers: Counter[str]) -> str:
    numbers[one.kind] += 1
    name, caption = escape(one.name), f"{one.kind} {numbers[one.kind]}"
    body = one.html or '<span class="missing" aria-hidden="true">?</span>'
    if one.path is not None:
        address = f"gradio_api/file={quote(str(one.path))}"
        if one.kind == "clip":
            body = (
                f'<button type="button" class="play" data-sound="{address}" aria-pressed="false" '
                f'aria-label="Play {name}">{body}</button>'
            )
        else:
            body = f'<a href="{address}" target="_blank" rel="noopener" title="{name}">{body}</a>'
    return f'<figure class="{one.kind}">{body}<figcaption>{caption}</figcaption></figure>'


def _answered(exchange: Exchange) -> str:
    parts = [_folded(exchange)] if exchange.reasoning else []
    if exchange.answer:
        parts.append(f"<p>{escape(exchange.answer)}</p>")
    if exchange.note:
        parts.append(f"<small>{escape(exchange.note)}</small>")
    said = f'<article class="said">{"".join(parts)}</article>' if parts else ""
    if exchange.error:
        said += (
            f'<article class="said error" role="alert"><p>{escape(exchange.error)}</p></article>'
        )
    return said


def _folded(exchange: Exchange, *, unfolded: bool = False) -> str:
    if not exchange.reasoning:
        return ""
    return (
        f'<details class="reasoning"{" open" if unfolded else ""}><summary>Reasoning</summary>'
        f"<div>{escape(exchange.reasoning)}</div></details>"
    )
