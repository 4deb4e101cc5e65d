"""Hold the engine thread, so that a test may use caches and stores in its own thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from oscar_mm.pipelines.pipeline import Pipeline


@contextmanager
def engine_waits(pipe: Pipeline, *, runs_model: bool = False) -> Iterator[None]:
    """Keep the engine thread waiting between two steps within the block, or between two layers.

    Args:
        pipe: pipeline with the engine.
        runs_model: wait for the end of the pass.
    """
    if pipe.engine.thread.is_current:
        yield
        return
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        over.wait()

    call = {"runs_model": runs_model}
    holding = threading.Thread(target=pipe.engine.call, args=[hold], kwargs=call)
    holding.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        holding.join()
