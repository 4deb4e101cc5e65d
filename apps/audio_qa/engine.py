"""Engine: answers rows on one model, every recording read once, rows in batches under a budget."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oscar_mm.apps.audio_qa.marking import correct
from oscar_mm.apps.audio_qa.results import Result, answered, chosen, failed, told
from oscar_mm.apps.audio_qa.rows import Row
from oscar_mm.apps.audio_qa.settings import Settings
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.join import can_join
from oscar_mm.errors import InputError
from oscar_mm.generation.prompt import Prompt
from oscar_mm.generation.sampling import Sampling
from oscar_mm.media.media import Media
from oscar_mm.pipelines.batch import BatchRequest, answers
from oscar_mm.pipelines.multiple_choice import choose
from oscar_mm.pipelines.shared_media import SharedMedia

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


@dataclass(eq=False)
class _Asked:
    """A row that is ready for a batch."""

    row: Row
    reading: SharedMedia
    prepared: BatchRequest
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
            reading = SharedMedia(self.pipe, heard, self.settings.system)
        except Exception as error:  # Whatever a file makes a library raise is its rows' own.
            yield from (failed(row, told(error)) for row in rows)
            return
        opened = time.perf_counter() - start
        media_bytes = 0 if reading.prompt is None else self._needed(reading.prompt, 0)
        needed = media_bytes + sum(one.needed for one in waiting)
        if waiting and self.pipe.admission.shortage(needed, "the media take"):
            yield from self._flush(waiting)
        start = time.perf_counter()
        try:
            self._check_room(media_bytes, "the media take")
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
            refusal = self.pipe.admission.shortage(asked.needed, "the row takes")
            if refusal is not None:
                yield failed(row, refusal)
                continue
            waiting.append(asked)
        if all(asked.reading is not reading for asked in waiting):
            reading.close()

    def _asked(self, reading: SharedMedia, row: Row, share: float) -> _Asked:
        start = time.perf_counter()
        question, texts = self.settings.prompt(row.question, row.choices)
        correct(row, "", 0 if row.choices else None)  # An answer that is no choice is told now.
        prepared = reading.request(0, question, self._how)
        choices = reading.continuations(question, texts) if texts else []
        new = sum(map(len, choices)) or self.settings.max_new_tokens
        needed = self._needed(prepared.prompt, new, prepared.past)
        return _Asked(row, reading, prepared, choices, needed, share + time.perf_counter() - start)

    def _needed(self, prompt: Prompt, new: int, past: OscarCache | None = None) -> int:
        """Bytes that a prompt and so many tokens after it add to what is held."""
        admission = self.pipe.admission
        return admission.growth_bytes(admission.growth(prompt, new, past))

    def _check_room(self, needed: int, what: str) -> None:
        if (refusal := self.pipe.admission.shortage(needed, what)) is not None:
            raise InputError(refusal)

    def _fits(self, asked: _Asked, rows: list[_Asked]) -> bool:
        together = [*rows, asked]
        needed = sum(one.needed for one in together)
        pasts = [one.prepared.past for one in together if one.prepared.past is not None]
        return (
            len(together) <= self.batch_size
            and self.pipe.admission.shortage(needed, "the rows take") is None
            and can_join(pasts)
        )

    def _flush(self, waiting: list[_Asked], keep: SharedMedia | None = None) -> Iterator[Result]:
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
