"""Measure how soon and how fast Qwen3-Omni speaks, with random weights, beside its bounds.

python -m benchmarks.speech
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.profiling import allocated
from benchmarks.random_model import RELEASED, build
from benchmarks.record import Record, Row, command, device_name, device_of, finish, parser, show
from oscar_mm import KVPolicy, OscarOmniPipeline, Speech
from oscar_mm.engine.answer import AnswerStream
from oscar_mm.errors import Cancelled
from oscar_mm.media.resample import RATE

VOICES = (1, 4, 16)
FRAMES = 100
"""Frames of each answer: 8 s of speech."""
WORDS = 40
"""Tokens of each answer."""
QUESTION_S, PAST_S = 5.0, 1800.0
"""Seconds of a question, and of the conversation before it."""
TURNS = 5
"""Number of questions after the conversation; the first ones compile kernels."""
FRAME_S = 0.08
FIRST_AUDIO_S = 0.35
"""Maximum seconds from the end of a question to the first samples of its answer."""
FACTORS = {1: 0.25, 16: 0.8}
"""Maximum real-time factor by the number of answers that are spoken at the same time."""
HOUR_MB = 900
"""Maximum MB of an hour of conversation, in both caches."""
SESSIONS = 100
"""Number of conversations with interruptions, after which no memory may be in use."""
MAX_LEFT = 511
"""Maximum bytes that a conversation may leave on a GPU: less than torch's smallest block."""
PIECES = 6
"""Answers are interrupted after 0 to ``PIECES - 1`` of their pieces, in turn."""
SHORT_FRAMES = 10
"""Frames of an answer that nobody interrupts in those conversations."""
NOTES = [
    "Qwen3-Omni-30B-A3B with random weights in bfloat16, policy standard unless --policy names "
    "another one: the thinker has the shapes of the released config.json, talker, code predictor "
    "and code2wav those of transformers' default configuration, with 16 codes a frame. Answers "
    f"have {WORDS} tokens and {FRAMES} frames of 80 ms; a question is {QUESTION_S:g} s of sound.",
    f"first audio: from the call with the question, in a chat that has heard {PAST_S / 60:g} "
    "minutes of sound, to the first samples of the answer; the median of the latest three of "
    f"{TURNS} turns. With several answers, in the median, from the moment when all are asked at "
    "once, each in a new conversation.",
    "real-time factor: seconds from the first to the last samples, per second of speech between "
    "them, of the slowest answer; above 1, playback stalls.",
    "bytes an hour: what the cache of the chat takes after the conversation, for an hour of it: "
    "that of the thinker, and that of the talker, which has read the same sound.",
    f"bytes held: in page stores, and allocated on the device more than before, after {SESSIONS} "
    f"conversations whose spoken answers were interrupted after 0 to {PIECES - 1} pieces of text "
    "and speech, every other one closed at that moment, the others after an answer of "
    f"{SHORT_FRAMES} frames; without CUDA graphs.",
]
_Times = list[float]


