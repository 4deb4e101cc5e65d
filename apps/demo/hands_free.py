"""Hands-free: the server finds the questions in what the page's microphone hears."""

from __future__ import annotations

import base64
import binascii
import threading
import wave
from pathlib import Path

import numpy as np

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
  <button type="button" aria-pressed="false">Hands-free</button>
  <meter min="0" max="1" aria-label="Level of the microphone"></meter>
  <output>Ask whenever you like; speak to interrupt an answer.</output>
</div>
"""
SCRIPT = (
    """
const [button, meter, output] = ['button', 'meter', 'output'].map((x) => element.querySelector(x));
const source = `registerProcessor('oscar-ears', class extends AudioWorkletProcessor {
  process([input]) { if (input.length) this.port.postMessage(input[0].slice()); return true; }
});`;
const words = {listening: 'Listening …', speaking: 'You speak …', asked: 'Answering …'};
let context = null, stream = null, waiting = [], size = 0, isBusy = false;
const quiet = () => {
  document.querySelectorAll('#spoken audio').forEach((one) => one.pause());
  QUIET;
};
const send = () => {
  if (isBusy || !context || size < 0.2 * RATE) return;
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
  trigger('input', {sound: btoa(text)});
};
const hear = ({data}) => {
  if (!context) return;  // A message that was under way at the end.
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
  waiting = []; size = 0; meter.value = 0; isBusy = false;
  button.setAttribute('aria-pressed', 'false');
  output.textContent = message;
};
const begin = async () => {
  button.setAttribute('aria-pressed', 'true');
  stream = await navigator.mediaDevices.getUserMedia(
    {audio: {channelCount: 1, echoCancellation: true, noiseSuppression: true}});
  context = new AudioContext({sampleRate: RATE});
  const module = URL.createObjectURL(new Blob([source], {type: 'text/javascript'}));
  await context.audioWorklet.addModule(module);
  URL.revokeObjectURL(module);
  const ears = new AudioWorkletNode(context, 'oscar-ears', {numberOfOutputs: 0});
  context.createMediaStreamSource(stream).connect(ears);
  ears.port.onmessage = hear;
  output.textContent = words.listening;
};
button.addEventListener('click', () => {
  if (button.getAttribute('aria-pressed') === 'true') end('');
  else begin().catch((error) => end(`The microphone cannot be used: ${error.message}`));
});
element.addEventListener('heard', ({detail: state}) => {
  isBusy = false;
  if (!context) return;
  if (state === 'failed') return end('The server cannot listen: press the button to try again.');
  if (state === 'speaking') quiet();
  if (state === 'asked') trigger('submit');
  if (words[state]) output.textContent = words[state];
  send();
});
""".replace("RATE", str(RATE))
    .replace("MAX_CHUNK", str(_MAX_CHUNK))
    .replace("QUIET", QUIET)
)
"""Script of the button: it sends 0.2 s of 16-bit samples or more whenever the server has answered,
shows the level, and asks when the server has found a question. A voice silences the answer."""
_TELL = """
  document.querySelector('#hands .hands').parentElement
    .dispatchEvent(new CustomEvent('heard', {detail: TOLD}));
"""
TOLD_SCRIPT = f"(told) => {{{_TELL.replace('TOLD', 'told')}}}"
FAILED_SCRIPT = f"() => {{{_TELL.replace('TOLD', repr('failed'))}}}"
"""Scripts that tell the button what ``Ears.hear`` returned, or that it raised an error."""


class Ears:
    """What a visitor says hands-free; several threads can call its methods.

    Args:
        folder: folder for recordings of questions.
        bounded: folder whose files are bounded together.
    """

    def __init__(self, folder: Path, bounded: Path) -> None:
        self._folder, self._bounded, self._lock = folder, bounded, threading.Lock()
        self._detector = SpeechDetector(_THRESHOLD, _PADDING_MS, _SILENCE_MS)
        self._said: list[np.ndarray] = []
        self._questions: list[Path] = []
        self._made = 0

    def hear(self, sound: object) -> str:
        """Listen to base64 text with 16-bit samples at 16 kHz.

        Returns:
            SPEAKING while the visitor speaks, ASKED if a question has ended, else LISTENING.

        Raises:
            InputError: if it is something else, too long, or the server has no more space.
        """
        samples = _samples(sound)
        with self._lock:
            state = None
            for found in self._detector.push(samples):
                if isinstance(found, np.ndarray):
                    self._said.append(found)
                elif isinstance(found, Ended):
                    self._keep()
                    # Perhaps only the beginning, which was cut, is long enough.
                    state = ASKED if self._questions else None
            self._cut_if_long()
            return state or (SPEAKING if self._detector.speaking else LISTENING)

    def _cut_if_long(self) -> None:
        """End a question that is too long to be read."""
        if sum(map(len, self._said)) >= LIMITS.max_audio_seconds * RATE:
            self._keep()

    def _keep(self) -> None:
        """Write the recording of a question if it is long enough to be one."""
        samples, self._said = np.concatenate(self._said), []
        if len(samples) < _MIN_SAMPLES:
            return
        if stored_bytes(self._bounded) > MAX_STORED_BYTES:
            raise InputError("the server cannot store more files at the moment; try again later")
        self._made += 1
        path = self._folder / f"question-{self._made}.wav"
        self._folder.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(in_16_bit(samples).tobytes())
        self._questions.append(path)

    def take(self) -> list[Path]:
        """Return the recordings since the last call."""
        with self._lock:
            taken, self._questions = self._questions, []
            return taken


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
