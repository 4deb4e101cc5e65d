"""Batch: many requests of unequal length and mixed media, several at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.join import join
from oscar_mm.cache.memory import MemoryReport, token_bytes
from oscar_mm.cache.rows import NOWHERE
from oscar_mm.cache.slot_growth import Growth
from oscar_mm.errors import InputError
from oscar_mm.generation.answer import Answer, AnswerWriter
from oscar_mm.generation.decode_loop import decode, read_prompt
from oscar_mm.generation.prefix_cache import LEAST_TOKENS, processor_settings
from oscar_mm.generation.prompt import Prompt, beginning, remaining
from oscar_mm.generation.sampling import Sampling
from oscar_mm.modality import Modality
from oscar_mm.pipelines.batching import Batching, Prepared, left_padded

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_AHEAD = 4
"""Batches of requests that are read before the first of them runs, to find those of one length."""
_AHEAD_BYTES = 1 << 29
"""Most bytes of processed media that are read ahead."""


@dataclass(frozen=True)
class BatchResult:
    """What became of one request: an answer, or the error that kept it from one.

    Attributes:
        index: place of the request, from 0.
        answer: as the pipeline would give it alone, or None. ``memory`` is of this request only;
            ``timings.prefill_s`` are reading it and the prefill of its batch.
        error: why there is none: InputError for a request that cannot be used.
    """

    index: int
    answer: Answer | None = None
    error: Exception | None = None


class Batched:
    """The part of a ``Pipeline`` that answers many requests."""

    def batch(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        batch_size: int = 8,
        max_tokens: int = 32_768,
        max_padding: float = 0.5,
    ) -> list[BatchResult]:
        """Answer many requests, several at a time; results in the order of the requests.

        ::

            for result in pipe.batch([{"images": ["a.png"], "prompt": "What is it?"}, ...]):
                print(result.error or result.answer)

        A request is a dict of the arguments of a single question: prompt, images, videos (of
        Qwen3-Omni also audio and use_audio_in_video), system, and each its own max_new_tokens,
        temperature, seed, stop and other fields of ``Sampling``. It gets the tokens that it would
        get alone, up to rounding (a matrix product of other size; with policies that balance by
        the prompt, that is by the batch, on models without QK-norm). A request that cannot be
        used does not stop the others: its result has the error. Where a batch has no room, runs
        out of memory or its logits are NaN, its halves are tried. Answers are text. A pipeline with
        ``prefix_cache`` reads the beginnings that prompts share once; without, for each.

        Args:
            requests: a list, or an iterator, of which a few batches are read ahead.
            batch_size: most requests that run at once.
            max_tokens: most tokens that run at once, padding and room for the answers included; a
                request that is over it by itself runs alone.
            max_padding: largest share of padding in the row of a request, 0 to 1.

        Raises:
            InputError: not a list of requests, or bounds that cannot be.
        """
        results = self.batch_stream(
            requests, batch_size=batch_size, max_tokens=max_tokens, max_padding=max_padding
        )
        return sorted(results, key=lambda result: result.index)

    def batch_stream(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        batch_size: int = 8,
        max_tokens: int = 32_768,
        max_padding: float = 0.5,
    ) -> Iterator[BatchResult]:
        """As ``batch``, but an iterator of results in the order in which they are finished."""
        batching = Batching(batch_size, max_tokens, max_padding)
        if isinstance(requests, Mapping | str | bytes) or not isinstance(requests, Iterable):
            raise InputError(
                "requests must be a list of dicts such as {'images': [...], 'prompt': '...'}, not "
                f"{type(requests).__name__}"
            )
        return _results(cast("Pipeline", self), requests, batching)


def _results(
    pipe: Pipeline, requests: Iterable[Mapping[str, Any]], batching: Batching
) -> Iterator[BatchResult]:
    ahead: list[Prepared] = []
    # Beginnings that are read ahead stay in the budget until their batch has run.
    room = math.inf if pipe.budget is None or pipe.prefixes is None else pipe.budget.limit
    taken = 0
    for index, request in enumerate(requests):
        one = _prepared(pipe, index, request)
        if isinstance(one, BatchResult):
            yield one
            continue
        takes = pipe.growth_bytes(pipe.growth(one.prompt, one.sampling.max_new_tokens))
        if taken + takes > room:
            yield from _in_batches(pipe, batching, ahead)
            taken = 0
        one = _begun(pipe, one)
        if isinstance(one, BatchResult):
            yield one
            continue
        ahead.append(one)
        taken += takes
        full = sum(other.nbytes for other in ahead) >= _AHEAD_BYTES
        if full or len(ahead) == _AHEAD * batching.batch_size:
            yield from _in_batches(pipe, batching, ahead)
            taken = 0
    yield from _in_batches(pipe, batching, ahead)


def _in_batches(pipe: Pipeline, batching: Batching, ahead: list[Prepared]) -> Iterator[BatchResult]:
    """Answer all requests of a list, which is empty then."""
    batches = batching.batches(ahead)
    ahead.clear()
    while batches:
        yield from answers(pipe, batches.pop(0))


def _prepared(pipe: Pipeline, index: int, request: Any) -> Prepared | BatchResult:
    """Read a request; its media are decoded here, and given up as soon as they are processed."""
    start = time.perf_counter()
    try:
        prompt, sampling = _read(pipe, request)
    except Exception as error:  # Whatever a file makes a library raise is this request's own.
        return BatchResult(index, error=error.with_traceback(None))
    return Prepared(index, prompt, sampling, time.perf_counter() - start)


def _begun(pipe: Pipeline, request: Prepared) -> Prepared | BatchResult:
    """A request that goes on from a beginning which others may share, if there is one."""
    start = time.perf_counter()
    try:
        past = _known_past(pipe, request.prompt)
    except Exception as error:
        return BatchResult(request.index, error=error.with_traceback(None))
    if past is None:
        return request
    known = past.get_seq_length()
    return replace(
        request,
        prompt=remaining(request.prompt, known),
        seconds=request.seconds + time.perf_counter() - start,
        past=past,
        past_ids=request.prompt.inputs["input_ids"][0, :known],
    )


def _known_past(pipe: Pipeline, prompt: Prompt) -> OscarCache | None:
    """A cache with a beginning that other prompts may share: it is read now if it is not known."""
    if pipe.prefixes is None:
        return None
    stop = prompt.media[-1].stop if prompt.media else 0
    with pipe.lock:
        settings = processor_settings(pipe.processor)
        past = pipe.prefixes.find(prompt, settings)
        known = 0 if past is None else past.get_seq_length()
        if known < stop and stop >= LEAST_TOKENS:
            first = beginning(prompt, stop)
            past = pipe.new_cache() if past is None else past
            new = remaining(first, known) if known else first
            pipe.make_room(pipe.growth(new, 0, past), new.tokens)
            read_prompt(pipe.model, new, past, pipe.prefill_chunk)
            pipe.prefixes.keep(first, settings, past)
        return past


def _read(pipe: Pipeline, request: Any) -> tuple[Prompt, Sampling]:
    if not isinstance(request, Mapping):
        raise InputError(f"a request must be a dict, not {type(request).__name__}")
    if "prompt" not in request:
        raise InputError("a request needs a prompt")
    media = ["images", "videos"]
    if Modality.AUDIO in pipe.family.reads:
        media += ["audio", "use_audio_in_video"]
    names = [*media, "prompt", "system"]
    options = {name: value for name, value in request.items() if name not in names}
    sampling = pipe.sampling(options, names)
    prompt, system = request["prompt"], request.get("system")
    pipe.check_texts(prompt, system)
    given = {name: request[name] for name in media if name in request}
    sound = bool(given.pop("use_audio_in_video", False))
    pipe.check_ahead(prompt, system, given | {"sound": sound}, sampling.max_new_tokens)
    prepared = pipe.prepare(prompt, pipe.read_media(**given, sound=sound), system)
    pipe.check_length(prepared, sampling.max_new_tokens)
    return prepared, sampling


def answers(pipe: Pipeline, batch: list[Prepared]) -> Iterator[BatchResult]:
    """Results of a batch; where it fails as a whole, of its halves."""
    finished: set[int] = set()
    failure: Exception | None = None
    try:
        for result in _run(pipe, batch):
            finished.add(result.index)
            yield result
    except (FloatingPointError, torch.OutOfMemoryError, InputError) as error:
        # No room for all at once, or none was left; without frames, which hold that memory.
        failure = error.with_traceback(None)
    if failure is None:
        return
    left = [one for one in batch if one.index not in finished]
    if len(batch) == 1:
        yield BatchResult(batch[0].index, error=failure)
        return
    half = (len(left) + 1) // 2
    for part in (left[:half], left[half:]):
        if part:
            yield from answers(pipe, part)


def _run(pipe: Pipeline, batch: list[Prepared]) -> Iterator[BatchResult]:
    """Answer the rows of one batch, each result as soon as its row has ended."""
    start = time.perf_counter()
    writers = [_writer(pipe, one, start) for one in batch]
    prompt = left_padded([one.prompt for one in batch], pipe.family)
    with pipe.lock:
        rows = (pipe.growth(one.prompt, one.sampling.max_new_tokens, one.past) for one in batch)
        growth = Growth.together(rows)
        pipe.make_room(growth, prompt.modalities.numel())
        cache = batch_cache(pipe, batch)
        room = pipe.reserve(growth, prompt.tokens, cache)
    ended = torch.zeros(len(batch), dtype=torch.bool)
    steps = decode(
        pipe.model,
        prompt,
        cache,
        [one.sampling for one in batch],
        end_tokens=pipe.family.end_tokens(),
        prefill_chunk=pipe.prefill_chunk,
        history=[_seen(one) for one in batch],
        ended=ended,
    )
    waiting = set(range(len(batch)))
    while waiting:
        with pipe.lock:
            tokens = next(steps, [None] * len(batch))
            for row in waiting:
                token = tokens[row]
                if token is not None:
                    writers[row].push(token)
                    ended[row] = writers[row].stopped
            over = sorted(row for row in waiting if tokens[row] is None)
            results = [_result(batch[row], writers[row], cache, row) for row in over]
        waiting -= set(over)
        yield from results
    with pipe.lock:
        cache.close()
    del room


def batch_cache(pipe: Pipeline, batch: list[Prepared]) -> OscarCache:
    """What the rows of a batch go on from; under the pipeline's lock."""
    if all(one.past is None for one in batch):
        return pipe.new_cache()
    return join([pipe.new_cache() if one.past is None else one.past for one in batch])


