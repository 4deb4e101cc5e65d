"""Batch: answer many requests, with prompts and media of any size, several at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oscar_mm.engine.answer import Answer
from oscar_mm.engine.message_lists import conversation_from
from oscar_mm.engine.request import Request
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


@dataclass(frozen=True)
class BatchResult:
    """Answer to one request, or the error that prevented it.

    Attributes:
        index: index of the request, from 0.
        answer: the answer that the request would get if it ran alone; None if it failed.
        error: exception that made the request fail, such as an InputError; None if it succeeded.
    """

    index: int
    answer: Answer | None = None
    error: Exception | None = None


def batch_results(
    pipe: Pipeline, requests: Iterable[Mapping[str, Any]], batch_size: int, max_tokens: int
) -> Iterator[BatchResult]:
    """Answer many requests and yield results as they finish; see ``Pipeline.batch``.

    Raises:
        InputError: if ``requests`` is not a list of requests, or a limit is invalid.
    """
    for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
        if type(value) is not int or value < 1:
            raise InputError(f"{name}={value!r}: must be a whole number, at least 1")
    if isinstance(requests, Mapping | str | bytes) or not isinstance(requests, Iterable):
        raise InputError(
            "requests must be a list of dicts such as {'images': [...], 'prompt': '...'}, not "
            f"{type(requests).__name__}"
        )
    return _results(pipe, requests, batch_size, max_tokens)


def _results(
    pipe: Pipeline, requests: Iterable[Mapping[str, Any]], batch_size: int, max_tokens: int
) -> Iterator[BatchResult]:
    running: dict[Request, int] = {}
    try:
        for index, arguments in enumerate(requests):
            try:
                answer = _new_request(pipe, arguments)
            except Exception as error:  # Libraries may raise any exception on a bad media file.
                yield BatchResult(index, error=error.with_traceback(None))
                continue
            while running and (
                len(running) >= batch_size
                or sum(one.max_total_tokens for one in (*running, answer)) > max_tokens
            ):
                yield from _next_results(pipe, running)
            running[answer] = index
            pipe.engine.submit(answer)
        while running:
            yield from _next_results(pipe, running)
    finally:
        for answer in running:
            answer.cancel()


def _new_request(pipe: Pipeline, arguments: Any) -> Request:
    """Check the arguments of a request, decode its media and create the request."""
    start = time.perf_counter()
    if not isinstance(arguments, Mapping):
        raise InputError(f"a request must be a dict, not {type(arguments).__name__}")
    if "prompt" not in arguments and "messages" not in arguments:
        raise InputError("a request needs a prompt: set 'prompt' or 'messages'")
    supports_audio = Modality.AUDIO in pipe.family.reads
    media = ["images", "videos", *(["audio", "use_audio_in_video"] if supports_audio else [])]
    names = [*media, "prompt", "system", "messages"]
    options = {name: value for name, value in arguments.items() if name not in names}
    sampling, template, of_media, adapter = pipe.read_options(options, names)
    asked = conversation_from(
        arguments.get("prompt", ""),
        (arguments.get("images"), arguments.get("videos"), arguments.get("audio")),
        arguments.get("messages"),
        arguments.get("system"),
        sound=bool(arguments.get("use_audio_in_video")),
        options=of_media,
        open_end=template.takes_any_end,
    )
    prompt = pipe.read_request(asked, sampling.max_new_tokens, template=template, adapter=adapter)
    return pipe.new_request(prompt, sampling, start)


def _next_results(pipe: Pipeline, running: dict[Request, int]) -> Iterator[BatchResult]:
    """Run until some requests have finished, remove these requests and yield their results."""
    for answer in pipe.engine.next_ended(running):
        index = running.pop(answer)
        try:
            yield BatchResult(index, answer.complete())
        except Exception as error:
            yield BatchResult(index, error=error.with_traceback(None))
