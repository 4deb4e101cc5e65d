"""Decode steps: one token of every row through the model, eagerly or as a CUDA graph.

Eagerly a step costs the host ten times what it costs the GPU. A captured step is launched at once;
what changes from step to step (tokens, positions, where the past is and where the new tokens go)
lies in tensors that are written over before each replay. A step may be launched early, before the
host has seen the tokens that feed it: the host learns only later which tokens were chosen and which
rows have ended, and the device goes on as if none had.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache, as_argument
from oscar_mm.cache.step_plan import GraphTables, StepPlan
from oscar_mm.fast_decode.decoder import FastDecoder, Record, has_full_attention, supports
from oscar_mm.kernels.launch import NotCapturable, kernels_disabled
from oscar_mm.modality import PADDING, Modality
from oscar_mm.modules import devices
from oscar_mm.tensor_parallel import TPGroup


class GraphInputs:
    """Prepares the decode steps of a cache for a graph, which reads their tables where it found
    them when it was captured.

    ``OscarCache.begin`` begins a step and ``OscarCache.replayed`` ends it; between the two a step
    that ``fix`` accepts may be replayed as long as ``version`` is that of the capture.

    Args:
        cache: that the steps add tokens to.
        rows: of its batch.
    """

    def __init__(self, cache: OscarCache, rows: int) -> None:
        self._cache, self._tables = cache, GraphTables(rows, cache.policy)

    @property
    def is_ready(self) -> bool:
        """Whether layers have asked for their tables: before that nothing can be captured."""
        return self._tables.known

    @property
    def version(self) -> tuple[int, ...]:
        """The same as long as a capture holds: tables and pools stay where they are. ``fix`` lets
        pools grow, so what was asked for before a step is fixed may not hold for it."""
        return self._tables.version, *self._cache.version

    def fix(self, step: StepPlan) -> bool:
        """Write what a step needs to where a graph reads it.

        Returns:
            False if the step does what no graph has in it: it is as before then.
        """
        if not self._tables.takes(step):
            return False
        self._cache.store.reserve()
        # No graph has these copies in it.
        for layer in self._cache.packed_layers if step.copies else ():
            layer.copy_pages(step)
        step.copies = []
        self._tables.write(step)
        # A row that has ended is computed like the others, and nobody looks at what comes of it.
        step.fixed, step.real = self._tables, None
        if step.fillings and not self._cache.policy.by_token:
            self._pack_whole_pages(step)
        return True

    def plan_ahead(self, modalities: np.ndarray) -> StepPlan | None:
        """The step that ``OscarCache.begin`` would give, fixed; the cache stays as it is.

        Args:
            modalities: (batch, 1) int8 modality ids, -1 for padding.

        Returns:
            None where a page would be copied or packed as a whole, a pool would grow, or no token
            would be stored.
        """
        step = self._cache.kv_manager.planned(modalities)
        if step is None or (step.fillings and not self._cache.policy.by_token):
            return None
        return step if self.fix(step) else None

    @contextmanager
    def dry_run(self, step: StepPlan) -> Iterator[None]:
        """Let layers that run meanwhile carry out this step, for a capture or before its time.

        Afterwards the cache's own step, and what layers have done of this one, are as before.
        """
        cache = self._cache
        before, cache.step = cache.step, step
        try:
            yield
        finally:
            cache.step = before
            step.restart()

    def _pack_whole_pages(self, step: StepPlan) -> None:
        """Pack the pages that leave the window, before the step.

        Otherwise that comes after attention, whose tables still list the slots of 16 bit: they are
        read, and not written to before the new token is.
        """
        for layer in self._cache.packed_layers:
            # None of the new tokens is packed, so any tokens stand for them.
            some = layer.recent.storage[:1, 0, :, None, :].expand(len(step.past), -1, -1, -1)
            layer.pack(some, some, step)
        step.filled()


SWITCH = "OSCAR_MM_CUDA_GRAPHS"
"""Environment variable: "off" leaves steps eager."""
Result = TypeVar("Result")
_CAPTURES = threading.Lock()
_log = logging.getLogger("oscar_mm")
_TRIES = 4
"""Captures that may fail one after the other before all further steps are eager."""
_EAGER_STEPS = 16
"""Steps between a capture that failed and the next try: other threads may have broken it."""


class InflightStep(NamedTuple):
    """A step that was launched before its time.

    It has written keys and values only where nothing is stored, so nothing needs to be taken back.

    Attributes:
        tokens: (batch,) ids that it was launched with.
        step: as it was foretold: where it has put the tokens of rows that had not ended, and what
            it has packed.
        logits: (batch, vocabulary) that come of it.
    """

    tokens: torch.Tensor
    step: StepPlan
    logits: torch.Tensor

    def is_step(self, tokens: torch.Tensor, step: StepPlan) -> bool:
        """Whether it has done what a step with these tokens does."""
        return tokens is self.tokens and step.planned is self.step


class GraphRunner:
    """The decode steps of a batch of so many rows.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        cache: what a step attends to and adds to.
        rows: of the batch.
        axes: leading axes of its position ids: 1 or 3 or 4 for M-RoPE, () for plain RoPE.
        device: of the model's inputs.
        record: how a step is captured; None for eager steps only. By default a CUDA graph where
            one can be had, unless ``SWITCH`` is "off".
    """

    def __init__(
        self,
        model: nn.Module,
        cache: OscarCache,
        rows: int,
        axes: tuple[int, ...],
        device: torch.device,
        record: Record | Literal["auto"] | None = "auto",
    ) -> None:
        self.model, self.cache, self.axes = model, cache, axes
        self._ranks = TPGroup.of(model)
        self._layers = FastDecoder(model) if supports(model) else None
        # What a step is fed with, at addresses that stay.
        self._ids = torch.zeros((rows, 1), dtype=torch.long, device=device)
        self._positions = torch.zeros(rows, dtype=torch.long, device=device)
        self._positions = self._positions.view(*[1] * len(axes), -1, 1)
        self._steps = GraphInputs(cache, rows)
        self._record = self._recorder() if record == "auto" else record
        self._early: InflightStep | None = None
        self._replay: Callable[[], torch.Tensor] | None = None
        self._version: tuple[int, ...] | None = None
        """Version of the steps when one was captured."""
        self._failures = self._eager_left = 0
        """Captures that have failed since the last one that did not, and steps to the next try."""

    @property
    def records(self) -> bool:
        """Whether steps are captured, so that their number of rows should seldom change."""
        return self._record is not None

    @property
    def is_ahead(self) -> bool:
        """Whether the next step has been launched early."""
        return self._early is not None

    def place(self, positions: Sequence[int]) -> None:
        """Set the (batch,) RoPE positions of the next step's tokens; each step comes one after."""
        placed = torch.tensor(positions, dtype=torch.long).view(self._positions.shape)
        self._positions.copy_(placed)
        self._early = None

    def __call__(self, tokens: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        """Logits (batch, vocabulary) after one more token of each row; overwritten by a later step.

        Args:
            tokens: (batch,) ids.
            ended: (batch,) bool on the CPU: rows that go on as padding, which is not stored.
        """
        early, self._early = self._early, None
        if self._record is None:
            self._ids.copy_(tokens[:, None])
            self.cache.expect(torch.where(ended, PADDING, int(Modality.TEXT))[:, None])
            logits = self._repeatable()
        else:
            logits = self._on_fixed_tables(tokens, ended, early)
        self._positions += 1
        return logits

    def ahead(self, tokens: torch.Tensor, ended: torch.Tensor) -> None:
        """Launch the step that comes next, if that is a replay which only appends tokens.

        The cache stays as it is. A call with the same tokens, in which more rows may have ended,
        makes it the next step; without one it has never been.

        Args:
            tokens, ended: as of a step.
        """
        if self._replay is None:
            return
        step = self._steps.plan_ahead(_codes(ended))
        if step is None or self._version != self._steps.version:
            return
        self._ids.copy_(tokens[:, None])
        with self._steps.dry_run(step):
            logits = self._replay()
        self._early = InflightStep(tokens, step, logits)

    def _recorder(self) -> Record | None:
        """CUDA graphs, where that is known to work."""
        if self._layers is not None:
            return recorder(self._layers.devices)
        # What modules of several devices or ranks say to each other in a graph was never tried.
        places = devices(self.model)
        alone = self._ranks.count == 1 and places == {self._ids.device}
        return recorder(places) if alone and has_full_attention(self.model) else None

    def _on_fixed_tables(
        self, tokens: torch.Tensor, ended: torch.Tensor, early: InflightStep | None
    ) -> torch.Tensor:
        """A step that is replayed, or was launched early, or is captured where that needs to be."""
        step = self.cache.begin(_codes(ended))
        if early is not None and early.is_step(tokens, step):
            self.cache.replayed(step)
            return early.logits
        self._ids.copy_(tokens[:, None])
        if not self._steps.fix(step):
            return self._repeatable()
        return self._by_record(step)

    def _repeatable(self) -> torch.Tensor:
        """The step, on tensors that stay where they are."""
        positions = self._expanded_positions()
        if self._layers is not None:
            return self._layers(self._ids, positions, self.cache)
        output = self.model(
            input_ids=self._ids,
            position_ids=positions,
            **as_argument(self.cache),
            use_cache=True,
        )
        self.cache.end_step()
        return output.logits[:, -1]

    def _expanded_positions(self) -> torch.Tensor:
        return self._positions.expand(*self.axes, -1, 1)

    def _by_record(self, step: StepPlan) -> torch.Tensor:
        if not self._steps.is_ready:
            # The first step is eager: it asks for tables, and for kernels that are compiled now.
            return self._repeatable()
        if self._version != self._steps.version:
            self._replay = None  # its memory goes back before the next one takes some
            if self._eager_left:
                self._eager_left -= 1
            else:
                self._capture(step)
        if self._replay is None:
            return self._repeatable()
        logits = self._replay()
        self.cache.replayed(step)
        return logits

    def _capture(self, step: StepPlan) -> None:
        """Record the step; if that fails, steps are eager until another try succeeds."""
        record, version, cause = self._record, self._steps.version, None
        try:
            with self._steps.dry_run(step):
                if record is not None and self._layers is not None:
                    given = self._ids, self._expanded_positions(), self.cache
                    self._replay = self._layers.recorded(record, *given)
                elif record is not None:
                    self._replay = record(self._repeatable, self._ids.device)
        except Exception as error:
            # The end of a broken capture raises over the error that broke it.
            cause = error.__context__ or error
        # Among ranks all or none: what is launched ahead is more than an eager rank would do.
        if self._ranks.all(self._replay is not None, self._ids.device):
            self._version, self._failures = version, 0
            return
        self._replay, self._version, self._eager_left = None, None, _EAGER_STEPS
        # Another try would find the same operation; the log has the reason for it already.
        final = isinstance(cause, NotCapturable)
        self._failures = _TRIES if final else self._failures + 1
        _log.log(
            logging.WARNING if self._failures in (1, _TRIES) and not final else logging.INFO,
            "decode steps run eagerly, a CUDA graph could not be made (try %d of %d): %s",
            *(self._failures, _TRIES, cause or "another rank has none"),
        )
        if self._failures == _TRIES:
            self._record = None


def _codes(ended: torch.Tensor) -> np.ndarray:
    """(batch, 1) modality ids of a step's tokens, as the KV cache manager takes them."""
    return np.where(ended.numpy(), np.int8(PADDING), np.int8(Modality.TEXT))[:, None]


def capture_cuda_graph(
    function: Callable[[], Result],
    device: torch.device,
    pool: Any = None,
) -> Callable[[], Result]:
    """Capture a function's work on a GPU; what comes back launches it and returns the same tensors
    again.

    Other threads may use the GPU meanwhile, but not wait for all of it, which breaks the capture.

    Args:
        function: what to capture.
        device: the GPU.
        pool: memory (``torch.cuda.graph_pool_handle``) of several small graphs that are replayed
            in the order of their captures; by default a graph has its own, for which torch gives
            back what it keeps unused.

    Raises:
        Exception: what the function raises, or torch as the capture is broken. Another try may
            succeed.
    """
    graph, aside = torch.cuda.CUDAGraph(), _capture_stream(device)
    own_pool = torch.cuda.graph_pool_handle() if pool is None else pool
    # One capture at a time, as they share a stream. Other threads may allocate meanwhile: they are
    # not part of it.
    with _CAPTURES:
        with torch.cuda.device(device):
            # A thread's first product makes a handle of cuBLAS, which allocates: no capture may.
            torch.cuda.current_blas_handle()
            if pool is None:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        try:
            # Out of the stream again also where the capture fails at its end. Not by
            # ``torch.cuda.graph``, which waits and gives memory back before each of many.
            with torch.cuda.stream(aside):
                graph.capture_begin(own_pool, capture_error_mode="thread_local")
                try:
                    result = function()
                finally:
                    graph.capture_end()
        except BaseException:
            _end_broken_capture(aside.device_index, own_pool)
            raise

    def replay() -> Result:
        graph.replay()
        return result

    return replay


def _end_broken_capture(device: int, pool: Any) -> None:
    """Tell torch's generator and allocator that a capture is over.

    The end of a broken capture raises before it does so. Random numbers would be refused from then
    on, and memory that several streams have used would never be free again.
    """
    # A copy of the generator's state is part of no capture.
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # the allocator knows already
        torch._C._cuda_endAllocateToPool(device, pool)


def recorder(devices: set[torch.device], *, small: bool = False) -> Record | None:
    """CUDA graphs where they can be had, for steps that attend by our kernels.

    Args:
        devices: on which steps compute.
        small: whether the graphs are many small ones, which share their memory.
    """
    if kernels_disabled() or os.environ.get(SWITCH) == "off":
        return None
    if any(device.type != "cuda" for device in devices):
        return None
    pool = torch.cuda.graph_pool_handle() if small else None
    return partial(capture_cuda_graph, pool=pool)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one that graphs of a GPU are captured on: cuBLAS keeps 32 MiB for every stream it saw."""
    return torch.cuda.Stream(device)
