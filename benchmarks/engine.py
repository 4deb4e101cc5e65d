"""Compare requests that decode together in a pipeline's engine with the bare decode loop.

python -m benchmarks.engine [--models qwen3-vl-8b,...] [--batches 1,16,...] [--ways compact-graph]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.cache_variants import VARIANTS, Decoder, Oscar
from benchmarks.decode_step import (
    STEPS,
    WARM_UP,
    DecodeLoop,
    add_variants,
    attempt,
    numbers,
    options_of,
    step_ms,
    sweep,
)
from benchmarks.profiling import allocated, free_bytes, release
from benchmarks.record import Row, now, show
from benchmarks.throughput import until_it_fits
from oscar_mm import OscarCache
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prompt import Prompt, beginning
from oscar_mm.engine.request import Request
from oscar_mm.engine.sampling import Sampling
from oscar_mm.media.media import Media
from oscar_mm.pipelines.pipeline import Pipeline
from tests.tiny import TEXT

MODELS = ("qwen3-vl-8b",)
CONTEXTS, TINY_CONTEXTS = (32768,), (400,)
BATCHES = (1, 16, 64, 172)
WAYS = {
    name: variant
    for name, variant in VARIANTS.items()
    if isinstance(variant, Oscar) and variant.graph
}
BOUND_CONTEXT, SHARE, READING = 32768, 0.9, 0.5
"""Context for which the bounds apply, minimum share of the bare loop's tokens per second, and the
minimum share while another prompt is prefilled."""
_QUESTION = "What is it?"
_MAX_TOKENS = 4096
"""Maximum tokens of an answer, which no measurement reaches."""
NOTES = [
    "Random weights of the released shapes; caches are filled with random keys and values of text "
    "and images. A number of rows without room is followed by the largest that has some.",
    "loop ms: a step of the bare loop of benchmarks.throughput on these caches, ms: a step of the "
    f"engine, which has read a short question on each. Medians of {STEPS} steps after {WARM_UP}. "
    "host: what is left of that time where the host does not wait for tokens.",
    "The engine's steps give each answer its token, and the tokenizer of some hundred tokens makes "
    "text of it; nobody takes the pieces.",
    "reading: tokens per second of the same rows while the engine reads another prompt, of as many "
    "tokens of text as the context; their share of those without. s: seconds that the prompt takes "
    "then, and alone afterwards.",
]


def measure_engine(
    decoder: Decoder, variant: Oscar, context: int, bandwidth: float, rows: int
) -> Row:
    """Fill caches, time the bare decode loop and then the engine with them, and free everything.

    Args:
        decoder: decoder whose pipeline has the engine.
        variant: cache variant with the policy.
        context: tokens of each row before the first step.
        bandwidth: bytes per second, for the floor of a step.
        rows: number of requests.

    Returns:
        A row of the record, see ``measure_cell``.
    """
    row: Row = {"model": decoder.name, "way": variant.policy, "batch": rows, "context": context}
    decoder.model.set_attn_implementation({"text_config": variant.attention})
    with torch.inference_mode():
        row |= attempt(lambda: _figures(decoder, variant, context, bandwidth, rows))
    release(decoder.device)
    return row | {"date": now()}


def _figures(decoder: Decoder, variant: Oscar, context: int, bandwidth: float, rows: int) -> Row:
    start = perf_counter()
    pipe = decoder.pipe.with_policy(variant.policy)
    cache = OscarCache(pipe.policy, model=pipe.model, store=pipe.store)
    slots = variant.slots(context, 3 * (WARM_UP + STEPS))
    variant.store_prompt(cache, decoder, rows, context, slots, more=1)
    filled = perf_counter()
    loop_ms, loop_host_ms = step_ms(
        DecodeLoop(variant.decoded(cache, decoder), decoder.device, rows).step
    )
    allocated(decoder.device)  # Synchronize, and start a new peak.
    release(decoder.device)  # Free the graph.
    kv_bytes = cache.memory().kv_bytes
    split = perf_counter()
    answers = [_answer(pipe, one, _MAX_TOKENS) for one in _rows_apart(cache)]
    engine = pipe.engine
    joining = perf_counter()
    engine.run_until(lambda: all(answer.tokens or answer.ended for answer in answers))
    joined = perf_counter()
    _check(answers)
    ms, host_ms = step_ms(partial(next_step, answers))
    _check(answers)
    tokens_per_s = 1e3 * rows / ms
    figures = {
        "kv_bytes": kv_bytes,
        "copy_bytes_per_second": bandwidth,
        "floor_ms": 1e3 * (decoder.weights(rows) + kv_bytes) / bandwidth,
        "fill_s": filled - start,
        "split_s": joining - split,
        "join_s": joined - joining,
        "loop_ms": loop_ms,
        "loop_host_ms": loop_host_ms,
        "ms": ms,
        "host_ms": host_ms,
        "tokens_per_s": tokens_per_s,
        "share": loop_ms / ms,
    }
    reading = _reading(pipe, answers, _text(pipe, context))
    if "tokens_per_s" in reading:
        reading["share"] = reading["tokens_per_s"] / tokens_per_s
    for answer in answers:
        answer.cancel()
        answer.cache.close()
    if "error" not in reading:
        reading["alone_s"] = _reading_s(pipe, _text(pipe, context))
    return figures | {"reading": reading, "peak": allocated(decoder.device).get("peak")}


def _rows_apart(cache: OscarCache) -> list[OscarCache]:
    """Split a cache into single-row caches, and close the original cache."""
    apart = []
    for row in range(cache.batch_size):
        apart.append(cache.fork())
        apart[-1].batch_select_indices(torch.tensor([row]))
    cache.close()
    return apart


def _answer(pipe: Pipeline, cache: OscarCache, most: int) -> Request:
    """Submit a request that continues a cache, and return the request."""
    family, past = pipe.family, cache.get_seq_length()
    question, place = first_turn(_QUESTION), torch.tensor([past])
    prompt = family.continuation(question, Media(), past, place).to(family.device)
    sampling = Sampling(max_new_tokens=most, temperature=0)
    answer = Request(pipe.engine, prompt, cache, sampling, perf_counter())
    pipe.engine.submit(answer)
    return answer


def _text(pipe: Pipeline, tokens: int) -> Prompt:
    """Return a prompt with ``tokens`` text tokens."""
    times = 1 + tokens // pipe.family.tokenize(TEXT).shape[1]
    return beginning(pipe.prepare(first_turn(TEXT * times), Media()), tokens)


def _check(answers: Sequence[Request]) -> None:
    """Raise the error of a failed request, or an error if the requests do not all run at once."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    running = answers[0].engine.running
    if running != len(answers):
        raise RuntimeError(
            f"only {running} of {len(answers)} answers run at once; measure fewer rows"
        )


