"""Transcript: questions, media and answers, and their HTML, where all text is escaped."""

from __future__ import annotations

import base64
import io
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from oscar_mm.apps.demo.answer_markdown import copy_button, markdown
from oscar_mm.apps.demo.visitor_input import place_files
from oscar_mm.chat.conversation import Turn
from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits
from oscar_mm.media.image import eighth
from oscar_mm.media.media import Media, MediaReader
from oscar_mm.media.part import media_parts
from oscar_mm.modality import MediumSpan, Modality

NOTES = {
    "interrupted": "stopped: the text so far counts as the answer",
    "length": "ended at the maximum answer length of the settings",
}
"""Note to show below an answer that the model did not end by itself, by finish reason."""
_THUMBNAIL_SIZE = (144, 96)
_WAVEFORM_BARS = 28
KINDS = {Modality.IMAGE: "picture", Modality.VIDEO: "video", Modality.AUDIO: "clip"}
"""Names of the modalities as shown on the page."""


def counted(number: int, kind: str) -> str:
    """Return a number of media in words: "1 picture", "3 pictures"."""
    return f"{number} {kind}{'' if number == 1 else 's'}"


SCROLL_SCRIPT = """
const box = document.getElementById('transcript');
const there = (selector) => box.querySelector(selector) !== null;
const enable = (id, can) => {
  const button = document.getElementById(id);
  if (button) button.disabled = !can;
};
const update = () => {
  draw();
  enable('stop', there('.live'));
  enable('undo', there('.asked, .said:not(.live)'));
  const last = [...box.querySelectorAll('.asked')].at(-1);
  // The files of a loaded question are missing, so it cannot be asked again.
  const again = last !== undefined && last.querySelector('[data-lost]') === null;
  for (const id of ['retry', 'edit']) enable(id, again);
  for (const id of ['fork', 'clear']) enable(id, there('.said'));
  const asked = box.querySelectorAll('.asked').length;
  // A new question is shown wherever the visitor was reading.
  if (asked > Number(box.dataset.asked ?? 0)) box.dataset.away = 'no';
  box.dataset.asked = asked;
  for (const text of box.querySelectorAll('.asked > p, .said pre, .formula.display')) {
    // Makes what is too long or wide scrollable by keyboard.
    const {scrollHeight, clientHeight, scrollWidth, clientWidth} = text;
    if (scrollHeight > clientHeight || scrollWidth > clientWidth) text.tabIndex = 0;
  }
  if (box.dataset.away !== 'yes') box.scrollTop = box.scrollHeight;
};
watch('value', update);
// The buttons below the transcript are made after it.
const first = () => document.getElementById('clear') ? update() : requestAnimationFrame(first);
first();
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
    const copy = event.target.closest('button.copy');
    if (copy) navigator.clipboard?.writeText(copy.dataset.text).then(() => {
      copy.classList.add('copied');
    }, () => {});
    const button = event.target.closest('button[data-sound]');
    if (!button) return;
    const again = button === pressed;
    silence();
    if (again) return;
    pressed = button;
    pressed.setAttribute('aria-pressed', 'true');
    sound = new Audio(button.dataset.sound);
    sound.addEventListener('ended', silence);
    sound.addEventListener('error', () => {
      silence();
      offer(button, button.dataset.sound, button.firstElementChild);
    });
    sound.play().catch(silence);
  });
  const end = document.createElement('button');
  Object.assign(end, {id: 'to-end', type: 'button', textContent: '↓'});
  end.setAttribute('aria-label', 'Go to the latest message');
  box.append(end);
  end.addEventListener('click', () => {
    box.dataset.away = 'no';
    box.scrollTop = box.scrollHeight;
    box.focus();
  });
  box.addEventListener('scroll', () => {
    const below = box.scrollHeight - box.scrollTop - box.clientHeight;
    box.dataset.away = below > 120 ? 'yes' : 'no';
  });
  const large = document.createElement('dialog');
  large.id = 'large';
  large.innerHTML =
    '<form method="dialog"><button aria-label="Close">&times;</button></form><div></div>';
  box.after(large);
  const offer = (element, href, picture) => {
    const link = Object.assign(document.createElement('a'), {href, download: ''});
    const text = 'This browser cannot play it: click to save the file';
    link.append(picture, Object.assign(document.createElement('small'), {textContent: text}));
    link.className = 'unplayable';
    element.replaceWith(link);
  };
  box.addEventListener('error', ({target}) => {
    if (target.error?.code !== MediaError.MEDIA_ERR_SRC_NOT_SUPPORTED) return;
    const picture = Object.assign(new Image(), {src: target.poster, alt: target.ariaLabel});
    offer(target, target.src, picture);
  }, true);
  box.addEventListener('click', (event) => {
    const link = event.target.closest('.media a:not([download])');
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    large.setAttribute('aria-label', link.title);
    const picture = Object.assign(new Image(), {src: link.href, alt: link.title});
    large.querySelector('div').replaceChildren(picture);
    large.showModal();
  });
  large.addEventListener('click', () => large.close());
}
"""
"""Script that keeps the end of the transcript in view unless the visitor has scrolled up since the
latest question, and then shows a button that leads there; disables buttons that would do nothing;
copies answers; shows pictures in full size; plays one recording at a time; and offers what the
browser cannot play as a file."""


