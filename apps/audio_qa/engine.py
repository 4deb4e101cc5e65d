"""Engine: a model that answers rows in batches and reads each recording once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from oscar_mm.apps.audio_qa.results import Result, answered, chosen, failed, told
from oscar_mm.apps.audio_qa.rows import Row, correct
from oscar_mm.cache.join import can_join
from oscar_mm.decoding.sampling import Sampling
from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits
from oscar_mm.pipelines import pipeline_for
from oscar_mm.pipelines.batch import answers
from oscar_mm.pipelines.choosing import choose
from oscar_mm.pipelines.media import Media
from oscar_mm.pipelines.packing import Prepared
from oscar_mm.pipelines.reading import Reading
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_FORMAT = 1
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Settings:
    """How all rows of a run are answered.

    Attributes:
        policy: how keys and values are stored.
        system: system prompt.
        max_new_tokens: longest free answer.
        list_choices: write the choices under the question, with letters, and choose among the
            letters; else the choices themselves are scored as answers.
        use_audio_in_video: hear the sound of videos too.
        video_fps: frames per second that are sampled from videos.
        dtype: of the weights; None for the default.

    Raises:
        InputError: a value that is not allowed.
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
        """What is asked, and the answers to choose from."""
        if not (self.list_choices and choices):
            return question, list(choices)
        if len(choices) > len(_LETTERS):
            raise InputError(f"choices: {len(choices)} are more than there are letters")
        letters = list(_LETTERS[: len(choices)])
        listed = [f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True)]
        return "\n".join([question, *listed, "Answer with the letter."]), letters

    def fingerprint(self, model: str | None = None) -> dict[str, Any]:
        """What answers depend on; ``model`` is ``Pipeline.fingerprint``, None if not known yet."""
        values = {"format": _FORMAT, "model": model}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                values |= {f"{name}.{part}": of_part for part, of_part in value.items()}
            else:
                values[name] = value
        return values


@dataclass(eq=False)
class _Asked:
    """A row that is ready for a batch."""

    row: Row
    reading: Reading
    prepared: Prepared
    choices: list[list[int]]
    needed: int
    seconds: float


