"""Measure the time to first token at full size: for texts, and by stage for many or long media.

python -m benchmarks.first_token [--models qwen3-vl-8b,qwen3-omni-30b-a3b [--add]] [--tiny]

``--models qwen3-vl-8b`` measures a single model; ``--add`` keeps the recorded rows of the other.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import soundfile
import torch
from PIL import Image

import oscar_mm
from benchmarks.profiling import release
from benchmarks.random_model import RELEASED, build, words
from benchmarks.record import (
    Record,
    Row,
    command,
    device_name,
    device_of,
    finish,
    models_of,
    now,
    parser,
    show,
)
from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.admission.admission import Admission
from oscar_mm.cache import cache as cache_module
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.engine.prompt import Prompt
from oscar_mm.media import encoder_inputs
from oscar_mm.media.encoder_inputs import ImagesInBytes, VideosInBytes
from oscar_mm.media.media import MediaReader
from oscar_mm.media.resample import RATE
from oscar_mm.modality import Modality
from oscar_mm.thread_pool import parallel_map

NOTES = [
    "Shapes of the released config.json, random weights in bfloat16, the default policy. Pictures "
    "are JPEG files (quality 90), recordings FLAC files at 16 kHz, mono.",
    "first token: from the call of the pipeline to its first token, the third call of its kind "
    "being the profiled one. Stages are of that profiled call, which waits for the GPU wherever a "
    "stage begins or ends; a stage within another one does not count for the outer one.",
    "headers: sizes of media and whether the request fits. decode: media files to pixels and "
    "samples. processor: pixels to patches and to numbers, samples to features with the copies to "
    "the device and back that the extractor makes. tokens: the rest of the prompt (template, "
    "tokenizer, positions, digests of media). copy: pixels to the device. towers and language "
    "model are the model's own time. pack: keys and values into pages. rest: all else, such as "
    "embeddings, joins of features and the choice of the token.",
    "cpu: seconds of all cores together.",
    "Texts: words in a random order, other ones in each call; the median of calls after the first "
    "ones of a length, which compile and record.",
]
OWN = ("towers", "language model")
"""Stages in which the model itself runs."""
STAGES = ("headers", "decode", "processor", "tokens", "copy", *OWN, "pack", "rest")
MOST = 0.05
"""Maximum time of any other stage, relative to the time of the model's own stages."""
_QUESTION = "What is it?"
WORDS = (20, 60, 300, 600, 1200)
"""Numbers of words in texts, from short questions to prompts of about 2,000 tokens."""
_WARM_UP, _CALLS = 4, 7