_EMPTY = (
    '<div class="welcome"><b>Show something and ask about it</b>'
    "<p>What the model has seen stays in a packed cache: later questions cost only their own "
    "tokens. The memory panel shows what it contains.</p></div>"
)
_MAX_CHARACTERS = 64 * 2**20


@dataclass(eq=False)
class Exchange:
    """A question and its answer.

    Attributes:
        question: text of the question.
        files: paths of the uploaded files of the question.
        media: the same files by kind, after they have been checked.
        previews: previews of the media, in the order of the turn's segments.
        parts: texts and media of the question, in order; empty if all media precede the text.
        options: sampling options for the answer.
        is_talk: whether the question is a recording of the visitor, which needs no text.
        speech: key of the answer's speech; "" if it is not spoken.
        is_mute: whether the model can speak, but not this answer.
        reasoning: a thinking model's reasoning so far.
        answer: text of the answer so far.
        baseline: text of the answer with a 16-bit cache so far; None if there is no comparison.
        note: reason why the answer ended; "" if the model ended it.
        hint: reason to distrust the answer, or "".
        error: reason why there is no answer, or "".
        counts: whether the exchange is a turn of the chat.
        key: name of the exchange, by which the page and copies of the conversation refer to it.
    """

    question: str
    files: list[str | Path] = field(default_factory=list)
    media: dict[str, list[Path]] = field(default_factory=dict)
    previews: list[Preview] = field(default_factory=list)
    parts: list[str | Preview] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    is_talk: bool = False
    speech: str = ""
    is_mute: bool = False
    reasoning: str = ""
    answer: str = ""
    baseline: str | None = None
    note: str = ""
    hint: str = ""
    error: str = ""
    counts: bool = False
    key: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def loaded(cls, turn: Turn, previews: list[Preview]) -> Exchange:
        """Convert a turn of a saved conversation, which contains media names but no files."""
        by_span = dict[Any, Preview](zip(turn.media, previews, strict=True))
        asked = [part for message in turn.messages for part in message.parts]
        return cls(
            question=turn.prompt,
            previews=previews,
            parts=[part if isinstance(part, str) else by_span[part] for part in asked],
            reasoning=turn.reasoning or "",
            answer=turn.answer,
            note=NOTES.get(turn.finish_reason, ""),
            counts=True,
        )

    def place_previews(self) -> None:
        """Put the media where the question names them; see ``place_files``."""
        parts = place_files(self.question, [preview.name for preview in self.previews])
        # The names of placed files are no longer in the texts.
        if "".join(part for part in parts if isinstance(part, str)) != self.question:
            self.parts = [part if isinstance(part, str) else self.previews[part] for part in parts]
            self.previews = [part for part in self.parts if isinstance(part, Preview)]

    @property
    def lacks_files(self) -> bool:
        """Whether files of the question are missing, as in a loaded conversation."""
        return any(preview.path is None for preview in self.previews)

    @property
    def asked(self) -> list[str | Preview]:
        """Texts and media of the question, in order."""
        return self.parts or [*self.previews, self.question]


@dataclass(frozen=True)
class Preview:
    """A media item of a message, with a small embedded picture.

    Attributes:
        kind: "picture", "video" or "clip".
        name: name of the file.
        path: path of the file; None if it is missing.
        html: HTML of the picture, or "".
    """

    kind: str
    name: str
    path: Path | None = None
    html: str = ""

    @classmethod
    def named(cls, modality: Modality, name: str, html: str = "") -> Preview:
        """Describe a media item whose file is missing."""
        return cls(KINDS[modality], name, html=html)