class Engine:
    """Answers rows; never raises for what a row holds, that becomes the row's ``error``.

    Args:
        pipe: answers; its ``kv_budget`` bounds what recordings and batches hold together.
        settings: how.
        batch_size: most rows at once; the choices of a row are not counted.

    Attributes:
        audio_seconds: of the recordings read so far, each once.
        peak_bytes: most bytes that the pools of pages and blocks took, free slots included.
    """

    def __init__(self, pipe: Pipeline, settings: Settings, batch_size: int = 8) -> None:
        self.pipe, self.settings, self.batch_size = pipe, settings, batch_size
        self.audio_seconds, self.peak_bytes = 0.0, 0
        self._how = Sampling(max_new_tokens=settings.max_new_tokens, temperature=0)

    def run(self, groups: Iterable[list[Row]]) -> Iterator[Result]:
        """Results in the order in which they are finished.

        Args:
            groups: rows about the same media, see ``rows.by_recording``.
        """
        waiting: list[_Asked] = []
        # Media of the next group are decoded while the model works on this one.
        with ThreadPoolExecutor(1) as thread:
            for group, media in self._read_ahead(groups, thread):
                yield from (failed(row, row.error) for row in group if row.error)
                rows = [row for row in group if not row.error]
                if rows:
                    yield from self._group(rows, media, waiting)
        yield from self._flush(waiting)

    def _read_ahead(
        self, groups: Iterable[list[Row]], thread: ThreadPoolExecutor
    ) -> Iterator[tuple[list[Row], Future[Media]]]:
        """Groups with their media, each given out once the next one's are being read."""
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
        self, rows: list[Row], media: Future[Media], waiting: list[_Asked]
    ) -> Iterator[Result]:
        """Read the media of rows, and put the rows into batches."""
        start = time.perf_counter()
        try:
            heard = media.result()
            reading = Reading(self.pipe, heard, self.settings.system)
        except Exception as error:  # Whatever a file makes a library raise is its rows' own.
            yield from (failed(row, told(error)) for row in rows)
            return
        opened = time.perf_counter() - start
        needed = self._bytes(reading) + sum(one.needed for one in waiting)
        if waiting and not self._has_room(needed):
            yield from self._flush(waiting)
        start = time.perf_counter()
        try:
            self._check_room(self._bytes(reading), "the media take")
            reading.read()
            self._check_room(0, "the media take")
        except Exception as error:
            reading.close()
            yield from (failed(row, told(error)) for row in rows)
            return
        self.audio_seconds += sum(one.seconds for one in heard.audio)
        self._note_peak()
        share = (opened + time.perf_counter() - start) / len(rows)
        for row in rows:
            try:
                asked = self._asked(reading, row, share)
            except Exception as error:
                yield failed(row, told(error))
                continue
            if not self._fits(asked, waiting):
                yield from self._flush(waiting, keep=reading)
            refusal = self._refusal(asked.needed, "the row takes")
            if refusal is not None:
                yield failed(row, refusal)
                continue
            waiting.append(asked)
        if all(asked.reading is not reading for asked in waiting):
            reading.close()

    def _asked(self, reading: Reading, row: Row, share: float) -> _Asked:
        start = time.perf_counter()
        question, texts = self.settings.prompt(row.question, row.choices)
        correct(row, "", 0 if row.choices else None)  # An answer that is no choice is told now.
        prepared = reading.asked(0, question, self._how)
        choices = reading.continuations(question, texts) if texts else []
        needed = self._needed(prepared, choices)
        return _Asked(row, reading, prepared, choices, needed, share + time.perf_counter() - start)

    def _needed(self, prepared: Prepared, choices: list[list[int]]) -> int:
        """Bytes that a row adds to its reading."""
        if self.pipe.budget is None:
            return 0
        new = 0 if choices else self.settings.max_new_tokens
        growth = self.pipe.growth(prepared.prompt, new + sum(map(len, choices)), prepared.past)
        return self.pipe.growth_bytes(growth)

    def _bytes(self, reading: Reading) -> int:
        if self.pipe.budget is None or reading.prompt is None:
            return 0
        return self.pipe.growth_bytes(self.pipe.growth(reading.prompt, 0))

    def _has_room(self, needed: int) -> bool:
        return self._refusal(needed, "") is None

    def _check_room(self, needed: int, what: str) -> None:
        refusal = self._refusal(needed, what)
        if refusal is not None:
            raise InputError(refusal)

    def _refusal(self, needed: int, what: str) -> str | None:
        """Why there is no room for so many bytes more; None if there is."""
        budget = self.pipe.budget
        total = needed + (0 if budget is None else budget.used_bytes)
        if budget is None or total <= budget.limit:
            return None
        return f"kv_budget is {budget.limit:,} bytes, and {what} it to {total:,}"

    def _fits(self, asked: _Asked, rows: list[_Asked]) -> bool:
        together = [*rows, asked]
        pasts = [one.prepared.past for one in together if one.prepared.past is not None]
        return (
            len(together) <= self.batch_size
            and self._has_room(sum(one.needed for one in together))
            and can_join(pasts)
        )

    def _flush(self, waiting: list[_Asked], keep: Reading | None = None) -> Iterator[Result]:
        """Answer the rows that wait, and give up what they are about, but for ``keep``."""
        rows = waiting[:]
        waiting.clear()
        for part in ([x for x in rows if x.choices], [x for x in rows if not x.choices]):
            if part:
                yield from self._answered(part)
        for reading in {asked.reading for asked in rows} - {keep}:
            reading.close()

    def _answered(self, batch: list[_Asked]) -> Iterator[Result]:
        """Results of a batch; if it fails as a whole, of each row alone."""
        start = time.perf_counter()
        run = self._chosen if batch[0].choices else self._written
        left, failure = dict(enumerate(batch)), ""
        try:
            for index, result in run(batch):
                asked = left.pop(index)
                self._note_peak()
                seconds = asked.seconds + (time.perf_counter() - start) / len(batch)
                yield result | {"seconds": round(seconds, 4)}
        except Exception as error:
            failure = told(error)
        if not left:
            return
        if len(batch) == 1:
            yield failed(batch[0].row, failure)
            return
        for asked in left.values():
            yield from self._answered([asked])

    def _chosen(self, batch: list[_Asked]) -> Iterator[tuple[int, Result]]:
        rows = [replace(asked.prepared, index=index) for index, asked in enumerate(batch)]
        for choice in choose(self.pipe, rows, [asked.choices for asked in batch]):
            yield choice.index, chosen(batch[choice.index].row, choice)

    def _written(self, batch: list[_Asked]) -> Iterator[tuple[int, Result]]:
        rows = [replace(asked.prepared, index=index) for index, asked in enumerate(batch)]
        for result in answers(self.pipe, rows):
            row = batch[result.index].row
            if result.answer is not None:
                yield result.index, answered(row, result.answer)
            elif result.error is not None:
                yield result.index, failed(row, told(result.error))

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.pipe.store.memory().pool_bytes)


@dataclass(frozen=True)
class Plan:
    """Everything a worker needs to know.

    Attributes:
        model: name of a bundled model, folder or hub id.
        settings: how rows are answered.
        batch_size: most rows at once.
        kv_budget: bytes that recordings and batches may hold together, or None.
        device: by default a GPU if there is one.
        allow_remote: fetch media that are http(s) addresses.
        limits: bounds on media.
    """

    model: str
    settings: Settings
    batch_size: int = 8
    kv_budget: int | str | None = None
    device: str | None = None
    allow_remote: bool = False
    limits: MediaLimits = field(default_factory=MediaLimits)


class Worker:
    """A loaded model.

    Args:
        plan: what to load and how to answer.
    """

    def __init__(self, plan: Plan) -> None:
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
        """See ``Engine.run``."""
        return self._engine.run(groups)

    @property
    def kv_bytes(self) -> int:
        """Of pages and blocks that are in use now."""
        return self._pipe.store.memory().used_bytes

    @property
    def report(self) -> dict[str, Any]:
        """What it has done so far: the fields of ``Work`` that only it knows."""
        return {
            "cpu_seconds": time.process_time() - self._loaded,
            "audio_seconds": self._engine.audio_seconds,
            "kv_peak_bytes": self._engine.peak_bytes,
            "process_peak_bytes": _process_peak(),
        }


def _process_peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
