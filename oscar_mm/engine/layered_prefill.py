"""Layered prefill: decode steps between the layers of a prompt."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import NamedTuple

from oscar_mm.cache.cache import OscarCache
from oscar_mm.engine.device_timer import DeviceTimer
from oscar_mm.engine.prefill import layers_of_towers
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.running_batches import RunningBatches
from oscar_mm.errors import Cancelled
from oscar_mm.modality import Modality

_MAX_OWED = 3
"""Maximum number of delayed decode steps that may be made up for later. With a limit of one, decode
ran at 0.49 of its normal pace, with three at 0.50."""
_IN_FLIGHT_S = 0.01
"""Seconds of prompt-layer work kept in flight on the GPU while the host launches a decode step. A
launch takes 3 ms for 64 rows, and twice that next to a server; more would delay the decode step."""
_MAX_IN_FLIGHT = 4
"""Maximum number of prompt layers in flight once decode steps run between layers."""
_PATIENCE_S = 0.2
"""Seconds that running requests wait for short prompts before decode steps run between the layers.

Short prompts are thus prefilled without interruption: their first tokens come sooner, and their
requests join the decode steps, which take nearly as long without them. With 64 clients, prompts of
2,000 tokens and answers of 400 (8B, H200), 64 requests decode on average. With decode steps between
the layers of all prompts, only 45 did, as prompts took twice as long and others waited for them.
With 0.1 seconds, decode steps interrupt every pass of two prompts, and tokens/s are 6% lower.
"""


@contextmanager
def layered_prefill(
    batches: RunningBatches,
    cache: OscarCache,
    prompts: Sequence[Prompt],
    max_short: int,
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Interleave decode steps with prompt layers within the block; see ``LayeredPrefill``.

    Args:
        batches: requests that decode.
        cache: cache that the prompts are written to.
        prompts: prompts of the pass.
        max_short: maximum number of tokens of short prompts, together.
        cancelled: function that returns whether all requests of the prompts were cancelled; if so,
            prefill stops, provided that ``RunningBatches.steps_while_reading``.

    Raises:
        Cancelled: if ``cancelled`` returned True; the cache can only be reset or closed.
    """
    model = batches.family.model
    if not (batches.live or cancelled) or not batches.steps_while_reading:
        yield
        return
    is_long = sum(prompt.tokens for prompt in prompts) > max_short
    turns = LayeredPrefill(batches, cache, len(prompts), is_long, cancelled)
    layers = model.get_decoder().layers
    hooks = [layer.register_forward_hook(turns.layer_ends) for layer in layers]
    if cancelled and any(bool((x.modalities > Modality.TEXT).any()) for x in prompts):
        towers = layers_of_towers(model)
        hooks += [layer.register_forward_hook(turns.stop_if_cancelled) for layer in towers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Interleave(NamedTuple):
    """Group of decode steps between two prompt layers.

    Attributes:
        since: end of the previous group; prompt layers ran between it and this group.
        begin, end: start and end of this group; the host prepares its first step after ``begin``.
        usual: seconds that the same number of steps takes outside of prefill.
        patience: seconds of the prompt layers that are not made up for.
    """

    since: DeviceTimer
    begin: DeviceTimer
    end: DeviceTimer
    usual: float
    patience: float

    def owed(self, share: float) -> float:
        """Return the seconds still due to decode, given the prefill-to-decode ratio ``share``."""
        lost = max(self.end.since(self.begin) - self.usual, 0.0)
        return self.begin.since(self.since) - self.patience + lost - share * self.usual


class LayeredPrefill:
    """Interleaving of prompt layers and decode steps during prefill.

    Running requests wait for the first 0.2 s of short prompts, in which most are complete. From
    then on, once prompt layers have run for as long as a decode step takes, decode gets the same
    amount of time, plus the cost of switching. If more than one request waits for every four that
    decode, prefill gets a larger share, because a step of few rows takes nearly as long as a step
    of many.

    Args:
        batches: requests that decode.
        cache: cache that the prompts are written to.
        count: number of prompts in the pass.
        is_long: whether the prompts are long. If they are short and no requests decode, the host
            does not wait for layers.
        cancelled: function that returns whether all requests of the prompts were cancelled.
    """

    def __init__(
        self,
        batches: RunningBatches,
        cache: OscarCache,
        count: int,
        is_long: bool,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._batches, self._cache, self._others = batches, cache, count - 1
        self._decodes = bool(batches.live)  # No requests join during the pass.
        self._waits = self._decodes or is_long
        # Another thread may use the model at the same time, and its passes call the hooks too.
        self._cancelled, self._ident = cancelled, threading.get_ident()
        self._launched: list[DeviceTimer] = []
        """Ends of the layers that the host has not waited for yet."""
        self._layer_end: DeviceTimer | None = None
        """End of the latest layer that the host has waited for since the last decode steps; None if
        there is none."""
        self._layer_seconds = math.inf
        begin = batches.wait_since if self._decodes else batches.now()
        self._turn = _Interleave(begin, begin, begin, 0.0, 0.0)
        self._patience = 0.0 if is_long else _PATIENCE_S
        self._owed = 0.0
        """Seconds that were still due to decode before the last group of decode steps."""

    def layer_ends(self, *_: object) -> None:
        """Forward hook of the decoder layers: run decode steps if they are due.

        Raises:
            Cancelled: see ``stop_if_cancelled``.
        """
        if self._batches.stepping or threading.get_ident() != self._ident:
            return
        if self._waits:
            self._wait_for_layers()
        self.stop_if_cancelled()
        self._batches.between_layers(self._cache)
        if self._layer_end is None or not self._decodes:
            return
        step_seconds = self._batches.pace.seconds()
        share = self._batches.reading_share(self._others)
        # Limited: if steps have become slower, prompts must not starve.
        owed = min(self._owed + self._turn.owed(share), _MAX_OWED * share * step_seconds)
        waited = owed + self._layer_end.since(self._turn.end) - self._patience
        if waited < share * step_seconds:
            return
        if self._launched and self._max_in_flight > 1:
            waited += len(self._launched) * self._layer_seconds
        elif self._launched:
            self._launched[-1].wait()
            waited = owed + self._launched[-1].since(self._turn.end) - self._patience
        self._launched.clear()
        self._layer_end, self._owed = None, owed
        # The count is rounded up; the surplus is subtracted from the next group of steps.
        self._step(math.ceil(waited / (share * step_seconds)) if step_seconds else 1, step_seconds)

    def stop_if_cancelled(self, *_: object) -> None:
        """Stop a cancelled prefill; forward hook of tower layers, also called after decoder layers.

        Raises:
            Cancelled: if all requests of the prompts were cancelled.
        """
        if threading.get_ident() == self._ident and self._cancelled and self._cancelled():
            raise Cancelled("no consumer is waiting for the answer any more")

    def _step(self, count: int, step_seconds: float) -> None:
        """Run up to ``count`` decode steps, as long as there are requests to decode."""
        begin, made = self._batches.now(), 0
        with self._cache.paused():
            while self._batches.live and made < count:
                # A step may be a call of the model within that of the prompt; it must not change
                # the context variables in which hooks keep the arguments of the outer call.
                copy_context().run(self._batches.step)
                self._batches.after_step()
                made += 1
        end, usual = self._batches.wait_since, made * step_seconds
        self._turn = _Interleave(self._turn.end, begin, end, usual, self._patience)
        self._patience = 0.0

    @property
    def _max_in_flight(self) -> int:
        """Number of layers left in flight while the host launches more layers or a step.

        While no step is due, the host may launch all layers, and then a decode step, before the
        device has finished the first ones.
        """
        if self._layer_end is None:
            return 1
        left = self._patience - self._layer_end.since(self._turn.end)
        count = math.ceil(max(_IN_FLIGHT_S, left) / max(self._layer_seconds, 1e-6))
        return max(count, 1) if left > _IN_FLIGHT_S else min(max(count, 1), _MAX_IN_FLIGHT)

    def _wait_for_layers(self) -> None:
        """Wait for the launched layers, except the last few, which stay in flight on a GPU."""
        self._launched.append(self._batches.now())
        in_flight = self._max_in_flight if self._launched[-1].comes_later else 0
        while len(self._launched) > in_flight:
            before, self._layer_end = self._layer_end or self._turn.end, self._launched.pop(0)
            self._layer_end.wait()
            self._layer_seconds = self._layer_end.since(before)
