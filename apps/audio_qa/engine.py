"""Engine: answer many rows at once with a model in this process, reading each recording once."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from oscar_mm.apps.audio_qa.results import (
    Result,
    answer_result,
    choice_result,
    error_line,
    error_result,
)
from oscar_mm.apps.audio_qa.rows import Row, is_correct
from oscar_mm.apps.server_process import freeze_loaded, short_thread_turns
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.request import Request
from oscar_mm.engine.sampling import Sampling
from oscar_mm.errors import InputError
from oscar_mm.kernels.address_range import bytes_in_ranges
from oscar_mm.media import MediaLimits
from oscar_mm.media.media import Media
from oscar_mm.media.part import media_parts
from oscar_mm.pipelines import pipeline_for
from oscar_mm.pipelines.shared_media import Choice, Question, SharedMedia, choose
from oscar_mm.policy import DEFAULT, KVPolicy

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_FORMAT = 1
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class AnswerSettings:
    """Settings for the answers to all rows of a run.

    Attributes:
        policy: policy for keys and values; None if a server chooses it.
        engine: "vllm" if workers start vLLM servers; None for this package's engine or a server.
        system: system prompt.
        max_new_tokens: maximum number of tokens in a free-form answer.
        list_choices: whether to list the choices under the question, with letters, and score the
            letters; otherwise the choices themselves are scored.
        use_audio_in_video: whether to use the audio tracks of videos too.
        video_fps: frames per second to sample from videos.
        dtype: dtype of the weights; None for the default.

    Raises:
        InputError: if a value is not allowed.
    """

    policy: KVPolicy | None
    system: str | None = None
    max_new_tokens: int = 64
    list_choices: bool = False
    use_audio_in_video: bool = False
    video_fps: float = 2.0
    dtype: str | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise InputError(
                f"max_new_tokens={self.max_new_tokens!r}: must be a whole number, at least 1"
            )

    def prompt(self, question: str, choices: tuple[str, ...]) -> tuple[str, list[str]]:
        """Return the prompt of a question with choices, and the texts of the answers to score."""
        if not (self.list_choices and choices):
            return question, list(choices)
        if len(choices) > len(_LETTERS):
            raise InputError(
                f"choices: {len(choices)} are more than the {len(_LETTERS)} letters that can name "
                "them; use fewer choices"
            )
        letters = list(_LETTERS[: len(choices)])
        listed = [f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True)]
        return "\n".join([question, *listed, "Answer with the letter."]), letters

    def fingerprint(self, model: str | None = None) -> dict[str, Any]:
        """Return a dict of everything that determines the answers.

        Args:
            model: ``Pipeline.fingerprint``, or the name of a server's model; None if unknown yet.
        """
        values = {"format": _FORMAT, "model": model}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                values |= {f"{name}.{part}": part_value for part, part_value in value.items()}
            else:
                values[name] = value
        return values


class Engine:
    """Answers rows with a pipeline; a failure of a row becomes its ``error``, not an exception.

    Args:
        pipe: pipeline of the model; its ``kv_budget`` limits the memory of recordings and answers
            together.
        settings: settings for the answers.
        batch_size: maximum number of rows at once, regardless of their number of choices.

    Attributes:
        audio_seconds: total length of the recordings read so far, in seconds; each counts once.
        peak_bytes: peak size of the pools so far, in bytes, including free slots.
    """

    def __init__(self, pipe: Pipeline, settings: AnswerSettings, batch_size: int = 32) -> None:
        self.pipe, self.settings, self.batch_size = pipe, settings, batch_size
        self.audio_seconds, self.peak_bytes = 0.0, 0
        self._sampling = Sampling(max_new_tokens=settings.max_new_tokens, temperature=0)
        self._running: dict[Request, tuple[Row, SharedMedia]] = {}
        self._reading: SharedMedia | None = None
        """Media of the current group, as long as some of its rows have not started yet."""
        self._since = 0.0

    def run(self, groups: Iterable[list[Row]]) -> Iterator[Result]:
        """Answer groups of rows, and yield the results as they are ready.

        Args:
            groups: groups of rows about the same media; see ``rows.by_recording``.
        """
        self._since = time.perf_counter()
        try:
            # The thread decodes the next group's media while the model answers this group.
            with ThreadPoolExecutor(1) as thread:
                for group, media in self._read_ahead(groups, thread):
                    yield from (error_result(row, row.error) for row in group if row.error)
                    rows = [row for row in group if not row.error]
                    if rows:
                        yield from self._group(rows, media)
            while self._running:
                yield from self._finished()
        finally:
            for answer in self._running:
                answer.cancel()
            self._running.clear()

    def _read_ahead(
        self, groups: Iterable[list[Row]], thread: ThreadPoolExecutor
    ) -> Iterator[tuple[list[Row], Future[Media]]]:
        """Yield groups with their media, while a thread reads the next group's media."""
        before = None
        for group in groups:
            first = next((row for row in group if not row.error), None)
            now = group, thread.submit(self._media_of, first)
            if before is not None:
                yield before
            before = now
        if before is not None:
            yield before

    def _media_of(self, row: Row | None) -> Media:
        """Decode the media of a row, after checking that they would fit without a question."""
        if row is None:
            return Media()

        media: dict[str, Any] = dict(row.media)
        parts = media_parts(**media, sound=self.settings.use_audio_in_video)

        def fits(sizes: Media) -> None:
            messages = first_turn("", parts, self.settings.system)
            self.pipe.admission.check_outline(messages, sizes, 1)

        return self.pipe.media_reader.read(parts, fits=fits)

    def _group(self, rows: list[Row], media: Future[Media]) -> Iterator[Result]:
        """Prefill the media of a group, and start answering the group's rows."""
        try:
            media_read = media.result()
            reading = SharedMedia(self.pipe, media_read, self.settings.system)
        except Exception as error:  # Libraries may raise any exception on a damaged file.
            yield from (error_result(row, error_line(error)) for row in rows)
            return
        admission = self.pipe.admission
        prompt = reading.prompt
        needed = 0 if prompt is None else admission.growth_bytes(admission.growth(prompt, 0))
        while self._running and admission.shortage(needed, ""):
            yield from self._finished()
        try:
            self._check_room(needed)
            reading.read()
            self._check_room(0)
        except Exception as error:
            reading.close()
            yield from (error_result(row, error_line(error)) for row in rows)
            return
        self.audio_seconds += sum(recording.seconds for recording in media_read.audio)
        self._note_peak()
        questions: list[tuple[Row, Question]] = []
        self._reading = reading
        for row in rows:
            try:
                text, choices = self.settings.prompt(row.question, row.choices)
                # Raises InputError if the right answer is not among the choices.
                is_correct(row, "", 0 if row.choices else None)
                if choices:
                    questions.append((row, reading.question(text, choices)))
                else:
                    while len(self._running) >= self.batch_size:
                        yield from self._finished()
                    answer = reading.new_request(text, self._sampling)
                    self._running[answer] = row, reading
                    self.pipe.engine.submit(answer)
            except Exception as error:
                yield error_result(row, error_line(error))
            if len(questions) == self.batch_size:
                yield from self._choices(questions)
                questions.clear()
        yield from self._choices(questions)
        self._reading = None
        self._close_unless_used(reading)

    def _check_room(self, needed: int) -> None:
        if (refusal := self.pipe.admission.shortage(needed, "the media take")) is not None:
            raise InputError(refusal)

    def _finished(self) -> Iterator[Result]:
        """Run until some answers have finished, and yield their results."""
        ended = self.pipe.engine.next_ended(self._running)
        self._note_peak()
        seconds = self._seconds(len(ended))
        for answer in ended:
            row, reading = self._running.pop(answer)
            try:
                yield answer_result(row, answer.complete()) | seconds
            except Exception as error:
                yield error_result(row, error_line(error))
            self._close_unless_used(reading)

    def _choices(self, questions: list[tuple[Row, Question]]) -> Iterator[Result]:
        """Answer multiple-choice questions as one batch; if that fails, one by one."""
        if not questions:
            return
        try:
            choices = self._choose([question for _, question in questions])
        except Exception as error:
            if len(questions) == 1 and not self._running:
                yield error_result(questions[0][0], error_line(error))
                return
        else:
            self._note_peak()
            seconds = self._seconds(len(questions))
            for (row, _), choice in zip(questions, choices, strict=True):
                yield choice_result(row, choice) | seconds
            return
        while self._running:
            yield from self._finished()
        for one in questions:
            yield from self._choices([one])

    def _choose(self, questions: list[Question]) -> list[Choice]:
        """Reserve memory for multiple-choice questions, and answer them as one batch."""
        admission = self.pipe.admission
        reservations: list[object] = []
        for one in questions:
            max_tokens = 1 + sum(map(len, one.choices))
            growth = admission.growth(one.prompt, max_tokens, one.cache)
            reservations.append(admission.reserve(growth, one.prompt, one.cache))
        return choose(self.pipe, questions)

    def _close_unless_used(self, reading: SharedMedia) -> None:
        used = [self._reading, *(other for _, other in self._running.values())]
        if all(other is not reading for other in used):
            reading.close()

    def _seconds(self, rows: int) -> Result:
        """Return the share of each finished row in the time since the previous rows finished."""
        before, self._since = self._since, time.perf_counter()
        return {"seconds": round((self._since - before) / rows, 4)}

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.pipe.store.memory().pool_bytes)


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker that loads the model in its own process.

    Attributes:
        model: name of a bundled model, folder or hub id.
        settings: settings for the answers.
        batch_size: maximum number of rows at once.
        kv_budget: maximum bytes of keys and values, recordings and answers together; None for no
            limit.
        device: torch device; by default a GPU if there is one.
        allow_remote: whether to fetch media given as http(s) URLs.
        limits: limits on media.
    """

    model: str
    settings: AnswerSettings
    batch_size: int = 32
    kv_budget: int | str | None = None
    device: str | None = None
    allow_remote: bool = False
    limits: MediaLimits = field(default_factory=MediaLimits)

    @property
    def uses_gpu(self) -> bool:
        """True if a worker uses a GPU whenever there is one."""
        return self.device != "cpu"

    def start(self) -> Worker:
        """Load the model and return a worker that runs it."""
        return Worker(self)


class Worker:
    """Worker that loads a model and answers rows, in this process or in a Ray actor.

    Args:
        plan: settings of the worker.
    """

    def __init__(self, plan: WorkerSettings) -> None:
        self.plan = plan
        settings = plan.settings
        self._pipe = pipeline_for(plan.model)(
            plan.model,
            policy=settings.policy or DEFAULT,
            device=plan.device,
            dtype=settings.dtype,
            limits=plan.limits,
            video_fps=settings.video_fps,
            allow_remote=plan.allow_remote,
            kv_budget=plan.kv_budget,
            spill=False,
        )
        self._engine = Engine(self._pipe, settings, plan.batch_size)
        freeze_loaded()
        self._loaded = time.process_time()
        self.fingerprint = settings.fingerprint(self._pipe.fingerprint)

    def close(self) -> None:
        """Undo the exclusion from garbage collection; the model is freed when the process ends."""
        gc.unfreeze()

    def run(self, groups: Iterable[list[Row]]) -> Iterator[Result]:
        """Answer groups of rows about the same media; yield results as they are ready."""
        with short_thread_turns():
            yield from self._engine.run(groups)

    @property
    def kv_bytes(self) -> int:
        """Size in bytes of the pages and blocks currently in use."""
        return self._pipe.store.memory().used_bytes

    @property
    def report(self) -> dict[str, Any]:
        """Return the current values of the ``Work`` fields that only this worker knows."""
        return {
            "cpu_seconds": time.process_time() - self._loaded,
            "audio_seconds": self._engine.audio_seconds,
            "kv_peak_bytes": self._engine.peak_bytes,
            "process_peak_bytes": _process_peak(),
        }


def _process_peak() -> int:
    if torch.cuda.is_available():
        pools = bytes_in_ranges(torch.device("cuda", torch.cuda.current_device()))[1]
        return torch.cuda.max_memory_allocated() + pools
    return resident_peak()


def resident_peak() -> int:
    """Return the peak resident memory (RSS) of this process so far, in bytes."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
