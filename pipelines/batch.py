"""Batch: many requests of unequal length and mixed media, several at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.join import can_join, join
from oscar_mm.cache.memory import MemoryReport, token_bytes
from oscar_mm.cache.rows import NOWHERE
from oscar_mm.cache.slot_growth import Growth
from oscar_mm.errors import InputError
from oscar_mm.generation.answer import Answer, AnswerWriter
from oscar_mm.generation.decode_loop import decode, read_prompt
from oscar_mm.generation.family import Family
from oscar_mm.generation.prefix_cache import LEAST_TOKENS, processor_settings
from oscar_mm.generation.prompt import Prompt, beginning, remaining
from oscar_mm.generation.sampling import Sampling
from oscar_mm.modality import PADDING, Modality

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_AHEAD = 4
"""Batches of requests that are read before the first of them runs, to find those of one length."""
_AHEAD_BYTES = 1 << 29
"""Most bytes of processed media that are read ahead."""


@dataclass(frozen=True)
class BatchResult:
    """The answer to one request, or the error in its place.

    Attributes:
        index: place of the request, from 0.
        answer: as the pipeline would give it alone, or None. ``memory`` covers this request only;
            ``timings.prefill_s`` covers reading it and the prefill of its batch.
        error: why there is no answer: InputError for a request that cannot be used.
    """

    index: int
    answer: Answer | None = None
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class BatchRequest:
    """A request whose prompt is ready for a batch.

    Attributes:
        index: place of the request.
        prompt: what the model is to read.
        sampling: how to answer.
        seconds: that reading the request took.
        past: a cache that holds what comes before the prompt; others share it, so it is not
            changed. None for nothing.
        past_ids: (tokens,) ids of what ``past`` holds.
    """

    index: int
    prompt: Prompt
    sampling: Sampling
    seconds: float
    past: OscarCache | None = None
    past_ids: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and its past."""
        return self.prompt.tokens + (0 if self.past is None else self.past.get_seq_length())

    @property
    def nbytes(self) -> int:
        """Bytes of the prompt's tensors, processed media included."""
        return sum(tensor.nbytes for tensor in self.prompt.inputs.values())


@dataclass(frozen=True)
class Batching:
    """How requests are grouped into batches.

    Attributes:
        batch_size: most requests that run at once.
        max_tokens: most tokens that run at once, padding and room for the answers included; a
            request that is over it by itself runs alone.
        max_padding: largest share of padding in the row of a request, 0 to 1.

    Raises:
        InputError: a value that is not allowed.
    """

    batch_size: int = 8
    max_tokens: int = 32_768
    max_padding: float = 0.5

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name}={value!r}: must be a whole number, at least 1")
        share = self.max_padding
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise InputError(f"max_padding={share!r}: must be a share from 0 to 1")

    def batches(self, requests: Iterable[BatchRequest]) -> list[list[BatchRequest]]:
        """Requests in batches, the longest first, each with requests of nearly its length."""
        batches: list[list[BatchRequest]] = []
        for request in sorted(requests, key=lambda one: -one.tokens):
            if batches and self._fits([*batches[-1], request]):
                batches[-1].append(request)
            else:
                batches.append([request])
        return batches

    def _fits(self, batch: list[BatchRequest]) -> bool:
        longest, shortest = batch[0].tokens, batch[-1].tokens
        answer = max(one.sampling.max_new_tokens for one in batch)
        return (
            len(batch) <= self.batch_size
            and len(batch) * (longest + answer) <= self.max_tokens
            and longest - shortest <= self.max_padding * longest
            and can_join([one.past for one in batch if one.past is not None])
        )


def left_padded(prompts: Sequence[Prompt], family: Family) -> Prompt:
    """One prompt of several rows.

    Args:
        prompts: of one row each, as ``family`` made them.
        family: joins the media of the rows (``Family.join_media``).

    Returns:
        ``inputs`` has an attention_mask if the rows are of unequal length; there are no ``media``.
    """
    longest = max(prompt.tokens for prompt in prompts)
    before = [longest - prompt.tokens for prompt in prompts]

    def rows(parts: Iterable[torch.Tensor], filler: int, dim: int = 0) -> torch.Tensor:
        counted = zip(parts, before, strict=True)
        return torch.cat([pad(part, (count, 0), value=filler) for part, count in counted], dim=dim)

    # Never a placeholder of media, or the model would look for its features.
    filler = family.processor.tokenizer.pad_token_id or 0
    tensors: dict[str, list[torch.Tensor]] = {}
    for prompt in prompts:
        for name, tensor in prompt.inputs.items():
            tensors.setdefault(name, []).append(tensor)
    ids = rows(tensors.pop("input_ids"), filler)
    inputs = {name: family.join_media(name, parts) for name, parts in tensors.items()}
    modalities = rows((prompt.modalities for prompt in prompts), PADDING)
    if any(before):
        inputs["attention_mask"] = (modalities != PADDING).long().to(ids.device)
    return Prompt(
        inputs={"input_ids": ids} | inputs,
        positions=rows((prompt.positions for prompt in prompts), 0, dim=-2),
        next_position=torch.cat([prompt.next_position for prompt in prompts]),
        modalities=modalities,
    )