def row_memory(cache: OscarCache, row: int, past: OscarCache | None = None) -> MemoryReport:
    """What one row of a batch holds, its padding not counted.

    Args:
        past: what the row began with; its part is reported as shared.
    """
    alone = cache.fork()
    alone.batch_select_indices(torch.tensor([row]))
    [sequence] = alone.ledger.sequences
    sequence.codes[:] = sequence.codes.replace(bytes([NOWHERE]), b"")
    shared = 0 if past is None else token_bytes(alone, 0, past.get_seq_length())
    report = replace(alone.memory(), shared_bytes=shared)
    alone.close()
    return report


def _writer(pipe: Pipeline, request: Prepared, start: float) -> AnswerWriter:
    ids = torch.cat([_seen(request).cpu(), request.prompt.inputs["input_ids"][0].cpu()])
    return AnswerWriter(
        pipe.processor.tokenizer,
        request.sampling,
        start - request.seconds,
        pipe.family.think_tokens,
        ids,
    )


def _seen(request: Prepared) -> torch.Tensor:
    return torch.empty(0, dtype=torch.long) if request.past_ids is None else request.past_ids


def _result(request: Prepared, writer: AnswerWriter, cache: OscarCache, row: int) -> BatchResult:
    writer.finish()
    answer = writer.answer(row_memory(cache, row, request.past), request.tokens)
    return BatchResult(request.index, answer)
