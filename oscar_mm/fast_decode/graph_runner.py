"""Graph runner: run decode steps (one token per row) eagerly, or replay them as a CUDA graph.

An eager step takes ten times as long on the host as on the GPU. A captured step is a single launch;
whatever changes from step to step (tokens, positions, slots of past and new tokens) is in tensors
that are updated before each replay. A step may be launched early, before the host has read
its input tokens: the host learns only later which tokens were chosen and which rows have
ended, and the device continues as if no row had ended.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache, as_argument
from oscar_mm.cache.step_plan import GraphTables, StagedTables, StepPlan
from oscar_mm.fast_decode.decoder import Capture, FastDecoder, modules_are_capturable, supports
from oscar_mm.fast_decode.graph_cache import GraphCache
from oscar_mm.fast_decode.module_products import in_fewer_launches, rms_norms
from oscar_mm.fast_decode.prompt_scratch import DecodingRows, PromptPiece, PromptScratch
from oscar_mm.fast_decode.row_adapters import RowAdapters, choosing
from oscar_mm.kernels.launch import NotCapturable, kernels_disabled
from oscar_mm.modality import PADDING, Modality
from oscar_mm.modules import devices
from oscar_mm.ops.decode_tables import fill_pinned_cache, upload
from oscar_mm.tensor_parallel import TPGroup


class GraphInputs:
    """Prepares a cache's decode steps for a graph, which reads their tables at fixed addresses.

    ``OscarCache.begin`` begins a step and ``OscarCache.replayed`` ends it; in between, if ``fix``
    accepts the step, it may be replayed as long as ``version`` is the same as at the capture.

    Args:
        cache: cache that the steps extend.
        rows: number of rows of the cache's batch.
    """

    def __init__(self, cache: OscarCache, rows: int) -> None:
        self._cache = cache
        self._tables = GraphTables(rows, cache.policy, cache.store.window_pages)

    @property
    def is_ready(self) -> bool:
        """Whether layers have requested their tables; until then nothing can be captured."""
        return self._tables.known

    @property
    def version(self) -> tuple[int, ...]:
        """Value that changes when tables or pools move in memory, which invalidates captures.

        Read the value after ``fix``, which may grow pools.
        """
        return self._tables.version, *self._cache.version

    def staged(self, step: StepPlan) -> StagedTables | None:
        """Return the tables of a chained step, computed ahead for ``fix``; None if ``fix`` must
        compute them itself."""
        if not self._tables.takes(step) or (step.pack_jobs and self._tables.packs_whole_pages):
            return None
        return self._tables.staged(step)

    def fix(self, step: StepPlan, staged: StagedTables | None = None) -> bool:
        """Write a step's tables to the fixed tensors of the graph.

        Args:
            step: the step.
            staged: its tables from ``staged``; None to compute them.

        Returns:
            Whether a graph can run the step; if not, the step is left unchanged.
        """
        if not self._tables.takes(step):
            return False
        self._cache.store.reserve(for_graph=True)
        # Graphs do not include these copies.
        for layer in self._cache.packed_layers if step.copies else ():
            layer.copy_pages(step)
        step.copies = []
        if staged is None:
            self._tables.write(step)
        else:
            staged.write()
        # A finished row is computed like the others; its output is ignored.
        step.fixed, step.real = self._tables, None
        if step.pack_jobs and self._tables.packs_whole_pages:
            self._pack_whole_pages(step)
        return True

    def fix_one_of(
        self, steps: Sequence[StepPlan], staged: Sequence[StagedTables], index: torch.Tensor
    ) -> None:
        """Write the tables of one of several chained steps, which only the device knows.

        Args:
            steps, staged: the steps and their tables, which ``staged`` has returned.
            index: (1,) int64 on the device: which of them.
        """
        self._cache.store.reserve(for_graph=True)
        StagedTables.write_one_of(staged, index)
        for step in steps:
            step.fixed, step.real = self._tables, None

    def plan_ahead(self, modalities: np.ndarray) -> StepPlan | None:
        """Return the fixed step that ``OscarCache.begin`` would return, without changing the cache.

        Args:
            modalities: (batch, 1) int8 modality ids, -1 for padding.

        Returns:
            The step; None if it would pack a full page, grow a pool or store nothing.
        """
        step = self._cache.kv_manager.planned(modalities)
        if step is None or (step.pack_jobs and self._tables.packs_whole_pages):
            return None
        return step if self.fix(step) else None

    @contextmanager
    def dry_run(self, step: StepPlan) -> Iterator[None]:
        """Let layers run this step within the block, for a capture or an early launch.

        On exit, the cache's current step and the progress of the given step are restored.
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

        Normally they are packed after attention, whose tables still list the pages' 16-bit slots.
        Packing first is safe: these slots are not overwritten before the new token is stored.
        """
        for layer in self._cache.packed_layers:
            layer.pack_stored(step)
        step.filled()


SWITCH = "OSCAR_MM_CUDA_GRAPHS"
"""Environment variable; "off" makes all steps eager."""
Result = TypeVar("Result")
_CAPTURES = threading.Lock()
_log = logging.getLogger("oscar_mm")
_TRIES = 4
"""Number of consecutive failed captures after which all further steps are eager."""
_EAGER_STEPS = 16
"""Steps between a failed capture, which another thread may have broken, and the next attempt."""


class InflightStep(NamedTuple):
    """A step that was launched early.

    It has written keys and values only to unused slots, and states to spare layers, so it can be
    discarded without cleanup.

    Attributes:
        tokens: (batch,) input ids.
        step: the planned step: the slots of the tokens in rows that had not ended, and the tokens
            that were packed.
        logits: (batch, vocabulary) output.
    """

    tokens: torch.Tensor
    step: StepPlan
    logits: torch.Tensor

    def is_step(self, tokens: torch.Tensor, step: StepPlan) -> bool:
        """Return whether the early step did exactly what a step with these tokens would do."""
        return tokens is self.tokens and step.planned is self.step


class GraphRunner:
    """Runs the decode steps of a batch with a fixed number of rows.

    Args:
        model: a generative transformers model with attention "oscar" in its decoder.
        cache: cache that a step attends to and extends.
        rows: number of rows of the batch.
        axes: leading axes of the position ids: 1, 3 or 4 for M-RoPE, () for plain RoPE.
        device: device of the model's inputs.
        capture: capture function; None makes all steps eager. By default, steps are captured as
            CUDA graphs if these are supported and ``SWITCH`` is not "off".
    """

    def __init__(
        self,
        model: nn.Module,
        cache: OscarCache,
        rows: int,
        axes: tuple[int, ...],
        device: torch.device,
        capture: Capture | Literal["auto"] | None = "auto",
    ) -> None:
        self.model, self.cache, self.axes = model, cache, axes
        self._ranks = TPGroup.of(model)
        self._layers = FastDecoder(model) if supports(model) else None
        # Inputs of the steps, at fixed addresses.
        self._ids = torch.zeros((rows, 1), dtype=torch.long, device=device)
        self._positions = torch.zeros(rows, dtype=torch.long, device=device)
        self._positions = self._positions.view(*[1] * len(axes), -1, 1)
        self._adapters, self._idle = RowAdapters.of(model), None
        """Adapters that rows may choose, and ranks that each row does not use, see ``choosing``."""
        self._steps = GraphInputs(cache, rows)
        self._capture = self._supported_capture() if capture == "auto" else capture
        captures = self._capture is not None and device.type == "cuda"
        # Eager steps would spend more time in the block than the kernels save.
        by_modules = captures and self._layers is None
        self._launches = partial(in_fewer_launches, rms_norms(model)) if by_modules else nullcontext
        if captures:
            fill_pinned_cache()
        self._early: InflightStep | None = None
        self._replay: Callable[[], torch.Tensor] | None = None
        self._version: tuple[int, ...] | None = None
        """Version of the steps at the last capture."""
        self._beside = WeakKeyDictionary[PromptScratch, GraphCache]()
        """Graphs of this step with pieces of prompts in a scratch."""
        self._failures = self._eager_left = 0
        """Consecutive failed captures, and steps until the next attempt."""

    @property
    def captures(self) -> bool:
        """Whether steps are captured; if so, the number of rows should seldom change."""
        return self._capture is not None

    @property
    def is_ahead(self) -> bool:
        """Whether the next step has been launched early."""
        return self._early is not None

    def place(self, positions: Sequence[int], adapters: Sequence[str | None] | None = None) -> None:
        """Set the rows of the next steps.

        Args:
            positions: RoPE position of each row's next token; each later step adds one.
            adapters: the adapter of each row, or None; by default, no row uses one.
        """
        placed = upload(np.array(positions, dtype=np.int64), self._positions.device)
        self._positions.copy_(placed.view(self._positions.shape))
        if self._adapters is not None:
            self._choose(self._adapters, adapters or [None] * len(positions))
        self._early = None

    def join(
        self, places: torch.Tensor, positions: torch.Tensor, adapters: Sequence[str | None]
    ) -> None:
        """Replace some rows; the others continue.

        Args:
            places: (joining,) int64 indices of the new rows, on the device.
            positions: (joining,) int64, see ``place``; on the device.
            adapters: the adapter of each row of the batch, or None.
        """
        self._positions.view(-1).index_copy_(0, places, positions)
        if self._adapters is not None:
            self._choose(self._adapters, adapters)
        self._early = None

    def _choose(self, adapters: RowAdapters, names: Sequence[str | None]) -> None:
        idle = adapters.idle(names)
        if self._capture is None:
            self._idle = idle
            return
        if self._idle is None:  # At a fixed address, also while no row uses adapters.
            self._idle = adapters.table[:1].repeat(len(names), 1)
        self._idle.copy_(adapters.table[:1] if idle is None else idle)

    def __call__(
        self, tokens: torch.Tensor, ended: torch.Tensor, piece: PromptPiece | None = None
    ) -> torch.Tensor:
        """Add one token to each row and return (batch, vocabulary) logits, which a later step
        overwrites.

        Args:
            tokens: (batch,) ids.
            ended: (batch,) bool on the CPU: rows that have ended and get only padding, which is not
                stored.
            piece: piece of prompts to launch in the same pass, if the step is captured.
        """
        early, self._early = self._early, None
        with choosing(self._idle):
            if self._capture is None:
                self._ids.copy_(tokens[:, None])
                self.cache.expect(torch.where(ended, PADDING, int(Modality.TEXT))[:, None])
                logits = self._repeatable()
            else:
                logits = self._on_fixed_tables(tokens, ended, early, piece)
        self._positions += 1
        return logits

    def ahead(
        self, tokens: torch.Tensor, ended: torch.Tensor, piece: PromptPiece | None = None
    ) -> None:
        """Launch the next step early if it is a replay that only appends tokens.

        The cache does not change. If the next call has the same tokens, it uses the launched step,
        even if more rows have ended; any other call discards the launched step.

        Args:
            tokens, ended, piece: see ``__call__``.
        """
        modalities = _codes(ended)
        if self._replay is None or not self.cache.can_spare_states(modalities):
            return
        step = self._steps.plan_ahead(modalities)
        if step is None or self._version != self._steps.version:
            return
        self._ids.copy_(tokens[:, None])
        with self._steps.dry_run(step), self.cache.sparing_states(modalities):
            logits = self._launched(self._replay, piece, step)
        self._early = InflightStep(tokens, step, logits)

    def _launched(
        self, replay: Callable[[], torch.Tensor], piece: PromptPiece | None, step: StepPlan
    ) -> torch.Tensor:
        """Replay the step, or run it together with a piece that has not been launched."""
        if piece is None or piece.alone or piece.logits is not None:
            return replay()
        scratch, size = piece.scratch, piece.size
        graphs = self._beside.setdefault(scratch, GraphCache(scratch.capture, self._ids.device))
        if graphs.fails:
            return replay()
        decoding = DecodingRows(self._ids, self._expanded_positions(), self.cache, self._idle)
        both = partial(scratch.run, size, decoding)
        try:
            with self._steps.dry_run(step):
                beside = graphs.replay(size, both)
                # The first pass is eager: it compiles kernels.
                found = (beside or both)()
        except BaseException:  # The prompts are read again; the step must not fail with them.
            piece.alone = True
            return replay()
        prompts = len(found) - len(self._ids)
        piece.logits = found[:prompts]
        return found[prompts:]

    def _supported_capture(self) -> Capture | None:
        """Return the capture function for CUDA graphs if they are known to work."""
        if self._layers is not None:
            return graph_capture(self._layers.devices)
        # Communication between devices or ranks within a graph is untested for plain modules.
        places = devices(self.model)
        alone = self._ranks.count == 1 and places == {self._ids.device}
        fits = alone and modules_are_capturable(self.model, self._ids.device)
        return graph_capture(places) if fits else None

    def _on_fixed_tables(
        self,
        tokens: torch.Tensor,
        ended: torch.Tensor,
        early: InflightStep | None,
        piece: PromptPiece | None,
    ) -> torch.Tensor:
        """Run a step: use its early launch, replay it, or capture it if necessary."""
        step = self.cache.begin(_codes(ended))
        if early is not None and early.is_step(tokens, step) and self.cache.take_spares():
            self.cache.replayed(step)
            return early.logits
        self._ids.copy_(tokens[:, None])
        if not self._steps.fix(step):
            return self._repeatable()
        return self._replayed(step, piece)

    def _repeatable(self) -> torch.Tensor:
        """Run the step on tensors at fixed addresses."""
        positions = self._expanded_positions()
        if self._layers is not None:
            return self._layers(self._ids, positions, self.cache)
        with self._launches():
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

    def _replayed(self, step: StepPlan, piece: PromptPiece | None) -> torch.Tensor:
        if not self._steps.is_ready:
            # The first step is eager: it requests tables, and compiles kernels.
            return self._repeatable()
        if self._version != self._steps.version:
            self._replay = None  # release its memory before the next capture
            self._beside.clear()
            if self._eager_left:
                self._eager_left -= 1
            else:
                self._capture_step(step)
        if self._replay is None:
            return self._repeatable()
        logits = self._launched(self._replay, piece, step)
        self.cache.replayed(step)
        return logits

    def _capture_step(self, step: StepPlan) -> None:
        """Capture the step; on failure, run steps eagerly until a later attempt succeeds."""
        capture, version, cause = self._capture, self._steps.version, None
        try:
            with self._steps.dry_run(step):
                if capture is not None and self._layers is not None:
                    given = self._ids, self._expanded_positions(), self.cache
                    self._replay = self._layers.captured(capture, *given)
                elif capture is not None:
                    self._replay = capture(self._repeatable, self._ids.device)
        except Exception as error:
            # Ending a broken capture raises an error that hides the cause.
            cause = error.__context__ or error
        # Either all ranks use graphs or none: a rank with a graph launches steps ahead, but an
        # eager rank does not.
        if self._ranks.all(self._replay is not None, self._ids.device):
            self._version, self._failures = version, 0
            return
        self._replay, self._version, self._eager_left = None, None, _EAGER_STEPS
        # Another attempt would fail at the same operation; its reason is already in the log.
        final = isinstance(cause, NotCapturable)
        self._failures = _TRIES if final else self._failures + 1
        _log.log(
            logging.WARNING if self._failures in (1, _TRIES) and not final else logging.INFO,
            "decode steps run eagerly: no CUDA graph could be captured (attempt %d of %d): %s",
            *(self._failures, _TRIES, cause or "another rank has no graph"),
        )
        if self._failures == _TRIES:
            self._capture = None


def _codes(ended: torch.Tensor) -> np.ndarray:
    """Return (batch, 1) modality ids of a step's tokens for the KV cache manager."""
    return np.where(ended.numpy(), np.int8(PADDING), np.int8(Modality.TEXT))[:, None]


