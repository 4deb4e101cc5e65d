"""The transcript: questions, media and answers, and their HTML, in which all text is escaped."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from oscar_mm.chat.conversation import Turn
from oscar_mm.media import MediaLimits, load_audio, load_image, load_video
from oscar_mm.media.image import eighth
from oscar_mm.modality import Modality

NOTES = {
    "interrupted": "stopped: what was written counts as the answer",
    "length": "ended at the longest answer that the settings allow",
}
"""How an answer ended, by finish reason, if it is not by itself."""
_SIZE = (144, 96)
_BARS = 28
_KINDS = {Modality.IMAGE: "picture", Modality.VIDEO: "video", Modality.AUDIO: "clip"}
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


@dataclass(eq=False)
class Exchange:
    """A question and what came of it.

    Attributes:
        question: its text.
        media: its files by kind.
        shown: its media, in the order of the turn's segments.
        options: how it was answered.
        reasoning: what a thinking model writes before it, as far as it was written.
        answer: as far as it was written.
        other: the answer over a 16-bit cache, or None.
        note: how the answer ended, if it is not by itself.
        error: why there is no answer.
        counts: whether it is a turn of the chat.
    """

    question: str
    media: dict[str, list[Path]] = field(default_factory=dict)
    shown: list[Shown] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""
    answer: str = ""
    other: str | None = None
    note: str = ""
    error: str = ""
    counts: bool = False

    @classmethod
    def loaded(cls, turn: Turn) -> Exchange:
        """A turn of a saved conversation, of whose media only the names are known."""
        return cls(
            question=turn.prompt,
            shown=[Shown.named(span.modality, span.label) for span in turn.media],
            reasoning=turn.reasoning or "",
            answer=turn.answer,
            note=NOTES.get(turn.finish_reason, ""),
            counts=True,
        )


@dataclass(frozen=True)
class Shown:
    """A medium of a message.

    Attributes:
        kind: "picture", "video" or "clip".
        name: of its file.
        path: of the file; None where only the name is known.
        html: the thumbnail, or "".
    """

    kind: str
    name: str
    path: Path | None = None
    html: str = ""

    @classmethod
    def named(cls, modality: Modality, name: str) -> Shown:
        """A medium whose file is not there."""
        return cls(_KINDS[modality], name)


def thumbnails(media: Mapping[str, list[Path]], limits: MediaLimits) -> list[Shown]:
    """Of the media of a message, in the order of its segments: images, videos, recordings.

    Raises:
        InputError: a file that cannot be read, or is over the limits.
    """
    two_frames = replace(limits, max_video_frames=2)
    shown = []
    for path in media["images"]:
        picture = load_image(path, limits=limits, label=path.name, fit=eighth)
        shown.append(Shown("picture", path.name, path, _picture(picture, path.name)))
    for path in media["videos"]:
        frames = load_video(path, limits=two_frames, label=path.name).frames
        picture = Image.fromarray(frames[0])
        shown.append(Shown("video", path.name, path, _picture(picture, path.name)))
    for path in media["audio"]:
        samples = load_audio(path, limits=limits, label=path.name).samples
        shown.append(Shown("clip", path.name, path, _waveform(samples, path.name)))
    return shown


def _picture(image: Image.Image, name: str) -> str:
    small = image.copy()
    small.thumbnail(_SIZE)
    target = io.BytesIO()
    small.save(target, "JPEG", quality=80)
    data = base64.b64encode(target.getvalue()).decode()
    width, height = small.size
    return (
        f'<img src="data:image/jpeg;base64,{data}" width="{width}" height="{height}" '
        f'alt="{escape(name)}">'
    )


def _waveform(samples: np.ndarray, name: str) -> str:
    peaks = [float(np.abs(part).max(initial=0)) for part in np.array_split(samples, _BARS)]
    highest = max(*peaks, 1e-6)
    bars = "".join(
        f'<rect x="{4 * place + 0.5:.1f}" y="{40 - 36 * peak / highest:.1f}" width="3" '
        f'height="{max(2.0, 72 * peak / highest):.1f}" rx="1.5"/>'
        for place, peak in enumerate(peaks)
    )
    return (
        f'<svg class="waveform" viewBox="0 0 {4 * _BARS} 80" role="img" '
        f'aria-label="waveform of {escape(name)}">{bars}</svg>'
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