@dataclass(frozen=True)
class Case:
    """Case of the benchmark: the media of one request.

    Attributes:
        name: name in the table.
        model: key of ``RELEASED``.
        count: number of pictures or recordings.
        size: width and height of a picture, in pixels.
        seconds: length of a recording, in seconds.
    """

    name: str
    model: str
    count: int
    size: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    def tiny(self) -> Case:
        """Return a small version of the case for a CPU."""
        width, height = self.size
        small = (width // 8, height // 8)
        return replace(self, count=min(self.count, 3), size=small, seconds=self.seconds / 600)


CASES = (
    Case("100 pictures of 1,200 x 900", "qwen3-vl-8b", 100, (1200, 900)),
    Case("100 pictures of 640 x 480", "qwen3-vl-8b", 100, (640, 480)),
    Case("a recording of 40 minutes", "qwen3-omni-30b-a3b", 1, seconds=2400.0),
    Case("40 recordings of a minute", "qwen3-omni-30b-a3b", 40, seconds=60.0),
)
MODELS = tuple(dict.fromkeys(case.model for case in CASES))


class StageClock:
    """Clock that measures the seconds of each stage, excluding nested stages.

    The clock counts the time of the thread that created it, and of other threads that take turns
    with this thread.

    Args:
        device: device that stages wait for.
        others: ids of the other threads, such as the engine thread.

    Attributes:
        wall: elapsed seconds by stage.
        cpu: CPU seconds of this process on all cores, by stage.
    """

    def __init__(self, device: torch.device, others: Iterable[int] = ()) -> None:
        self.wall = dict.fromkeys(STAGES, 0.0)
        self.cpu = dict.fromkeys(STAGES, 0.0)
        self._device = device
        self._threads = {threading.get_ident(), *others}
        self._open: list[str] = []
        self._last = (0.0, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Within the block, count the time for a stage."""
        if threading.get_ident() not in self._threads:
            yield
            return
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another function as a stage."""

        @wraps(call)
        def as_stage(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return call(*args, **kwargs)

        # The fast layers require that a ``forward`` is the class's own or belongs to this library.
        as_stage.__module__ = oscar_mm.__name__ + ".benchmarks"
        return as_stage

    def _count(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        before, self._last = self._last, (perf_counter(), process_time())
        if self._open:
            self.wall[self._open[-1]] += self._last[0] - before[0]
            self.cpu[self._open[-1]] += self._last[1] - before[1]


@contextmanager
def stages(pipe: Any, clock: StageClock) -> Iterator[None]:
    """Within the block, time a pipeline's requests by stage; everything else counts as "rest"."""
    family, model, processor = pipe.family, pipe.model, pipe.processor
    decoder = model.get_decoder()
    kinds = family.reads & {Modality.IMAGE, Modality.AUDIO}
    towers = [model.get_encoder(modality=kind.label) for kind in kinds]
    readers = [getattr(processor, name, None) for name in ("image_processor", "feature_extractor")]
    places: list[tuple[Any, str, str]] = [
        (MediaReader, "outline", "headers"),
        (Admission, "check_outline", "headers"),
        (MediaReader, "_decoded", "decode"),
        *((type(reader), "__call__", "processor") for reader in readers if reader is not None),
        *((kind, "__call__", "processor") for kind in (ImagesInBytes, VideosInBytes)),
        (encoder_inputs, "scaled_inputs", "processor"),
        (encoder_inputs, "with_features", "processor"),
        (family, "prompt", "tokens"),
        (Prompt, "arguments", "copy"),
        *((tower, "forward", "towers") for tower in towers),
        (decoder, "forward", "language model"),
        (model.get_output_embeddings(), "forward", "language model"),
        (OscarLayer, "append", "pack"),
        (cache_module, "pack_together", "pack"),
    ]
    with ExitStack() as patches, clock.stage("rest"):
        for owner, name, stage in places:
            timed = clock.timed(stage, getattr(owner, name))
            patches.enter_context(patch.object(owner, name, timed))
        yield


def pictures(folder: Path, case: Case) -> list[Path]:
    """Create different JPEG files that show shapes of all sizes and some noise."""
    width, height = case.size

    def picture(index: int) -> Path:
        numbers = np.random.default_rng(index)
        canvas = numbers.normal(0, 8, (height, width, 3))
        for side in (4, 16, 64):
            coarse = numbers.integers(0, 256, (side, side, 3), dtype=np.uint8)
            large = Image.fromarray(coarse).resize(case.size, Image.Resampling.BICUBIC)
            canvas += (np.asarray(large) - 128.0) / 2
        path = folder / f"{index}.jpg"
        Image.fromarray((canvas + 128).clip(0, 255).astype(np.uint8)).save(path, quality=90)
        return path

    return [*parallel_map(picture, range(case.count))]


def recordings(folder: Path, case: Case) -> list[Path]:
    """Create different FLAC files that contain noise of varying loudness."""
    count = round(case.seconds * RATE)
    swell = (0.05 + 0.05 * np.sin(np.arange(count) / RATE)).astype(np.float32)

    def recording(index: int) -> Path:
        noise = np.random.default_rng(index).standard_normal(count, dtype=np.float32)
        path = folder / f"{index}.flac"
        soundfile.write(path, noise * swell, RATE)
        return path

    return [*parallel_map(recording, range(case.count))]


def measure(name: str, device: torch.device, *, tiny: bool) -> Iterator[Row]:
    """Yield a row for each text length and each case of a model."""
    released = RELEASED[name].tiny() if tiny else RELEASED[name]
    start = perf_counter()
    model, processor = build(released, device, torch.bfloat16)
    kind = OscarOmniPipeline if released.audio else OscarVLPipeline
    pipe = kind(model, processor=processor)
    build_s = perf_counter() - start
    for count in WORDS:
        row = {"model": name, "case": f"a text of {count:,} words", "date": now()}
        yield row | read_text(pipe, count)
    for case in (case for case in CASES if case.model == name):
        row = {"model": name, "case": case.name, "date": now(), "build_s": build_s}
        yield row | request(pipe, case.tiny() if tiny else case, device)


def read_text(pipe: Any, count: int) -> Row:
    """Time requests whose texts have ``count`` words."""
    answers = [
        pipe(images=None, prompt=words(count, seed), max_new_tokens=1, temperature=0)
        for seed in range(_WARM_UP + _CALLS)
    ]
    seconds = [answer.timings.prefill_s for answer in answers[_WARM_UP:]]
    return {"prompt_tokens": answers[-1].prompt_tokens, "first_token_s": median(seconds)}


def request(pipe: Any, case: Case, device: torch.device) -> Row:
    """Ask about the media of a case three times: to warm up, to time the request, and by stage."""
    with tempfile.TemporaryDirectory() as folder:
        start = perf_counter()
        make = recordings if case.seconds else pictures
        media = {"audio" if case.seconds else "images": make(Path(folder), case)}
        made = perf_counter()
        size = sum(path.stat().st_size for paths in media.values() for path in paths)

        def ask() -> Any:
            return pipe(prompt=_QUESTION, **media, max_new_tokens=1, temperature=0)

        ask()
        answer = ask()
        clock = StageClock(device, [pipe.engine.call(threading.get_ident)])
        with stages(pipe, clock):
            ask()
    own = sum(clock.wall[name] for name in OWN)
    return {
        "files": case.count,
        "file_bytes": size,
        "make_s": made - start,
        "prompt_tokens": answer.prompt_tokens,
        "first_token_s": answer.timings.prefill_s,
        "profiled_s": sum(clock.wall.values()),
        "wall_s": clock.wall,
        "cpu_s": clock.cpu,
        "share": {name: seconds / own for name, seconds in clock.wall.items() if name not in OWN},
    }


def report(rows: Sequence[Row]) -> None:
    """Print the times of texts, and seconds by stage with the verdict on each of our stages."""
    texts = [row for row in rows if "wall_s" not in row]
    show(
        "Texts",
        ("model", "tokens", "first token, ms"),
        ((x["model"], f"{x['prompt_tokens']:,}", f"{1e3 * x['first_token_s']:.1f}") for x in texts),
    )
    for row in (row for row in rows if "wall_s" in row):
        show(
            f"{row['model']}, {row['case']}: {row['prompt_tokens']:,} tokens, first token after "
            f"{row['first_token_s']:.2f} s",
            ("stage", "s", "cpu s", "share of the model's own", f"at most {MOST:.0%}"),
            (
                (
                    *(name, f"{row['wall_s'][name]:.3f}", f"{row['cpu_s'][name]:.2f}"),
                    *_verdict(row["share"].get(name)),
                )
                for name in STAGES
            ),
        )


def _verdict(share: float | None) -> tuple[str, str]:
    return ("", "") if share is None else (f"{share:.1%}", "met" if share <= MOST else "NOT met")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 2 for unknown models or without a CUDA device."""
    options = parser("benchmarks.first_token", __doc__)
    options.add_argument("--models", default=",".join(MODELS), help="models, comma-separated")
    options.add_argument("--add", action="store_true", help="keep the file's rows of other models")
    options.add_argument("--tiny", action="store_true", help="trial run with tiny models")
    options = options.parse_args(arguments)
    names = models_of(options.models, MODELS)
    device = None if names is None else device_of("first_token", tiny=options.tiny)
    if names is None or device is None:
        return 2
    line = command("benchmarks.first_token", arguments)
    record = Record("first_token", line, device_name(device.type), [], NOTES)
    if options.add and (earlier := record.earlier(options.out)):
        record.rows += [row for row in earlier.rows if row["model"] not in names]
    for name in names:
        start = perf_counter()
        for row in measure(name, device, tiny=options.tiny):
            record.rows.append(row)
            record.write(options.out)
        release(device)
        print(f"{name}: {perf_counter() - start:.0f} s", flush=True)
    report(record.rows)
    finish(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