def load_previews(media: Mapping[str, list[Path]], limits: MediaLimits) -> list[Preview]:
    """Return previews of a message's media in the order of segments: images, videos, recordings.

    Raises:
        InputError: if a file cannot be read, or exceeds the limits.
    """
    reader = MediaReader(replace(limits, max_video_frames=2), fit=eighth)
    previews = []
    for path in media["images"]:
        [picture] = _read(reader, "images", path).images
        previews.append(Preview("picture", path.name, path, _picture(picture, path.name)))
    for path in media["videos"]:
        [video] = _read(reader, "videos", path).videos
        picture = Image.fromarray(video.frames[0])
        previews.append(Preview("video", path.name, path, _picture(picture, path.name)))
    for path in media["audio"]:
        [recording] = _read(reader, "audio", path).audio
        previews.append(Preview("clip", path.name, path, _waveform(recording.samples, path.name)))
    return previews


def _read(reader: MediaReader, kind: str, path: Path) -> Media:
    """Decode a file; errors name the file without its folder, which visitors must not see."""
    try:
        shown: dict[str, Any] = {kind: [path]}
        return reader.read(media_parts(**shown))
    except InputError as error:
        raise InputError(str(error).replace(str(path), path.name)) from error


def _picture(image: Image.Image, name: str) -> str:
    small = image.copy()
    small.thumbnail(_THUMBNAIL_SIZE)
    target = io.BytesIO()
    small.save(target, "JPEG", quality=80)
    data = base64.b64encode(target.getvalue()).decode()
    width, height = small.size
    return (
        f'<img src="data:image/jpeg;base64,{data}" width="{width}" height="{height}" '
        f'alt="{escape(name)}">'
    )


def _waveform(samples: np.ndarray, name: str) -> str:
    peaks = [float(np.abs(part).max(initial=0)) for part in np.array_split(samples, _WAVEFORM_BARS)]
    highest = max(*peaks, 1e-6)
    bars = "".join(
        f'<rect x="{4 * place + 0.5:.1f}" y="{40 - 36 * peak / highest:.1f}" width="3" '
        f'height="{max(2.0, 72 * peak / highest):.1f}" rx="1.5"/>'
        for place, peak in enumerate(peaks)
    )
    return (
        f'<svg class="waveform" viewBox="0 0 {4 * _WAVEFORM_BARS} 80" role="img" '
        f'aria-label="waveform of {escape(name)}">{bars}</svg>'
    )


def history(exchanges: Sequence[Exchange], active: Exchange | None = None) -> str:
    """Return the HTML of all exchanges except the active answer.

    The HTML changes only when a turn starts or ends.
    """
    numbers: Counter[str] = Counter()
    is_begun = any(one.question or one.files or one.previews for one in exchanges)
    parts = [] if is_begun else [_EMPTY]
    count = 0
    for exchange in exchanges:
        # The model sees, and numbers, only the media of exchanges that are turns of the chat.
        seen = exchange.counts or exchange is active
        if question := _question(exchange, numbers if seen else None):
            count += 1
            menu = "" if exchange is active else _menu_button(exchange, count)
            parts.append(f'<article class="asked">{question}{menu}</article>')
        if exchange is not active:
            parts.append(_answer(exchange))
    return "".join(parts)


def as_markdown(exchanges: Sequence[Exchange]) -> str:
    """Return the questions and answers of a conversation as Markdown."""
    numbers: Counter[str] = Counter()
    parts = []
    for exchange in exchanges:
        asked = []
        for part in exchange.asked:
            if isinstance(part, str):
                asked.append(f"\n{part}\n")
            else:
                numbers[part.kind] += 1
                asked.append(f"- {part.kind} {numbers[part.kind]}: {part.name}\n")
        notes = "".join(f"\n({note})\n" for note in (exchange.note, exchange.hint) if note)
        parts.append(f"## Question\n{''.join(asked)}\n## Answer\n\n{exchange.answer}\n{notes}")
    return "\n".join(parts)


def live(exchange: Exchange | None) -> str:
    """Return the HTML of the active answer; "" if there is none."""
    if exchange is None:
        return ""
    reasoning = _reasoning(exchange, is_open=not exchange.answer)
    if exchange.answer:
        text = markdown(exchange.answer)
    else:
        text = f'<p class="dots">{"thinking" if reasoning else "reading"}</p>'
    return f'<article class="said live" aria-busy="true">{reasoning}{text}</article>'


