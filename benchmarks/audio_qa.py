"""Compare audio QA with questions that share a recording's pages and with questions that do not.

python -m benchmarks.audio_qa [--ray]
python -m benchmarks.audio_qa --full-size

Each run is a process of `oscar-mm audio-qa` with the bundled pocket-omni on the CPU. The benchmark
needs the program espeak-ng, which synthesizes the recordings; --ray needs Ray. With --full-size, a
model with the shapes of Qwen3-Omni and random weights answers in this process, on a GPU.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.random_model import RELEASED, build
from benchmarks.record import Record, command, device_name, device_of, finish, parser, show
from examples.train_pocket.speech import NUMBERS, RATE, VOICES, speak
from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.audio_qa.engine import AnswerSettings, Engine
from oscar_mm.apps.audio_qa.rows import by_recording, read_rows
from oscar_mm.apps.server_process import freeze_loaded
from oscar_mm.engine.warm_up import warm_up

RECORDINGS, CLIPS, QUESTIONS = 20, 20, 10
BATCH = 8
_LIMIT_S = 1800
VOICES_USED = VOICES[:4]
_GAP_S = 0.06
_MAX_S, _MIN_S = 3.5, 1.0
FULL_SIZE, FULL_SECONDS, FULL_TOKENS = "qwen3-omni-30b-a3b", 60, 64
FULL_RUNS = (("shared", 64, 200), ("shared", 8, 200), ("shared", 1, 50), ("not shared", 64, 50))
"""Runs: for each, its kind, its maximum number of running rows, and its total number of rows."""
AT_LEAST = 5.0
"""Minimum speedup, in rows per minute, of the first run over the run without batching."""
FULL_NOTES = [
    f"{RECORDINGS} recordings of noise of {FULL_SECONDS} s, {QUESTIONS} questions about each. "
    f"Random weights, which never end an answer before {FULL_TOKENS} tokens, the default policy. "
    "'batch': most rows at once; in each row's time is all that a job does, from the files on, but "
    "for loading the model. Steps were captured and two recordings asked about before.",
    "Not shared: each row has its own links to the same sound files.",
]
NOTES = [
    f"{RECORDINGS} recordings of {CLIPS} spoken clips of 1 to 3.5 s, {QUESTIONS} questions about "
    "each, half of them with four choices, which are scored. espeak-ng speaks the clips.",
    f"Rows run in batches of {BATCH}; 'one by one' is a batch of one. 'Not shared': each row has "
    "its own links to the same sound files, so its recording is decoded and read for it alone.",
    "Seconds are those of the rows, without loading the model. Those of killed runs last from the "
    "start of the first process to the end of the last and include start and loading. Seconds "
    "depend on what else the machine does: 'load' is the mean number of processes that wanted its "
    "processors in the minute before the first run and after the last. CPU seconds count all "
    "threads and depend on it much less, so the ratios are of CPU seconds.",
    "KV peak: bytes of the pools of pages and 16-bit blocks, with free slots. The model is float32 "
    "on a CPU, and so are the 16-bit blocks. On Ray it is the peak of the largest worker.",
    "'Same answers' compares id, answer, choice and error of all rows with those of the first run.",
]


@cache
def _unit(words: str, voice: tuple[str, int, int]) -> np.ndarray:
    return speak(words, *voice)


def clip(digits: str, voice: tuple[str, int, int]) -> np.ndarray:
    """Synthesize digits spoken in pairs, as in the model's training.

    Returns:
        (samples,) float32 at 16 kHz.
    """
    gap = np.zeros(round(_GAP_S * RATE), np.float32)
    parts = [gap]
    for place in range(0, len(digits), 2):
        words = " ".join(NUMBERS[int(digit)] for digit in digits[place : place + 2])
        parts += [_unit(words, voice), gap]
    sound = np.concatenate(parts)[: round(_MAX_S * RATE)]
    return np.pad(sound, (0, max(0, round(_MIN_S * RATE) - len(sound))))


def write_wav(path: Path, samples: np.ndarray) -> None:
    """Write audio samples to a 16-bit WAV file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def spoken_questions(
    folder: Path, recordings: int, clips: int, questions: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Create rows for audio-qa about recordings, each of which consists of clips of spoken digits.

    Every other question is free-form, and the rest have four choices. Wrong choices are the digits
    of other clips of the same recording.

    Args:
        folder: folder for the recordings.
        recordings: number of recordings.
        clips: number of clips per recording.
        questions: number of questions per recording.
        seed: seed of the digits, voices and questions.
    """
    rng = random.Random(seed)
    rows = []
    for number in range(recordings):
        voice = rng.choice(VOICES_USED)
        spoken: list[str] = []
        while len(spoken) < clips:
            digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 5)))
            if digits not in spoken:
                spoken.append(digits)
        names = [f"recording{number:02}-clip{place:02}.wav" for place in range(1, clips + 1)]
        for name, digits in zip(names, spoken, strict=True):
            write_wav(folder / name, clip(digits, voice))
        for turn, place in enumerate(rng.sample(range(clips), questions)):
            row = {
                "id": f"r{number:02}q{turn:02}",
                "audio": names,
                "question": f"What was said in clip {place + 1}?",
                "answer": spoken[place],
                "group": "free",
            }
            if turn % 2:
                others = rng.sample([digits for digits in spoken if digits != spoken[place]], 3)
                choices = rng.sample([spoken[place], *others], 4)
                row |= {"choices": choices, "group": "choices"}
            rows.append(row)
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows to a JSONL file and return its path."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def with_own_files(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the rows with their own links to the media files, so they share nothing."""
    apart = []
    for row in rows:
        names = [f"{row['id']}-{name}" for name in row["audio"]]
        for name, link in zip(row["audio"], names, strict=True):
            (folder / link).hardlink_to(folder / name)
        apart.append(row | {"audio": names})
    return apart


class Runs:
    """Runs of the command, and table rows with their figures.

    Args:
        folder: folder for the recordings and the outputs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        self._expected: dict[str, Any] | None = None

    def run(
        self,
        name: str,
        questions: Path,
        *options: str,
        kill: Callable[[subprocess.Popen, Path], None] | None = None,
        resume: bool = False,
    ) -> None:
        """Run the command and add a row to the table.

        Args:
            name: name of the run.
            questions: JSONL file with the questions.
            options: further options of the command.
            kill: function that kills the process once it has written a quarter of the rows.
            resume: whether to run the command again after the kill.

        Raises:
            RuntimeError: if the command failed.
        """
        out = self.folder / f"answers-{name.replace(' ', '-')}.jsonl"
        line = [sys.executable, "-m", "oscar_mm.cli", "audio-qa", str(questions), "--out", str(out)]
        line += ["--model", "pocket-omni", "--device", "cpu", *options]
        start = time.perf_counter()
        code = self._exit_code(line, out, kill)
        before = out.read_bytes().count(b"\n")
        if resume:
            code = self._exit_code(line, out, None)
        if code != 0:
            raise RuntimeError(f"{name}: oscar-mm audio-qa failed with exit code {code}")
        wall = time.perf_counter() - start
        summary = json.loads(out.with_name(f"{out.name}.summary.json").read_text())
        answers = {
            row["id"]: [row[field] for field in ("answer", "choice", "error")]
            for row in map(json.loads, out.read_text().splitlines())
        }
        if self._expected is None:
            self._expected = answers
        work = summary["work"]
        self.rows.append(
            {
                "run": name,
                "seconds": wall if kill else work["seconds"],
                "cpu_seconds": None if kill else work["cpu_seconds"],
                "rows": len(answers),
                "rows_before_kill": before if resume else None,
                "same_answers": sum(answers[row] == self._expected[row] for row in answers),
                "accuracy": summary["accuracy"],
                "groups": {name: group["accuracy"] for name, group in summary["groups"].items()},
                "mean_tokens": summary["mean_tokens"],
                "audio_seconds_read": work["audio_seconds"],
                "kv_peak_bytes": work["kv_peak_bytes"],
                "process_peak_bytes": work["process_peak_bytes"],
            }
        )
        print(f"{name}: {self.rows[-1]['seconds']:.1f} s", flush=True)

    def _exit_code(
        self, line: list[str], out: Path, kill: Callable[[subprocess.Popen, Path], None] | None
    ) -> int:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(line, **quiet) as process:
            if kill is not None:
                threading.Thread(target=kill, args=(process, out), daemon=True).start()
            errors = process.communicate(timeout=_LIMIT_S)[1]
        if process.returncode > 0:
            print(errors, file=sys.stderr)
        return process.returncode


def _wait_for_rows(process: subprocess.Popen, out: Path, rows: int) -> None:
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= rows):
        time.sleep(0.01)


def kill_process(process: subprocess.Popen, out: Path) -> None:
    """Kill the process (SIGKILL) once it has written a quarter of the rows."""
    _wait_for_rows(process, out, RECORDINGS * QUESTIONS // 4)
    process.send_signal(signal.SIGKILL)


def kill_worker(process: subprocess.Popen, out: Path) -> None:
    """Kill one of Ray's workers (SIGKILL) once a quarter of the rows has been written."""
    _wait_for_rows(process, out, RECORDINGS * QUESTIONS // 4)
    for child in psutil.Process(process.pid).children(recursive=True):
        if "ray::MapWorker" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
            return
    raise RuntimeError("no Ray worker was found to kill: the run may have ended too early")


def measure(folder: Path, ray: bool) -> list[dict[str, Any]]:
    """Run the command in all ways, and return a row for each run."""
    rows = spoken_questions(folder, RECORDINGS, CLIPS, QUESTIONS)
    shared = write_jsonl(folder / "shared.jsonl", rows)
    apart = write_jsonl(folder / "apart.jsonl", with_own_files(folder, rows))
    batch = ("--batch-size", str(BATCH))
    runs = Runs(folder)
    runs.run("shared", shared, *batch)
    runs.run("not shared", apart, *batch)
    runs.run("shared, one by one", shared, "--batch-size", "1")
    runs.run("not shared, one by one", apart, "--batch-size", "1")
    runs.run("killed and resumed", shared, *batch, kill=kill_process, resume=True)
    if ray:
        cluster = ("--ray", "local", "--workers", "2")
        runs.run("on Ray, a worker killed", shared, *batch, *cluster, kill=kill_worker)
    return runs.rows


def measure_full_size(folder: Path, device: torch.device, *, tiny: bool) -> list[dict[str, Any]]:
    """Return a row for each run with a full-size random model, by batch size and kind of run.

    Args:
        folder: folder for the recordings.
        device: device of the model.
        tiny: whether to use a small version of the model.
    """
    released = RELEASED[FULL_SIZE].tiny() if tiny else RELEASED[FULL_SIZE]
    model, processor = build(released, device, torch.float32 if tiny else torch.bfloat16)
    pipe = OscarOmniPipeline(model, processor=processor)
    freeze_loaded()  # As the workers of the command do.
    recordings, questions, length = (2, 3, 2) if tiny else (RECORDINGS, QUESTIONS, FULL_SECONDS)
    noise = np.random.default_rng(0)
    rows = []
    for number in range(recordings):
        name = f"{number:02}.wav"
        write_wav(folder / name, noise.uniform(-0.5, 0.5, length * RATE).astype(np.float32))
        for turn in range(questions):
            question = f"What was said in part {turn}?"
            rows.append({"id": f"{number:02}-{turn}", "audio": [name], "question": question})
    kinds = {"shared": rows, "not shared": with_own_files(folder, rows)}
    largest = FULL_RUNS[0][1]
    warm_up(pipe.engine, largest)
    _full_size_run(pipe, write_jsonl(folder / "first.jsonl", rows[: 2 * questions]), largest)
    found = []
    for name, batch, count in FULL_RUNS:
        file = write_jsonl(folder / "rows.jsonl", kinds[name][:count])
        found.append(_full_size_run(pipe, file, batch) | {"run": name, "batch": batch})
        print(found[-1], flush=True)
    return found


def _full_size_run(pipe: OscarOmniPipeline, file: Path, batch: int) -> dict[str, Any]:
    settings = AnswerSettings(policy=pipe.policy, max_new_tokens=FULL_TOKENS)
    engine = Engine(pipe, settings, batch)
    start = time.perf_counter()
    results = list(engine.run(by_recording(read_rows(file))))
    seconds = time.perf_counter() - start
    if errors := [result["error"] for result in results if result["error"]]:
        raise RuntimeError(errors[0])
    return {
        "seconds": seconds,
        "rows": len(results),
        "rows_per_minute": 60 * len(results) / seconds,
        "audio_seconds_read": engine.audio_seconds,
        "kv_peak_bytes": engine.peak_bytes,
    }


def _full_size_table(rows: list[dict[str, Any]]) -> None:
    show(
        "Rows of audio-qa with full-size shapes",
        ("run", "batch", "rows", "s", "rows a minute", "audio s read", "KV peak MB"),
        (
            (
                *(row["run"], str(row["batch"]), str(row["rows"]), f"{row['seconds']:.1f}"),
                *(f"{row['rows_per_minute']:.0f}", f"{row['audio_seconds_read']:.0f}"),
                f"{row['kv_peak_bytes'] / 1e6:.1f}",
            )
            for row in rows
        ),
    )
    speeds = {row["batch"]: row["rows_per_minute"] for row in rows if row["run"] == "shared"}
    largest = max(speeds)
    times = speeds[largest] / speeds[1]
    verdict = "met" if times >= AT_LEAST else "NOT met"
    print(
        f"{largest} rows at once are {times:.1f} times as fast as one by one, at least "
        f"{AT_LEAST:.0f}: {verdict}"
    )


def _table(rows: list[dict[str, Any]]) -> None:
    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    show(
        f"{RECORDINGS * QUESTIONS} questions over {RECORDINGS} recordings",
        ("run", "s", "CPU s", "same answers", "accuracy", "audio s read", "KV peak MB", "RSS MB"),
        (
            (
                row["run"],
                seconds(row["seconds"]),
                seconds(row["cpu_seconds"]),
                f"{row['same_answers']} of {row['rows']}",
                f"{100 * row['accuracy']:.1f}%",
                f"{row['audio_seconds_read']:.0f}",
                f"{row['kv_peak_bytes'] / 1e6:.1f}",
                f"{row['process_peak_bytes'] / 1e6:.0f}",
            )
            for row in rows
        ),
    )


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the CPU time and KV memory of runs without sharing, relative to runs with sharing."""
    by_name = {row["run"]: row for row in rows}
    quotients = {}
    for way in ("", ", one by one"):
        shared, apart = by_name[f"shared{way}"], by_name[f"not shared{way}"]
        for field, name in (("cpu_seconds", "CPU time"), ("kv_peak_bytes", "KV memory")):
            quotients[f"{name}{way}"] = round(apart[field] / shared[field], 2)
    return quotients


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: measure, print and record; return the exit code."""
    options = parser("benchmarks.audio_qa", __doc__)
    options.add_argument("--ray", action="store_true", help="also run on two Ray workers")
    options.add_argument("--full-size", action="store_true", help="shapes of Qwen3-Omni, on a GPU")
    options.add_argument(
        "--tiny", action="store_true", help="--full-size with a tiny model, on a CPU"
    )
    options = options.parse_args(arguments)
    if options.full_size:
        device = torch.device("cpu") if options.tiny else device_of("audio_qa", tiny=False)
        if device is None:
            return 2
        with tempfile.TemporaryDirectory() as folder:
            rows = measure_full_size(Path(folder), device, tiny=options.tiny)
        _full_size_table(rows)
        line = command("benchmarks.audio_qa", arguments)
        if not options.tiny:  # A tiny run must not replace the record of the other runs.
            finish(Record("audio_qa", line, device_name("cuda"), rows, FULL_NOTES), options.out)
        return 0
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.ray)
    _table(rows)
    line = command("benchmarks.audio_qa", arguments)
    extra = {
        "not shared / shared": ratios(rows),
        "load": {"before": load, "after": os.getloadavg()[0]},
    }
    print(extra)
    finish(Record("audio_qa", line, device_name("cpu"), rows, NOTES, extra), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
