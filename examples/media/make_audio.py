"""Make dial.wav: the tones of a telephone that dials 5550 1987, each key for a fifth of a second.

python make_audio.py [FOLDER]
"""

import sys
from pathlib import Path

import numpy as np
import soundfile

NUMBER = "55501987"
RATE = 8000
KEY_S, PAUSE_S = 0.2, 0.12

# Two tones a key: one for its row, one for its column, in Hz (ITU-T Q.23).
KEYS = ("123", "456", "789", "*0#")
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)


def key_tones(key: str) -> np.ndarray:
    """(samples,) float64 of one key, faded in and out over 5 ms."""
    row = next(index for index, keys in enumerate(KEYS) if key in keys)
    time = np.arange(round(KEY_S * RATE)) / RATE
    tones = [
        np.sin(2 * np.pi * pitch * time) for pitch in (ROWS[row], COLUMNS[KEYS[row].index(key)])
    ]
    fade = np.minimum(1, np.minimum(time, time[::-1]) / 0.005)
    return 0.35 * fade * sum(tones)


def dialled(number: str) -> np.ndarray:
    """(samples,) float64 of all keys with pauses between them."""
    pause = np.zeros(round(PAUSE_S * RATE))
    return np.concatenate([pause, *(part for key in number for part in (key_tones(key), pause))])


def main() -> None:
    """Write dial.wav into a folder, by default where this script is."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    soundfile.write(folder / "dial.wav", dialled(NUMBER), RATE, subtype="PCM_16")


if __name__ == "__main__":
    main()