def batch_results(
    pipe: Pipeline, requests: Iterable[Mapping[str, Any]], batching: Batching
) -> Iterator[BatchResult]:
    """Answer many requests, see ``Pipeline.batch``; results in the order in which they finish.

    Raises:
        InputError: not a list of requests.
    """
    if isinstance(requests, Mapping | str | bytes) or not isinstance(requests, Iterable):
        raise InputError(
            "requests must be a list of dicts such as {'images': [...], 'prompt': '...'}, not "
            f"{type(requests).__name__}"
        )
    return _results(pipe, requests, batching)


def _results(
    pipe: Pipeline, requests: Iterable[Mapping[str, Any]], batching: Batching
) -> Iterator[BatchResult]:
    admission, ahead = pipe.admission, list[BatchRequest]()
    # Beginnings that are read ahead stay in the budget until their batch has run.
    room = math.inf if pipe.budget is None or pipe.prefixes is None else pipe.budget.limit
    taken = 0
    for index, arguments in enumerate(requests):
        request = _read(pipe, index, arguments)
        if isinstance(request, BatchResult):
            yield request
            continue
        growth = admission.growth(request.prompt, request.sampling.max_new_tokens)
        needed = admission.growth_bytes(growth)
        if taken + needed > room:
            yield from _in_batches(pipe, batching, ahead)
            taken = 0
        request = _after_prefix(pipe, request)
        if isinstance(request, BatchResult):
            yield request
            continue
        ahead.append(request)
        taken += needed
        full = sum(request.nbytes for request in ahead) >= _AHEAD_BYTES
        if full or len(ahead) == _AHEAD * batching.batch_size:
            yield from _in_batches(pipe, batching, ahead)
            taken = 0
    yield from _in_batches(pipe, batching, ahead)


def _in_batches(
    pipe: Pipeline, batching: Batching, ahead: list[BatchRequest]
) -> Iterator[BatchResult]:
    """Answer all requests of a list, and empty it."""
    batches = batching.batches(ahead)
    ahead.clear()
    while batches:
        yield from answers(pipe, batches.pop(0))


def _read(pipe: Pipeline, index: int, arguments: Any) -> BatchRequest | BatchResult:
    """Read a request; its media are given up as soon as they are processed."""
    start = time.perf_counter()
    try:
        prompt, sampling = _prompt(pipe, arguments)
    except Exception as error:  # Whatever a file makes a library raise is this request's own.
        return BatchResult(index, error=error.with_traceback(None))
    return BatchRequest(index, prompt, sampling, time.perf_counter() - start)


def _prompt(pipe: Pipeline, arguments: Any) -> tuple[Prompt, Sampling]:
    """The prompt of a request, checked, and how to answer it."""
    if not isinstance(arguments, Mapping):
        raise InputError(f"a request must be a dict, not {type(arguments).__name__}")
    if "prompt" not in arguments:
        raise InputError("a request needs a prompt")
    media = ["images", "videos"]
    if Modality.AUDIO in pipe.family.reads:
        media += ["audio", "use_audio_in_video"]
    names = [*media, "prompt", "system"]
    options = {name: value for name, value in arguments.items() if name not in names}
    sampling = pipe.sampling(options, names)
    shown = {name: arguments[name] for name in media if name in arguments}
    shown["sound"] = bool(shown.pop("use_audio_in_video", False))
    most = sampling.max_new_tokens
    return pipe.read_request(arguments["prompt"], shown, arguments.get("system"), most), sampling


def _after_prefix(pipe: Pipeline, request: BatchRequest) -> BatchRequest | BatchResult:
    """The request after the beginning that it may share with others, if there is one."""
    start = time.perf_counter()
    try:
        past = _prefix(pipe, request.prompt)
    except Exception as error:
        return BatchResult(request.index, error=error.with_traceback(None))
    if past is None:
        return request
    tokens = past.get_seq_length()
    return replace(
        request,
        prompt=remaining(request.prompt, tokens),
        seconds=request.seconds + time.perf_counter() - start,
        past=past,
        past_ids=request.prompt.inputs["input_ids"][0, :tokens],
    )


