"""LiveSpeech: the speech of an answer, which the page plays while it is made, with captions."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncIterator
from typing import NamedTuple

import numpy as np

from oscar_mm.engine.speech import Speech, heard_tokens

_LOOKS_PER_S = 50
"""Number of times per second that the server looks for new pieces."""
MARKUP = '<div class="voice"><output aria-label="Captions"></output></div>'
SCRIPT = """
const caption = element.querySelector('output'), voice = element.querySelector('.voice');
let playing = null;
const quiet = () => {
  playing?.leaving.abort();
  playing?.context?.close();
  clearInterval(playing?.timer);
  playing = null;
  voice.dataset.state = '';
};
const current = (now) => now.marks.find((one) => (now.context?.currentTime ?? 0) < one.until);
const heard = (now, mark = current(now)) =>
  mark ? mark.before + Math.max(0, now.context.currentTime - mark.from) : now.seconds;
const silence = () => {
  if (playing) trigger('input', {key: playing.key, seconds: heard(playing)});
  quiet();
};
const add = (now, {sound, rate, said}) => {
  now.context ??= new AudioContext({sampleRate: rate});
  const bytes = Uint8Array.from(atob(sound), (one) => one.charCodeAt(0));
  const samples = Float32Array.from(new Int16Array(bytes.buffer), (one) => one / 32768);
  const buffer = now.context.createBuffer(1, samples.length, rate);
  buffer.copyToChannel(samples, 0);
  const source = now.context.createBufferSource();
  source.buffer = buffer;
  source.connect(now.context.destination);
  const from = Math.max(now.next, now.context.currentTime);
  source.start(from);
  now.next = from + buffer.duration;
  now.seconds += buffer.duration;
  now.marks.push({from, until: now.next, before: now.seconds - buffer.duration, said});
  voice.dataset.state = 'playing';
};
const follow = (now) => {
  const mark = current(now), seconds = heard(now, mark);
  let said = mark?.said ?? now.text ?? '';
  if (now.text !== null && mark) {
    const share = Math.ceil(now.text.length * seconds / now.seconds);
    said = now.text.slice(0, share) + now.text.slice(share).match(/^\\S*/)[0];
  }
  if (now.marks.length && said.length > caption.textContent.length) caption.textContent = said;
  caption.scrollTop = caption.scrollHeight;
  if (now.text === null || mark) return;
  quiet();
  if (!now.marks.length) return;
  caption.textContent = now.text;
  voice.dataset.state = 'ended';
};
const play = async (key) => {
  quiet();
  caption.textContent = '';
  if (!key) return;
  const leaving = new AbortController();
  const now = {key, leaving, context: null, next: 0, seconds: 0, marks: [], text: null, timer: 0};
  playing = now;
  now.timer = setInterval(() => follow(now), 50);
  const {body} = await fetch(`speech/${key}`, {signal: leaving.signal});
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {done, value} = await reader.read();
    if (done || playing !== now) break;
    const lines = (rest + value).split('\\n');
    rest = lines.pop();
    for (const line of lines.map((one) => JSON.parse(one))) {
      if ('sound' in line) add(now, line); else now.text = line.text;
    }
  }
  now.text ??= caption.textContent;
};
element.addEventListener('quiet', silence);
element.addEventListener('play', ({detail}) => play(detail).catch(() => {}));
"""
"""Script of the player: it plays pieces as they come, and shows the words with the sound.

While the answer is made, the captions have the words that the talker has read by the end of the
piece that plays; then the same share of the text as of the speech. A player that is silenced tells
the page how many seconds were heard."""
QUIET = """document.querySelector('#voice .voice')?.parentElement
  .dispatchEvent(new CustomEvent('quiet'))"""
"""Expression that silences the player."""
PLAY_SCRIPT = """(key) => { document.querySelector('#voice .voice').parentElement
  .dispatchEvent(new CustomEvent('play', {detail: key})); }"""
"""Function that ends the current speech and plays the one with a key, or none for ""."""


def in_16_bit(samples: np.ndarray) -> np.ndarray:
    """Return (samples,) float32 from -1 to 1 as 16-bit little-endian integers."""
    return (samples * np.iinfo(np.int16).max).astype("<i2")


class _Piece(NamedTuple):
    """Piece of speech as 16-bit little-endian samples, and the text that is said by its end."""

    samples: bytes
    rate: int
    said: str


class LiveSpeech:
    """Speech of one answer: the thread of the answer adds pieces, and the page's server sends them.

    Attributes:
        key: unguessable name of the speech in its address.
    """

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self._pieces: list[_Piece] = []
        self._text: str | None = None
        self._seconds, self._frames = 0.0, 0

    def add(self, speech: Speech, said: str) -> None:
        """Add a piece of speech.

        Args:
            speech: the piece.
            said: the part of the answer's text that the talker has read by its end.
        """
        samples = in_16_bit(speech.samples).tobytes()
        self._pieces.append(_Piece(samples, speech.sample_rate, said))
        self._seconds += len(speech.samples) / speech.sample_rate
        self._frames = speech.frames

    def heard_tokens(self, tokens: int, seconds: float, *, is_complete: bool) -> int:
        """Return how many tokens of the answer were heard, all of them if it was not spoken.

        Args:
            tokens: number of tokens of the answer.
            seconds: seconds of the speech that were heard.
            is_complete: whether the answer was not interrupted.
        """
        if not self._pieces:
            return tokens
        speech = self._seconds, self._frames
        return heard_tokens(tokens, min(seconds, self._seconds), *speech, is_complete=is_complete)

    def end(self, text: str) -> None:
        """End the speech of an answer with this text."""
        self._text = text

    async def lines(self) -> AsyncIterator[str]:
        """Yield a line of JSON for each piece as it comes, and a last one with the text."""
        sent = 0
        while True:
            text = self._text  # Before the pieces, since none follow it.
            for piece in self._pieces[sent:]:
                sent += 1
                sound = base64.b64encode(piece.samples).decode()
                yield json.dumps({"sound": sound, "rate": piece.rate, "said": piece.said}) + "\n"
            if text is not None:
                yield json.dumps({"text": text}) + "\n"
                return
            await asyncio.sleep(1 / _LOOKS_PER_S)
