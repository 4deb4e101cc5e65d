"""Measure how fast Qwen3-Omni's talker, with random weights, speaks several texts at a time.

python -m benchmarks.speech
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.random_model import RELEASED, Released, build, words
from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm import OscarOmniPipeline, Speech
from oscar_mm.pipelines.loading import device_of

VOICES = (1, 4, 16)
FRAMES = 100
"""Frames of each text: 8 s of speech."""
WORDS = 40
"""Words of each text."""
_FRAME_S = 0.08
NOTES = [
    "The talker has the shapes of transformers' default configuration, with 16 codes a frame; the "
    "model that writes answers is tiny and does not run. All texts begin at the same time.",
    "first: seconds to the first piece (5 frames, 0.4 s) of all texts, median. frame: milliseconds "
    "of a step that adds a frame to each text, with its part of the samples. times: seconds of "
    "speech per second, for each text; below 1, playback stalls.",
]


def speaking_pipeline(*, tiny: bool, device: torch.device) -> OscarOmniPipeline:
    """Create a pipeline whose talker has random weights, and speaks every text in FRAMES frames."""
    dtype = torch.float32 if tiny else torch.bfloat16
    released: Released = RELEASED["qwen3-omni-30b-a3b"].tiny()
    model, processor = build(released, device, dtype, talker=talker_fields(tiny=tiny))
    pipe = OscarOmniPipeline(model, processor=processor, policy="standard")
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
        "accept_hidden_layer": 1,
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


def say(pipe: OscarOmniPipeline, seed: int) -> tuple[float, float]:
    """Speak a text, and return the times of its first and of its last piece."""
    stream = pipe.read_aloud(words(WORDS, seed), seed=seed)
    times = [time.perf_counter() for piece in stream.with_speech() if isinstance(piece, Speech)]
    assert stream.result.speech_tokens == FRAMES
    return times[0], times[-1]


def measure(pipe: OscarOmniPipeline, voices: int) -> dict[str, Any]:
    """Speak several texts at the same time, and return the row of the table."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(voices) as threads:
        times = [*threads.map(lambda seed: say(pipe, seed), range(voices))]
    first, last = zip(*times, strict=True)
    seconds = max(last) - begin
    return {
        "voices": voices,
        "first_s": statistics.median(first) - begin,
        "frame_ms": seconds / FRAMES * 1e3,
        "times": FRAMES * _FRAME_S / seconds,
    }


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    options = parser("benchmarks.speech", __doc__)
    options.add_argument("--tiny", action="store_true", help="a tiny talker, to try the command")
    chosen = options.parse_args(arguments)
    device = device_of(None)
    pipe = speaking_pipeline(tiny=chosen.tiny, device=device)
    say(pipe, 0)  # Compiles kernels.
    rows = [measure(pipe, voices) for voices in VOICES]
    show(
        "Speech",
        ("texts at a time", "first s", "frame ms", "times real time"),
        (
            (str(x["voices"]), f"{x['first_s']:.2f}", f"{x['frame_ms']:.1f}", f"{x['times']:.2f}")
            for x in rows
        ),
    )
    line = command("benchmarks.speech", arguments)
    finish(Record("speech", line, device_name(device.type), rows, NOTES), chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