def capture_cuda_graph(
    function: Callable[[], Result],
    device: torch.device,
    pool: Any = None,
) -> Callable[[], Result]:
    """Capture a function's work on a GPU and return its replay, which returns the same tensors.

    Other threads may use the GPU meanwhile, but must not synchronize the device, since that
    breaks the capture.

    Args:
        function: work to capture.
        device: the GPU.
        pool: memory pool (``torch.cuda.graph_pool_handle``) shared by several small graphs, which
            are replayed in the order of their captures; by default a separate pool, for which torch
            first releases its unused memory.

    Raises:
        Exception: any error that the function raises, or that torch raises if the capture is
            broken. Another attempt may succeed.
    """
    graph, aside = torch.cuda.CUDAGraph(), _capture_stream(device)
    own_pool = torch.cuda.graph_pool_handle() if pool is None else pool
    # One capture at a time, since captures share a stream. Allocations by other threads are not
    # captured.
    with _CAPTURES:
        with torch.cuda.device(device):
            # A thread's first matrix product creates a cuBLAS handle, which allocates memory; this
            # must not happen within the capture.
            torch.cuda.current_blas_handle()
            if pool is None:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        try:
            # This leaves the stream even if the capture fails at its end. ``torch.cuda.graph`` is
            # not used, since it synchronizes and releases memory before each of many captures.
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
    """Tell torch's random number generator and allocator that a capture is over.

    Ending a broken capture raises before torch tells them. Otherwise random numbers would fail from
    then on, and memory used by several streams would never be freed.
    """
    # A copy of the generator's state belongs to no capture.
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # raised if the allocator already knows
        torch._C._cuda_endAllocateToPool(device, pool)


def graph_capture(devices: set[torch.device], *, small: bool = False) -> Capture | None:
    """Return the capture function for CUDA graphs of steps whose attention uses our kernels; None
    if they are not supported.

    Args:
        devices: devices of the steps.
        small: whether there are many small graphs, which are to share their memory.
    """
    if kernels_disabled() or os.environ.get(SWITCH) == "off":
        return None
    if any(device.type != "cuda" for device in devices):
        return None
    return SmallGraphs() if small else capture_cuda_graph


class SmallGraphs:
    """Captures small graphs, which share their memory.

    Torch refuses further captures into a memory pool whose graphs are all gone, so these get a new
    one.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._replays = WeakSet[Callable[[], Any]]()
        """Replays of the graphs in the pool; a graph is gone with its replay."""

    def __call__(
        self, function: Callable[[], Result], device: torch.device
    ) -> Callable[[], Result]:
        """Capture a function's work, see ``capture_cuda_graph``."""
        if not self._replays:
            self._pool = torch.cuda.graph_pool_handle()
        replay = capture_cuda_graph(function, device, self._pool)
        self._replays.add(replay)
        return replay


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the capture stream of a GPU; there is only one, since cuBLAS keeps 32 MiB per
    stream."""
    return torch.cuda.Stream(device)
