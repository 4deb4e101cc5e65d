"""Warm-up: capture decode steps and mixed passes of every batch size before the first request."""

from __future__ import annotations

import logging
from functools import partial
from time import perf_counter

from oscar_mm.cache.cache import OscarCache
from oscar_mm.engine.decode_runner import DecodeRunner
from oscar_mm.engine.engine import Engine
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.mixed_prefill import WARM_UP_STEPS
from oscar_mm.engine.request import Request
from oscar_mm.engine.sampling import Sampling
from oscar_mm.fast_decode.decoder import decodes_any_rows
from oscar_mm.media.media import Media

_STEPS = 4
"""Number of steps per batch size: the first runs eagerly, and the second is captured."""
_MIXED_S = 40.0
"""Seconds after which no more mixed passes are captured; the rest wait until prompts need them."""
_log = logging.getLogger("oscar_mm")


def warm_up(engine: Engine, rows: int) -> None:
    """Capture the decode steps of batches up to ``rows``, and their mixed passes with text; do
    nothing if steps are not captured.

    Short requests run together and are ended until only one is left. Each request takes cache
    memory for up to some thousand tokens. Each batch size takes a capture and four steps, and for
    each size of mixed passes another capture and three passes, for at most 40 seconds in all.
    An error is logged, and the first requests then capture their steps.

    Args:
        engine: an idle engine.
        rows: maximum number of requests that will decode together.
    """
    answers: list[Request] = []
    try:
        _run_down(engine, min(rows, engine.max_rows), answers)
        if error := next((answer.error for answer in answers if answer.error), None):
            raise error
    except Exception as error:
        _log.warning("the warm-up failed, so decode steps are captured later: %s", error)
    finally:
        for answer in answers:
            answer.cancel()

        def settle() -> None:
            for answer in answers:
                answer.settle()

        engine.call(settle, runs_model=True)


def _run_down(engine: Engine, rows: int, answers: list[Request]) -> None:
    """Run ``rows`` requests, adding them to ``answers``, and end them step by step."""
    family = engine.family
    if not decodes_any_rows(family.model):
        return  # Each request decodes in its own batch.
    read = family.prompt(first_turn("Hello"), Media())
    prompt = read.to(family.device)
    axes, cache = prompt.positions.shape[:-2], OscarCache(engine.store.policy, store=engine.store)
    sizes = DecodeRunner(family.model, cache, axes, family.device).captured_sizes(rows)
    # Decode steps also run between the layers of prompts, hence twice as many tokens.
    most = (2 * _STEPS + WARM_UP_STEPS) * (len(sizes) + 2)
    sampling = Sampling(max_new_tokens=most)
    for _ in range(rows if sizes else 0):
        cache = OscarCache(engine.store.policy, store=engine.store)
        answers.append(Request(engine, prompt, cache, sampling, perf_counter()))
        answers[-1].end_tokens = frozenset()
        answers[-1].has_past = True  # Bypasses the prefix cache.
        engine.submit(answers[-1])
    engine.run_until(lambda: _all_decode(engine, answers))
    until = perf_counter() + _MIXED_S  # Only now, since on a new machine the first steps compile.
    for size in sizes:
        live = [answer for answer in answers if answer.tokens and not answer.ended]
        for answer in live[size:]:
            answer.cancel()
        if live:
            goal = len(live[0].tokens) + _STEPS
            engine.run_until(lambda x=live[0], goal=goal: x.ended or len(x.tokens) >= goal)
            engine.call(partial(engine.scheduler.capture_mixed_passes, until), runs_model=True)


def _all_decode(engine: Engine, answers: list[Request]) -> bool:
    """Return whether all requests decode, or those that the budget has memory for."""
    decoding = sum(bool(answer.tokens) and not answer.ended for answer in answers)
    blocked = engine.running > 0 and not engine.scheduler.runnable_count()
    return (blocked or not engine.waiting) and decoding >= engine.running