def next_step(answers: Sequence[Request]) -> None:
    """Run the engine until each request has one more token."""
    first = answers[0]
    count = len(first.tokens)
    first.engine.run_until(lambda: len(first.tokens) > count or first.ended)


def _reading(pipe: Pipeline, answers: Sequence[Request], prompt: Prompt) -> dict[str, Any]:
    """Measure running requests while another prompt is prefilled.

    If this is not possible, the row has an "error" with the reason.
    """
    reader = Request(
        pipe.engine, prompt, pipe.new_cache(), Sampling(max_new_tokens=1), perf_counter()
    )
    before, start = sum(len(answer.tokens) for answer in answers), perf_counter()
    pipe.engine.submit(reader)
    first, count = answers[0], len(answers[0].tokens)
    # A prompt for which there is no memory stays in the queue while the answers continue.
    pipe.engine.run_until(
        lambda: reader.ended or (pipe.engine.waiting > 0 and len(first.tokens) > count)
    )
    seconds = perf_counter() - start
    tokens = sum(len(answer.tokens) for answer in answers) - before
    waits, error = not reader.ended, reader.error
    reader.cancel()
    reader.cache.close()
    if waits or error is not None:
        return {"error": "there is no room for the prompt" if waits else repr(error)}
    _check(answers)
    return {
        "prompt_tokens": prompt.tokens,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
    }


