"""What the page's microphone hears: hands-free, the server finds the questions in it; with push to
talk, a button marks where they begin and end."""

from __future__ import annotations

import base64
import binascii
import threading
import wave
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oscar_mm.apps.demo.live_question import LiveQuestion
from oscar_mm.apps.demo.live_speech import QUIET, in_16_bit
from oscar_mm.apps.demo.visitor_input import LIMITS, MAX_STORED_BYTES, stored_bytes
from oscar_mm.apps.turn_detection import Ended, SpeechDetector
from oscar_mm.errors import InputError
from oscar_mm.media.resample import RATE

LISTENING, SPEAKING, ASKED = "listening", "speaking", "asked"
_THRESHOLD, _PADDING_MS, _SILENCE_MS = 0.5, 300, 700
_MAX_CHUNK = 4 * RATE
"""Maximum samples of a call: a browser sends more often, but may have to wait for the server."""
_MIN_SAMPLES = RATE // 4
"""Minimum samples of a question; less is a cough."""
MARKUP = """
<div class="hands">
  <button type="button" class="push" aria-pressed="false">Hold to talk</button>
  <button type="button" class="free" aria-pressed="false">Hands-free</button>
  <meter min="0" max="1" aria-label="Level of the microphone"></meter>
  <output>Hold the button while you ask, or ask hands-free; speak to interrupt an answer.</output>
</div>
"""
SCRIPT = (
    """
const [push, free, meter, output] =
  ['.push', '.free', 'meter', 'output'].map((one) => element.querySelector(one));
const source = `registerProcessor('oscar-ears', class extends AudioWorkletProcessor {
  process([input]) { if (input.length) this.port.postMessage(input[0].slice()); return true; }
});`;
const words = {listening: 'Listening …', speaking: 'You speak …', asked: 'Answering …'};
let context = null, stream = null, waiting = [], size = 0, isBusy = false;
let button = null, isEnding = false;  // What was pressed, and whether it is released.
let press = null, begins = false;  // The last press, and whether no sound of it was sent yet.
const quiet = () => {
  document.querySelectorAll('#spoken audio').forEach((one) => one.pause());
  QUIET;
};
const send = () => {
  if (isBusy || !context || (size < 0.2 * RATE && !isEnding)) return;
  const samples = new Int16Array(Math.min(size, MAX_CHUNK));
  let place = 0;
  while (waiting.length && place + waiting[0].length <= samples.length) {
    for (const one of waiting.shift()) samples[place++] = Math.max(-1, Math.min(1, one)) * 32767;
  }
  size -= place;
  const bytes = new Uint8Array(samples.buffer, 0, 2 * place);
  let text = '';
  for (const byte of bytes) text += String.fromCharCode(byte);
  isBusy = true;
  const ends = isEnding && !size;
  trigger('input', {sound: btoa(text), push: button === push, begins, ends});
  begins = false;
};
const hear = ({data}) => {
  if (!context || isEnding) return;  // A message that was under way at the end.
  waiting.push(data);
  size += data.length;
  const power = Math.sqrt(data.reduce((sum, one) => sum + one * one, 0) / data.length);
  meter.value = Math.max(power * 4, meter.value * 0.95);
  send();
};
const end = (message) => {
  stream?.getTracks().forEach((track) => track.stop());
  context?.close();
  context = stream = null;
  waiting = []; size = 0; meter.value = 0; isBusy = isEnding = false;
  button?.setAttribute('aria-pressed', 'false');
  button = press = null;
  output.textContent = message;
};
const begin = async (isOver) => {
  const granted = await navigator.mediaDevices.getUserMedia(
    {audio: {channelCount: 1, echoCancellation: true, noiseSuppression: true}});
  if (isOver()) return granted.getTracks().forEach((track) => track.stop());
  stream = granted;
  context = new AudioContext({sampleRate: RATE});
  const module = URL.createObjectURL(new Blob([source], {type: 'text/javascript'}));
  await context.audioWorklet.addModule(module);
  URL.revokeObjectURL(module);
  if (isOver()) return;
  const ears = new AudioWorkletNode(context, 'oscar-ears', {numberOfOutputs: 0});
  context.createMediaStreamSource(stream).connect(ears);
  ears.port.onmessage = hear;
  output.textContent = button === push ? words.speaking : words.listening;
  send();
};
const start = (pressed) => {
  const mine = {}, isOver = () => press !== mine;
  press = mine;
  begins = true;
  button = pressed;
  button.setAttribute('aria-pressed', 'true');
  begin(isOver).catch((error) => {
    if (!isOver()) end(`The microphone cannot be used: ${error.message}`);
  });
};
free.addEventListener('click', () => {
  if (button === push) return;
  if (!button) return start(free);
  if (context) trigger('input', {sound: '', push: false, begins, ends: true});
  end('');
});
const down = (event) => {
  event.preventDefault();
  if (!button) start(push);
};
const up = () => {
  if (button !== push || isEnding) return;
  isEnding = true;
  send();
};
push.addEventListener('pointerdown', (event) => {
  push.setPointerCapture?.(event.pointerId);
  push.focus();
  down(event);
});
for (const name of ['pointerup', 'pointercancel', 'blur']) push.addEventListener(name, up);
push.addEventListener('contextmenu', (event) => event.preventDefault());
push.addEventListener('keydown', (event) => {
  if ([' ', 'Enter'].includes(event.key)) down(event);
});
push.addEventListener('keyup', (event) => {
  if ([' ', 'Enter'].includes(event.key)) up();
});
element.addEventListener('heard', ({detail: state}) => {
  isBusy = false;
  if (!context) return;
  if (state === 'failed') return end('The server cannot listen: press the button to try again.');
  if (state === 'speaking') quiet();
  if (state === 'asked') trigger('submit');
  if (isEnding && !size && state !== 'speaking') {
    return end(state === 'asked' ? '' : 'Hold the button while you speak.');
  }
  if (words[state]) output.textContent = words[state];
  send();
});
""".replace("RATE", str(RATE))
    .replace("MAX_CHUNK", str(_MAX_CHUNK))
    .replace("QUIET", QUIET)
)
"""Script of the buttons: it sends 0.2 s of 16-bit samples or more whenever the server has answered,
shows the level, and asks when the server has a whole question. A voice silences the answer."""
_TELL = """
  document.querySelector('#hands .hands').parentElement
    .dispatchEvent(new CustomEvent('heard', {detail: TOLD}));
"""
TOLD_SCRIPT = f"(told) => {{{_TELL.replace('TOLD', 'told')}}}"
FAILED_SCRIPT = f"() => {{{_TELL.replace('TOLD', repr('failed'))}}}"
"""Scripts that tell the button what ``Ears.hear`` returned, or that it raised an error."""


