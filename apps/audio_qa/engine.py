"""Engine: a model that answers rows in batches and reads each recording once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
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
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.join import can_join
from oscar_mm.errors import InputError
from oscar_mm.generation.prompt import Prompt
from oscar_mm.generation.sampling import Sampling
from oscar_mm.kernels.address_range import bytes_in_ranges
from oscar_mm.media import MediaLimits
from oscar_mm.media.media import Media
from oscar_mm.pipelines import pipeline_for
from oscar_mm.pipelines.batch import BatchRequest, answers
from oscar_mm.pipelines.multiple_choice import choose
from oscar_mm.pipelines.shared_media import SharedMedia
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_FORMAT = 1
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class AnswerSettings:
    """How all rows of a run are answered.

    Attributes:
        policy: how keys and values are stored.
        system: system prompt.
        max_new_tokens: longest free answer.
        list_choices: write the choices under the question, with letters, and score the letters;
            else score the choices themselves.
        use_audio_in_video: hear the sound of videos too.
        video_fps: frames per second that are sampled from videos.
        dtype: dtype of the weights; None for the default.

    Raises:
        InputError: a value is not allowed.
    """

    policy: KVPolicy
    system: str | None = None
    max_new_tokens: int = 64
    list_choices: bool = False
    use_audio_in_video: bool = False
    video_fps: float = 2.0
    dtype: str | None = None

    def __post_init__(self) -> None:
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise InputError(
                f"max_new_tokens={self.max_new_tokens!r}: must be a whole number, at least 1"
            )

    def prompt(self, question: str, choices: tuple[str, ...]) -> tuple[str, list[str]]:
        """Return the text of the prompt, and the answers from which the model chooses."""
        if not (self.list_choices and choices):
            return question, list(choices)
        if len(choices) > len(_LETTERS):
            raise InputError(f"choices: {len(choices)} are more than there are letters")
        letters = list(_LETTERS[: len(choices)])
        listed = [f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True)]
        return "\n".join([question, *listed, "Answer with the letter."]), letters

    def fingerprint(self, model: str | None = None) -> dict[str, Any]:
        """Return what answers depend on.

        Args:
            model: ``Pipeline.fingerprint``, or None while no model is loaded.
        """
        values = {"format": _FORMAT, "model": model}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                values |= {f"{name}.{part}": part_value for part, part_value in value.items()}
            else:
                values[name] = value
        return values


@dataclass(eq=False)
class _BatchRow:
    """A row that waits for its batch."""

    row: Row
    reading: SharedMedia
    prepared: BatchRequest
    choices: list[list[int]]
    needed_bytes: int
    seconds: float


class Engine:
    """Answers rows; what is wrong with a row becomes its ``error``, not an exception.

    Args:
        pipe: the model; its ``kv_budget`` bounds recordings and batches together.
        settings: how to answer.
        batch_size: most rows at once; the choices of a row do not count.

    Attributes:
        audio_seconds: length of the recordings read so far, each once.
        peak_bytes: largest pools of pages and blocks so far, free slots included.
    """

    def __init__(self, pipe: Pipeline, settings: AnswerSettings, batch_size: int = 8) -> None:
        self.pipe, self.settings, self.batch_size = pipe, settings, batch_size
        self.audio_seconds, self.peak_bytes = 0.0, 0
        self._sampling = Sampling(max_new_tokens=settings.max_new_tokens, temperature=0)

    def run(self, groups: Iterable[list[Row]]) -> Iterator[Result]:
        """Yield results as they are ready.

        Args:
            groups: rows about the same media, see ``rows.by_recording``.
        """
        waiting: list[_BatchRow] = []
        # The thread decodes the next group while the model works on this one.
        with ThreadPoolExecutor(1) as thread:
            for group, media in self._read_ahead(groups, thread):
                yield from (error_result(row, row.error) for row in group if row.error)
                rows = [row for row in group if not row.error]
                if rows:
                    yield from self._group(rows, media, waiting)
        yield from self._flush(waiting)

    def _read_ahead(
        self, groups: Iterable[list[Row]], thread: ThreadPoolExecutor
    ) -> Iterator[tuple[list[Row], Future[Media]]]:
        """Yield groups with their media, while a thread reads the media of the next group."""
        sound, before = self.settings.use_audio_in_video, None
        for group in groups:
            first = next((row for row in group if not row.error), None)
            media = {} if first is None else first.media
            now = group, thread.submit(self.pipe.read_media, **media, sound=sound)
            if before is not None:
                yield before
            before = now
        if before is not None:
            yield before

    def _group(
        self, rows: list[Row], media: Future[Media], waiting: list[_BatchRow]
    ) -> Iterator[Result]:
        """Read the media of a group, and put its rows into batches."""
        start = time.perf_counter()
        try:
            media_read = media.result()
            reading = SharedMedia(self.pipe, media_read, self.settings.system)
        except Exception as error:  # A file may make a library raise anything.
            yield from (error_result(row, error_line(error)) for row in rows)
            return
        open_s = time.perf_counter() - start
        media_bytes = 0 if reading.prompt is None else self._needed_bytes(reading.prompt, 0)
        needed_bytes = media_bytes + sum(entry.needed_bytes for entry in waiting)
        if waiting and self.pipe.admission.shortage(needed_bytes, "the media take"):
            yield from self._flush(waiting)
        start = time.perf_counter()
        try:
            self._check_room(media_bytes, "the media take")
            reading.read()
            self._check_room(0, "the media take")
        except Exception as error:
            reading.close()
            yield from (error_result(row, error_line(error)) for row in rows)
            return
        self.audio_seconds += sum(recording.seconds for recording in media_read.audio)
        self._note_peak()
        share = (open_s + time.perf_counter() - start) / len(rows)
        for row in rows:
            try:
                entry = self._batch_row(reading, row, share)
            except Exception as error:
                yield error_result(row, error_line(error))
                continue
            if not self._fits(entry, waiting):
                yield from self._flush(waiting, keep=reading)
            refusal = self.pipe.admission.shortage(entry.needed_bytes, "the row takes")
            if refusal is not None:
                yield error_result(row, refusal)
                continue
            waiting.append(entry)
        if all(entry.reading is not reading for entry in waiting):
            reading.close()

    def _batch_row(self, reading: SharedMedia, row: Row, share: float) -> _BatchRow:
        start = time.perf_counter()
        question, texts = self.settings.prompt(row.question, row.choices)
        # A right answer that is no choice is an error now.
        is_correct(row, "", 0 if row.choices else None)
        prepared = reading.request(0, question, self._sampling)
        choices = reading.continuations(question, texts) if texts else []
        new = sum(map(len, choices)) or self.settings.max_new_tokens
        needed_bytes = self._needed_bytes(prepared.prompt, new, prepared.past)
        return _BatchRow(
            row, reading, prepared, choices, needed_bytes, share + time.perf_counter() - start
        )

    def _needed_bytes(self, prompt: Prompt, new: int, past: OscarCache | None = None) -> int:
        """Bytes that a prompt and ``new`` tokens after it add to what the pipeline holds."""
        admission = self.pipe.admission
        return admission.growth_bytes(admission.growth(prompt, new, past))

    def _check_room(self, needed_bytes: int, what: str) -> None:
        if (refusal := self.pipe.admission.shortage(needed_bytes, what)) is not None:
            raise InputError(refusal)

    def _fits(self, entry: _BatchRow, rows: list[_BatchRow]) -> bool:
        together = [*rows, entry]
        needed_bytes = sum(other.needed_bytes for other in together)
        pasts = [other.prepared.past for other in together if other.prepared.past is not None]
        return (
            len(together) <= self.batch_size
            and self.pipe.admission.shortage(needed_bytes, "the rows take") is None
            and can_join(pasts)
        )

    def _flush(self, waiting: list[_BatchRow], keep: SharedMedia | None = None) -> Iterator[Result]:
        """Answer the rows that wait, and close their media, but for ``keep``."""
        rows = waiting[:]
        waiting.clear()
        for part in ([x for x in rows if x.choices], [x for x in rows if not x.choices]):
            if part:
                yield from self._answer_batch(part)
        for reading in {entry.reading for entry in rows} - {keep}:
            reading.close()

    def _answer_batch(self, batch: list[_BatchRow]) -> Iterator[Result]:
        """Answer a batch; if that fails, answer each row alone."""
        start = time.perf_counter()
        run = self._choices if batch[0].choices else self._free_answers
        left, failure = dict(enumerate(batch)), ""
        try:
            for index, result in run(batch):
                entry = left.pop(index)
                self._note_peak()
                seconds = entry.seconds + (time.perf_counter() - start) / len(batch)
                yield result | {"seconds": round(seconds, 4)}
        except Exception as error:
            failure = error_line(error)
        if not left:
            return
        if len(batch) == 1:
            yield error_result(batch[0].row, failure)
            return
        for entry in left.values():
            yield from self._answer_batch([entry])

    def _choices(self, batch: list[_BatchRow]) -> Iterator[tuple[int, Result]]:
        rows = [replace(entry.prepared, index=index) for index, entry in enumerate(batch)]
        for choice in choose(self.pipe, rows, [entry.choices for entry in batch]):
            yield choice.index, choice_result(batch[choice.index].row, choice)

    def _free_answers(self, batch: list[_BatchRow]) -> Iterator[tuple[int, Result]]:
        rows = [replace(entry.prepared, index=index) for index, entry in enumerate(batch)]
        for result in answers(self.pipe, rows):
            row = batch[result.index].row
            if result.answer is not None:
                yield result.index, answer_result(row, result.answer)
            elif result.error is not None:
                yield result.index, error_result(row, error_line(result.error))

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.pipe.store.memory().pool_bytes)


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker loads, and how it answers.

    Attributes:
        model: name of a bundled model, folder or hub id.
        settings: how to answer.
        batch_size: most rows at once.
        kv_budget: most bytes of recordings and batches together, or None.
        device: torch device; by default a GPU if there is one.
        allow_remote: fetch media that are http(s) addresses.
        limits: bounds on media.
    """

    model: str
    settings: AnswerSettings
    batch_size: int = 8
    kv_budget: int | str | None = None
    device: str | None = None
    allow_remote: bool = False
    limits: MediaLimits = field(default_factory=MediaLimits)


class Worker:
    """A loaded model that answers rows, in this process or as an actor of Ray.

    Args:
        plan: what to load, and how to answer.
    """

    def __init__(self, plan: WorkerSettings) -> None:
        self.plan = plan
        settings = plan.settings
        self._pipe = pipeline_for(plan.model)(
            plan.model,
            policy=settings.policy,
            device=plan.device,
            dtype=settings.dtype,
            limits=plan.limits,
            video_fps=settings.video_fps,
            allow_remote=plan.allow_remote,
            kv_budget=plan.kv_budget,
            spill=False,
        )
        self._engine = Engine(self._pipe, settings, plan.batch_size)
        self._loaded = time.process_time()
        self.fingerprint = settings.fingerprint(self._pipe.fingerprint)

    def run(self, groups: Iterable[list[Row]]) -> Iterator[Result]:
        """Answer groups of rows about the same media; yield results as they are ready."""
        return self._engine.run(groups)

    @property
    def kv_bytes(self) -> int:
        """Bytes of pages and blocks in use now."""
        return self._pipe.store.memory().used_bytes

    @property
    def report(self) -> dict[str, Any]:
        """The fields of ``Work`` that only this worker knows, so far."""
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
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
