"""Measure how soon a chat answers about a recording that it has heard while it was made.

python -m benchmarks.listening
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm import OscarOmniPipeline
from oscar_mm.engine.answer import AnswerStream
from oscar_mm.media.resample import RATE

SECONDS = (10, 60, 300)
REPEATS = 5
_PIECE = RATE // 10
"""Samples that are heard at a time."""
NOTES = [
    "Seconds from the last sample to the first token; median. heard: by chat.listen, which was "
    "given 0.1 s of sound at a time as fast as it was read. whole: the recording is passed to the "
    "chat as audio. load: seconds of reading per second of sound, while it is heard.",
]


def first_token_s(ask: Callable[[], AnswerStream]) -> float:
    """Return the seconds until the first token of an answer."""
    begin = time.perf_counter()
    next(ask())
    return time.perf_counter() - begin


def measure(pipe: OscarOmniPipeline, seconds: int) -> dict[str, Any]:
    """Ask about a recording in both ways, and return the row of the table."""
    samples = 0.1 * np.random.default_rng(seconds).standard_normal(seconds * RATE)
    samples = samples.astype(np.float32)
    heard, whole, load = [], [], []
    for _ in range(REPEATS):
        with pipe.chat() as chat, chat.listen() as listening:
            begin = time.perf_counter()
            for start in range(0, len(samples), _PIECE):
                listening.hear(samples[start : start + _PIECE])
            load.append((time.perf_counter() - begin) / seconds)
            heard.append(first_token_s(partial(listening.stream, "Who?", max_new_tokens=2)))
        with pipe.chat() as chat:
            shown = {"audio": (samples, RATE)}
            whole.append(first_token_s(partial(chat.stream, "Who?", max_new_tokens=2, **shown)))
    median = statistics.median
    times = {"heard_s": median(heard), "whole_s": median(whole), "load": median(load)}
    return {"seconds": seconds, **times}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    options = parser("benchmarks.listening", __doc__)
    options.add_argument("--model", default="pocket-omni", help="hub id, folder or bundled model")
    chosen = options.parse_args(arguments)
    pipe = OscarOmniPipeline(chosen.model, policy="standard")
    measure(pipe, SECONDS[0])  # Compiles kernels.
    rows = [measure(pipe, seconds) for seconds in SECONDS]
    show(
        "First token after the last sample",
        ("seconds of sound", "heard s", "whole s", "load"),
        (
            (str(x["seconds"]), f"{x['heard_s']:.3f}", f"{x['whole_s']:.3f}", f"{x['load']:.4f}")
            for x in rows
        ),
    )
    line = command("benchmarks.listening", arguments)
    device = device_name(pipe.family.device.type)
    finish(Record("listening", line, device, rows, NOTES), chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