def speaking_pipeline(*, tiny: bool, device: torch.device, policy: KVPolicy) -> OscarOmniPipeline:
    """Create a pipeline with random weights that speaks every answer in FRAMES frames."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    released = RELEASED["qwen3-omni-30b-a3b"]
    released = released.tiny() if tiny else released
    model, processor = build(released, device, dtype, talker=talker_fields(tiny=tiny))
    pipe = OscarOmniPipeline(model, processor=processor, policy=policy)
    talker = pipe.family.talker
    assert talker is not None
    talker.end_code, talker.max_frames = -1, FRAMES
    return pipe


def talker_fields(*, tiny: bool) -> dict[str, Any]:
    """Return the configurations of the talker and of code2wav."""
    sections = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    rope = {"rope_type": "default", "rope_theta": 1_000_000, **sections}
    text: dict[str, Any] = {"head_dim": 128, "rope_parameters": rope, "vocab_size": 3072}
    text |= {"shared_expert_intermediate_size": 768}
    predictor: dict[str, Any] = {"num_code_groups": 16}
    sound: dict[str, Any] = {}
    if tiny:
        small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        text |= small | {"num_key_value_heads": 1, "num_experts": 8, "moe_intermediate_size": 32}
        text |= {"shared_expert_intermediate_size": 32}
        predictor |= small | {"num_key_value_heads": 1, "intermediate_size": 96, "head_dim": 32}
        sound |= small | {"num_key_value_heads": 2, "intermediate_size": 64, "decoder_dim": 32}
    talker = {
        "text_config": text,
        "code_predictor_config": predictor,
        "num_code_groups": 16,
        "accept_hidden_layer": 1 if tiny else 18,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"ethan": 2302},
        "spatial_merge_size": 2,
    }
    return {"talker_config": talker, "code2wav_config": sound}


def sound(seconds: float, seed: int) -> tuple[np.ndarray, int]:
    """Create a recording of noise."""
    numbers = np.random.default_rng(seed)
    return 0.1 * numbers.standard_normal(round(seconds * RATE), dtype=np.float32), RATE


def asked(seed: int) -> dict[str, Any]:
    """Return the arguments of a question."""
    recording = sound(QUESTION_S, seed)
    return {
        "prompt": "Answer.",
        "audio": recording,
        "speak": True,
        "seed": seed,
        "max_new_tokens": WORDS,
    }


def listen(stream: AnswerStream) -> tuple[_Times, float]:
    """Return the time of each piece of speech, and the seconds of speech after the first one."""
    times, samples = [], []
    for piece in stream.with_speech():
        if isinstance(piece, Speech):
            times.append(time.perf_counter())
            samples.append(len(piece.samples))
    rate = stream.result.sample_rate
    assert stream.result.speech_tokens == FRAMES and rate is not None
    return times, sum(samples[1:]) / rate


def factor(times: _Times, seconds: float) -> float:
    """Return the real-time factor of an answer, given the results of ``listen``."""
    return (times[-1] - times[0]) / seconds


def in_a_long_chat(pipe: OscarOmniPipeline) -> Row:
    """Ask questions in a chat that has heard PAST_S seconds."""
    with pipe.chat() as chat:
        start = time.perf_counter()
        chat.ask("Listen.", audio=sound(PAST_S, 0), speak=True, max_new_tokens=2)
        past_s, memory = time.perf_counter() - start, chat.memory
        waits, factors = [], []
        for turn in range(TURNS):
            question = asked(turn)
            begin = time.perf_counter()
            times, seconds = listen(chat.stream(**question))
            waits.append(times[0] - begin)
            factors.append(factor(times, seconds))
    speech = memory.by_modality["speech"]
    return {
        "case": f"in a chat of {PAST_S / 60:g} minutes",
        "voices": 1,
        "first_audio_s": statistics.median(waits[-3:]),
        "first_audio_each_s": waits,
        "factor": statistics.median(factors[-3:]),
        "past_s": past_s,
        "past_tokens": sum(memory.tokens.values()) - memory.tokens["speech"],
        "bytes_an_hour": (memory.kv_bytes - speech) / PAST_S * 3600,
        "talker_bytes_an_hour": speech / PAST_S * 3600,
        "bf16_bytes_an_hour": memory.bf16_bytes / PAST_S * 3600,
    }


def together(pipe: OscarOmniPipeline, voices: int) -> Row:
    """Ask several questions at the same time, and return the row of the table."""
    for first in (voices, 0):  # The first time, kernels are compiled and steps captured.
        questions = [asked(first + place) for place in range(voices)]
        begin = time.perf_counter()
        with ThreadPoolExecutor(voices) as threads:
            found = [*threads.map(lambda question: listen(pipe.stream(**question)), questions)]
    return {
        "case": "new conversations",
        "voices": voices,
        "first_audio_s": statistics.median(times[0] for times, _ in found) - begin,
        "factor": max(factor(*one) for one in found),
    }


def interrupted(pipe: OscarOmniPipeline) -> Row:
    """Interrupt answers, and return what is held once all conversations are closed."""
    device = pipe.family.device
    for number in range(2 * PIECES):  # Pools that grow now are not counted.
        interrupt(pipe, number)
    pipe.release_graphs()
    begin, before = time.perf_counter(), allocated(device).get("requested", 0)
    for number in range(SESSIONS):
        interrupt(pipe, number)
    seconds = time.perf_counter() - begin
    pipe.release_graphs()
    stores = pipe.engine.call(lambda: (pipe.store.memory().used_bytes, pipe.engine.speech_bytes))
    return {
        "sessions": SESSIONS,
        "seconds": seconds,
        "held_bytes": sum(stores),
        "grown_bytes": allocated(device).get("requested", 0) - before,
    }


def interrupt(pipe: OscarOmniPipeline, number: int) -> None:
    """Speak in a conversation while it answers, then leave it or ask again."""
    talker = pipe.family.talker
    assert talker is not None
    talker.max_frames = FRAMES
    with pipe.chat() as chat, chat.listen(speak=True) as listening:
        listening.hear(sound(QUESTION_S, number)[0])
        pieces = listening.stream(max_new_tokens=WORDS, seed=number).with_speech()
        for _ in range(number % PIECES):
            next(pieces, None)
        listening.hear(sound(1.0, number)[0])
        chat.stop()
        if number % 2:
            return
        with suppress(Cancelled):
            for _ in pieces:
                pass
        talker.max_frames = SHORT_FRAMES
        listening.ask("Answer.", max_new_tokens=2)


def bounds(rows: Sequence[Row]) -> Iterator[tuple[str, float, float]]:
    """Yield what was measured of each bound: its name, the value and the maximum."""
    for row in rows:
        if "past_s" in row:
            yield f"first audio {row['case']}, s", row["first_audio_s"], FIRST_AUDIO_S
            both = row["bytes_an_hour"] + row["talker_bytes_an_hour"]
            yield "MB of an hour of conversation", both / 1e6, HOUR_MB
        if "factor" in row and row["voices"] in FACTORS:
            name = f"real-time factor, {row['voices']} {row['case']}"
            yield name, row["factor"], FACTORS[row["voices"]]
        if "held_bytes" in row:
            after = f"after {row['sessions']} interrupted conversations"
            yield f"bytes held {after}", row["held_bytes"], 0
            yield f"more bytes allocated {after}", row["grown_bytes"], MAX_LEFT * row["sessions"]


def verdict(value: float, most: float | None) -> str:
    """Return the bound on a value, and whether the value meets it."""
    if most is None:
        return ""
    return f"{most:g}: {'met' if value <= most else 'NOT met'}"


def report(rows: Sequence[Row]) -> None:
    """Print the rows beside their bounds, and the bytes of an hour."""
    show(
        "Speech",
        ("answers at a time", "first audio s", "at most", "real-time factor", "at most"),
        (
            (
                f"{row['voices']}, {row['case']}",
                f"{row['first_audio_s']:.3f}",
                verdict(row["first_audio_s"], FIRST_AUDIO_S if "past_s" in row else None),
                f"{row['factor']:.3f}",
                verdict(row["factor"], FACTORS.get(row["voices"])),
            )
            for row in rows
            if "factor" in row
        ),
    )
    kinds = {"thinker": "bytes_an_hour", "talker": "talker_bytes_an_hour"}
    kinds |= {"both in 16 bits": "bf16_bytes_an_hour"}
    for row in (row for row in rows if "past_s" in row):
        sizes = ((name, f"{row[key] / 1e6:,.0f}") for name, key in kinds.items())
        show("An hour of conversation", ("cache", "MB"), sizes)
    found = ((name, f"{value:,.3f}", verdict(value, most)) for name, value, most in bounds(rows))
    show("Bounds", ("what", "measured", "at most"), found)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 2 without a CUDA device."""
    options = parser("benchmarks.speech", __doc__)
    options.add_argument("--tiny", action="store_true", help="trial run with a tiny model")
    how = {"type": KVPolicy.of, "default": "standard", "metavar": "POLICY"}
    options.add_argument("--policy", **how, help="policy of the KV cache, as in oscar-mm serve")
    chosen = options.parse_args(arguments)
    device = device_of("speech", tiny=chosen.tiny)
    if device is None:
        return 2
    line = command("benchmarks.speech", arguments)
    record = Record("speech", line, device_name(device.type), [], NOTES)
    start = time.perf_counter()
    pipe = speaking_pipeline(tiny=chosen.tiny, device=device, policy=chosen.policy)
    record.extra["build_s"] = time.perf_counter() - start
    calls = [partial(in_a_long_chat, pipe), *(partial(together, pipe, x) for x in VOICES)]
    calls.append(partial(interrupted, pipe))
    for call in calls:
        record.rows.append(call())
        record.extra["total_s"] = time.perf_counter() - start
        record.write(chosen.out)
        print(f"{record.rows[-1]}, after {record.extra['total_s']:.0f} s", flush=True)
    report(record.rows)
    finish(record, chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