def _reading_s(pipe: Pipeline, prompt: Prompt) -> float:
    """Return the time to prefill a prompt while nothing else runs, in seconds."""

    def read() -> float:
        cache, start = pipe.new_cache(), perf_counter()
        pipe.engine.reader.read(prompt, cache).argmax().item()
        seconds = perf_counter() - start
        cache.close()
        return seconds

    return pipe.engine.call(read, runs_model=True)


def rows_of(
    decoder: Decoder,
    bandwidth: float,
    contexts: Sequence[int],
    batches: Sequence[int],
    variants: Sequence[str],
) -> Iterator[Row]:
    """Yield a row for each context, cache variant and batch, including batches that do not fit."""
    for context in contexts:
        for name in variants:
            variant = WAYS[name]
            measure = partial(measure_engine, decoder, variant, context, bandwidth)
            most = max(batches)
            if decoder.device.type == "cuda":
                row_bytes = variant.row_bytes(decoder, context, 3 * (WARM_UP + STEPS))
                most = max(1, free_bytes(decoder.device) // row_bytes - 1)
            for batch in sorted({min(batch, most) for batch in batches}):
                yield from until_it_fits(batch, measure)


def bounds(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the bounds that apply to the rows: each with its value and whether it is met."""
    checks = []
    for row in rows:
        if "error" in row or row["context"] != BOUND_CONTEXT:
            continue
        place = f"{row['model']}, {row['way']}, {row['batch']} x {row['context']:,} tokens"
        figures = [("tokens per second / bare loop", row["share"], SHARE)]
        if "share" in row["reading"]:
            figures.append(
                ("tokens per second while a prompt is read", row["reading"]["share"], READING)
            )
        checks += [
            {"place": place, "figure": name, "found": found, "least": least, "met": found >= least}
            for name, found, least in figures
        ]
    return checks


def report(rows: Sequence[Row]) -> None:
    """Print a table and verdicts."""
    columns = ("model", "way", "batch", "context", "loop ms", "host", "ms", "host", "tokens/s")
    reading = ("of loop", "reading", "of it", "s", "alone s")
    complete = [row for row in rows if "error" not in row]
    show("The engine", (*columns, *reading), map(_figures_of, complete))
    for row in complete:
        if "error" in row["reading"]:
            print(f"{row['model']}, {row['way']}, {row['batch']}: {row['reading']['error']}")
    for bound in bounds(rows):
        verdict = "met" if bound["met"] else "NOT met"
        print(
            f"{bound['place']}: {bound['figure']} {bound['found']:.2f}, at least "
            f"{bound['least']}: {verdict}"
        )


def _figures_of(row: Row) -> tuple[str, ...]:
    reading = row["reading"]
    figures = [
        *(f"{row[name]:.2f}" for name in ("loop_ms", "loop_host_ms", "ms", "host_ms")),
        f"{row['tokens_per_s']:.1f}",
        f"{row['share']:.3f}",
    ]
    if "error" in reading:
        figures += ["-"] * 4
    else:
        figures += [f"{reading['tokens_per_s']:.1f}", f"{reading['share']:.3f}"]
        figures += [f"{reading[name]:.2f}" for name in ("seconds", "alone_s")]
    return row["model"], row["way"], str(row["batch"]), f"{row['context']:,}", *figures


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: measure, print and record; return the exit code, see ``sweep``."""
    parser = options_of("engine", __doc__, CONTEXTS)
    parser.set_defaults(models=MODELS)
    parser.add_argument(
        "--batches", type=numbers, default=BATCHES, help="numbers of answers, comma-separated"
    )
    add_variants(parser, ("compact-graph", "standard-graph"), tuple(WAYS))
    options = parser.parse_args(arguments)
    contexts = TINY_CONTEXTS if options.tiny and options.contexts == CONTEXTS else options.contexts

    def cells(decoder: Decoder, bandwidth: float) -> Iterator[Row]:
        return rows_of(decoder, bandwidth, contexts, options.batches, options.ways)

    cell = ("model", "way", "context", "batch")
    return sweep("engine", arguments, options, NOTES, cells, report, cell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