def _prefix(pipe: Pipeline, prompt: Prompt) -> OscarCache | None:
    """A cache with a beginning that other prompts may share, which is read now where it is new."""
    if pipe.prefixes is None:
        return None
    stop = prompt.media[-1].stop if prompt.media else 0
    with pipe.lock:
        settings = processor_settings(pipe.processor)
        past = pipe.prefixes.find(prompt, settings)
        tokens = 0 if past is None else past.get_seq_length()
        if tokens < stop and stop >= LEAST_TOKENS:
            first = beginning(prompt, stop)
            past = pipe.new_cache() if past is None else past
            new = remaining(first, tokens) if tokens else first
            pipe.admission.reserve(pipe.admission.growth(new, 0, past), new, past)
            read_prompt(pipe.model, new, past, pipe.prefill_chunk)
            pipe.prefixes.keep(first, settings, past)
        return past


def answers(pipe: Pipeline, batch: list[BatchRequest]) -> Iterator[BatchResult]:
    """Results of a batch; where the whole batch fails, its halves are answered."""
    finished: set[int] = set()
    failure: Exception | None = None
    try:
        for result in _run(pipe, batch):
            finished.add(result.index)
            yield result
    except (FloatingPointError, torch.OutOfMemoryError, InputError) as error:
        # No room for all rows at once. The frames of the traceback would hold their memory.
        failure = error.with_traceback(None)
    if failure is None:
        return
    left = [request for request in batch if request.index not in finished]
    if len(batch) == 1:
        yield BatchResult(batch[0].index, error=failure)
        return
    half = (len(left) + 1) // 2
    for part in (left[:half], left[half:]):
        if part:
            yield from answers(pipe, part)


def _run(pipe: Pipeline, batch: list[BatchRequest]) -> Iterator[BatchResult]:
    """Answer the rows of a batch; each result comes as soon as its row has ended."""
    start = time.perf_counter()
    writers = [_writer(pipe, request, start) for request in batch]
    prompt = left_padded([request.prompt for request in batch], pipe.family)
    with pipe.lock:
        grow = pipe.admission.growth
        rows = [
            grow(request.prompt, request.sampling.max_new_tokens, request.past) for request in batch
        ]
        cache = batch_cache(pipe, batch)
        room = pipe.admission.reserve(Growth.together(rows), prompt, cache)
    ended = torch.zeros(len(batch), dtype=torch.bool)
    steps = decode(
        pipe.model,
        prompt,
        cache,
        [request.sampling for request in batch],
        end_tokens=pipe.family.end_tokens(),
        prefill_chunk=pipe.prefill_chunk,
        history=[_seen(request) for request in batch],
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


def batch_cache(pipe: Pipeline, batch: list[BatchRequest]) -> OscarCache:
    """The cache that the rows of a batch go on from; used under the pipeline's lock."""
    if all(request.past is None for request in batch):
        return pipe.new_cache()
    return join([pipe.new_cache() if request.past is None else request.past for request in batch])


def row_memory(cache: OscarCache, row: int, past: OscarCache | None = None) -> MemoryReport:
    """Memory of one row of a batch without its padding.

    Args:
        cache: of the batch.
        row: of the batch.
        past: what the row began with; it is reported as shared.
    """
    alone = cache.fork()
    alone.batch_select_indices(torch.tensor([row]))
    [sequence] = alone.ledger.sequences
    sequence.codes[:] = sequence.codes.replace(bytes([NOWHERE]), b"")
    shared = 0 if past is None else token_bytes(alone, 0, past.get_seq_length())
    report = replace(alone.memory(), shared_bytes=shared)
    alone.close()
    return report


def _writer(pipe: Pipeline, request: BatchRequest, start: float) -> AnswerWriter:
    ids = torch.cat([_seen(request).cpu(), request.prompt.inputs["input_ids"][0].cpu()])
    return AnswerWriter(
        pipe.processor.tokenizer,
        request.sampling,
        start - request.seconds,
        pipe.family.think_tokens,
        ids,
    )


def _seen(request: BatchRequest) -> torch.Tensor:
    return torch.empty(0, dtype=torch.long) if request.past_ids is None else request.past_ids


def _result(
    request: BatchRequest, writer: AnswerWriter, cache: OscarCache, row: int
) -> BatchResult:
    writer.finish()
    answer = writer.answer(row_memory(cache, row, request.past), request.tokens)
    return BatchResult(request.index, answer)