class Question(NamedTuple):
    """A question that was heard.

    Attributes:
        path: its recording.
        live: what was read of it while it was spoken.
    """

    path: Path
    live: LiveQuestion


class Ears:
    """What a visitor says; several threads can call its methods.

    Args:
        folder: folder for recordings of questions.
        bounded: folder whose files are bounded together.
        begin: function that begins to read a question, given the name of its recording.

    Attributes:
        live: the question that the visitor is saying; None in silence.
    """

    def __init__(self, folder: Path, bounded: Path, begin: Callable[[str], LiveQuestion]) -> None:
        self._folder, self._bounded, self._begin = folder, bounded, begin
        self._lock = threading.Lock()
        self._detector: SpeechDetector | None = None
        self._said: list[np.ndarray] = []
        self._questions: list[Question] = []
        self._made = 0
        self.live: LiveQuestion | None = None

    def hear(
        self, sound: object, *, push: bool = False, begins: bool = False, ends: bool = False
    ) -> str:
        """Listen to base64 text with 16-bit samples at 16 kHz.

        Args:
            sound: the text; may be empty at the end.
            push: whether a button marks where the question begins and ends (push to talk).
            begins: whether a button was pressed since the last call. An unfinished question, whose
                end was lost with the connection or after an error, is forgotten.
            ends: whether the visitor stops: with ``push``, the question is complete; hands-free, an
                unfinished question is forgotten.

        Returns:
            SPEAKING while the visitor speaks, ASKED if a question has ended, else LISTENING.

        Raises:
            InputError: if it is something else, too long, or the server has no more space.
        """
        samples = np.zeros(0, np.float32) if ends and sound == "" else _samples(sound)
        stops = ends and not push
        if begins or stops:
            self.forget()
        if stops:
            return LISTENING
        with self._lock:
            return self._hear_pushed(samples, ends=ends) if push else self._hear_free(samples)

    def _hear_pushed(self, samples: np.ndarray, *, ends: bool) -> str:
        self._add(samples)
        if not ends:
            self._cut_if_long()
            return SPEAKING
        self._keep()
        return ASKED if self._questions else LISTENING

    def _hear_free(self, samples: np.ndarray) -> str:
        if self._detector is None:
            self._detector = SpeechDetector(_THRESHOLD, _PADDING_MS, _SILENCE_MS)
        state = None
        for found in self._detector.push(samples):
            if isinstance(found, np.ndarray):
                self._add(found)
            elif isinstance(found, Ended):
                self._keep()
                # Perhaps only the beginning, which was cut, is long enough.
                state = ASKED if self._questions else None
        self._cut_if_long()
        return state or (SPEAKING if self._detector.speaking else LISTENING)

    def _add(self, samples: np.ndarray) -> None:
        if self.live is None:
            self._made += 1
            self.live = self._begin(self._name)
        self._said.append(samples)
        self.live.hear(samples)

    @property
    def _name(self) -> str:
        """Name of the latest recording."""
        return f"question-{self._made}.wav"

    def _cut_if_long(self) -> None:
        """End a question that is too long to be read."""
        if sum(map(len, self._said)) >= LIMITS.max_audio_seconds * RATE:
            self._keep()

    def _keep(self) -> None:
        """Write the recording of a question if it is long enough to be one."""
        live, said = self.live, self._said
        if live is None:
            return
        self.live, self._said = None, []
        samples = np.concatenate(said)
        if len(samples) < _MIN_SAMPLES:
            live.close()
            return
        if stored_bytes(self._bounded) > MAX_STORED_BYTES:
            live.close()
            raise InputError("the server cannot store more files at the moment; try again later")
        path = self._folder / self._name
        self._folder.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(in_16_bit(samples).tobytes())
        self._questions.append(Question(path, live))
        if len(self._questions) > 1:
            self._free_waiting()  # Several at once are asked with their recordings.

    def _free_waiting(self) -> None:
        """Free what was read of questions that nobody has asked yet; their recordings stay."""
        for question in self._questions:
            question.live.close()

    def take(self) -> list[Question]:
        """Return the questions since the last call, which the caller closes."""
        with self._lock:
            taken, self._questions = self._questions, []
            return taken

    def forget(self) -> None:
        """Forget the question that the visitor is saying."""
        with self._lock:
            self._free_waiting()
            self._detector, self._said, live = None, [], self.live
            self.live = None
        if live is not None:
            live.close()


def _samples(sound: object) -> np.ndarray:
    try:
        data = base64.b64decode(sound, validate=True) if isinstance(sound, str) else b""
    except (binascii.Error, ValueError):
        data = b""
    if not data or len(data) % 2 or len(data) > 2 * _MAX_CHUNK:
        seconds = _MAX_CHUNK // RATE
        raise InputError(
            f"sound must be base64 of up to {seconds} s of 16-bit samples at {RATE} Hz"
        )
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768