def _question(exchange: Exchange, numbers: Counter[str] | None) -> str:
    shown = []
    for is_text, run in groupby(exchange.asked, lambda part: isinstance(part, str)):
        if is_text:
            shown += [f"<p>{escape(text)}</p>" for text in map(str, run) if text]
        else:
            figures = (_figure(part, numbers) for part in run if isinstance(part, Preview))
            shown.append(f'<div class="media">{"".join(figures)}</div>')
    return "".join(shown)


def _menu_button(exchange: Exchange, number: int) -> str:
    """Return a button that opens the menu of ``message_menu.SCRIPT``."""
    lost = " data-lost" if exchange.lacks_files else ""
    return (
        f'<button type="button" class="more" data-key="{exchange.key}"'
        f'{lost} aria-haspopup="menu" aria-expanded="false" '
        f'aria-label="Actions for question {number}">'
        '<svg viewBox="0 0 16 16" aria-hidden="true"><circle cx="8" cy="3" r="1.4"/>'
        '<circle cx="8" cy="8" r="1.4"/><circle cx="8" cy="13" r="1.4"/></svg></button>'
    )


def _figure(preview: Preview, numbers: Counter[str] | None) -> str:
    name, caption, mark = escape(preview.name), "not seen", ""
    if numbers is not None:
        numbers[preview.kind] += 1
        caption = f"{preview.kind} {numbers[preview.kind]}"
        mark = f' data-name="{caption}"'
    body = preview.html or '<span class="missing" aria-hidden="true">?</span>'
    if preview.path is not None:
        address = f"gradio_api/file={quote(str(preview.path))}"
        if preview.kind == "clip":
            body = (
                f'<button type="button" class="play" data-sound="{address}" aria-pressed="false" '
                f'aria-label="Play {name}">{body}</button>'
            )
        elif preview.kind == "video":
            body = (
                f'<video controls preload="none" src="{address}" poster="{_source(preview.html)}" '
                f'aria-label="{name}"></video>'
            )
        else:
            body = f'<a href="{address}" target="_blank" rel="noopener" title="{name}">{body}</a>'
    return f'<figure class="{preview.kind}"{mark}>{body}<figcaption>{caption}</figcaption></figure>'


def _source(picture: str) -> str:
    """Return the data URI of a preview's picture."""
    return picture.partition('src="')[2].partition('"')[0]


def _answer(exchange: Exchange) -> str:
    parts = [_reasoning(exchange)] if exchange.reasoning else []
    if exchange.answer:
        parts.append(f'<div class="text">{markdown(exchange.answer)}</div>')
        parts.append(copy_button(exchange.answer, "Copy the answer"))
    parts += [f"<small>{escape(note)}</small>" for note in (exchange.note, exchange.hint) if note]
    html = f'<article class="said">{"".join(parts)}</article>' if parts else ""
    if exchange.error:
        html += (
            f'<article class="said error"><p role="alert">{escape(exchange.error)}</p></article>'
        )
    return html


def _reasoning(exchange: Exchange, *, is_open: bool = False) -> str:
    if not exchange.reasoning:
        return ""
    return (
        f'<details class="reasoning"{" open" if is_open else ""}><summary>Reasoning</summary>'
        f"<div>{escape(exchange.reasoning)}</div></details>"
    )


class PreviewStore:
    """Previews of recently shown media, by content digest and name.

    A saved conversation that contains the SHA-256 of a media item comes from a visitor who had that
    item, so showing its preview reveals nothing.
    """

    def __init__(self) -> None:
        self._htmls: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._size, self._lock = 0, threading.Lock()

    def add(self, media: Sequence[MediumSpan], htmls: Sequence[str]) -> None:
        """Add previews, and drop the oldest previews if all together take too much memory."""
        with self._lock:
            for span, html in zip(media, htmls, strict=True):
                key = span.digest, span.label
                self._size += len(html) - len(self._htmls.pop(key, ""))
                self._htmls[key] = html
            while self._size > _MAX_CHARACTERS:
                self._size -= len(self._htmls.popitem(last=False)[1])

    def html(self, span: MediumSpan) -> str:
        """Return the HTML of a media item's picture; "" if none is stored."""
        with self._lock:
            return self._htmls.get((span.digest, span.label), "")

    def preview(self, span: MediumSpan) -> Preview:
        """Describe a media item whose file is missing."""
        return Preview.named(span.modality, span.label, self.html(span))
