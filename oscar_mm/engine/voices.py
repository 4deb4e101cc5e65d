"""Voices: the speech of running answers, which grows between decode steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache, balancing_of
from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine.speech import FIRST_FRAMES, SIZES, Frames, Talker
from oscar_mm.engine.spoken_request import SpokenRequest
from oscar_mm.errors import MemoryBusy
from oscar_mm.ops.pack import NOT_STORABLE
from oscar_mm.policy import KVPolicy

MAX_VOICES = SIZES[-1]
"""Maximum number of answers that are spoken at the same time; the speech of others begins later."""


class SpeechMemory(Protocol):
    """Reserves memory for speech; implemented by ``oscar_mm.admission.admission.Admission``."""

    def reserve_speech(
        self, model: object, cache: OscarCache, tokens: int, frames: int
    ) -> object | None:
        """Reserve memory for a talker's keys and values, until the returned object is dropped.

        Raises:
            MemoryBusy: if other requests have reserved the memory at present.
        """
        ...


class Voices:
    """Generates the speech of a scheduler's spoken requests, as one batch.

    A step adds a frame to each voice whose next word is written, and prefills a chunk of a voice
    that begins. While other answers decode, steps take at most half of the time; only the first
    piece of an answer's speech may take more, so that it comes as soon as possible.

    Only the engine thread may use it, except for ``add``.

    Args:
        policy: policy of the talker's keys and values.
        memory: reserves memory for voices.
    """

    def __init__(self, policy: KVPolicy, memory: SpeechMemory) -> None:
        self._policy, self._memory = policy, memory
        self._waiting: deque[SpokenRequest] = deque()
        self._beginning: deque[tuple[SpokenRequest, Iterator[None]]] = deque()
        self._saying: list[SpokenRequest] = []
        self._view: BatchView | None = None
        self._frames: Frames | None = None
        """Adds frames to the view's rows."""
        self._rows: list[SpokenRequest] = []
        """Requests whose caches are the rows of the view."""
        self._ended_at = self._seconds = 0.0
        """End and duration of the last step."""

    @property
    def live(self) -> list[SpokenRequest]:
        """Requests with words that are not spoken yet."""
        begun = [*(request for request, _ in self._beginning), *self._saying]
        return [*list(self._waiting), *begun]

    def add(self, request: SpokenRequest) -> None:
        """Speak the words of a request, from the next step on. Safe from any thread."""
        self._waiting.append(request)

    @property
    def used_bytes(self) -> int:
        """Bytes of keys and values in use."""
        return 0 if self._view is None else self._view.store.memory().used_bytes

    def trim(self) -> None:
        """Return the memory of all pools, and forget captured steps if the talker's weights have
        changed; call this only while no speech is generated."""
        if self._view is not None and self._frames is not None:
            self._view.store.trim_surplus(0)
            self._frames.refresh()

    def release_graphs(self) -> None:
        """Drop the CUDA graphs of speech; later steps are captured again."""
        if self._frames is not None:
            self._frames.forget()

    def drop_ended(self) -> bool:
        """Release the memory of ended voices; return whether there were any."""
        ended = [request for request in self.live if request.voice.ended]
        for request in ended:
            self._drop(request)
        return bool(ended)

    def step(self, *, others: bool) -> bool:
        """Extend the speech of each request whose next word is written; return whether any voices
        ended.

        Args:
            others: whether other requests run, which get half of the time.
        """
        begin = time.perf_counter()
        waits = others and not self._is_awaited
        if waits and begin - self._ended_at < self._seconds:
            return False
        ended = self.drop_ended()
        for request in self.live:
            request.voice.is_written |= request.ended
        self._begin_next(others=others)
        self._read_on()
        said = [request for request in self._saying if not request.voice.is_said]
        if ready := [request for request in said if request.voice.is_ready]:
            self._guard(ready, lambda: self._say(ready))
        spoken = [request for request in self._saying if not request.voice.ended]
        if due := [request for request in spoken if request.voice.ends_piece]:
            self._guard(due, lambda: self._deliver(due))
        ended |= self.drop_ended()
        self._ended_at = time.perf_counter()
        self._seconds = self._ended_at - begin
        return ended

    @property
    def _is_awaited(self) -> bool:
        """Whether the first piece of a voice is missing, apart from those that cannot begin yet."""
        begun = [*(request for request, _ in self._beginning), *self._saying]
        waiting = list(self._waiting)[: MAX_VOICES - len(begun)]
        return any(request.voice.frames < FIRST_FRAMES for request in (*begun, *waiting))

    def _begin_next(self, *, others: bool) -> None:
        """Begin the voices that have a word and get memory, in order of arrival."""
        running = len(self._beginning) + len(self._saying)
        while self._waiting and running < MAX_VOICES:
            request = self._waiting[0]
            voice = request.voice
            if not (voice.words or voice.is_written):
                return
            self._waiting.popleft()
            if not voice.words:
                voice.settle()
                continue
            try:
                self._begin(request)
            except MemoryBusy as error:
                if others or running:
                    self._waiting.appendleft(request)
                    return
                request.fail(error)
            except BaseException as error:
                request.fail(error)
            running += 1

    def _begin(self, request: SpokenRequest) -> None:
        voice, talker = request.voice, request.talker
        if self._view is None:
            sigmas = balancing_of(talker.model, self._policy)
            self._view = _view_of(PageStore(self._policy), sigmas)
            self._frames = talker.frames(self._view)
        cache = None if voice.past is None else voice.past.continued()
        if cache is None:
            cache = OscarCache(self._policy, store=self._view.store)
            cache.sigmas = self._view.sigmas
        try:
            voice.reservation = self._memory.reserve_speech(
                talker.model, cache, voice.prompt_tokens, talker.max_frames
            )
        except BaseException:
            cache.close()
            raise
        voice.cache = cache
        self._beginning.append((request, voice.read(cache)))

    def _read_on(self) -> None:
        """Prefill the next chunk of the first voice that begins."""
        if self._beginning:
            request, chunks = self._beginning[0]
            self._guard([request], lambda: self._read_chunk(request, chunks))

    def _read_chunk(self, request: SpokenRequest, chunks: Iterator[None]) -> None:
        if next(chunks, self) is self:
            self._beginning.popleft()
            assert request.voice.cache is not None
            request.voice.cache.check_complete()
            self._saying.append(request)

    def _say(self, ready: list[SpokenRequest]) -> None:
        view, frames = self._view, self._frames
        assert view is not None and frames is not None
        try:
            if ready != self._rows:
                padding = [None] * (frames.size_for(len(ready)) - len(ready))
                self._rows = ready
                view.set_rows([*(request.voice.cache for request in ready), *padding])
            frames.say([request.voice for request in ready])
            if view.pop_overflow():
                raise FloatingPointError(NOT_STORABLE)
        except BaseException:
            # The step may have reached only some layers, which no later step may find.
            self._begin_anew(ready[0].talker, view)
            raise

    def _begin_anew(self, talker: Talker, old: BatchView) -> None:
        self._view, self._rows = _view_of(old.store, old.sigmas), []
        self._frames = talker.frames(self._view)

    def _deliver(self, due: list[SpokenRequest]) -> None:
        """Hand over the speech of requests whose latest frame completes a piece."""
        assert self._frames is not None
        sounds = self._frames.sound([request.voice for request in due])
        for request, samples in zip(due, sounds, strict=True):
            request.say(samples)
            if request.voice.is_said:
                request.voice.settle()

    def _drop(self, request: SpokenRequest) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        self._beginning = deque(one for one in self._beginning if one[0] is not request)
        self._saying = [one for one in self._saying if one is not request]
        if request in self._rows and self._view is not None:
            self._rows = []
            self._view.set_rows([])  # The rows keep their caches alive, also those without a turn.
        request.voice.settle()

    def _guard(self, requests: list[SpokenRequest], work: Callable[[], None]) -> None:
        """Run work for some requests; if it fails, these requests fail."""
        try:
            work()
        except BaseException as error:
            for request in requests:
                request.fail(error)


def _view_of(store: PageStore, sigmas: Mapping[int, torch.Tensor | None] | None) -> BatchView:
    view = BatchView(store)
    view.sigmas = sigmas
    return view
